"""What hand-written algorithms map and draw with: concurrent calls, batches out of an endless iterator, mini-batches.

Calls that run concurrently reach the engine as packed batches (engine.models.call_batching), so a listing that maps a
method over samples fills the device.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import islice, repeat
from typing import Generic, TypeVar

from engine.errors import EngineError, SampleTooLong
from engine.text.errors import TextError
from engine.text.threads import StringThread
from tasks.datasets.order import permutation

log = logging.getLogger("ostinato.recipe")

Item = TypeVar("Item")
Result = TypeVar("Result")


async def async_map(function: Callable[[Item], Awaitable[Result]], items: Iterable[Item]) -> list[Result]:
    """`function` of every item, concurrently, in their order. The first exception is raised, and ends the others."""
    calls = [asyncio.ensure_future(_as_coroutine(function, item)) for item in items]
    try:
        return await asyncio.gather(*calls)
    except BaseException:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        raise


async def async_map_fallible(
    function: Callable[[Item], Awaitable[Result]], items: Iterable[Item]
) -> list[Result]:
    """The results of the items that did not fail, in their order; failures are counted in the log. What is no item's
    fault (the engine is away, the run is fenced) is raised."""
    found = await async_map(lambda item: _outcome(function, item), items)
    return _successes(found)


async def async_map_batch(
    function: Callable[[Item], Awaitable[Result]],
    items: Iterable[Item],
    batch_size: int,
    max_failures: int | None = None,
) -> list[Result]:
    """`batch_size` results: items are drawn until so many succeeded, each round as many as are missing. An iterator
    keeps its place from call to call; where it ends early the batch is short.

    Raises the last failure when there were more than `max_failures` (batch_size when None); ValueError when there is no
    item left.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}; give 1 or more")
    source, results, failures = iter(items), list[Result](), 0
    limit = batch_size if max_failures is None else max_failures
    while len(results) < batch_size:
        drawn = list(islice(source, batch_size - len(results)))
        if not drawn:
            break
        found = await async_map(lambda item: _outcome(function, item), drawn)
        results += _successes(found)
        failed = [outcome for outcome in found if isinstance(outcome, _Failed)]
        failures += len(failed)
        if failures > limit:
            raise failed[-1].error
    if not results:
        raise ValueError("no item is left to make a batch of; give a DataSet with allow_looping=True, or more data")
    return results


def get_minibatches(
    samples: Sequence[Item], mini_batch_size: int, mini_epochs: int = 1, seed: int = 0
) -> list[list[Item]]:
    """Mini-batches of `mini_epochs` passes, each over all samples in an order of its own that follows from `seed`. The
    last of a pass may be smaller."""
    if mini_batch_size < 1 or mini_epochs < 1:
        raise ValueError(f"mini_batch_size={mini_batch_size}, mini_epochs={mini_epochs}; give 1 or more of each")
    if not samples:
        return []
    found = []
    for epoch in range(mini_epochs):
        order = _order(len(samples), seed, epoch)
        found += [
            [samples[at] for at in order[start : start + mini_batch_size]]
            for start in range(0, len(order), mini_batch_size)
        ]
    return found


def repeat_thread(thread: StringThread) -> Iterator[StringThread]:
    """The thread, without end: what `async_map_batch` draws the completions of one prompt from."""
    return repeat(thread)


class DataSet(Generic[Item]):
    """An iterator over threads (or anything), shuffled by `seed`, every pass in another order.

    `position` is how many were drawn; setting it moves there, so that `ctx.steps(n, dataset)` goes on where an earlier
    attempt of the recipe was.
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
        epoch, place = divmod(self.position, len(self.threads))
        if epoch and not self.allow_looping:
            raise StopIteration
        if epoch != self._epoch:
            self._epoch, self._order = epoch, _order(len(self.threads), self.seed, epoch)
        self.position += 1
        return self.threads[self._order[place]]

    def completion_percentage(self) -> float:
        """Passes over the data so far: 1.0 is one."""
        return self.position / len(self.threads)


class _Failed:
    def __init__(self, error: Exception) -> None:
        self.error = error


async def _as_coroutine(function: Callable[[Item], Awaitable[Result]], item: Item) -> Result:
    return await function(item)


async def _outcome(function: Callable[[Item], Awaitable[Result]], item: Item) -> Result | _Failed:
    try:
        return await function(item)
    except (SampleTooLong, TextError) as error:
        return _Failed(error)
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
