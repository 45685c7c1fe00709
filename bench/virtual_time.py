"""Runs real threads and a real event loop on a virtual clock, which skips the time in which every thread waits.

The clock counts the CPU seconds of this process, so that the code of the project takes the time that it takes. When no
thread of the process runs, the clock jumps to the time at which the first sleeper wakes up. Seconds in which other
programs use the machine do not count.
"""

from __future__ import annotations

import asyncio
import heapq
import os
import selectors
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

_real_sleep = time.sleep

Timer = list[Any]
"""[virtual time, number, what is called then, or None if it was cancelled]"""


class VirtualTime:
    """Virtual seconds for all threads of this process. `read` and `advance` are those of bench.scale_sim_store.Clock:
    here, `advance` lets the calling thread sleep."""

    def __init__(self, *, settle_seconds: float = 0.0002) -> None:
        """`settle_seconds`: real seconds without a running thread, after which the clock jumps."""
        self._settle_seconds = settle_seconds
        self._jumped, self._uncounted, self._latest = 0.0, 0.0, 0.0
        self._begin = time.process_time()
        self._timers: list[Timer] = []
        self._numbers = count()
        self._changed = threading.Condition()
        self._closed = False
        self.jumps = 0
        self._thread = threading.Thread(target=self._tick, name="virtual-time", daemon=True)
        self._thread.start()

    def read(self) -> float:
        """Virtual seconds since the clock was made."""
        counted = time.process_time() - self._begin - self._uncounted
        # the CPU seconds that do not count are known only afterwards, and a clock must not go back
        self._latest = max(self._latest, self._jumped + counted)
        return self._latest

    def advance(self, seconds: float) -> None:
        """Returns when `seconds` have passed."""
        if seconds > 0:
            over = threading.Event()
            self.call_at(self.read() + seconds, over.set)
            over.wait()

    def add(self, seconds: float) -> None:
        """Moves the clock on at once, as the calling thread's own work does."""
        with self._changed:
            self._jumped += seconds

    def call_at(self, when: float, callback: Callable[[], Any]) -> Timer:
        timer: Timer = [when, next(self._numbers), callback]
        with self._changed:
            heapq.heappush(self._timers, timer)
            self._changed.notify()
        return timer

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """The CPU seconds of the block do not count: a real run would spend them on another machine."""
        begin = time.thread_time()
        try:
            yield
        finally:
            with self._changed:
                self._uncounted += time.thread_time() - begin

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Within the block, the modules that call time.monotonic, time.perf_counter and time.sleep use this clock."""
        with (
            patch("time.monotonic", self.read),
            patch("time.perf_counter", self.read),
            patch("time.sleep", self.advance),
        ):
            yield

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    # -- the thread that moves the clock ---------------------------------------------------------------------------

    def _tick(self) -> None:
        cpu = time.thread_time()
        while True:
            with self._changed:
                while not self._timers and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
            if not self._call_due() and self._is_quiet():
                self._jump()
            cpu, before = time.thread_time(), cpu
            with self._changed:
                self._uncounted += cpu - before

    def _call_due(self) -> bool:
        """Calls what is due. Returns whether there was anything."""
        now, due = self.read(), []
        with self._changed:
            while self._timers and (self._timers[0][2] is None or self._timers[0][0] <= now):
                due.append(heapq.heappop(self._timers))
        for _, _, callback in due:
            if callback is not None:
                callback()
        return bool(due)

    def _is_quiet(self) -> bool:
        """Whether no other thread ran in the last `settle_seconds`, and none is waiting for a core now.

        A thread that waits for the interpreter's lock takes it while this one sleeps, and so uses CPU seconds."""
        before = time.process_time() - time.thread_time()
        _real_sleep(self._settle_seconds)
        if time.process_time() - time.thread_time() - before > 1e-9:
            return False
        own = threading.get_native_id()
        for thread in os.listdir("/proc/self/task"):
            try:
                state = Path("/proc/self/task", thread, "stat").read_text().rpartition(")")[2].split()[0]
            except (FileNotFoundError, ProcessLookupError):  # the thread has ended
                return False
            if state != "S" and int(thread) != own:
                return False
        return True

    def _jump(self) -> None:
        with self._changed:
            if self._timers and self._timers[0][2] is not None:
                when = self._timers[0][0]
                self._jumped += max(0.0, when - self.read())
                # a rounding error must not leave the clock before the sleeper's time
                self._latest = max(self._latest, when)
                self.jumps += 1


class _VirtualSelector(selectors.DefaultSelector):
    """Waits on the virtual clock."""

    clock: VirtualTime
    wake: Callable[[], Any]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        timer = None if timeout is None else self.clock.call_at(self.clock.read() + timeout, self.wake)
        try:
            return super().select(None)
        finally:
            if timer is not None:
                timer[2] = None


def run(clock: VirtualTime, main: Any) -> Any:
    """Runs a coroutine in an event loop on the clock. Call it within `clock.patched()`."""
    selector = _VirtualSelector()
    loop = asyncio.SelectorEventLoop(selector)
    # a call from another thread is how a loop is woken up
    selector.clock, selector.wake = clock, partial(loop.call_soon_threadsafe, lambda: None)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main)
