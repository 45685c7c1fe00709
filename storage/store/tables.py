"""Reads and writes tables as Parquet files with declared schemas, which pandas, DuckDB and `datasets` can open.

Rows are written in groups of ROW_GROUP with fixed settings, so that equal tables give equal bytes. Every page has a
checksum, so that a read of a few row groups of a large file is checked, too.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import JsonValue

from storage.errors import CorruptArtifact, SchemaMismatch
from storage.serialization import digest, digest_file
from storage.store.artifacts import (
    ArtifactRef,
    Provenance,
    commit_bytes,
    commit_file,
    read_bytes,
)
from storage.store.objects import ObjectStore
from storage.store.recent_tables import KINDS, MAX_BYTES, RECENT
from storage.store.row_reader import RowReader, read_column, read_rows
from storage.store.schemas import OPTIONAL, SCHEMAS, table_schema
from storage.temporary import process_folder

__all__ = [
    "ROW_GROUP",
    "SCHEMAS",
    "RowReader",
    "TableWriter",
    "commit_table",
    "conform_table",
    "read_column",
    "read_rows",
    "read_step_table",
    "read_table",
    "table_schema",
]

ROW_GROUP = 256
"""Rows that are compressed together: the unit of random access, and of memory when writing."""
PENDING_BYTES = 64 * 2**20
"""Bytes of rows after which a table is written although its row group has fewer rows than ROW_GROUP."""


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
    if kind in KINDS and ref.sha256 == digest(data):
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
    return table.select(_present_columns(columns, table.column_names, ref) or table.column_names)


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
        self._recent: list[pa.Table] | None = [] if kind in KINDS else None
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
        table = _with_schema(table, self._schema, self.kind)
        if self._recent is not None:
            fits = sum(kept.nbytes for kept in (*self._recent, table)) <= MAX_BYTES
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
    return pq.ParquetWriter(
        where, schema, compression="zstd", compression_level=3, version="2.6", write_page_checksum=True
    )


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
