"""Reads raw rows of a file in bounded memory: JSON lines one line at a time, Parquet one batch at a time."""

import glob
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.datasets.errors import BadRow, DatasetError, DatasetNotFound

MAX_LINE_BYTES = 64 * 2**20
"""Longest line of JSON that is read into memory. A longer line is a bad row."""
PARQUET_BATCH_ROWS = 512
"""Rows of a Parquet file that are in memory at a time."""
PARQUET_BUFFER_BYTES = 1 << 20
"""Bytes of a column of a Parquet file that are read at a time."""


class TableColumns(NamedTuple):
    """The columns that a use of a dataset needs of a table."""

    read: set[str]
    """Those that are read if the table has them."""
    required: set[str]
    """Those that it must have."""
    any_of: set[str]
    """Those of which it must have one. Empty: no such rule."""


ChooseColumns = Callable[[set[str]], TableColumns]
"""The columns that a table has -> those that are needed of it."""


class _NotInJSON(Exception):
    """Raised for a number that Python's parser accepts and JSON does not have: NaN and the infinities."""


def _refuse_constant(constant: str) -> NoReturn:
    raise _NotInJSON(constant)


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)

SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".pq": "parquet"}


def find_files(path: str) -> list[Path]:
    """The file at `path`, or all files that match the pattern `path`, sorted. Raises DatasetNotFound."""
    literal = Path(path).expanduser()
    if literal.is_file():
        return [literal]
    if literal.is_dir():
        raise DatasetNotFound(f"given the folder {path!r}; expected a file, or a pattern such as '{path}/*.parquet'")
    matches = sorted(Path(match) for match in glob.glob(str(literal), recursive=True))
    files = [match for match in matches if match.is_file()]
    if not files:
        raise DatasetNotFound(
            f"no file at {path!r} (in the folder {Path.cwd()}); expected a JSON lines or Parquet file"
        )
    return files


def format_of(file: Path, declared: str) -> str:
    """'jsonl' or 'parquet': the declared format or, for 'auto', the one of the file's suffix. Raises DatasetError."""
    if declared != "auto":
        return declared
    if file.suffix not in SUFFIXES:
        raise DatasetError(
            f"{file}: given the suffix {file.suffix!r}; expected one of {', '.join(SUFFIXES)}. "
            f"Declare the format with format='jsonl' (one JSON object per line) or format='parquet'."
        )
    return SUFFIXES[file.suffix]


def column_names(file: Path, file_format: str) -> set[str]:
    """The columns of a Parquet file, or of the first row of JSON lines that can be read. Raises DatasetError."""
    if file_format == "parquet":
        with _open_parquet(file) as parquet:
            return set(parquet.schema_arrow.names)
    for row, line in json_lines(file):
        # a dataset may skip rows that cannot be read
        with suppress(BadRow):
            return set(parse_json_line(str(file), row, line))
    return set()


def json_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, line) for each line that is not blank.

    A line above MAX_LINE_BYTES is cut to MAX_LINE_BYTES + 1, which `parse_json_line` refuses.
    """
    with file.open("rb") as stream:
        number = 0
        while line := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            # Blank lines are counted, so that row numbers are line numbers.
            if len(line) > MAX_LINE_BYTES:
                _skip_rest_of_line(stream, line)
            elif not line.strip():
                continue
            # The file may begin with a byte order mark.
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            yield number, line


def _skip_rest_of_line(stream: Any, line: bytes) -> None:
    """Read to the end of the line that begins with `line`, in small pieces that are dropped."""
    while line and not line.endswith(b"\n"):
        line = stream.readline(2**20)


def parse_json_line(source: str, row: int, line: bytes) -> dict[str, Any]:
    """Parse one line, which must hold one JSON object. Raises BadRow."""

    def bad(given: str, expected: str, todo: str = "") -> BadRow:
        return BadRow(source, row, None, given=given, expected=expected, todo=todo)

    # Decode the line.
    if len(line) > MAX_LINE_BYTES:
        raise bad(f"a line of more than {MAX_LINE_BYTES} bytes", "a shorter one", "Use Parquet for rows this large.")
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad(f"bytes that are not UTF-8 (at byte {error.start})", "UTF-8 text") from error

    # Parse it.
    try:
        value = _DECODER.decode(text)
    except _NotInJSON as error:
        raise bad(f"the number {error}", "JSON, which has no NaN and no infinity", "Use null.") from error
    except (ValueError, RecursionError) as error:
        shown = text.strip()[:60]
        raise bad(f"{shown!r}, not JSON ({error})", "one whole JSON object on each line") from error
    if not isinstance(value, dict):
        is_array = text.lstrip()[:1] == "["
        todo = "A file that is one JSON array must be written one object per line." if is_array else ""
        raise bad(f"a {type(value).__name__}", "one JSON object per line", todo)
    return value


def _open_parquet(file: Path) -> pq.ParquetFile:
    try:
        # pyarrow's defaults read whole row groups ahead: the load of a file of 5 GB then took 4.9 GB of memory.
        return pq.ParquetFile(file, pre_buffer=False, buffer_size=PARQUET_BUFFER_BYTES)
    except pa.ArrowException as error:
        raise DatasetError(f"{file}: given a file that is not Parquet ({error}); expected a Parquet file") from error


def checked_columns(
    choose_columns: ChooseColumns, present: list[str], *, source: str, table: str = "file", instead: str = ""
) -> list[str]:
    """The columns to read of a table with the columns `present`, in its order.

    Raises DatasetError if the table lacks a required column. The other arguments are for its message: `source` and
    `table` say which table that is, and `instead` what a user can do other than to map names.
    """
    columns = choose_columns(set(present))
    missing = sorted(columns.required - set(present))
    if not missing and not columns.any_of & set(present):
        missing = sorted(columns.any_of)
    if missing:
        raise DatasetError(
            f"{source}: no column {' or '.join(map(repr, missing))}; the {table} has {', '.join(present) or 'none'}. "
            f"Map the names with columns, for instance columns={{'prompt': 'question'}}{instead}."
        )
    return [name for name in present if name in columns.read]


def parquet_rows(file: Path, choose_columns: ChooseColumns) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield (row number from 1, number of rows of the file, values of the row). Only the chosen columns are read.

    Raises DatasetError if the file is not Parquet, or lacks a required column.
    """
    with _open_parquet(file) as parquet:
        # Check the schema before any row is read.
        columns = checked_columns(choose_columns, parquet.schema_arrow.names, source=str(file))

        # Stream the rows, a batch at a time.
        number, rows = 0, parquet.metadata.num_rows
        try:
            for batch in parquet.iter_batches(batch_size=PARQUET_BATCH_ROWS, columns=columns):
                for values in batch.to_pylist():
                    number += 1
                    yield number, rows, values
        except (pa.ArrowException, OSError) as error:
            raise DatasetError(f"{file}: cannot be read after row {number} ({error}); the file is damaged") from error
