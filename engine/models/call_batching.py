"""Sends calls that are made concurrently as one batch, so that code that makes single calls fills the device."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from engine.errors import PermanentEngineError
from engine.waiting import waiting_for_engine

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
