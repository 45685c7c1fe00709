"""Where the time of a step goes. One clock per flow run; tasks of the same process add to it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tasks.metrics import ACTIVITIES

_clock: ContextVar[dict[str, float] | None] = ContextVar("ostinato_clock", default=None)


@contextmanager
def timed(part: str) -> Iterator[None]:
    """Adds the wall seconds of the block to `part`; without a running clock, only runs the block."""
    started = time.perf_counter()
    try:
        yield
    finally:
        clock = _clock.get()
        if clock is not None:
            clock[part] = clock.get(part, 0.0) + time.perf_counter() - started


class StepClock:
    """Splits the wall time of each step among the parts; what no part claims is orchestration."""

    def __init__(self) -> None:
        self._parts: dict[str, float] = {}
        _clock.set(self._parts)
        self._started = time.perf_counter()

    def lap(self) -> dict[str, float]:
        """Seconds per part since the last lap."""
        now = time.perf_counter()
        wall, self._started = now - self._started, now
        split = {part: self._parts.get(part, 0.0) for part in ACTIVITIES}
        split["orchestration"] = max(0.0, wall - sum(split.values()))
        self._parts.clear()
        return split
