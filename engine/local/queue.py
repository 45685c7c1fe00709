"""The fair queue of calls for the engine's one compute thread.

It implements start-time fair queueing (Goyal, Vin, Cheng 1996) with measured costs. Each run has a virtual time: the
compute seconds that it has used. The run with the lowest virtual time goes next. A run that had no calls waiting starts
again at the virtual time of the call that began last, so that it is owed nothing for its absence.

Calls of one run stay in order, and a running call is never interrupted. A run that had no calls therefore waits for at
most one call of each other run. A run that was just served also waits until each other run has used as many seconds
as its own last call took.
"""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from engine.errors import EngineBusy, TransientEngineError

R = TypeVar("R")


class Abandoned(TransientEngineError):
    """Raised within a call whose caller was cancelled."""


@dataclass(slots=True)
class _Job:
    """One call in the queue."""

    function: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)
    abandoned: bool = False
    """Whether its caller was cancelled."""


@dataclass(slots=True)
class _Line:
    """The waiting calls of one run, and its virtual time in seconds."""

    jobs: deque[_Job] = field(default_factory=deque)
    virtual: float = 0.0


class FairQueue:
    """Runs calls in a thread of its own, those of the least served run first. `clock` returns seconds."""

    def __init__(
        self, *, name: str, prepare: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        self._changed = threading.Condition()
        self._closed = False
        self._running: _Job | None = None
        self._floor = 0.0
        """Virtual time of the call that began last. A run without waiting calls starts from it."""
        self._clock = clock
        self._thread = threading.Thread(target=self._work, args=(prepare,), name=name, daemon=True)
        self._thread.start()

    async def run(self, line: str, function: Callable[[], R]) -> R:
        """Calls `function` in the compute thread when it is the turn of `line`, and returns its result.

        Cancelling the caller removes a waiting call from the queue. A running call ends at its next `check`."""
        job = _Job(function)
        with self._changed:
            if self._closed:
                raise EngineBusy("the engine is closing; call again when it is back")
            entry = self._lines.setdefault(line, _Line(virtual=self._floor))
            # An idle run must not save up time and then keep all others waiting.
            if not entry.jobs:
                entry.virtual = max(entry.virtual, self._floor)
            entry.jobs.append(job)
            self._changed.notify()
        try:
            return await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:
            job.abandoned = True
            raise

    def check(self) -> None:
        """Raises Abandoned when the caller of the running call was cancelled. Long calls call it now and then."""
        if self._running is not None and self._running.abandoned:
            raise Abandoned("the caller of this call is gone")

    def waiting(self) -> int:
        """Number of calls that have not begun."""
        with self._changed:
            return sum(len(line.jobs) for line in self._lines.values())

    def close(self) -> None:
        """Refuses new calls, ends waiting ones with EngineBusy, and returns when the running call has ended."""
        with self._changed:
            self._closed = True
            dropped: list[_Job] = []
            for line in self._lines.values():
                dropped += line.jobs
            self._lines.clear()
            self._changed.notify()
        # Set the errors outside the lock: a callback of a future may call the queue again.
        for job in dropped:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(EngineBusy("the engine closed before this call began; call again"))
        self._thread.join()

    def _work(self, prepare: Callable[[], None]) -> None:
        """The loop of the compute thread."""
        prepare()
        while True:
            entry = self._next()
            if entry is None:
                return
            line, job = entry
            if not job.future.set_running_or_notify_cancel():
                continue  # its caller was cancelled

            # Charge the run for the seconds that its call took, also when the call failed.
            self._running, start = job, self._clock()
            try:
                result = job.function()
            except BaseException as error:  # noqa: BLE001 - every error is passed to the caller
                _clear_frames(error)
                job.future.set_exception(error)
            else:
                job.future.set_result(result)
            line.virtual += self._clock() - start

    def _next(self) -> tuple[_Line, _Job] | None:
        """Waits for a call and takes it out of its line. None when the queue is closed."""
        with self._changed:
            while not self._closed and not any(line.jobs for line in self._lines.values()):
                self._changed.wait()
            if self._closed:
                return None

            # The least served run, and of equal ones the first by name.
            waiting = [(line.virtual, name) for name, line in self._lines.items() if line.jobs]
            self._floor, name = min(waiting)
            line = self._lines[name]
            self._forget_idle(keep=name)
            return line, line.jobs.popleft()

    def _forget_idle(self, *, keep: str) -> None:
        """Deletes the lines that have no calls and are not ahead of the floor. A service sees very many runs."""
        idle = []
        for name, line in self._lines.items():
            if not line.jobs and name != keep and line.virtual <= self._floor:
                idle.append(name)
        for name in idle:
            del self._lines[name]


def _clear_frames(error: BaseException) -> None:
    """Clears the local variables of the frames in the error's traceback, which would keep weights in memory."""
    current: BaseException | None = error
    while current is not None:
        traceback.clear_frames(current.__traceback__)
        current = current.__cause__ or current.__context__
