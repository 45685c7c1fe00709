"""The tables that this process committed last, so that the next task of a step need not read them again.

A cached table is what a read would return: its key has the digest of the bytes that were committed. A hit does not show
that the store still has them: a gradient step asks (`check_stored`), and audits and `ostinato verify` read them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import pyarrow as pa

from storage.errors import CorruptArtifact
from storage.store.artifacts import ArtifactRef, single_file_entry
from storage.store.objects import ObjectStore

MAX_BYTES = 128 << 20
"""Bytes of tables that are kept. The table that was not used for the longest time is dropped first."""
MAX_TABLES = 64
"""Number of tables that are kept. Besides its bytes, a table takes some 10 kB for its schema, columns and buffers. For
a small table that is more than its content."""
KINDS = frozenset({"rollouts", "graded", "batch"})
"""Kinds of tables that one task of a step writes and another reads."""

TableKey = tuple[str, str, str]


class RecentTables:
    """A cache of tables, the least recently used dropped first. It may be used from several threads."""

    def __init__(self, max_bytes: int = MAX_BYTES, max_tables: int = MAX_TABLES) -> None:
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
"""The tables that this process committed last."""
