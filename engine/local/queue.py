"""The fair queue in front of the one compute thread.

Start-time fair queueing (Goyal, Vin, Cheng 1996) with measured cost: each run has a virtual time, the compute seconds
it has used; the run that has used least goes next. A run that was away comes back at the virtual time of the call that
began last: it is owed nothing for its absence. Calls of one run stay in order. No call gives way to another, so a run
that was away waits at most for one call of each other run; one that has just been served, besides that, until each has
had as many seconds as its own last call took.
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
    """Nobody waits for the call any more."""


@dataclass(slots=True)
class _Job:
    function: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)
    abandoned: bool = False
    """Its caller was cancelled."""


@dataclass(slots=True)
class _Line:
    """The calls of one run, and the compute seconds it has used (virtual: see the module)."""

    jobs: deque[_Job] = field(default_factory=deque)
    virtual: float = 0.0


class FairQueue:
    """Runs calls in one thread of its own, those of the least served run first. `clock` gives seconds."""

    def __init__(
        self, *, name: str, prepare: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        self._changed = threading.Condition()
        self._closed = False
        self._running: _Job | None = None
        self._floor = 0.0
        """Virtual time of the call that ran last: where a run starts that was not waiting."""
        self._clock = clock
        self._thread = threading.Thread(target=self._work, args=(prepare,), name=name, daemon=True)
        self._thread.start()

    async def run(self, line: str, function: Callable[[], R]) -> R:
        """The result of `function`, called in the compute thread when it is the turn of `line`. Cancelling the caller
        takes a waiting call back; a running one ends at its next `check`, or as it would."""
        job = _Job(function)
        with self._changed:
            if self._closed:
                raise EngineBusy("the engine is closing; call again when it is back")
            entry = self._lines.setdefault(line, _Line(virtual=self._floor))
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
        """For long calls, from within: raises Abandoned when the caller of the running call was cancelled."""
        if self._running is not None and self._running.abandoned:
            raise Abandoned("the caller of this call is gone")

    def waiting(self) -> int:
        """Calls that have not begun."""
        with self._changed:
            return sum(len(line.jobs) for line in self._lines.values())

    def close(self) -> None:
        """Takes no more calls, ends those that wait with EngineBusy, and returns when the running one has ended."""
        with self._changed:
            self._closed = True
            dropped = [job for line in self._lines.values() for job in line.jobs]
            self._lines.clear()
            self._changed.notify()
        for job in dropped:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(EngineBusy("the engine closed before this call began; call again"))
        self._thread.join()

    def _work(self, prepare: Callable[[], None]) -> None:
        prepare()
        while True:
            taken = self._next()
            if taken is None:
                return
            line, job = taken
            if not job.future.set_running_or_notify_cancel():
                continue
            self._running, start = job, self._clock()
            try:
                result = job.function()
            except BaseException as error:  # noqa: BLE001 - it belongs to the caller, whatever it is
                _let_go(error)
                job.future.set_exception(error)
            else:
                job.future.set_result(result)
            line.virtual += self._clock() - start

    def _next(self) -> tuple[_Line, _Job] | None:
        """The next call, taken out of its line; None when the queue is closed. Waits for one."""
        with self._changed:
            while not self._closed and not any(line.jobs for line in self._lines.values()):
                self._changed.wait()
            if self._closed:
                return None
            waiting = [(line.virtual, name) for name, line in self._lines.items() if line.jobs]
            self._floor, name = min(waiting)
            line = self._lines[name]
            self._forget_idle(keep=name)
            return line, line.jobs.popleft()

    def _forget_idle(self, *, keep: str) -> None:
        """Lines that wait for nothing and are owed nothing need no memory: a service sees very many runs."""
        idle = [n for n, line in self._lines.items() if not line.jobs and n != keep and line.virtual <= self._floor]
        for name in idle:
            del self._lines[name]


def _let_go(error: BaseException) -> None:
    """Empties the frames that the error went through: whoever keeps the error would keep the weights they named."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
