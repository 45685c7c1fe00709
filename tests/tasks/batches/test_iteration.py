"""The helpers of hand-written algorithms."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import chain, count, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import EngineUnreachable, SampleTooLong
from engine.models.tape import Enqueued
from engine.text.threads import StringThread
from tasks.batches.iteration import (
    DataSet,
    async_map,
    async_map_batch,
    async_map_fallible,
    get_minibatches,
    repeat_thread,
)


class Odd(Exception):
    pass


async def even(number: int) -> int:
    await asyncio.sleep(0)
    if number % 2:
        raise Odd(number)
    return number * 10


async def test_a_map_is_concurrent_and_in_order() -> None:
    there = asyncio.Event()

    async def meet(number: int) -> int:
        if number == 3:
            there.set()
        await there.wait()  # the first waits for the last: one by one would never end
        return number

    assert await asyncio.wait_for(async_map(meet, range(4)), 10) == [0, 1, 2, 3]
    assert await async_map(lambda _: Enqueued(), range(2)) == [None, None]  # a train_* call, as the listings map it


async def test_the_first_failure_of_a_map_ends_the_others() -> None:
    ended = []

    async def wait(number: int) -> None:
        if number == 1:
            raise Odd
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(number)

    with pytest.raises(Odd):
        await async_map(wait, range(3))
    assert sorted(ended) == [0, 2]


async def test_failures_are_left_out_where_that_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    assert await async_map_fallible(even, range(5)) == [0, 20, 40]
    assert "2 of 5 items failed" in caplog.text


@pytest.mark.parametrize("mapped", [async_map_fallible, lambda f, items: async_map_batch(f, items, 2)])
async def test_an_engine_that_is_away_is_no_items_fault(mapped: object) -> None:
    async def away(_: int) -> int:
        raise EngineUnreachable("away")

    with pytest.raises(EngineUnreachable):
        await mapped(away, range(3))  # type: ignore[operator]


async def test_a_batch_is_filled_from_where_the_iterator_stands() -> None:
    numbers = count()
    assert await async_map_batch(even, numbers, 4) == [0, 20, 40, 60]
    assert await async_map_batch(even, numbers, 2) == [80, 100]
    assert await async_map_batch(even, iter([2, 4, 6]), 2) == [20, 40]
    assert await async_map_batch(even, iter([2]), 2) == [20]
    with pytest.raises(ValueError, match="allow_looping"):
        await async_map_batch(even, iter([]), 2)


async def test_a_batch_gives_up_at_too_many_failures() -> None:
    async def long(_: int) -> int:
        raise SampleTooLong("long")

    with pytest.raises(SampleTooLong):
        await async_map_batch(long, count(), 3)
    with pytest.raises(Odd):
        await async_map_batch(even, count(), 4, max_failures=1)


@given(st.integers(1, 20), st.integers(1, 25), st.integers(1, 3), st.integers(0, 5))
def test_every_pass_has_every_sample_once(samples: int, size: int, epochs: int, seed: int) -> None:
    batches = get_minibatches(list(range(samples)), size, epochs, seed)
    assert max(map(len, batches)) <= size
    assert Counter(chain.from_iterable(batches)) == dict.fromkeys(range(samples), epochs)
    assert batches == get_minibatches(list(range(samples)), size, epochs, seed)


def test_the_passes_of_minibatches_and_datasets_are_in_other_orders() -> None:
    first, second = get_minibatches(list(range(50)), 50, 2)
    assert first != second
    looping = DataSet(range(50), allow_looping=True, seed=1)
    passes = [list(islice(looping, 50)) for _ in range(2)]
    assert passes[0] != passes[1] and sorted(passes[0]) == sorted(passes[1]) == list(range(50))
    assert looping.completion_percentage() == 2.0
    assert list(DataSet(range(50), seed=1)) == passes[0] != list(DataSet(range(50), seed=2))


@given(st.integers(0, 30), st.integers(0, 10))
def test_a_dataset_goes_on_from_any_position(position: int, further: int) -> None:
    whole = list(islice(DataSet(range(7), allow_looping=True), position + further))
    moved: DataSet[int] = DataSet(range(7), allow_looping=True)
    moved.position = position
    assert list(islice(moved, further)) == whole[position:]


def test_a_repeated_thread_is_itself() -> None:
    thread = StringThread(turns=[("user", "hi")])
    assert list(islice(repeat_thread(thread), 3)) == [thread] * 3
    with pytest.raises(ValueError, match="empty"):
        DataSet([])
