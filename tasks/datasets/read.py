"""Threads out of JSON lines and Parquet files, and out of a user's own code, streamed; bad rows are errors, or are
skipped and counted."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from engine.text.threads import StringThread
from tasks.datasets.convert import RowLocation, column_of, thread_from_row
from tasks.datasets.errors import BadRow, DatasetError
from tasks.datasets.file_formats import find_files, format_of, json_lines, parquet_rows, parse_json_line
from tasks.datasets.preferences import Pair, pair_from_row
from tasks.datasets.python import raw_rows
from tasks.datasets.spec import ColumnRole, DatasetUse, FileDataset, PythonDataset

T = TypeVar("T")

KEPT_REASONS = 10
ROLES_OF: dict[DatasetUse, tuple[ColumnRole, ...]] = {
    "prompt": ("messages", "prompt", "metadata"),
    "completion": ("messages", "prompt", "completion", "metadata"),
    "rating": ("messages", "prompt", "completion", "metadata"),
    "preference": ("prompt", "chosen", "rejected", "metadata"),
}
"""Columns that are read."""


@dataclass
class SkippedRows:
    """Rows left out under on_bad_row='skip': how many, and why the first ten."""

    count: int = 0
    reasons: list[str] = field(default_factory=list)

    def add(self, error: BadRow) -> None:
        self.count += 1
        if len(self.reasons) < KEPT_REASONS:
            self.reasons.append(str(error))


def rows(
    spec: FileDataset | PythonDataset, *, kind: DatasetUse = "prompt", skipped: SkippedRows | None = None
) -> Iterator[StringThread]:
    """The source's threads in its order, at most `spec.limit`.

    Raises DatasetNotFound, DatasetError (not the declared format, a required column is absent), and BadRow, unless
    on_bad_row is 'skip': then bad rows are added to `skipped`.
    """
    if kind == "prompt" and "completion" in spec.columns:
        raise DatasetError(
            f"{spec.source}: given a completion column, {spec.columns['completion']!r}, for a dataset of prompts, "
            f"which has no use for it. To keep it for graders: metadata_columns=({spec.columns['completion']!r},)."
        )
    yield from _converted(spec, kind, skipped, lambda values, location: thread_from_row(values, location, spec, kind))


def pairs(spec: FileDataset | PythonDataset, *, skipped: SkippedRows | None = None) -> Iterator[Pair]:
    """The source's preferences in its order, at most `spec.limit`. Raises as `rows` does."""
    yield from _converted(spec, "preference", skipped, lambda values, location: pair_from_row(values, location, spec))


def _converted(
    spec: FileDataset | PythonDataset,
    kind: DatasetUse,
    skipped: SkippedRows | None,
    convert: Callable[[dict[str, Any], RowLocation], T],
) -> Iterator[T]:
    skipped = SkippedRows() if skipped is None else skipped
    made = 0
    for location, raw in _raw_rows(spec, kind) if isinstance(spec, FileDataset) else raw_rows(spec):
        if made == spec.limit:
            return
        try:
            values = parse_json_line(location.source, location.row, raw) if isinstance(raw, bytes) else raw
            if not isinstance(values, dict):
                raise location.bad_row(None, given=f"a {type(values).__name__}", expected="a dict of columns")
            found = convert(values, location)
        except BadRow as error:
            if spec.on_bad_row == "error":
                raise
            skipped.add(error)
            continue
        yield found
        made += 1


def _raw_rows(spec: FileDataset, kind: DatasetUse) -> Iterator[tuple[RowLocation, bytes | dict[str, Any]]]:
    for file in [file for path in spec.paths for file in find_files(path)]:  # a missing one is told before any is read
        if format_of(file, spec.format) == "parquet":
            for row, values in _parquet_rows(file, spec, kind):
                yield RowLocation(str(file), row), values
        else:
            for row, line in json_lines(file):
                yield RowLocation(str(file), row), line


def _parquet_rows(file: Path, spec: FileDataset, kind: DatasetUse) -> Iterator[tuple[int, dict[str, Any]]]:
    named = set(spec.columns.values()) | set(spec.metadata_columns)
    used = {column_of(role, spec) for role in ROLES_OF[kind]}
    if kind == "preference":
        required = {column_of(role, spec) for role in ("chosen", "rejected")}
        return parquet_rows(file, wanted=named | used, required=named | required, any_of=required)
    layouts = {column_of("messages", spec), column_of("prompt", spec)}
    return parquet_rows(file, wanted=named | used, required=named, any_of=layouts)
