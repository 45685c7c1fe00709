"""Counts repetitions of digests in bounded memory. SQLite moves what its cache cannot hold to a temporary file."""

import sqlite3
from types import TracebackType
from typing import Self


class RepetitionCounter:
    """Counts how often each key was added. Use it as a context manager."""

    def __init__(self) -> None:
        # An empty name is a temporary database on disk. It needs no journal: a crash ends the loading anyway.
        self._database = sqlite3.connect("", isolation_level=None)
        self._database.executescript(
            "PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF;"
            "CREATE TABLE seen (key TEXT PRIMARY KEY, times INTEGER NOT NULL) WITHOUT ROWID; BEGIN"
        )

    def add(self, key: str) -> int:
        """Add `key` and return how many earlier calls added it."""
        row = self._database.execute(
            "INSERT INTO seen VALUES (?, 0) ON CONFLICT (key) DO UPDATE SET times = times + 1 RETURNING times", (key,)
        ).fetchone()
        return int(row[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._database.close()
