"""Counts repetitions of digests in bounded memory. SQLite moves what its cache cannot hold to a temporary file."""

import sqlite3
from collections.abc import Sequence
from types import TracebackType
from typing import Self

CACHE_KIB = 64 << 10
"""Memory of SQLite's cache, in KiB. It holds about a million digests."""


class RepetitionCounter:
    """Counts how often each key was added. Use it as a context manager."""

    def __init__(self) -> None:
        # An empty name is a temporary database on disk. It needs no journal: a crash ends the loading anyway.
        self._database = sqlite3.connect("", isolation_level=None)
        self._database.executescript(
            f"PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-{CACHE_KIB};"
            "CREATE TABLE seen (key TEXT PRIMARY KEY, times INTEGER NOT NULL) WITHOUT ROWID; BEGIN"
        )

    def add(self, key: str) -> int:
        """Add `key` and return how many earlier calls added it."""
        row = self._database.execute(
            "INSERT INTO seen VALUES (?, 0) ON CONFLICT (key) DO UPDATE SET times = times + 1 RETURNING times", (key,)
        ).fetchone()
        return int(row[0])

    def add_all(self, keys: Sequence[str]) -> list[int]:
        """Add all keys in their order, as `add` does, in one statement if none of them was added before."""
        if not keys:
            return []
        # The table is ordered by key, so sorted keys change fewer pages.
        values = ",".join(["(?,0)"] * len(keys))
        rows = self._database.execute(f"INSERT OR IGNORE INTO seen VALUES {values} RETURNING key", sorted(keys))
        new = {key for (key,) in rows}
        if len(new) == len(keys):
            return [0] * len(keys)
        repetitions = []
        for key in keys:
            # The first occurrence of a new key was added above.
            is_new = key in new
            repetitions.append(0 if is_new else self.add(key))
            new.discard(key)
        return repetitions

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._database.close()
