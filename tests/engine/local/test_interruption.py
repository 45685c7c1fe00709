"""Tests of completions that are cut when new weights are staged, and go on under these.

The cuts are scripted: the sampler is held at a token until the later policy has been staged.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.local.engine import LocalEngine
from engine.local.queue import Interruption
from engine.protocol import Completion, GenerateRequest, LogprobsRequest, SamplingParams, TokenSequence
from storage.chain.records import PolicyRef
from storage.store.objects import ObjectStore
from tests.engine.local.test_lanes import DETERMINISTIC, TWO_LANES, step
from tests.fixtures.clocks import Clock
from tests.fixtures.engines import new_policy

SAMPLING = SamplingParams(max_new_tokens=24, ignore_eos=True)
PROMPTS = [[10, 11, 12], [40, 41]]
SEEDS = [1, 2]


@pytest.fixture
async def engine(store: ObjectStore) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(store.url, TWO_LANES)
    yield engine
    await engine.close(checkpoint=False)


class Held:
    """A listener that holds the sampler at its `count`-th token, until `go_on` is set."""

    def __init__(self, count: int) -> None:
        self.count, self.heard = count, 0
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self, index: int, token: int, logprob: float) -> None:
        self.heard += 1
        if self.heard == self.count:
            self.reached.set()
            assert self.go_on.wait(60)


def rest(policy: PolicyRef, sampled: list[list[int]] | None, seeds: list[int] = SEEDS) -> GenerateRequest:
    return GenerateRequest(policy, PROMPTS, seeds, SAMPLING, sampled=sampled, interruptible=True)


async def cut_at(
    engine: LocalEngine, request: GenerateRequest, token: int, parent: PolicyRef
) -> tuple[list[Completion], PolicyRef]:
    """The completions of a call during whose `token`-th token the step after `parent` is taken and its weights are
    staged, and the policy after that step."""
    held = Held(token)
    call = asyncio.create_task(engine.generate(request, on_token=held))
    await asyncio.to_thread(held.reached.wait, 60)
    policy = await step(engine, parent)
    await engine.stage_policy(policy)
    held.go_on.set()
    return await call, policy


async def teacher_forced(engine: LocalEngine, policy: PolicyRef, prompt: list[int], tokens: list[int]) -> list[float]:
    mask = [False] * len(prompt) + [True] * len(tokens)
    (logprobs,) = await engine.logprobs(LogprobsRequest(policy, [TokenSequence([*prompt, *tokens], mask)]))
    return logprobs


async def test_each_segment_has_the_logprobs_of_its_policy_and_the_cuts_decide_the_tokens(
    engine: LocalEngine, store: ObjectStore, tiny_folder: Path
) -> None:
    """Three policies, cut after 5 and after 4 more tokens. Another engine that is given the same cuts samples the same
    tokens."""
    policies = [await new_policy(engine, tiny_folder)]
    sampled: list[list[int]] = [[], []]
    segments: list[list[Completion]] = []
    for number, cut in enumerate((5, 4, None)):
        policy = policies[-1]
        request = rest(policy, sampled, [seed + 100 * number for seed in SEEDS])
        if cut is None:
            completions = await engine.generate(request)
        else:
            # Both completions get a token in each pass, so the n-th pass begins with token 2 n - 1.
            completions, later = await cut_at(engine, request, 2 * cut - 1, policy)
            policies.append(later)
            assert [len(completion.token_ids) for completion in completions] == [cut, cut]
        expected = "length" if cut is None else "interrupted"
        assert {completion.stop_reason for completion in completions} == {expected}
        segments.append(completions)
        for row, completion in enumerate(completions):
            before = [*PROMPTS[row], *sampled[row]]
            forced = await teacher_forced(engine, policy, before, completion.token_ids)
            assert completion.logprobs == pytest.approx(forced, abs=1e-5)
        sampled = [
            tokens + completion.token_ids for tokens, completion in zip(sampled, completions, strict=True)
        ]
    assert [len(tokens) for tokens in sampled] == [24, 24]

    # The journal: policy, seeds and number of tokens of each segment. max_new_tokens makes the same cuts.
    other = LocalEngine(store.url, DETERMINISTIC)
    again: list[list[int]] = [[], []]
    for number, (policy, length) in enumerate(zip(policies, (5, 9, 24), strict=True)):
        sampling = SAMPLING.model_copy(update={"max_new_tokens": length})
        seeds = [seed + 100 * number for seed in SEEDS]
        completions = await other.generate(GenerateRequest(policy, PROMPTS, seeds, sampling, sampled=again))
        assert completions == [
            Completion(segment.token_ids, segment.logprobs, "length") for segment in segments[number]
        ]
        again = [tokens + completion.token_ids for tokens, completion in zip(again, completions, strict=True)]
    await other.close(checkpoint=False)


async def test_a_call_that_may_not_be_interrupted_and_one_of_another_chain_go_on(
    engine: LocalEngine, tiny_folder: Path
) -> None:
    first = await new_policy(engine, tiny_folder)
    other = await new_policy(engine, tiny_folder, run="other", init_seed=1)
    for request in (GenerateRequest(first, PROMPTS, SEEDS, SAMPLING), rest(other, None)):
        completions, first = await cut_at(engine, request, 5, first)
        assert {completion.stop_reason for completion in completions} == {"length"}


async def test_a_call_that_waits_when_later_weights_are_staged_samples_nothing(
    engine: LocalEngine, tiny_folder: Path
) -> None:
    first = await new_policy(engine, tiny_folder)
    await engine.generate(rest(first, None))
    second = await step(engine, first)
    held = Held(3)
    running = asyncio.create_task(engine.generate(GenerateRequest(first, PROMPTS, SEEDS, SAMPLING), on_token=held))
    await asyncio.to_thread(held.reached.wait, 60)
    waiting = asyncio.create_task(engine.generate(rest(first, [[9], []])))
    while not engine.sampler_lane.queue.waiting():
        await asyncio.sleep(0.01)
    await engine.stage_policy(second)
    held.go_on.set()
    assert await waiting == [Completion([], [], "interrupted")] * 2
    assert {completion.stop_reason for completion in await running} == {"length"}
    # A call that comes later is served: its caller knows of the second policy, and asks for the first one.
    assert {completion.stop_reason for completion in await engine.generate(rest(first, None))} == {"length"}


async def test_calls_that_share_a_batch_are_continued_each_from_its_own_tokens(
    store: ObjectStore, tiny_folder: Path
) -> None:
    shared = LocalEngine(store.url, TWO_LANES.model_copy(update={"deterministic": False}))
    policy = await new_policy(shared, tiny_folder)
    requests = [
        GenerateRequest(policy, [[40]], [seed], SAMPLING, sampled=sampled, interruptible=True)
        for seed, sampled in ((1, [[7, 8, 9]]), (2, None), (3, [[7]]))
    ]
    together = await asyncio.gather(*(shared.generate(request) for request in requests))
    alone = [await shared.generate(request) for request in requests]
    await shared.close(checkpoint=False)
    assert [[c.token_ids for c in call] for call in together] == [[c.token_ids for c in call] for call in alone]
    assert [len(call[0].token_ids) for call in together] == [21, 24, 23]


def test_the_time_limit_counts_from_the_beginning_of_the_sampling() -> None:
    clock = Clock()
    interruption = Interruption(5.0, clock)
    clock.now += 100
    assert not interruption.is_set()
    interruption.begin()
    clock.now += 4.9
    assert not interruption.is_set()
    clock.now += 0.1
    assert interruption.is_set()
    unlimited = Interruption(None, clock)
    unlimited.begin()
    assert not unlimited.is_set()
    unlimited.set()
    assert unlimited.is_set()
