"""Reads raw rows of a file in bounded memory: JSON lines and CSV one row at a time, Parquet one batch at a time. A file
with one JSON array is read whole, so it has the size limit of a row.

A Parquet file of some kilobytes can hold rows of gigabytes, as indices of one large value. So few rows are read at a
time if the values can be large, lists of texts are read as indices, and a row within MAX_LINE_BYTES is made of them.
"""

import csv
import glob
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks.datasets.errors import BadRow, DatasetError, DatasetNotFound
from tasks.datasets.sources.parquet_pages import PageBytes, page_bytes, row_groups

MAX_LINE_BYTES = 64 * 2**20
"""Longest line of JSON, and largest row of a Parquet file, that is read into memory. A longer one is a bad row."""
PARQUET_BATCH_ROWS = 512
"""Most rows of a Parquet file that are in memory at a time."""
PARQUET_BATCH_BYTES = 64 * 2**20
"""Memory of a batch of a Parquet file, for which the number of its rows is chosen."""
PYTHON_ROWS_BYTES = 16 * 2**20
"""Bytes of rows that become objects of Python at a time, if it is more than one row."""
PARQUET_BUFFER_BYTES = 1 << 20
"""Bytes of a column of a Parquet file that are read at a time."""
PARQUET_PAGES_BYTES = 512 * 2**20
"""Most memory of the pages that pyarrow holds at a time: one of each column that is read, and its dictionary."""
INDEXED_BYTES = 128 * 2**20
"""Most bytes of texts of a row group that are read as indices. Each batch has a copy of these texts."""
LIST_VALUE_BYTES = 8
"""Memory of a value of a list, at least."""


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

SUFFIXES = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".json": "json",
}  # fmt: skip


def checked_suffix(name: str, data: bytes) -> str:
    """The suffix of a file of this name, in small letters, after a look at its content. Raises DatasetError."""
    suffix = Path(name).suffix.lower()
    if suffix not in SUFFIXES:
        raise DatasetError(f"{name[:100]}: given the suffix {suffix[:20]!r}; expected one of {', '.join(SUFFIXES)}")
    is_parquet = data[:4] == data[-4:] == b"PAR1"
    if is_parquet != (SUFFIXES[suffix] == "parquet"):
        content = "a Parquet file" if is_parquet else "a file that is not Parquet, or is cut off"
        raise DatasetError(f"{name[:100]}: given {content}; expected what its suffix {suffix} says")
    return suffix


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
            f"no file at {path!r} (in the folder {Path.cwd()}); expected a file of JSON lines, JSON, CSV or Parquet"
        )
    return files


def format_of(file: Path, declared: str) -> str:
    """The declared format or, for 'auto', the one of the file's suffix. Raises DatasetError."""
    if declared != "auto":
        return declared
    if file.suffix not in SUFFIXES:
        raise DatasetError(
            f"{file}: given the suffix {file.suffix!r}; expected one of {', '.join(SUFFIXES)}. "
            f"Declare the format with format='jsonl' (one JSON object per line), 'json', 'csv' or 'parquet'."
        )
    return SUFFIXES[file.suffix]


def column_names(file: Path, file_format: str) -> set[str]:
    """The columns of a Parquet file, or of the first row of another file that can be read. Raises DatasetError."""
    if file_format == "parquet":
        with _open_parquet(file) as parquet:
            return set(parquet.schema_arrow.names)
    for row, _, values in text_rows(file, file_format):
        # a dataset may skip rows that cannot be read
        with suppress(BadRow):
            return set(parse_json_line(str(file), row, values) if isinstance(values, bytes) else values)
    return set()


def text_rows(file: Path, file_format: str) -> Iterator[tuple[int, int, Any]]:
    """Yield (row number from 1, bytes of the file read for it, row) of a file that is not Parquet. A row is an object,
    or a line of JSON as bytes. Raises BadRow, DatasetError."""
    if file_format == "csv":
        yield from _csv_rows(file)
    elif file_format == "json" and (values := _json_array(file)) is not None:
        size = file.stat().st_size // max(1, len(values))
        for row, value in enumerate(values, start=1):
            yield row, size, value
    else:
        for row, line in json_lines(file):
            yield row, len(line), line


def _csv_rows(file: Path) -> Iterator[tuple[int, int, dict[str, str | None]]]:
    """The rows of CSV after the first line, which names the columns. A cell is a text, and an empty one is null."""
    source, read, before = str(file), 0, 0

    def lines() -> Iterator[str]:
        nonlocal read
        with file.open("rb") as stream:
            while line := stream.readline(MAX_LINE_BYTES + 1):
                if len(line) > MAX_LINE_BYTES:
                    raise DatasetError(f"{source}: given a line of more than {MAX_LINE_BYTES} bytes; expected CSV")
                # the file may begin with a byte order mark
                text = line.decode("utf-8" if read else "utf-8-sig")
                read += len(line)
                yield text

    # the limit is one of the process, and it holds for a quoted cell of several lines, too
    csv.field_size_limit(MAX_LINE_BYTES)
    number = 0
    try:
        reader = csv.reader(lines(), strict=True)
        names = next(reader, [])
        if len(set(names)) < len(names) or "" in names:
            raise DatasetError(f"{source}: given the first line {names!r:.200}; expected a name of its own per column")
        for number, cells in enumerate(filter(None, reader), start=1):
            if len(cells) != len(names):
                cells_and_names = f"{len(cells)} cells, where the first line names {len(names)} columns"
                raise BadRow(source, number, None, given=cells_and_names, expected="a cell for each column")
            yield number, read - before, {name: cell or None for name, cell in zip(names, cells, strict=True)}
            before = read
    except (csv.Error, UnicodeDecodeError) as error:
        problem = f"cannot be read as CSV after row {number} ({error})"
        raise DatasetError(f"{source}: {problem}; expected CSV in UTF-8") from error


def _json_array(file: Path) -> list[Any] | None:
    """The values of a file with one JSON array. None: it does not begin like one, so it should have JSON lines."""
    with file.open("rb") as stream:
        if not stream.read(1 << 10).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            return None
    size = file.stat().st_size
    if size > MAX_LINE_BYTES:
        raise DatasetError(
            f"{file}: given a JSON array of {size:,} bytes; expected at most {MAX_LINE_BYTES:,}. Write one object per "
            "line (.jsonl), which is read in pieces."
        )
    try:
        values = _DECODER.decode(file.read_text("utf-8-sig"))
    except (_NotInJSON, ValueError, RecursionError) as error:
        raise DatasetError(f"{file}: given a text that is not JSON ({error}); expected an array of objects") from error
    assert isinstance(values, list)
    return values


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


UNREADABLE = (
    pa.ArrowException, OSError, ValueError, OverflowError, RecursionError, MemoryError, LookupError, TypeError,
)  # fmt: skip
"""What pyarrow raises for a damaged file, and for values that Python's types cannot hold. KeyError: an unknown time
zone."""


def _open_parquet(file: Path, *, indexed: Sequence[str] | None = None) -> pq.ParquetFile:
    """Opens the file. The leaves `indexed` are read as indices of their values."""
    try:
        # pyarrow's defaults read whole row groups ahead: the load of a file of 5 GB then took 4.9 GB of memory.
        parquet = pq.ParquetFile(file, pre_buffer=False, buffer_size=PARQUET_BUFFER_BYTES, read_dictionary=indexed)
        len(parquet.schema_arrow)  # a damaged schema is found here
    except (FileNotFoundError, PermissionError):
        raise
    except UNREADABLE as error:
        reason = " ".join(str(error).split())
        raise DatasetError(
            f"{file}: given a file that is not Parquet, or is damaged ({reason:.200}); expected a Parquet file"
        ) from error
    return parquet


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
            f"Map the names with columns, for instance columns={{prompt: question}}{instead}."
        )
    return [name for name in present if name in columns.read]


def parquet_rows(file: Path, choose_columns: ChooseColumns) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield (row number from 1, number of rows of the file, values of the row). Only the chosen columns are read.

    Raises DatasetError if the file is not Parquet, or lacks a required column; BadRow for a row over MAX_LINE_BYTES.
    """
    with _open_parquet(file) as parquet:
        # Check the schema before any row is read.
        columns = checked_columns(choose_columns, parquet.schema_arrow.names, source=str(file))
        number, rows = 0, parquet.metadata.num_rows
        try:
            # Stream the rows, a batch at a time.
            for batch in _batches(file, parquet, columns):
                for values in _python_rows(batch, str(file), number):
                    number += 1
                    yield number, rows, values
        except UNREADABLE as error:
            reason = " ".join(str(error).split())
            raise DatasetError(
                f"{file}: cannot be read after row {number} ({type(error).__name__}: {reason:.200}); the file is "
                "damaged, or has values that Python has no type for"
            ) from error


def _batches(file: Path, parquet: pq.ParquetFile, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """Yields the chosen columns of the file in batches of at most PARQUET_BATCH_BYTES, as far as that can be known.

    Raises DatasetError for pages that are too large, and BadRow for rows that are, before they are read.
    """
    leaves = _chosen_leaves(parquet.schema, columns)
    text_lists = [leaf.path for leaf in leaves.values() if _is_text_list(leaf)]
    lists = [index for index, leaf in leaves.items() if leaf.max_repetition_level > 0]
    before = 0
    with _open_parquet(file, indexed=text_lists) as indexed, file.open("rb") as stream:
        for group, chunks in zip(range(parquet.num_row_groups), row_groups(stream), strict=False):
            # Check the memory of the pages.
            if len(chunks) < len(parquet.schema):
                raise ValueError(f"a row group has {len(chunks)} of {len(parquet.schema)} columns")
            pages = {index: page_bytes(stream, chunks[index]) for index in leaves}
            _check_pages(pages.values(), str(file), before)
            # Check the size of the rows. A file of some hundred bytes can hold lists of any length.
            group_rows = parquet.metadata.row_group(group).num_rows
            list_bytes = sum(LIST_VALUE_BYTES * chunks[index].values for index in lists)
            _check_mean_row(list_bytes, group_rows, str(file), before)
            if columns == parquet.schema_arrow.names:
                _check_mean_row(parquet.metadata.row_group(group).total_byte_size, group_rows, str(file), before)
            # Read them.
            in_text_lists = sum(pages[index].stored for index, leaf in leaves.items() if _is_text_list(leaf))
            stored = sum(sizes.stored for sizes in pages.values())
            mean_list_bytes = list_bytes // max(group_rows, 1)
            batch_rows, as_indices = _batch_rows(in_text_lists, stored - in_text_lists, mean_list_bytes)
            yield from (indexed if as_indices else parquet).iter_batches(batch_rows, [group], columns)
            before += group_rows


def _check_mean_row(group_bytes: int, rows: int, source: str, before: int) -> None:
    """Raises BadRow if the rows of a group have more than MAX_LINE_BYTES on average, before one of them is read. Then
    at least one row has; `before` rows came before the group."""
    if group_bytes > MAX_LINE_BYTES * max(1, rows):
        raise BadRow(
            source, before + 1, None, given=f"a row group of {rows:,} rows and {group_bytes:,} bytes",
            expected=f"rows of at most {MAX_LINE_BYTES:,} bytes",
        )  # fmt: skip


def _check_pages(pages: Iterable[PageBytes], source: str, before: int) -> None:
    """Raises DatasetError if pyarrow would reserve more than PARQUET_PAGES_BYTES for the pages of these columns."""
    needed = sum(sizes.at_a_time for sizes in pages)
    if needed > PARQUET_PAGES_BYTES:
        raise DatasetError(
            f"{source}: after row {before} given pages that need {needed:,} bytes of memory; expected at most "
            f"{PARQUET_PAGES_BYTES:,}. The file is damaged, or must be written with smaller pages (for instance with "
            "pyarrow's data_page_size, dictionary_pagesize_limit and a smaller write_batch_size)."
        )


def _chosen_leaves(schema: pq.ParquetSchema, columns: list[str]) -> dict[int, pq.ColumnSchema]:
    """The leaves of the chosen columns, such as messages.list.element.content, by their number in the schema."""
    leaves = {}
    for index in range(len(schema)):
        leaf = schema.column(index)
        if any(leaf.path == column or leaf.path.startswith(f"{column}.") for column in columns):
            leaves[index] = leaf
    return leaves


def _is_text_list(leaf: pq.ColumnSchema) -> bool:
    """Whether the leaf holds lists of texts or bytes."""
    return bool(leaf.physical_type == "BYTE_ARRAY" and leaf.max_repetition_level > 0)


def _batch_rows(in_text_lists: int, in_other_columns: int, mean_list_bytes: int) -> tuple[int, bool]:
    """(rows to read at a time, whether lists of texts are read as indices), for a row group that stores so many bytes.

    Each value may be as large as all that its columns store. A list may repeat it any number of times, unless it is
    read as indices; then a batch holds each text once. The values of the lists of a row take `mean_list_bytes` on
    average."""
    as_indices = 0 < in_text_lists <= INDEXED_BYTES
    row_bytes = max(mean_list_bytes, in_other_columns + (0 if as_indices else in_text_lists), 1)
    return max(1, min(PARQUET_BATCH_ROWS, PARQUET_BATCH_BYTES // row_bytes)), as_indices


def _python_rows(batch: pa.RecordBatch, source: str, before: int) -> Iterator[dict[str, Any]]:
    """The rows of a batch as dicts. Raises BadRow for a row of more than MAX_LINE_BYTES; `before` rows came before."""
    has_indices = any(pa.types.is_nested(kind) or pa.types.is_dictionary(kind) for kind in batch.schema.types)
    if not has_indices and batch.nbytes <= PYTHON_ROWS_BYTES:
        yield from batch.to_pylist()
        return
    sizes = np.zeros(len(batch), np.int64)
    for column in batch.columns:
        sizes += _value_bytes(column)
    start = 0
    while start < len(batch):
        if sizes[start] > MAX_LINE_BYTES:
            raise BadRow(
                source, before + start + 1, None, given=f"a row of {sizes[start]:,} bytes",
                expected=f"at most {MAX_LINE_BYTES:,}",
            )  # fmt: skip
        # as many further rows as are within the limit together
        count = max(1, int(np.searchsorted(np.cumsum(sizes[start:]), PYTHON_ROWS_BYTES, side="right")))
        yield from batch.slice(start, count).to_pylist()
        start += count


def _value_bytes(values: pa.Array) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Bytes that each value takes when it is written out, by the lengths of its texts and 8 for anything else."""
    if pa.types.is_dictionary(values.type):
        of_indices = _value_bytes(values.dictionary)
        indices = values.indices.fill_null(0).to_numpy(zero_copy_only=False)
        return of_indices[indices] if len(of_indices) else np.zeros(len(values), np.int64)
    if pa.types.is_struct(values.type):
        sizes = np.full(len(values), 8, np.int64)
        for field in values.flatten():
            sizes += _value_bytes(field)
        return sizes
    if pa.types.is_map(values.type):
        values = values.cast(pa.list_(pa.struct([("key", values.type.key_type), ("value", values.type.item_type)])))
    if isinstance(values, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
        lengths = pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False)
        totals = np.concatenate([[0], np.cumsum(_value_bytes(values.flatten()))])
        ends = np.cumsum(lengths)
        return 8 + totals[ends] - totals[ends - lengths]
    if pa.types.is_string(values.type) or pa.types.is_binary(values.type) or pa.types.is_large_string(values.type):
        return np.asarray(pc.binary_length(values).fill_null(0).to_numpy(zero_copy_only=False), np.int64)
    return np.full(len(values), 8, np.int64)
