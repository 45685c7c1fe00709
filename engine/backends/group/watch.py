"""When a group counts as hung: pure bookkeeping over what ranks report, with the clock of the caller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.backends.group.progress import Activity, Phase


@dataclass(frozen=True, slots=True)
class Stuck:
    """A rank that is taken for hung."""

    rank: int
    phase: Phase
    seconds: float
    """Since it last got further."""
    stopped: bool

    def describe(self) -> str:
        how = "; a signal has stopped it" if self.stopped else ""
        return f"rank {self.rank} got no further for {self.seconds:.0f} s ({self.phase.name.lower()}{how})"


class ProgressWatch:
    """Judges a running call. Two rules, since a rank may rightly wait long for another one:

    - a rank that computes and got no further for `hang_seconds` is hung;
    - when no rank at all got further for `hang_seconds`, those that have not finished are.
    """

    def __init__(self, ranks: int, hang_seconds: float, clock: Callable[[], float]) -> None:
        self._hang_seconds = hang_seconds
        self._clock = clock
        self._counters = [0] * ranks
        self._phases = [Phase.IDLE] * ranks
        self._stopped = [False] * ranks
        self._since = [0.0] * ranks
        self._running = False

    def begin(self) -> None:
        """A call starts now."""
        self._since = [self._clock()] * len(self._since)
        self._phases = [Phase.IDLE] * len(self._phases)
        self._running = True

    def end(self) -> None:
        self._running = False

    def saw(self, activities: Sequence[Activity]) -> None:
        now = self._clock()
        for activity in activities:
            if activity.counter != self._counters[activity.rank]:
                self._counters[activity.rank] = activity.counter
                self._since[activity.rank] = now
            self._phases[activity.rank] = activity.phase
            self._stopped[activity.rank] = activity.stopped

    def stuck(self) -> list[Stuck]:
        """Stopped ones first. Empty while all is well, and between calls."""
        if not self._running:
            return []
        now = self._clock()
        silent = [
            Stuck(rank, phase, now - since, stopped)
            for rank, (phase, since, stopped) in enumerate(zip(self._phases, self._since, self._stopped, strict=True))
            if now - since >= self._hang_seconds
        ]
        if len(silent) == len(self._since):
            stuck = [one for one in silent if one.phase is not Phase.FINISHED or one.stopped] or silent
        else:
            stuck = [one for one in silent if one.phase is Phase.COMPUTING]
        return sorted(stuck, key=lambda one: (not one.stopped, one.rank))
