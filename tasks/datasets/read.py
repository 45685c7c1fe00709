"""Reads threads, or pairs of threads, from JSON lines and Parquet files and from a user's own code, one at a time.

A row that cannot be used raises an error or is skipped and counted, as the spec says.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from engine.text.threads import StringThread
from tasks.datasets.convert import RowLocation, column_of, thread_from_row
from tasks.datasets.errors import BadRow, DatasetError
from tasks.datasets.layouts import CONVERSATIONS
from tasks.datasets.preferences import Pair, pair_from_row
from tasks.datasets.sources.file_formats import (
    TableColumns,
    column_names,
    find_files,
    format_of,
    json_lines,
    parquet_rows,
    parse_json_line,
)
from tasks.datasets.sources.hub import hub_rows
from tasks.datasets.sources.python import raw_rows
from tasks.datasets.spec import ColumnRole, DatasetUse, FileDataset, HubDataset, PythonDataset
from tasks.datasets.stored import StoredItem, stored_row

T = TypeVar("T")
RowsSpec = FileDataset | HubDataset | PythonDataset
"""The sources of raw rows."""

MAX_REASONS = 10
"""Number of skipped rows whose errors are remembered."""
COLUMN_ROLES: dict[DatasetUse, tuple[ColumnRole, ...]] = {
    "prompt": ("messages", "prompt", "tools", "metadata"),
    "completion": ("messages", "prompt", "completion", "tools", "metadata"),
    "rating": ("messages", "prompt", "completion", "label", "tools", "metadata"),
    "preference": ("prompt", "chosen", "rejected", "tools", "metadata"),
}
"""The roles of the columns that each use of a dataset reads."""


@dataclass
class SkippedRows:
    """Counts the rows that on_bad_row='skip' left out, and remembers the errors of the first ten."""

    count: int = 0
    reasons: list[str] = field(default_factory=list)

    def add(self, error: BadRow) -> None:
        self.count += 1
        if len(self.reasons) < MAX_REASONS:
            self.reasons.append(str(error))


@dataclass
class ReadPosition:
    """How much of the files of a dataset has been read, in bytes of files, or in rows of a dataset of the hub."""

    read: int = 0
    total: int | None = None
    """None if it is unknown, as for a user's own code."""

    @property
    def fraction(self) -> float | None:
        return self.read / self.total if self.total else None


def read_stored(
    spec: RowsSpec,
    *,
    kind: DatasetUse,
    skipped: SkippedRows | None = None,
    position: ReadPosition | None = None,
) -> Iterator[StoredItem]:
    """Yield the items of the source as a table stores them, at most `spec.limit`. Raises as `read_threads` does."""
    _check_columns(spec, kind)
    yield from _read(
        spec, kind, skipped, lambda values, location: stored_row(values, location, spec, kind), position=position
    )


def read_threads(
    spec: RowsSpec, *, kind: DatasetUse = "prompt", skipped: SkippedRows | None = None
) -> Iterator[StringThread]:
    """Yield the threads of the source in its order, at most `spec.limit`.

    Raises DatasetNotFound, DatasetError (a file in another format, a missing column) and, unless on_bad_row is 'skip',
    BadRow. Skipped rows are added to `skipped`.
    """
    _check_columns(spec, kind)
    yield from _read(spec, kind, skipped, lambda values, location: thread_from_row(values, location, spec, kind))


def read_pairs(spec: RowsSpec, *, skipped: SkippedRows | None = None) -> Iterator[Pair]:
    """Yield the preference pairs of the source in its order, at most `spec.limit`. Raises as `read_threads` does."""
    yield from _read(spec, "preference", skipped, lambda values, location: pair_from_row(values, location, spec))


def _check_columns(spec: RowsSpec, kind: DatasetUse) -> None:
    """Raise DatasetError if the spec names a column that a dataset of this kind does not read."""
    if kind == "prompt" and "completion" in spec.columns:
        column = spec.columns["completion"]
        raise DatasetError(
            f"{spec.source}: given a completion column, {column!r}, for a dataset of prompts, "
            f"which does not read it. To keep it for graders: metadata_columns=({column!r},)."
        )


def _read(
    spec: RowsSpec,
    kind: DatasetUse,
    skipped: SkippedRows | None,
    convert: Callable[[dict[str, Any], RowLocation], T],
    *,
    position: ReadPosition | None = None,
) -> Iterator[T]:
    """Yield the converted rows of the source, without the skipped ones."""
    skipped = SkippedRows() if skipped is None else skipped
    source_rows = _source_rows(spec, kind, position or ReadPosition())
    yielded = 0
    for location, raw in source_rows:
        if yielded == spec.limit:
            return
        # Only the defects of a row are skipped. Errors of the source itself always end the loading.
        try:
            values = parse_json_line(location.source, location.row, raw) if isinstance(raw, bytes) else raw
            if not isinstance(values, dict):
                raise location.bad_row(None, given=f"a {type(values).__name__}", expected="a dict of columns")
            converted = convert(values, location)
        except BadRow as error:
            if spec.on_bad_row == "error":
                raise
            skipped.add(error)
            continue
        yield converted
        yielded += 1


def _source_rows(spec: RowsSpec, kind: DatasetUse, position: ReadPosition) -> Iterator[tuple[RowLocation, Any]]:
    """Yield the raw rows of a source with their locations. Moves the position on."""
    if isinstance(spec, FileDataset):
        return _file_rows(spec, kind, position)
    if isinstance(spec, HubDataset):
        return _hub_rows(spec, kind, position)
    return raw_rows(spec)


def _hub_rows(spec: HubDataset, kind: DatasetUse, position: ReadPosition) -> Iterator[tuple[RowLocation, Any]]:
    """Yield the rows of a dataset of the hub, after a check that it has the required columns."""
    for location, values, total_rows in hub_rows(spec, partial(_columns_of_table, spec, kind)):
        position.read, position.total = location.row, total_rows
        yield location, values


def files_of(spec: FileDataset) -> list[Path]:
    """The files of a dataset, in reading order. Raises DatasetNotFound."""
    files: list[Path] = []
    for path in spec.paths:
        files.extend(find_files(path))
    return files


def unread_columns(spec: FileDataset, kind: DatasetUse) -> list[str]:
    """The columns of the first file that this use of the dataset does not read, sorted. Raises DatasetError."""
    file = files_of(spec)[0]
    return sorted(column_names(file, format_of(file, spec.format)) - _columns_to_read(spec, kind))


def _columns_to_read(spec: FileDataset | HubDataset, kind: DatasetUse) -> set[str]:
    declared = set(spec.columns.values()) | set(spec.metadata_columns)
    return declared | {CONVERSATIONS} | {column_of(role, spec) for role in COLUMN_ROLES[kind]}


def _file_rows(
    spec: FileDataset, kind: DatasetUse, position: ReadPosition
) -> Iterator[tuple[RowLocation, bytes | dict[str, Any]]]:
    """Yield the rows of all files: a line of JSON as bytes, a row of Parquet as a dict. Moves the position on."""
    # Find all files before the first is read, so that a missing file is reported at once.
    files = files_of(spec)
    sizes = [file.stat().st_size for file in files]
    position.total = sum(sizes)
    for file, size in zip(files, sizes, strict=True):
        name, start = str(file), position.read
        if format_of(file, spec.format) == "parquet":
            for row, rows, values in parquet_rows(file, partial(_columns_of_table, spec, kind)):
                position.read = start + size * row // rows
                yield RowLocation(name, row), values
        else:
            for row, line in json_lines(file):
                position.read += len(line)
                yield RowLocation(name, row), line
        position.read = start + size


def _columns_of_table(spec: FileDataset | HubDataset, kind: DatasetUse, names: set[str]) -> TableColumns:
    """The columns that a use of a dataset needs of a table. `names`: the columns that the table has."""

    def in_table(columns: set[str]) -> set[str]:
        # A dotted name that is no column is a field of the column before the first dot.
        return {column if column in names else column.partition(".")[0] for column in columns}

    # Columns that the spec names must exist. The others are read if the table has them.
    declared = in_table(set(spec.columns.values()) | set(spec.metadata_columns))
    columns = in_table(_columns_to_read(spec, kind))
    if kind == "preference":
        answers = in_table({column_of(role, spec) for role in ("chosen", "rejected")})
        return TableColumns(columns, declared | answers, answers)
    # Either layout of a conversation will do.
    conversations = in_table({column_of("messages", spec), column_of("prompt", spec), CONVERSATIONS})
    return TableColumns(columns, declared, conversations)
