"""Where the time of a step goes. One clock per flow run; tasks of the same process add to it."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tasks.reports.metrics import ACTIVITIES


class StepClock:
    """Splits the wall time of each step among the parts; what no part claims is orchestration.

    Tasks run at once: an instant in which several parts are open is shared among them, and one that several tasks spend
    in the same part counts once, so that the parts add up to the wall time.
    """

    def __init__(self) -> None:
        self._parts: defaultdict[str, float] = defaultdict(float)
        self._open: Counter[str] = Counter()
        self._since = time.perf_counter()
        _clock.set(self)

    def begin(self, part: str) -> None:
        self._advance()
        self._open[part] += 1

    def end(self, part: str) -> None:
        self._advance()
        self._open[part] -= 1

    def lap(self) -> dict[str, float]:
        """Seconds per part since the last lap."""
        self._advance()
        split = {part: self._parts[part] for part in ACTIVITIES}
        self._parts.clear()
        return split

    def _advance(self) -> None:
        """Gives the time since the last change to the parts that were open."""
        now = time.perf_counter()
        parts = [part for part, tasks in self._open.items() if tasks > 0] or ["orchestration"]
        for part in parts:
            self._parts[part] += (now - self._since) / len(parts)
        self._since = now


_clock: ContextVar[StepClock | None] = ContextVar("ostinato_clock", default=None)


@contextmanager
def timed(part: str) -> Iterator[None]:
    """Counts the wall time of the block as `part`; without a running clock, only runs the block."""
    clock = _clock.get()
    if clock is None:
        yield
        return
    clock.begin(part)
    try:
        yield
    finally:
        clock.end(part)
