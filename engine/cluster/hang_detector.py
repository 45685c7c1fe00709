"""Decides when the ranks of a group hang, from the progress that they report. The caller provides the clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.cluster.rank_progress import RankPhase


@dataclass(frozen=True, slots=True)
class HungRank:
    """A rank that counts as hung."""

    rank: int
    phase: RankPhase
    seconds: float
    """Seconds since its last progress."""
    responds: bool
    """Whether its process still replies to polls. A stopped process does not."""

    def describe(self) -> str:
        no_reply = "" if self.responds else "; its process does not answer"
        return f"rank {self.rank} made no progress for {self.seconds:.0f} s ({self.phase.name.lower()}{no_reply})"


class HangDetector:
    """Finds the ranks that hang in a running call. There are two rules, because a rank may wait long for another rank:

    - a rank in phase COMPUTING without progress for `hang_seconds` hangs;
    - if no rank made progress for `hang_seconds`, all ranks that have not finished hang.

    While the ranks start, imports report no progress. There a rank hangs if its process has not replied to polls for
    `hang_seconds`, although another rank or the same one has replied before.
    """

    def __init__(self, ranks: int, hang_seconds: float, clock: Callable[[], float]) -> None:
        self._hang_seconds = hang_seconds
        self._clock = clock
        self._counters = [0] * ranks
        self._responds = [True] * ranks
        self._last_reply: list[float | None] = [None] * ranks
        """By rank: the time of its last reply to a poll."""
        self._first_reply: float | None = None
        """The time of the first reply of any rank."""
        self.begin_call()

    def begin_call(self) -> None:
        """Starts the observation of a call."""
        ranks = len(self._counters)
        self._last_progress = [self._clock()] * ranks
        self._phases = [RankPhase.IDLE] * ranks

    def record_reply(self, rank: int, counter: int, phase: RankPhase) -> bool:
        """Records a reply of the rank to a poll. Returns whether the rank made progress since its last reply."""
        made_progress = counter != self._counters[rank]
        self._responds[rank] = True
        self._last_reply[rank] = self._clock()
        if self._first_reply is None:
            self._first_reply = self._clock()
        if made_progress:
            self._counters[rank] = counter
            self._last_progress[rank] = self._clock()
            # FINISHED in a reply may belong to the previous call. The end of this call is recorded by record_finish.
            if RankPhase.FINISHED not in (phase, self._phases[rank]):
                self._phases[rank] = phase
        return made_progress

    def record_finish(self, rank: int) -> None:
        """Records that the rank returned from the call."""
        self._phases[rank] = RankPhase.FINISHED
        self._last_progress[rank] = self._clock()

    def record_no_reply(self, rank: int) -> None:
        """Records that the rank has not replied to a poll."""
        self._responds[rank] = False

    def silent_ranks(self) -> list[HungRank]:
        """The ranks that hang while they start."""
        if self._first_reply is None:
            return []
        # All ranks start at the same time, so one that never replied is compared with the first that did.
        silent = []
        for rank, last_reply in enumerate(self._last_reply):
            seconds = self._clock() - (self._first_reply if last_reply is None else last_reply)
            if seconds >= self._hang_seconds:
                silent.append(HungRank(rank, self._phases[rank], seconds, responds=False))
        return silent

    def hung_ranks(self) -> list[HungRank]:
        """The ranks that hang now. Those that do not reply come first."""
        now = self._clock()
        without_progress = []
        for rank, last_progress in enumerate(self._last_progress):
            seconds = now - last_progress
            if seconds >= self._hang_seconds:
                without_progress.append(HungRank(rank, self._phases[rank], seconds, self._responds[rank]))

        # Some ranks make progress: one that waits for them does not hang, but one that computes does.
        if len(without_progress) < len(self._last_progress):
            hung = [rank for rank in without_progress if rank.phase is RankPhase.COMPUTING]
        # No rank makes progress: those that finished and still reply wait for the others.
        else:
            unfinished = [
                rank for rank in without_progress if rank.phase is not RankPhase.FINISHED or not rank.responds
            ]
            hung = unfinished or without_progress
        return sorted(hung, key=lambda rank: (rank.responds, rank.rank))
