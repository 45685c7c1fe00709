"""Helpers of hand-written algorithms: concurrent calls over samples, batches from an iterator, mini-batches.

Concurrent calls reach the engine as packed batches (engine.models.call_batching), so mapping a method over samples uses
the device well.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from itertools import islice, repeat
from typing import Generic, TypeVar

from engine.errors import EngineError, SampleTooLong, TextError
from engine.text.threads import StringThread
from tasks.datasets.order import permutation

log = logging.getLogger("ostinato.recipe")

Item = TypeVar("Item")
Result = TypeVar("Result")


async def async_map(
    function: Callable[[Item], Awaitable[Result]], items: Iterable[Item], *, at_once: int | None = None
) -> list[Result]:
    """The results of `function` for every item in order, computed concurrently, at most `at_once` at a time (None: all
    of them). The first exception cancels the other calls and is raised."""
    places: AbstractAsyncContextManager[None] = nullcontext()
    if at_once is not None:
        places = asyncio.Semaphore(at_once)
    calls = [asyncio.ensure_future(_call_in(places, function, item)) for item in items]
    try:
        return await asyncio.gather(*calls)
    except BaseException:
        # `gather` leaves the other calls running. Wait until they have ended, so that none outlives this function.
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        raise


async def async_map_fallible(
    function: Callable[[Item], Awaitable[Result]], items: Iterable[Item]
) -> list[Result]:
    """The results of the items that did not fail, in order. Failures are counted in the log. Errors that no item causes
    (the engine is unreachable, the run is fenced) are raised."""
    outcomes = await async_map(lambda item: _outcome(function, item), items)
    return _successes(outcomes)


async def async_map_batch(
    function: Callable[[Item], Awaitable[Result]],
    items: Iterable[Item],
    batch_size: int,
    max_failures: int | None = None,
) -> list[Result]:
    """`batch_size` results: takes items until that many calls succeeded. An iterator keeps its position between calls.
    If it ends, the batch is shorter.

    Raises:
        Exception: the last failure, if there were more than `max_failures` (None: batch_size).
        ValueError: no item is left.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}; give 1 or more")
    source = iter(items)
    results: list[Result] = []
    failures = 0
    limit = batch_size if max_failures is None else max_failures
    # Each round takes only the items that are still missing, so that no result is computed and thrown away.
    while len(results) < batch_size:
        missing = batch_size - len(results)
        round_items = list(islice(source, missing))
        if not round_items:
            break
        outcomes = await async_map(lambda item: _outcome(function, item), round_items)
        results += _successes(outcomes)
        failed = [outcome for outcome in outcomes if isinstance(outcome, _Failed)]
        failures += len(failed)
        if failures > limit:
            raise failed[-1].error
    if not results:
        raise ValueError("no item is left for a batch; give a DataSet with allow_looping=True, or more data")
    return results


def get_minibatches(
    samples: Sequence[Item], mini_batch_size: int, mini_epochs: int = 1, seed: int = 0
) -> list[list[Item]]:
    """Mini-batches of `mini_epochs` passes over all samples. Each pass has its own order, which follows from `seed`.
    The last mini-batch of a pass may be smaller."""
    if mini_batch_size < 1 or mini_epochs < 1:
        raise ValueError(f"mini_batch_size={mini_batch_size}, mini_epochs={mini_epochs}; give 1 or more of each")
    if not samples:
        return []
    mini_batches = []
    for epoch in range(mini_epochs):
        order = _order(len(samples), seed, epoch)
        for start in range(0, len(order), mini_batch_size):
            indices = order[start : start + mini_batch_size]
            mini_batches.append([samples[index] for index in indices])
    return mini_batches


def repeat_thread(thread: StringThread) -> Iterator[StringThread]:
    """An endless iterator of the thread, from which `async_map_batch` samples several completions of one prompt."""
    return repeat(thread)


class DataSet(Generic[Item]):
    """An iterator over threads (or other items), shuffled by `seed` in a different order in every pass.

    `position` is the number of items taken. It can be set, so that `ctx.steps(n, dataset)` resumes at the position of
    an earlier attempt of the recipe.
    """

    def __init__(self, threads: Sequence[Item], allow_looping: bool = False, seed: int = 42) -> None:
        if not threads:
            raise ValueError("the dataset is empty; give at least one thread")
        self.threads, self.allow_looping, self.seed = list(threads), allow_looping, seed
        self.position = 0
        self._epoch, self._order = -1, list[int]()

    def __len__(self) -> int:
        return len(self.threads)

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        # The position alone determines the epoch and the item, so it is all that a resume needs.
        epoch, place = divmod(self.position, len(self.threads))
        if epoch and not self.allow_looping:
            raise StopIteration
        if epoch != self._epoch:
            self._epoch, self._order = epoch, _order(len(self.threads), self.seed, epoch)
        self.position += 1
        return self.threads[self._order[place]]

    def completion_percentage(self) -> float:
        """Passes over the data so far; 1.0 is one pass."""
        return self.position / len(self.threads)


class _Failed:
    def __init__(self, error: Exception) -> None:
        self.error = error


async def _call_in(
    places: AbstractAsyncContextManager[None], function: Callable[[Item], Awaitable[Result]], item: Item
) -> Result:
    """The result of one call, made in `places`."""
    async with places:
        return await function(item)


async def _outcome(function: Callable[[Item], Awaitable[Result]], item: Item) -> Result | _Failed:
    try:
        return await function(item)
    except (SampleTooLong, TextError) as error:
        return _Failed(error)
    # An error of the engine is not the item's fault: leaving the item out would hide it.
    except EngineError:
        raise
    except Exception as error:  # noqa: BLE001  the boundary to a recipe's own code
        return _Failed(error)


def _successes(outcomes: Sequence[Result | _Failed]) -> list[Result]:
    failed = [outcome for outcome in outcomes if isinstance(outcome, _Failed)]
    if failed:
        log.warning("%d of %d items failed and are left out: %r", len(failed), len(outcomes), failed[0].error)
    return [outcome for outcome in outcomes if not isinstance(outcome, _Failed)]


def _order(length: int, seed: int, epoch: int) -> list[int]:
    return permutation(length, seed=seed, epoch=epoch).tolist()  # type: ignore[no-any-return]
