"""Reads and writes tables as Parquet files with declared schemas, which pandas, DuckDB and `datasets` can open. Single
rows and columns are read from tables that may be larger than memory (`RowReader`).

Rows are written in groups of ROW_GROUP with fixed settings, so that equal tables give equal bytes. Every page has a
checksum, so that a read of a few row groups of a large file is checked, too.
"""

from __future__ import annotations

import io
import tempfile
import threading
from bisect import bisect_right
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import JsonValue

from storage.errors import CorruptArtifact, SchemaMismatch, StorageError
from storage.serialization import digest, digest_file
from storage.store.artifacts import (
    ArtifactRef,
    FileEntry,
    Provenance,
    commit_bytes,
    commit_file,
    read_bytes,
    single_file_entry,
)
from storage.store.backends.local import storage_error_of
from storage.store.objects import ObjectStore
from storage.store.schemas import OPTIONAL, SCHEMAS, table_schema
from storage.temporary import process_folder

__all__ = [
    "AHEAD",
    "ROW_GROUP",
    "SCHEMAS",
    "RowReader",
    "TableWriter",
    "check_stored",
    "commit_table",
    "conform_table",
    "read_column",
    "read_rows",
    "read_step_table",
    "read_table",
    "read_tables",
    "table_schema",
]

ROW_GROUP = 256
"""Rows that are compressed together: the unit of random access, and of memory when writing."""
PENDING_BYTES = 64 * 2**20
"""Bytes of rows after which a table is written although its row group has fewer rows than ROW_GROUP."""
RECENT_BYTES = 128 << 20
"""Bytes of tables that RECENT keeps. The table that was not used for the longest time is dropped first."""
RECENT_TABLES = 64
"""Number of tables that RECENT keeps. Besides its bytes, a table takes some 10 kB for its schema, columns and buffers:
more than the content of a small table."""
RECENT_KINDS = frozenset({"rollouts", "graded", "batch"})
"""Kinds of tables that one task of a step writes and another reads."""

AHEAD = 16
"""Tables of a step's shards that are read concurrently, so that a step of thousands does not wait for the latency of
each request."""

TableKey = tuple[str, str, str]


class RecentTables:
    """The tables that this process committed last, so that the next task of a step need not read them again. The least
    recently used is dropped first. It may be used from several threads.

    A cached table is what a read would return: its key has the digest of the bytes that were committed. A hit does not
    show that the store still has them: a gradient step asks (`check_stored`), and audits and `ostinato verify` read
    them.
    """

    def __init__(self, max_bytes: int = RECENT_BYTES, max_tables: int = RECENT_TABLES) -> None:
        self._max_bytes, self._max_tables = max_bytes, max_tables
        self._lock = threading.Lock()
        self._tables: OrderedDict[TableKey, pa.Table] = OrderedDict()
        self._bytes = 0

    def add(self, store: ObjectStore, ref: ArtifactRef, table: pa.Table) -> None:
        """Keeps the content of a committed table, unless it alone is larger than the cache."""
        if table.nbytes > self._max_bytes:
            return
        with self._lock:
            replaced = self._tables.pop(table_key(store, ref), None)
            self._bytes += table.nbytes - (0 if replaced is None else replaced.nbytes)
            self._tables[table_key(store, ref)] = table
            while self._bytes > self._max_bytes or len(self._tables) > self._max_tables:
                _, dropped = self._tables.popitem(last=False)
                self._bytes -= dropped.nbytes

    def find(self, store: ObjectStore, ref: ArtifactRef) -> pa.Table | None:
        """The table, or None if it is not in the cache."""
        with self._lock:
            table = self._tables.get(table_key(store, ref))
            if table is not None:
                self._tables.move_to_end(table_key(store, ref))
            return table


def table_key(store: ObjectStore, ref: ArtifactRef) -> TableKey:
    """Equal for equal content in the same store."""
    return store.url, ref.key, ref.sha256


def check_stored(store: ObjectStore, ref: ArtifactRef) -> None:
    """Raises CorruptArtifact or ObjectNotFound unless the store has a one-file artifact in its full size. The bytes are
    not read."""
    entry = single_file_entry(store, ref)
    size = next((info.size for info in store.list(entry.key) if info.key == entry.key), None)
    if size != entry.bytes:
        has = "is gone from" if size is None else f"has {size} of its {entry.bytes} bytes in"
        raise CorruptArtifact(f"{ref.key} is committed, but its data {entry.key} {has} {store.url}")


RECENT = RecentTables()


def commit_table(
    store: ObjectStore,
    key: str,
    table: pa.Table,
    *,
    kind: str,
    parents: Sequence[str | ArtifactRef] = (),
    provenance: Provenance,
    extra: Mapping[str, JsonValue] | None = None,
) -> ArtifactRef:
    """Commits a table of one of the SCHEMAS. Raises SchemaMismatch, naming the column."""
    table = conform_table(table, kind)
    # the bytes depend on the rows only, not on how the table is divided into chunks
    buffer = io.BytesIO()
    with _parquet_writer(buffer, table.schema) as writer:
        _write_groups(writer, table)
    data = buffer.getvalue()
    ref = commit_bytes(
        store, key, data, kind=kind, suffix=".parquet", rows=table.num_rows, parents=parents,
        provenance=provenance, extra=extra,
    )  # fmt: skip
    # another writer may have committed other rows first
    if kind in RECENT_KINDS and ref.sha256 == digest(data):
        RECENT.add(store, ref, table)
    return ref


def read_table(store: ObjectStore, ref: ArtifactRef, columns: Sequence[str] | None = None) -> pa.Table:
    """Reads the table, or only `columns`. OPTIONAL columns that the table does not have are left out.

    Raises ObjectNotFound, CorruptArtifact, and SchemaMismatch for a column that the table lacks.
    """
    data = read_bytes(store, ref)
    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        return file.read(columns=_present_columns(columns, file.schema_arrow.names, ref))
    except (pa.ArrowException, OSError) as error:
        raise CorruptArtifact(f"{ref.key} is no readable Parquet file: {error}") from error


def read_step_table(store: ObjectStore, ref: ArtifactRef, columns: Sequence[str] | None = None) -> pa.Table:
    """Like read_table, but without a request to the store if this process committed the table a short time ago."""
    table = RECENT.find(store, ref)
    if table is None:
        return read_table(store, ref, columns)
    present = _present_columns(columns, table.column_names, ref)
    return table if present is None else table.select(present)


def read_tables(
    store: ObjectStore, refs: Sequence[ArtifactRef], columns: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """Yields the tables of `refs` in order; at most AHEAD are in memory. Raises the errors of `read_table`."""
    if len(refs) == 1:
        yield read_step_table(store, refs[0], columns)
        return
    pool = ThreadPoolExecutor(min(AHEAD, max(1, len(refs))), thread_name_prefix="shards")
    try:
        waiting: deque[Future[pa.Table]] = deque()
        for ref in refs:
            # Yield the oldest table before another read begins, which bounds the memory.
            if len(waiting) == AHEAD:
                yield waiting.popleft().result()
            waiting.append(pool.submit(read_step_table, store, ref, columns))
        while waiting:
            yield waiting.popleft().result()
    finally:
        # Also reached when the caller stops early: reads that have not begun are dropped.
        pool.shutdown(cancel_futures=True)


class TableWriter:
    """Writes a table that may be larger than memory to a local file, then commits it.

        with TableWriter("threads") as writer:
            for rows in ...:
                writer.write(rows)              # dicts, or a pyarrow table
            version = writer.digest()           # sha256 of the finished file, for a key that names the content
            ref = writer.commit(store, key, provenance=provenance)

    Equal rows give the same digest as commit_table, if no row group exceeds PENDING_BYTES. The end of the block removes
    what was not committed.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.rows = 0
        self._folder = tempfile.TemporaryDirectory(prefix="table-", dir=process_folder())
        self.path = Path(self._folder.name) / "table.parquet"
        self._schema = table_schema(kind)
        self._writer: pq.ParquetWriter | None = None
        self._finished = False
        self._pending: list[pa.Table] = []
        self._pending_rows = 0
        self._recent: list[pa.Table] | None = [] if kind in RECENT_KINDS else None
        """The rows so far, until they are more than RECENT keeps."""

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, rows: pa.Table | Sequence[Mapping[str, Any]]) -> None:
        """Appends rows. Raises SchemaMismatch, ValueError after digest or commit."""
        if self._finished:
            raise ValueError("this table is finished: write before digest() and commit()")
        table = rows if isinstance(rows, pa.Table) else _table_of_rows(rows, self.kind)
        table = conform_table(table, self.kind)
        # the first rows decide which optional columns the table has
        if not self.rows:
            self._schema = table.schema
        if not table.num_rows:
            return
        table = _with_schema(table, self._schema, self.kind)
        if self._recent is not None:
            fits = sum(kept.nbytes for kept in (*self._recent, table)) <= RECENT_BYTES
            self._recent = [*self._recent, table] if fits else None
        self._pending.append(table)
        self._pending_rows += table.num_rows
        self.rows += table.num_rows
        # write all complete row groups; the rest waits for more rows
        if self._pending_rows >= ROW_GROUP:
            pending = pa.concat_tables(self._pending)
            complete_rows = pending.num_rows // ROW_GROUP * ROW_GROUP
            _write_groups(self._open(), pending.slice(0, complete_rows))
            self._pending, self._pending_rows = [pending.slice(complete_rows)], pending.num_rows - complete_rows
        # a row may have megabytes, so that a whole row group of them does not fit into memory
        elif sum(waiting.nbytes for waiting in self._pending) >= PENDING_BYTES:
            _write_groups(self._open(), pa.concat_tables(self._pending))
            self._pending, self._pending_rows = [], 0

    def digest(self) -> str:
        """Returns the sha256 of the whole file. No rows can be written afterwards."""
        self._finish()
        return digest_file(self.path)[0]

    def commit(
        self,
        store: ObjectStore,
        key: str,
        *,
        parents: Sequence[str | ArtifactRef] = (),
        provenance: Provenance,
        extra: Mapping[str, JsonValue] | None = None,
    ) -> ArtifactRef:
        """Commits the rows that were written. The local file is removed."""
        sha256 = self.digest() if self._recent else None
        self._finish()
        ref = commit_file(
            store, key, self.path, kind=self.kind, suffix=".parquet", rows=self.rows, parents=parents,
            provenance=provenance, extra=extra,
        )  # fmt: skip
        if self._recent and ref.sha256 == sha256:
            RECENT.add(store, ref, pa.concat_tables(self._recent))
        self.close()
        return ref

    def close(self) -> None:
        """Removes the local file."""
        self._finished = True
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._folder.cleanup()

    def _open(self) -> pq.ParquetWriter:
        if self._writer is None:
            self._writer = _parquet_writer(self.path, self._schema)
        return self._writer

    def _finish(self) -> None:
        if not self._finished:
            if self._pending:
                _write_groups(self._open(), pa.concat_tables(self._pending))
            self._open().close()
            self._writer, self._pending, self._finished = None, [], True


def conform_table(table: pa.Table, kind: str) -> pa.Table:
    """Returns the table with its columns in the declared order and without other metadata. Raises SchemaMismatch."""
    schema = table_schema(kind, table.column_names)
    # no unknown and no repeated columns
    for name in table.column_names:
        if name not in schema.names or table.column_names.count(name) > 1:
            raise SchemaMismatch(f"column {name!r} does not belong in a {kind} table; its columns are {schema.names}")
    # every declared column, with its type and without unexpected nulls
    for field in schema:
        if field.name not in table.column_names:
            raise SchemaMismatch(f"column {field.name!r} ({field.type}) of a {kind} table is missing")
        column = table.column(field.name)
        if column.type != field.type:
            raise SchemaMismatch(f"column {field.name!r} of a {kind} table is {column.type}, expected {field.type}")
        if column.null_count and not field.nullable:
            raise SchemaMismatch(f"column {field.name!r} of a {kind} table has nulls, expected none")
        if pa.types.is_list(field.type) and any(chunk.flatten().null_count for chunk in column.chunks):
            raise SchemaMismatch(f"column {field.name!r} of a {kind} table has nulls within its lists, expected none")
    return pa.table([table.column(name) for name in schema.names], schema=schema)


def _with_schema(table: pa.Table, schema: pa.Schema, kind: str) -> pa.Table:
    """Adds the optional columns that earlier rows have, as nulls.

    Raises SchemaMismatch if these rows have an optional column that earlier rows lack.
    """
    # a column that earlier rows have and these lack is optional
    for field in schema:
        if field.name not in table.column_names:
            table = table.append_column(field, pa.nulls(table.num_rows, field.type))
    if set(table.column_names) == set(schema.names):
        table = table.select(schema.names)
    if table.schema != schema:
        raise SchemaMismatch(f"rows of a {kind} table have {table.column_names}, those before them {schema.names}")
    return table


def _table_of_rows(rows: Sequence[Mapping[str, Any]], kind: str) -> pa.Table:
    schema = table_schema(kind, set[str]().union(*rows))
    # every row has the same columns
    expected = set(schema.names)
    for row in rows:
        differing = set(row) ^ expected
        if differing:
            raise SchemaMismatch(f"a row of a {kind} table has the columns {sorted(row)}: {sorted(differing)} differ")
    # convert each column with its declared type, so that an error names the column
    columns = []
    for field in schema:
        try:
            columns.append(pa.array([row[field.name] for row in rows], type=field.type))
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise SchemaMismatch(f"column {field.name!r} of a {kind} table, {field.type}: {error}") from error
    return pa.table(columns, schema=schema)


def _parquet_writer(where: Path | io.BytesIO, schema: pa.Schema) -> pq.ParquetWriter:
    # Names repeat, so a dictionary makes them small. Tokens and numbers hardly do: their dictionaries take three
    # quarters of the time of writing a batch, and make its file larger.
    names = [field.name for field in schema if pa.types.is_string(field.type)]
    return pq.ParquetWriter(
        where, schema, compression="zstd", compression_level=3, version="2.6", write_page_checksum=True,
        use_dictionary=names,
    )  # fmt: skip


def _write_groups(writer: pq.ParquetWriter, table: pa.Table) -> None:
    for start in range(0, table.num_rows, ROW_GROUP):
        writer.write_table(table.slice(start, ROW_GROUP).combine_chunks(), row_group_size=ROW_GROUP)


def _present_columns(columns: Sequence[str] | None, present: list[str], ref: ArtifactRef) -> list[str] | None:
    """`columns` without the OPTIONAL ones that the table does not have; None for all columns."""
    if columns is None:
        return None
    optional = set(OPTIONAL[ref.kind].names) if ref.kind in OPTIONAL else set()
    if missing := set(columns) - set(present) - optional:
        raise SchemaMismatch(f"{ref.key} has no column {sorted(missing)}; it has {present}")
    return [name for name in columns if name in present]


CACHED_GROUPS = 8
"""Row groups that a RowReader keeps in memory."""
COPIED_BYTES = 1 << 30
"""read_rows and read_column copy remote tables up to this size to this machine."""


class RowReader:
    """Reads single rows of a committed table by index, so that a dataset larger than memory can be shuffled.

    It may be used from several threads. Raises ObjectNotFound, CorruptArtifact (wrong checksum of a page, or size).
    """

    def __init__(self, store: ObjectStore, ref: ArtifactRef, *, copy: bool = False) -> None:
        """With `copy` a remote table is downloaded once and then read from the disk of this machine."""
        self.ref, self._store = ref, store
        # open the file, and check its size against the manifest
        entry = single_file_entry(store, ref)
        self._lock = threading.Lock()
        self._groups: OrderedDict[int, pa.Table] = OrderedDict()
        self._source = _download(store, entry) if copy else store.open(entry.key)
        if self._source.seek(0, io.SEEK_END) != entry.bytes:
            raise CorruptArtifact(f"{entry.key} does not have the {entry.bytes} bytes that its manifest says")
        # read the footer, which says where the row groups are
        try:
            self._file = pq.ParquetFile(self._source, page_checksum_verification=True, pre_buffer=False)
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(error, f"{ref.key} is no readable Parquet file", ref, store) from error
        # _starts[group] is the index of the first row of the group; the last entry is the number of rows
        self._starts = [0]
        for group in range(self._file.num_row_groups):
            self._starts.append(self._starts[-1] + self._file.metadata.row_group(group).num_rows)

    def __len__(self) -> int:
        return self._starts[-1]

    def rows(self, indices: Iterable[int]) -> list[dict[str, Any]]:
        """Returns the rows with these indices, in the order given. Raises IndexError."""
        row_indices = list(indices)
        # places in the result, by the row group that they are read from
        by_group: dict[int, list[int]] = defaultdict(list)
        for place, index in enumerate(row_indices):
            if not 0 <= index < len(self):
                raise IndexError(f"{self.ref.key} has {len(self)} rows, and none with index {index}")
            by_group[bisect_right(self._starts, index) - 1].append(place)
        # read each row group once
        rows: list[dict[str, Any]] = [{}] * len(row_indices)
        for group, places in sorted(by_group.items()):
            table = self._group(group).take([row_indices[place] - self._starts[group] for place in places])
            for place, row in zip(places, table.to_pylist(), strict=True):
                rows[place] = row
        return rows

    def column(self, name: str) -> Iterator[Any]:
        """Yields the values of one column, in the order of the rows. One row group of it is in memory at a time, and
        no other column is read."""
        for group in range(self._file.num_row_groups):
            with self._lock:
                table = self._read_group(group, [name])
            yield from table.column(name).to_pylist()

    def blocks(self) -> Iterator[pa.Table]:
        """Yields the table in blocks that follow one another, each a row group."""
        for group in range(self._file.num_row_groups):
            with self._lock:
                table = self._read_group(group)
            yield table

    def close(self) -> None:
        self._source.close()

    def _group(self, number: int) -> pa.Table:
        # a least-recently-used cache of row groups
        with self._lock:
            if number in self._groups:
                self._groups.move_to_end(number)
                return self._groups[number]
            table = self._read_group(number)
            self._groups[number] = table
            if len(self._groups) > CACHED_GROUPS:
                self._groups.popitem(last=False)
            return table

    def _read_group(self, number: int, columns: list[str] | None = None) -> pa.Table:
        """Reads a row group, or some columns of it, from the file."""
        try:
            return self._file.read_row_group(number, columns=columns)
        except (pa.ArrowException, OSError) as error:
            problem = f"row group {number} of {self.ref.key} is torn"
            raise _unreadable(error, problem, self.ref, self._store) from error


def _unreadable(error: Exception, problem: str, ref: ArtifactRef, store: ObjectStore) -> StorageError:
    """Returns the storage error for a failed read. An OSError with an errno is the disk's error, not the table's."""
    if isinstance(error, OSError) and error.errno:
        return storage_error_of(error, ref.key, store.url)
    return CorruptArtifact(f"{problem}: {error}")


def read_rows(store: ObjectStore, ref: ArtifactRef, indices: Iterable[int]) -> list[dict[str, Any]]:
    """Like RowReader(store, ref).rows(indices), with one cached reader per table and process.

    The rows of a shard of a shuffled dataset lie in many row groups, and each would be a request of its own. So a
    remote table of up to COPIED_BYTES is copied to this machine first.
    """
    return _shared_reader(_ReaderKey(store, ref)).rows(indices)


def read_column(store: ObjectStore, ref: ArtifactRef, name: str) -> Iterator[Any]:
    """Like RowReader(store, ref).column(name), with the readers of `read_rows`."""
    return _shared_reader(_ReaderKey(store, ref)).column(name)


class _ReaderKey:
    """Key of the cache of readers: equal for equal content in the same store."""

    def __init__(self, store: ObjectStore, ref: ArtifactRef) -> None:
        self.store, self.ref = store, ref
        self.name = table_key(store, ref)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ReaderKey) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


@lru_cache(maxsize=4)
def _shared_reader(table: _ReaderKey) -> RowReader:
    is_local = table.store.local_path(table.ref.key) is not None
    return RowReader(table.store, table.ref, copy=not is_local and table.ref.bytes <= COPIED_BYTES)


def _download(store: ObjectStore, entry: FileEntry) -> BinaryIO:
    """Downloads the file and opens it; it has no name any more, so that closing removes it.

    Raises ObjectNotFound, CorruptArtifact.
    """
    with tempfile.TemporaryDirectory(prefix="table-", dir=process_folder()) as folder:
        path = Path(folder, "table.parquet")
        sha256 = store.fetch(entry.key, path).sha256
        if sha256 != entry.sha256:
            raise CorruptArtifact(f"{entry.key} has sha256 {sha256[:12]}, its manifest says {entry.sha256[:12]}")
        return path.open("rb")
