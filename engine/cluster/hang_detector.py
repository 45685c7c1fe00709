"""When the ranks of a group count as hung: bookkeeping over what they report, with the clock of the caller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.cluster.rank_progress import RankPhase


@dataclass(frozen=True, slots=True)
class Stuck:
    """A rank that is taken for hung."""

    rank: int
    phase: RankPhase
    seconds: float
    """Since its last progress."""
    answers: bool
    """Whether its process still answers the watch; a stopped process does not."""

    def describe(self) -> str:
        silent = "" if self.answers else "; its process does not answer"
        return f"rank {self.rank} made no progress for {self.seconds:.0f} s ({self.phase.name.lower()}{silent})"


class HangDetector:
    """Judges a running call. There are two rules, since a rank may rightly wait long for another one:

    - a rank that computes and made no progress for `hang_seconds` is hung;
    - when no rank at all made progress for `hang_seconds`, those that have not finished are.
    """

    def __init__(self, ranks: int, hang_seconds: float, clock: Callable[[], float]) -> None:
        self._hang_seconds = hang_seconds
        self._clock = clock
        self._counters = [0] * ranks
        self._answers = [True] * ranks
        self.begin()

    def begin(self) -> None:
        """A call starts now."""
        ranks = len(self._counters)
        self._since = [self._clock()] * ranks
        self._phases = [RankPhase.IDLE] * ranks

    def saw(self, rank: int, counter: int, phase: RankPhase) -> bool:
        """The rank answered the watch. Returns whether it made progress since its last answer."""
        moved = counter != self._counters[rank]
        self._answers[rank] = True
        if moved:
            self._counters[rank] = counter
            self._since[rank] = self._clock()
            # FINISHED in an answer may be of the call before; of this one, the caller tells
            if RankPhase.FINISHED not in (phase, self._phases[rank]):
                self._phases[rank] = phase
        return moved

    def finished(self, rank: int) -> None:
        """The rank returned from the call."""
        self._phases[rank] = RankPhase.FINISHED
        self._since[rank] = self._clock()

    def heard_nothing(self, rank: int) -> None:
        """The rank has not answered the watch."""
        self._answers[rank] = False

    def stuck(self) -> list[Stuck]:
        """The ranks that hang now; those that do not answer come first."""
        now = self._clock()
        silent = [
            Stuck(rank, self._phases[rank], now - since, self._answers[rank])
            for rank, since in enumerate(self._since)
            if now - since >= self._hang_seconds
        ]
        if len(silent) == len(self._since):
            hung = [rank for rank in silent if rank.phase is not RankPhase.FINISHED or not rank.answers] or silent
        else:
            hung = [rank for rank in silent if rank.phase is RankPhase.COMPUTING]
        return sorted(hung, key=lambda rank: (rank.answers, rank.rank))
