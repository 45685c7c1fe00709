"""Tests of the fair queue against virtual times computed by hand. The clock moves only when a call sets it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from engine.errors import EngineBusy
from engine.local.queue import FairQueue
from tests.fixtures.clocks import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def running(queue: FairQueue, gate: threading.Event) -> asyncio.Task[None]:
    """A call that has begun, and ends when the gate is opened."""
    begun = threading.Event()

    def call() -> None:
        begun.set()
        gate.wait(30)

    task = asyncio.create_task(queue.run("blocker", call))
    await asyncio.to_thread(begun.wait)
    return task


async def served(queue: FairQueue, clock: Clock, calls: list[tuple[str, float]]) -> list[str]:
    """The order in which calls (run, seconds) are served when all of them wait before the first begins."""
    order: list[str] = []
    gate = threading.Event()

    def call(run: str, seconds: float) -> None:
        clock.now += seconds
        order.append(run)

    blocker = await running(queue, gate)
    tasks = [asyncio.create_task(queue.run(run, lambda r=run, s=seconds: call(r, s))) for run, seconds in calls]
    while queue.waiting() < len(calls):
        await asyncio.sleep(0.001)
    gate.set()
    await asyncio.gather(blocker, *tasks)
    return order


@pytest.fixture
def queue(clock: Clock) -> FairQueue:
    return FairQueue(name="test", clock=clock)


async def test_equal_calls_take_turns(queue: FairQueue, clock: Clock) -> None:
    calls = [("a", 1.0)] * 4 + [("b", 1.0)] * 4
    assert await served(queue, clock, calls) == ["a", "b"] * 4


async def test_a_run_with_long_calls_gets_fewer_of_them(queue: FairQueue, clock: Clock) -> None:
    # a: 3 s each, b: 1 s each. Virtual times: a 0 -> 3; b 0 -> 1 -> 2 -> 3; a (3 = 3, first by name) -> 6; b 3 -> 4 …
    calls = [("a", 3.0)] * 2 + [("b", 1.0)] * 6
    assert await served(queue, clock, calls) == ["a", "b", "b", "b", "a", "b", "b", "b"]


async def test_one_call_is_not_starved_by_a_hundred(queue: FairQueue, clock: Clock) -> None:
    order = await served(queue, clock, [("greedy", 1.0)] * 100 + [("modest", 1.0)])
    assert order.index("modest") <= 1


async def test_calls_of_one_run_stay_in_order(queue: FairQueue) -> None:
    seen: list[int] = []
    await asyncio.gather(*(queue.run("a", lambda n=n: seen.append(n)) for n in range(50)))
    assert seen == list(range(50))


async def test_waiting_calls_of_one_run_begin_by_their_order(queue: FairQueue) -> None:
    """Equal ones in the order in which they came. A call that runs is not overtaken."""
    gate, seen = threading.Event(), list[str]()
    blocker = await running(queue, gate)
    given = {"b": (1, 0), "c": (1, 1), "a": (0, 1), "c2": (1, 1), "b2": (1, 0), "first": ()}
    tasks = []
    for waiting, (name, order) in enumerate(given.items()):
        tasks.append(asyncio.create_task(queue.run("run", lambda name=name: seen.append(name), order=order)))
        while queue.waiting() <= waiting:
            await asyncio.sleep(0.001)
    gate.set()
    await asyncio.gather(blocker, *tasks)
    assert seen == ["first", "a", "b", "b2", "c", "c2"]


async def test_absence_earns_nothing(queue: FairQueue, clock: Clock) -> None:
    await served(queue, clock, [("a", 100.0)])  # a has used 100 s while no other run waited
    order = await served(queue, clock, [("b", 1.0)] * 3 + [("a", 1.0)] * 3)
    assert order.index("a") <= 3  # b is new: it does not get 100 s before a is served again


async def test_errors_and_results_reach_their_callers(queue: FairQueue) -> None:
    def fail() -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        await queue.run("a", fail)
    assert await queue.run("a", lambda: 7) == 7


async def test_a_cancelled_caller_takes_its_waiting_call_back(queue: FairQueue) -> None:
    gate, ran = threading.Event(), []
    blocker = await running(queue, gate)
    waiting = asyncio.create_task(queue.run("a", lambda: ran.append(1)))
    while queue.waiting() != 1:
        await asyncio.sleep(0.001)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.set()
    await blocker
    await queue.run("a", lambda: None)
    assert not ran


async def test_closing_ends_what_waits_and_finishes_what_runs(queue: FairQueue) -> None:
    gate, ran = threading.Event(), []
    first = await running(queue, gate)
    second = asyncio.create_task(queue.run("a", lambda: ran.append(1)))
    while not queue.waiting():
        await asyncio.sleep(0.001)
    closing = asyncio.create_task(asyncio.to_thread(queue.close))
    with pytest.raises(EngineBusy):
        await second
    gate.set()
    await asyncio.gather(first, closing)
    assert not ran
    with pytest.raises(EngineBusy, match="closing"):
        await queue.run("a", lambda: None)
