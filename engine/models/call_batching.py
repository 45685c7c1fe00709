"""Sends calls that are made concurrently as one batch, so that code that makes single calls fills the device.

A call's wait for an engine is the time in its queue and the time of its computation. An engine serves many callers, so
this time says nothing about the caller. `report_waits_to` lets a time limit on a call leave it out, as that of a grader
does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, Protocol, TypeVar

from engine.errors import PermanentEngineError

Item = TypeVar("Item")
Result = TypeVar("Result")


class CallBatcher(Generic[Item, Result]):
    """Collects the items submitted under one key in the same turn of the event loop, and runs them as one call."""

    def __init__(self, run: Callable[[Hashable, list[Item]], Awaitable[list[Result]]]) -> None:
        self._run = run
        self._waiting: dict[Hashable, list[tuple[Item, asyncio.Future[Result]]]] = {}
        self._flushes: set[asyncio.Task[None]] = set()

    async def submit(self, key: Hashable, item: Item) -> Result:
        """Returns the result of `item` from the call that runs it together with the other items of `key`."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(key, [])
        waiting.append((item, future))
        # The first item of a batch starts the task that sends it.
        if len(waiting) == 1:
            flush = asyncio.create_task(self._flush(key))
            self._flushes.add(flush)  # the event loop holds only a weak reference to a task
            flush.add_done_callback(self._flushes.discard)
        with waiting_for_engine():
            return await future

    async def _flush(self, key: Hashable) -> None:
        # Items that are submitted in the same turn of the event loop join this batch.
        await asyncio.sleep(0)
        batch = self._waiting.pop(key)
        try:
            results = await self._run(key, [item for item, _ in batch])
            if len(results) != len(batch):
                raise PermanentEngineError(f"the engine answered {len(results)} of {len(batch)} calls of one batch")
        except BaseException as error:
            # Each caller gets the error, also one whose own item was not at fault.
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            # A cancellation must also end this task.
            if not isinstance(error, Exception):
                raise
            return

        # A future is done already if its caller was cancelled.
        for (_, future), result in zip(batch, results, strict=True):
            if not future.done():
                future.set_result(result)


class WaitListener(Protocol):
    """Its methods are called in the thread that waits when a wait for an engine begins and when it ends.

    Waits of one call may overlap."""

    def begin(self) -> None: ...

    def end(self) -> None: ...


_LISTENER: ContextVar[WaitListener | None] = ContextVar("engine_wait_listener", default=None)


@contextmanager
def report_waits_to(listener: WaitListener) -> Iterator[None]:
    """Tasks that are created within the block report their waits for an engine to `listener`, also after the block."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


@contextmanager
def waiting_for_engine() -> Iterator[None]:
    """Reports the block as a wait for an engine, if there is a listener."""
    # Most calls have no time limit, and so no listener.
    listener = _LISTENER.get()
    if listener is None:
        yield
        return
    listener.begin()
    try:
        yield
    finally:
        listener.end()
