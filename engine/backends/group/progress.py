"""The progress of ranks, in memory that they share with the process that watches them: two integers per rank.

`progress()` is for the code that a rank runs: once per micro-batch, layer or file. It says that the computing thread
itself got further; a thread that beats by the clock would beat on while the computation hangs.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import IO


class Phase(IntEnum):
    """What a rank does."""

    IDLE = 0
    """Waits for a call."""
    COMPUTING = 1
    """Runs the method."""
    FINISHED = 2
    """Has run it and waits for the other ranks."""


@dataclass(frozen=True, slots=True)
class Activity:
    """A rank at one moment."""

    rank: int
    counter: int
    phase: Phase
    stopped: bool = False
    """By SIGSTOP or a debugger."""


_SLOT = struct.Struct("=qq")


class ProgressFile:
    """One slot per local rank: a counter that only grows, and a phase. Shared by its file descriptor."""

    def __init__(self, file: IO[bytes] | int, slots: int) -> None:
        self._file = file
        self._map = mmap.mmap(file if isinstance(file, int) else file.fileno(), slots * _SLOT.size)

    @classmethod
    def create(cls, slots: int) -> ProgressFile:
        file = tempfile.TemporaryFile(prefix="ostinato-progress-")  # noqa: SIM115 - `close` closes it
        file.truncate(slots * _SLOT.size)
        return cls(file, slots)

    def fileno(self) -> int:
        return self._file if isinstance(self._file, int) else self._file.fileno()

    def read(self, slot: int) -> tuple[int, Phase]:
        counter, phase = _SLOT.unpack_from(self._map, slot * _SLOT.size)
        return counter, Phase(phase)

    def write(self, slot: int, counter: int, phase: Phase) -> None:
        _SLOT.pack_into(self._map, slot * _SLOT.size, counter, phase)

    def close(self) -> None:
        self._map.close()
        if isinstance(self._file, int):
            os.close(self._file)
        else:
            self._file.close()


class Reporter:
    """A rank's own slot. `listener` hears of each step too."""

    def __init__(self) -> None:
        self._file: ProgressFile | None = None
        self._slot = 0
        self._counter = 0
        self._phase = Phase.IDLE
        self._listener: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def attach(self, file: ProgressFile, slot: int, listener: Callable[[], None] | None = None) -> None:
        self._file, self._slot, self._listener = file, slot, listener

    def enter(self, phase: Phase) -> None:
        self._phase = phase
        self._step()

    def step(self) -> None:
        self._step()
        if self._listener is not None and self._phase is Phase.COMPUTING:
            self._listener()

    def _step(self) -> None:
        if self._file is not None:
            with self._lock:
                self._counter += 1
                self._file.write(self._slot, self._counter, self._phase)


REPORTER = Reporter()
"""This process's, as a process is at most one rank. Not attached, so without effect, in any other process."""


def progress() -> None:
    """The computation got one step further. Costs a microsecond; in a process that is no rank it does nothing."""
    REPORTER.step()
