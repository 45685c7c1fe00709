"""Datasets of raw rows: dicts of columns, that are converted to threads or pairs of threads one at a time.

A row that cannot be used raises an error or is skipped and counted, as the spec says. The modules in
tasks.datasets.sources say where the rows come from.
"""

from __future__ import annotations

import hashlib
import re
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from tasks.datasets.convert import RowLocation, column_of
from tasks.datasets.errors import BadRow, DatasetError
from tasks.datasets.layouts import CONVERSATIONS
from tasks.datasets.load import DatasetUse, OrderedDataset, ReadDataset, ReadPosition, SkippedRows, order_last
from tasks.datasets.sources.file_formats import TableColumns, parse_json_line
from tasks.datasets.stored import StoredItem, stored_row

ColumnRole = Literal["messages", "prompt", "completion", "chosen", "rejected", "label", "tools", "metadata"]
COLUMN_ROLES: dict[DatasetUse, tuple[ColumnRole, ...]] = {
    "prompt": ("messages", "prompt", "tools", "metadata"),
    "completion": ("messages", "prompt", "completion", "tools", "metadata"),
    "rating": ("messages", "prompt", "completion", "label", "tools", "metadata"),
    "preference": ("prompt", "chosen", "rejected", "tools", "metadata"),
}
"""The roles of the columns that each use of a dataset reads."""


def _source_first(schema: dict[str, Any]) -> None:
    """Order the fields of a form: those of the source come before those that all sources share."""
    common = {name: schema["properties"].pop(name) for name in RowsDataset.model_fields}
    schema["properties"].update(common)
    order_last(schema)


class RowsDataset(OrderedDataset, ReadDataset):
    """The settings of rows that all sources share.

    A row has either `messages`, or `prompt` and, with an answer, `completion`. A row of preferences has `chosen` and
    `rejected`: whole conversations or, if it has a `prompt` too, answers to it. `conversations` in ShareGPT's layout
    stand for `messages`, or for the prompt of preferences. `label` is the rating of an answer, a number or true or
    false. `tools` are descriptions of tools in the format of OpenAI's API.
    """

    model_config = ConfigDict(json_schema_extra=_source_first)

    columns: dict[ColumnRole, str] = {}
    """The column of each role, for columns that are not named like their role: {"prompt": "question"}. A dotted name is
    a field within the objects of a column: {"prompt": "extra_info.question"}."""
    metadata_columns: tuple[str, ...] = ()
    """Further columns to store in the metadata of each thread, where graders can read them."""
    system_prompt: str | None = None
    """System turn for the threads that do not begin with one."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What to do with a row that cannot be used. error: fail. skip: leave it out and count it."""
    limit: int | None = Field(default=None, ge=1)
    """Number of rows to use: the first ones that can be used. Empty: all."""

    @model_validator(mode="after")
    def _one_layout(self) -> Self:
        if "messages" in self.columns and {"prompt", "completion", "chosen", "rejected"} & set(self.columns):
            raise ValueError(
                f"given columns={self.columns}; expected either messages, or prompt and completion, or chosen and "
                "rejected (and prompt)"
            )
        return self

    @property
    def store_name(self) -> str:
        return allowed_name(self.source)

    @abstractmethod
    def raw_rows(self, use: DatasetUse, position: ReadPosition) -> Iterator[tuple[RowLocation, Any]]:
        """Yield the rows with their locations: dicts, or lines of JSON as bytes. Moves the position on."""

    def items(self, use: DatasetUse, skipped: SkippedRows, position: ReadPosition) -> Iterator[StoredItem]:
        """Yield the items of the source as a table stores them, in its order, at most `limit`.

        Raises DatasetNotFound, DatasetError (a file in another format, a missing column) and, unless on_bad_row is
        'skip', BadRow. Skipped rows are added to `skipped`.
        """
        if use == "prompt" and "completion" in self.columns:
            column = self.columns["completion"]
            raise DatasetError(
                f"{self.source}: given a completion column, {column!r}, for a dataset of prompts, "
                f"which does not read it. To keep it for graders: metadata_columns=[{column}]."
            )
        yielded = 0
        for location, raw in self.raw_rows(use, position):
            if yielded == self.limit:
                return
            # Only the defects of a row are skipped. Errors of the source itself always end the loading.
            try:
                values = parse_json_line(location.source, location.row, raw) if isinstance(raw, bytes) else raw
                if not isinstance(values, dict):
                    raise location.bad_row(None, given=f"a {type(values).__name__}", expected="a dict of columns")
                item = stored_row(values, location, self, use)
            except BadRow as error:
                if self.on_bad_row == "error":
                    raise
                skipped.add(error)
                continue
            yield item
            yielded += 1

    def columns_to_read(self, use: DatasetUse) -> set[str]:
        """The columns that this use of the dataset reads, if the source has them."""
        declared = set(self.columns.values()) | set(self.metadata_columns)
        return declared | {CONVERSATIONS} | {column_of(role, self) for role in COLUMN_ROLES[use]}

    def columns_of_table(self, use: DatasetUse, names: set[str]) -> TableColumns:
        """The columns that a use of the dataset needs of a table. `names`: the columns that the table has."""

        def in_table(columns: set[str]) -> set[str]:
            # A dotted name that is no column is a field of the column before the first dot.
            return {column if column in names else column.partition(".")[0] for column in columns}

        # Columns that the spec names must exist. The others are read if the table has them.
        declared = in_table(set(self.columns.values()) | set(self.metadata_columns))
        columns = in_table(self.columns_to_read(use))
        if use == "preference":
            answers = in_table({column_of(role, self) for role in ("chosen", "rejected")})
            return TableColumns(columns, declared | answers, answers)
        # Either layout of a conversation will do.
        conversations = in_table({column_of("messages", self), column_of("prompt", self), CONVERSATIONS})
        return TableColumns(columns, declared, conversations)


def allowed_name(name: str) -> str:
    """The name with only the characters that are allowed in a key of the store."""
    # A name without any gets a digest, so that two files do not become one dataset.
    allowed = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:100]
    return allowed or f"file-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
