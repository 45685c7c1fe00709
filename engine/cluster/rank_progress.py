"""Lets code inside a rank report its progress, and report that the rank cannot continue.

`report_progress()` is called once per micro-batch, layer or file, by the thread that computes. A separate thread that
reported at fixed intervals would continue to report while the computation hangs.
"""

from __future__ import annotations

import ctypes
import signal
import sys
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
