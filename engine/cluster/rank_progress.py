"""Lets code inside a rank report its progress, and report that the rank cannot continue.

`report_progress()` is called once per micro-batch, layer or file, by the thread that computes. A separate thread that
reported at fixed intervals would continue to report while the computation hangs.

`HangDetector` decides from these reports when the ranks of a group hang. The caller provides the clock.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

PR_SET_PDEATHSIG = 1


class RankPhase(IntEnum):
    """The phase of a rank during a call."""

    IDLE = 0
    """The rank has not begun the call."""
    COMPUTING = 1
    """The rank runs the method."""
    FINISHED = 2
    """The method has returned, and the rank waits for the other ranks."""


class RankFailed(Exception):
    """Raised inside a rank that cannot continue in the middle of an exchange with the others: the group must end."""

    def __init__(self, reason: str, *, is_cause: bool = True) -> None:
        """`is_cause` is False if the rank only noticed that another rank was gone."""
        super().__init__(reason)
        self.is_cause = is_cause


class ProgressReporter:
    """The progress of this process's rank."""

    def __init__(self) -> None:
        self.counter = 0
        """Increases with each step and at each change of phase."""
        self.phase = RankPhase.IDLE

    def set_phase(self, phase: RankPhase) -> None:
        self.phase = phase
        self.counter += 1

    def step(self) -> None:
        self.counter += 1


REPORTER = ProgressReporter()
"""The reporter of this process. A process runs at most one rank."""


def report_progress() -> None:
    """Reports that the computation advanced by one step. It has no effect in a process that is not a rank."""
    REPORTER.step()


def end_with_parent() -> None:
    """Makes the kernel kill this process when its parent ends (Linux only).

    The parent of an actor is the Ray daemon of its machine. A stopped actor could not notice the end of the daemon, and
    would keep its memory.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def is_peer_loss(error: BaseException) -> bool:
    """Whether an exchange failed because another rank is gone. gloo raises plain RuntimeErrors."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


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
