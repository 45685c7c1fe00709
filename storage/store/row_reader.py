"""Reads rows and columns of a committed table that may be larger than memory."""

from __future__ import annotations

import io
import tempfile
import threading
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from storage.errors import CorruptArtifact, StorageError
from storage.serialization import digest_file
from storage.store.artifacts import ArtifactRef, FileEntry, single_file_entry
from storage.store.backends.local_errors import storage_error_of
from storage.store.objects import ObjectStore
from storage.store.recent_tables import table_key
from storage.temporary import process_folder

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
        store.fetch(entry.key, path)
        sha256 = digest_file(path)[0]
        if sha256 != entry.sha256:
            raise CorruptArtifact(f"{entry.key} has sha256 {sha256[:12]}, its manifest says {entry.sha256[:12]}")
        return path.open("rb")
