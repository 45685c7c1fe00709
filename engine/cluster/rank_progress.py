"""What the code inside a rank tells its group: how far it is, and that it cannot go on.

`progress()` is called once per micro-batch, layer or file. It says that the computing thread itself got further; a
thread that reported by the clock would report on while the computation hangs.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from enum import IntEnum

PR_SET_PDEATHSIG = 1


class RankPhase(IntEnum):
    """What a rank does during a call."""

    IDLE = 0
    """It has not begun the call."""
    COMPUTING = 1
    """It runs the method."""
    FINISHED = 2
    """It has returned and waits for the other ranks."""


class RankFailed(Exception):
    """A rank cannot go on in the middle of an exchange with the others: the group must end."""

    def __init__(self, reason: str, *, is_cause: bool = True) -> None:
        """`is_cause` is False where the rank only noticed that another one was gone."""
        super().__init__(reason)
        self.is_cause = is_cause


class Reporter:
    """The progress of this process's rank."""

    def __init__(self) -> None:
        self.counter = 0
        """Grows with each step and at each change of phase."""
        self.phase = RankPhase.IDLE

    def enter(self, phase: RankPhase) -> None:
        self.phase = phase
        self.counter += 1

    def step(self) -> None:
        self.counter += 1


REPORTER = Reporter()
"""A process is at most one rank."""


def report_progress() -> None:
    """Says that the computation got one step further. It has no effect in a process that is no rank."""
    REPORTER.step()


def end_with_parent() -> None:
    """Has the kernel kill this process when its parent ends (Linux). An actor's parent is its machine's Ray daemon: a
    stopped actor could not notice the daemon's end itself, and would hold its memory."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def is_peer_loss(error: BaseException) -> bool:
    """Whether an exchange failed because another rank is gone. gloo raises plain RuntimeErrors."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
