"""Tests of cancelled calls: a step ends at its next micro-batch and leaves nothing behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from engine.local import apply
from engine.local.engine import LocalEngine
from engine.local.queue import Abandoned, FairQueue
from engine.protocol import LogprobsRequest, TokenSequence
from storage.chain.records import Chain, MinibatchPlan, PolicyRef, StepRequest
from storage.store.objects import ObjectStore
from tests.fixtures.engines import DETERMINISTIC, PROVENANCE, commit_batch, new_policy, request_after
from tests.fixtures.worklog import events

UPDATES = 5
SCORED = TokenSequence([10, 11, 12, 20, 21], [0.0, 0.0, 0.0, 1.0, 1.0])


@pytest.fixture
async def engine(store: ObjectStore) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(store.url, DETERMINISTIC)
    yield engine
    await engine.close(checkpoint=False)


class Gate:
    """Holds the compute thread after the second micro-batch of what runs, once; counts the micro-batches."""

    def __init__(self) -> None:
        self.reached, self.open, self.count = threading.Event(), threading.Event(), 0

    def __call__(self, name: str) -> None:
        assert name == "step.mid_gradient"
        self.count += 1
        if self.count == 2:
            self.reached.set()
            assert self.open.wait(60)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Gate]:
    def make() -> Gate:
        gate = Gate()
        monkeypatch.setattr(apply, "failpoint", gate)
        return gate

    return make


def request_of(store: ObjectStore, start: PolicyRef) -> StepRequest:
    """A step of several updates, a micro-batch each."""
    return request_after(start, commit_batch(store, start), minibatches=MinibatchPlan(size=None, epochs=UPDATES))


async def cancelled(gate: Gate, call: asyncio.Task[object]) -> None:
    """Cancels the call in the middle, and lets it go on."""
    await asyncio.to_thread(gate.reached.wait, 60)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    gate.open.set()


async def test_a_cancelled_step_ends_at_its_next_micro_batch_and_can_be_taken_again(
    engine: LocalEngine, store: ObjectStore, tiny_folder: Path, gate: Callable[[], Gate]
) -> None:
    plain = await engine.take_gradient_step(request_of(store, await new_policy(engine, tiny_folder, run="plain")))
    start = await new_policy(engine, tiny_folder)
    held = gate()
    await cancelled(held, asyncio.create_task(engine.take_gradient_step(request_of(store, start))))
    await engine.release(start.run)  # waits its turn behind the step
    assert held.count == 2
    assert list(Chain.of(store, start).steps()) == []

    record = await engine.take_gradient_step(request_of(store, start))
    assert record.updates == UPDATES
    assert record.weights_digest == plain.weights_digest


async def test_a_cancelled_redo_ends_too_and_half_of_it_passes_for_nothing(
    engine: LocalEngine, store: ObjectStore, tiny_folder: Path, gate: Callable[[], Gate], worklog: Path
) -> None:
    policy = await new_policy(engine, tiny_folder)
    for _ in range(2):
        policy = (await engine.take_gradient_step(request_of(store, policy))).policy
    expected = await engine.logprobs(LogprobsRequest(policy, [SCORED]))
    other = LocalEngine(store.url, DETERMINISTIC)
    try:
        held = gate()
        await cancelled(held, asyncio.create_task(other.logprobs(LogprobsRequest(policy, [SCORED]))))
        await other.release(policy.run)
        assert held.count == 2
        assert events(worklog, "redo") == []
        assert await other.logprobs(LogprobsRequest(policy, [SCORED])) == expected
    finally:
        await other.close(checkpoint=False)


async def test_a_step_whose_caller_waits_is_not_ended(
    engine: LocalEngine, store: ObjectStore, tiny_folder: Path, gate: Callable[[], Gate]
) -> None:
    start = await new_policy(engine, tiny_folder)
    held = gate()
    step = asyncio.create_task(engine.take_gradient_step(request_of(store, start)))
    await asyncio.to_thread(held.reached.wait, 60)
    waiting = asyncio.create_task(engine.save_checkpoint(start, provenance=PROVENANCE))
    while not engine.queue.waiting():
        assert not step.done(), step.result()
        await asyncio.sleep(0.001)
    waiting.cancel()
    held.open.set()
    assert (await step).updates == UPDATES


async def test_only_the_running_call_is_told() -> None:
    queue = FairQueue(name="test")
    begun, go_on, told = threading.Event(), threading.Event(), []

    def call() -> None:
        begun.set()
        assert go_on.wait(60)
        with pytest.raises(Abandoned):
            queue.check()
        told.append(1)

    first = asyncio.create_task(queue.run("a", call))
    await asyncio.to_thread(begun.wait)
    first.cancel()
    await asyncio.sleep(0)
    go_on.set()
    assert await queue.run("a", lambda: "well") == "well"
    assert told == [1]
    await queue.run("a", queue.check)
    queue.check()  # no call runs
    queue.close()
    with pytest.raises(asyncio.CancelledError):
        await first
