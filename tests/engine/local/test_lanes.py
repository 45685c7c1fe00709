"""Tests of the two lanes: sampling goes on while a gradient step is taken, from the weights that were asked for.

The tests order events with gates, not with the clock.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from engine.errors import EngineBusy
from engine.local import apply
from engine.local.engine import LocalEngine
from engine.local.queue import FairQueue
from engine.local.sampling import LaneSampler, Weights, WeightsGone
from engine.protocol import Completion, GenerateRequest, SamplingParams
from engine.specs.engine import LocalEngineSpec, TorchSamplerSpec
from storage.chain.records import PolicyRef
from storage.store.objects import ObjectStore
from tests.fixtures.clocks import Clock
from tests.fixtures.engines import DETERMINISTIC, commit_batch, new_policy, request_after
from tests.fixtures.waiting import wait_until
from tests.fixtures.worklog import events

TWO_LANES = DETERMINISTIC.model_copy(update={"sampler": TorchSamplerSpec(own_lane=True)})
SAMPLING = SamplingParams(max_new_tokens=12, temperature=1.0)
PROMPTS = [[10, 11, 12], [40, 41]]


@pytest.fixture
async def engine(store: ObjectStore) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(store.url, TWO_LANES)
    yield engine
    await engine.close(checkpoint=False)


@pytest.fixture
def gradient(monkeypatch: pytest.MonkeyPatch) -> Gradient:
    gradient = Gradient()
    monkeypatch.setattr(apply, "failpoint", gradient)
    return gradient


class Gradient:
    """Holds a gradient step at its first micro-batch until `finish` is set."""

    def __init__(self) -> None:
        self.reached, self.finish = threading.Event(), threading.Event()

    def __call__(self, name: str) -> None:
        self.reached.set()
        assert self.finish.wait(60)


async def sample(engine: LocalEngine, policy: PolicyRef) -> list[Completion]:
    return await engine.generate(GenerateRequest(policy, PROMPTS, [1, 2], SAMPLING))


async def step(engine: LocalEngine, policy: PolicyRef) -> PolicyRef:
    record = await engine.take_gradient_step(request_after(policy, commit_batch(engine.store, policy), lr=0.05))
    return record.policy


async def alone(store: ObjectStore, policy: PolicyRef, spec: LocalEngineSpec = DETERMINISTIC) -> list[Completion]:
    """The completions of an engine that does nothing else, with one lane."""
    engine = LocalEngine(store.url, spec)
    try:
        return await sample(engine, policy)
    finally:
        await engine.close(checkpoint=False)


async def test_sampling_goes_on_while_a_step_is_taken(
    engine: LocalEngine, store: ObjectStore, tiny_folder: Path, gradient: Gradient
) -> None:
    policy = await new_policy(engine, tiny_folder)
    before = await sample(engine, policy)
    taking = asyncio.create_task(step(engine, policy))
    await asyncio.to_thread(gradient.reached.wait, 60)
    # the step has begun and cannot end before this call has ended
    assert await sample(engine, policy) == before
    assert not taking.done()
    gradient.finish.set()
    await taking
    assert before == await alone(store, policy)


async def test_a_policy_can_be_sampled_after_its_chain_has_moved_on(
    engine: LocalEngine, store: ObjectStore, tiny_folder: Path, worklog: Path
) -> None:
    first = await new_policy(engine, tiny_folder)
    before = await sample(engine, first)
    second = await step(engine, first)
    assert await sample(engine, first) == before  # the sampler still holds it
    # staged in time, the second policy is sampled after the third was reached
    await engine.stage_policy(second)
    third = await step(engine, second)
    drawn = [await sample(engine, policy) for policy in (second, third)]
    # no policy was restored a second time or redone
    assert [(line["event"], line["step"]) for line in events(worklog, "restore", "redo", "sync")] == [
        ("restore", 0), ("sync", 0), ("sync", 1), ("sync", 2)
    ]  # fmt: skip
    assert drawn == [await alone(store, policy) for policy in (second, third)]
    assert drawn[0] != drawn[1]


async def test_the_lane_takes_several_policies_that_are_staged_before_their_turn(
    engine: LocalEngine, store: ObjectStore, tiny_folder: Path
) -> None:
    policies = [await new_policy(engine, tiny_folder)]
    await sample(engine, policies[0])
    for _ in range(2):
        await engine.stage_policy(policies[-1])
        policies.append(await step(engine, policies[-1]))
    drawn = await asyncio.gather(*(sample(engine, policy) for policy in policies))
    assert list(drawn) == [await alone(store, policy) for policy in policies]


async def test_weights_that_were_replaced_are_staged_again(
    engine: LocalEngine, store: ObjectStore, tiny_folder: Path
) -> None:
    first = await new_policy(engine, tiny_folder)
    before = await sample(engine, first)
    second = await step(engine, first)
    await sample(engine, second)  # the sampler holds the second policy, and nobody staged the first one again
    assert await sample(engine, first) == before


async def test_an_engine_that_closes_ends_the_calls_of_both_lanes(
    engine: LocalEngine, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = await new_policy(engine, tiny_folder)
    await sample(engine, policy)
    sampling, go_on = threading.Event(), threading.Event()

    def on_token(*_: Any) -> None:
        sampling.set()
        assert go_on.wait(60)

    running = asyncio.create_task(
        engine.generate(GenerateRequest(policy, PROMPTS, [1, 2], SAMPLING), on_token=on_token)
    )
    await asyncio.to_thread(sampling.wait, 60)
    closing = asyncio.create_task(engine.close(checkpoint=False))
    await asyncio.to_thread(engine._closing.wait, 60)
    go_on.set()
    with pytest.raises(EngineBusy, match="closing"):
        await running
    await closing


class OneWeights:
    """A sampler that remembers what it was told."""

    independent, base_group = True, None

    def __init__(self) -> None:
        self.loaded_state: str | None = None
        self.closed = False
        self.staged: list[Staged] = []

    def stage(self, trainer: Any, state: str) -> Staged:
        self.staged.append(Staged(state))
        return self.staged[-1]

    def load(self, staged: Staged) -> None:
        assert not staged.closed
        self.loaded_state = staged.state

    def nbytes(self) -> int:
        return 0

    def close(self) -> None:
        self.closed = True


class Staged:
    def __init__(self, state: str) -> None:
        self.state, self.closed = state, False

    def close(self) -> None:
        self.closed = True


def policy_at(step: int) -> PolicyRef:
    return PolicyRef(run="r", stage="0-s", model="policy", step=step, state=str(step))


def lane_sampler() -> tuple[OneWeights, LaneSampler]:
    sampler = OneWeights()
    return sampler, LaneSampler(sampler)  # type: ignore[arg-type]


def test_a_sampler_in_use_is_closed_when_its_last_call_ends() -> None:
    sampler, held = lane_sampler()
    weights = Weights("0", None)
    held.stage(None, weights, policy_at(0))  # type: ignore[arg-type]
    held.stage(None, Weights("1", None), policy_at(1))  # type: ignore[arg-type]
    with held.holding(weights, policy_at(0)), held.holding(weights, policy_at(0)):
        held.close()
        assert not sampler.closed
        assert held.holding_of(policy_at(0)) is None
        with pytest.raises(WeightsGone), held.holding(weights, policy_at(0)):
            pass
    assert sampler.closed
    assert [staged.closed for staged in sampler.staged] == [True, True]


def test_staged_weights_are_freed_once_they_are_loaded_and_equal_ones_are_staged_once() -> None:
    sampler, held = lane_sampler()
    weights = Weights("0", None)
    for name in (policy_at(0), policy_at(0).model_copy(update={"run": "with-the-same-history"})):
        held.stage(None, weights, name)  # type: ignore[arg-type]
        assert held.holding_of(name) == (held, weights, 1)
    assert len(sampler.staged) == 1
    with held.holding(weights, policy_at(0)):
        assert sampler.loaded_state == "0" and sampler.staged[0].closed
    with pytest.raises(WeightsGone), held.holding(Weights("1", None), policy_at(1)):
        pass


def test_weights_that_are_lost_and_staged_again_are_another_holding() -> None:
    """So the queue does not load them while a call still samples from the first ones."""
    sampler, held = lane_sampler()
    weights = Weights("0", None)
    first = held.stage(None, weights, policy_at(0))  # type: ignore[arg-type]
    with held.holding(weights, policy_at(0)):
        sampler.loaded_state = None  # a failed proof in another call
        assert held.holding_of(policy_at(0)) is None
        assert held.stage(None, weights, policy_at(0)).staging == first.staging + 1  # type: ignore[arg-type]


async def test_a_call_for_its_own_number_of_devices_is_sampled(engine: LocalEngine, tiny_folder: Path) -> None:
    policy = await new_policy(engine, tiny_folder)
    engine.devices = 2  # tp(1) is then no longer the setting of the config
    completions = await engine.generate(GenerateRequest(policy, PROMPTS, [1, 2], SAMPLING, tensor_parallel=1))
    engine.devices = 1
    assert completions == await sample(engine, policy)


async def test_the_weights_of_a_policy_that_left_the_engine_are_freed(store: ObjectStore, tiny_folder: Path) -> None:
    """Also those that a sampler shares with the trainer."""
    engine = LocalEngine(store.url, DETERMINISTIC)
    policy = await new_policy(engine, tiny_folder)
    await sample(engine, policy)
    loaded = engine.loaded_policies.training_policy_of(policy)
    assert loaded is not None
    weights = [weakref.ref(parameter) for parameter in loaded.trainer.model.module.parameters()]  # type: ignore[attr-defined]
    del loaded
    await engine.queue.run("", lambda: engine.loaded_policies.drop(policy))
    await engine.queue.run("", lambda: None)  # the thread waits for its next call then
    gc.collect()
    assert [reference() for reference in weights] == [None] * len(weights)
    await engine.close(checkpoint=False)


async def test_a_run_is_charged_for_a_call_that_another_run_outlives() -> None:
    """A run whose only call is running is not forgotten when another run's call begins."""
    queue = FairQueue(name="test", threads=2, clock=Clock())
    calls = Calls(queue)
    first = calls.start("a1", "a", "W", cost=5.0)
    await calls.expect("a1")
    second = calls.start("b1", "b", "W", cost=1.0)
    await calls.expect("a1", "b1")
    calls.gates["a1"].set()
    await first
    assert queue._lines["a"].virtual == 5.0
    calls.gates["b1"].set()
    await second
    await asyncio.to_thread(queue.close)


class Calls:
    """Calls of a queue that end when they are told to."""

    def __init__(self, queue: FairQueue) -> None:
        self.queue, self.begun = queue, list[str]()
        self.gates: dict[str, threading.Event] = {}

    def start(self, name: str, run: str, group: str | None, cost: float = 1.0) -> asyncio.Task[str]:
        gate = self.gates[name] = threading.Event()

        def call() -> str:
            self.begun.append(name)
            assert gate.wait(30)
            return name

        return asyncio.create_task(self.queue.run(run, call, group=group, cost=lambda _: cost))

    async def expect(self, *names: str) -> None:
        await asyncio.to_thread(wait_until, lambda: sorted(self.begun) == sorted(names), seconds=30)


async def test_calls_of_one_group_run_at_the_same_time_and_others_wait_for_their_end() -> None:
    queue = FairQueue(name="test", threads=3, clock=Clock())
    calls = Calls(queue)
    tasks = [calls.start("a1", "a", "weights-a")]
    await calls.expect("a1")
    tasks += [calls.start("a2", "a", "weights-a"), calls.start("c1", "c", "weights-a")]
    await calls.expect("a1", "a2", "c1")
    # Another group waits. So does a later call of the running group whose run is not the least served one.
    tasks += [calls.start("b1", "b", "weights-b"), calls.start("a3", "c", "weights-a")]
    calls.gates["a1"].set()
    await tasks[0]
    calls.gates["c1"].set()
    await tasks[2]
    calls.gates["a2"].set()
    await calls.expect("a1", "a2", "c1", "b1")
    for gate in calls.gates.values():
        gate.set()
    await asyncio.gather(*tasks)
    await asyncio.to_thread(queue.close)


async def test_a_group_that_begins_takes_its_waiting_calls_along() -> None:
    """With two threads, two waiting calls of a run share the weights that were loaded for the first, although another
    run has waited longer."""
    queue = FairQueue(name="test", threads=2, clock=Clock())
    calls = Calls(queue)
    tasks = [calls.start("x", "x", None)]
    await calls.expect("x")
    tasks += [
        calls.start(name, run, group)
        for name, run, group in (("a1", "a", "A"), ("b1", "b", "B"), ("a2", "a", "A"), ("b2", "b", "B"))
    ]
    await asyncio.to_thread(wait_until, lambda: queue.waiting() == 4)
    for finished, begun in (("x", "a1 a2"), ("a1", ""), ("a2", "b1 b2"), ("b1", ""), ("b2", "")):
        before = len(calls.begun)
        calls.gates[finished].set()
        await next(task for task, name in zip(tasks, ("x", "a1", "b1", "a2", "b2"), strict=True) if name == finished)
        await asyncio.to_thread(
            wait_until, lambda before=before, begun=begun: sorted(calls.begun[before:]) == begun.split()
        )
    await asyncio.to_thread(queue.close)


# -- staged weights that are never loaded --------------------------------------------------------------------------


class StagedOnce:
    """Weights on their way, which know whether they were freed."""

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


class StagingSampler:
    """Stages and loads nothing but names."""

    independent, base_group, loaded_state = True, None, None

    def __init__(self) -> None:
        self.staged: list[StagedOnce] = []

    def stage(self, trainer: Any, state: str) -> StagedOnce:
        self.staged.append(StagedOnce())
        return self.staged[-1]

    def load(self, staged: StagedOnce) -> None:
        self.loaded_state = f"{self.staged.index(staged)}"


def test_weights_that_were_overtaken_are_freed() -> None:
    """In flight, completions go on under the newest policy: many policies are staged and never sampled."""
    sampler = StagingSampler()
    lane_sampler = LaneSampler(cast(Any, sampler))
    policy = PolicyRef(run="r", stage="grpo", model="policy", step=0, state="0" * 64)
    all_weights = []
    for step in range(8):
        weights = Weights(str(step), None)
        all_weights.append(weights)
        lane_sampler.stage(cast(Any, None), weights, policy.model_copy(update={"step": step}))
    with lane_sampler.holding(all_weights[6], policy.model_copy(update={"step": 6})):
        pass
    # six were staged before, of which the newest four stay; the loaded one is closed; a later one stays
    assert [staged.closed for staged in sampler.staged] == [True, True, False, False, False, False, True, False]
    assert lane_sampler.holding_of(policy) is None
    with pytest.raises(WeightsGone), lane_sampler.holding(all_weights[0], policy):
        pass


# -- adapters on one base ------------------------------------------------------------------------------------------


class OneAdapter(OneWeights):
    """A sampler of one adapter, whose base other samplers share."""

    base_group = ("runtime", "base")  # type: ignore[assignment]

    def __init__(self, made: list[OneAdapter] | None = None) -> None:
        super().__init__()
        self.made = [] if made is None else made
        """All samplers of the group but the first."""

    def in_same_group(self) -> OneAdapter:
        self.made.append(OneAdapter(self.made))
        return self.made[-1]


def stage_and_use(held: LaneSampler, step: int) -> Any:
    weights = Weights(str(step), None)
    held.stage(cast(Any, None), weights, policy_at(step))
    with held.holding(weights, policy_at(step)) as sampler:
        return sampler


def test_an_adapter_is_loaded_beside_those_before_it() -> None:
    first = OneAdapter()
    held = LaneSampler(cast(Any, first))
    with held.holding(held.stage(cast(Any, None), Weights("0", None), policy_at(0)).weights, policy_at(0)) as older:
        newer = stage_and_use(held, 1)
        assert (older.loaded_state, newer.loaded_state) == ("0", "1")
    of_both = [held.holding_of(policy_at(step)) for step in (0, 1)]
    assert of_both[0] is not None and of_both[1] is not None and of_both[0].group == of_both[1].group
    with held.holding(Weights("0", None), policy_at(0)) as again:
        assert again is older
    held.close()
    assert [sampler.closed for sampler in (first, *first.made)] == [True, True, True]


def test_five_adapters_of_a_chain_stay_loaded_and_none_goes_that_a_call_uses() -> None:
    first = OneAdapter()
    held = LaneSampler(cast(Any, first))
    with held.holding(held.stage(cast(Any, None), Weights("0", None), policy_at(0)).weights, policy_at(0)):
        for step in range(1, 8):
            stage_and_use(held, step)
    assert [sampler.closed for sampler in first.made] == [False, True, True, True, False, False, False, False]
    assert [held.holding_of(policy_at(step)) is None for step in range(8)] == [False] + [True] * 3 + [False] * 4
    stage_and_use(held, 8)
    assert first.made[0].closed


def test_an_adapter_that_failed_a_proof_is_loaded_again_by_another_sampler() -> None:
    first = OneAdapter()
    held = LaneSampler(cast(Any, first))
    lost = stage_and_use(held, 0)
    lost.loaded_state = None
    assert held.holding_of(policy_at(0)) is None
    assert stage_and_use(held, 0).loaded_state == "0" and lost.closed
    assert len(first.made) == 2
