"""Calls that a real vLLM replica batches: adapters on one base sample at the same time, and the last ones stay loaded;
completions that have begun go before others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.cluster.connection import Cluster
from engine.local.engine import LocalEngine
from engine.protocol import Completion, GenerateRequest, LogprobsRequest, SamplingParams, TokenSequence
from engine.specs.adapters import LoraSpec
from storage.chain.records import PolicyRef
from tests.engine.vllm.gating import spec_of
from tests.fixtures.engines import commit_batch, new_policy, request_after
from tests.fixtures.worklog import events

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPTS = [[10, 20, 30], [40, 41]]
SAMPLING = SamplingParams(max_new_tokens=12, min_new_tokens=12)
ADAPTER = LoraSpec(rank=4, alpha=6.0)


@pytest.fixture
async def engine(tmp_path: Path, cluster: Cluster) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(f"file://{tmp_path}/store", spec_of(replicas=1, kv_cache_gib=0.125))
    yield engine
    await engine.close(checkpoint=False)


class Meeting:
    """Holds two calls at their first token until both have one."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=60)
        self.met: set[str] = set()

    async def sample(self, engine: LocalEngine, policy: PolicyRef) -> list[Completion]:
        def on_token(index: int, token: int, logprob: float) -> None:
            if policy.uri not in self.met:
                self.met.add(policy.uri)
                self.barrier.wait()

        return await engine.generate(GenerateRequest(policy, PROMPTS, [1, 2], SAMPLING), on_token=on_token)


async def step(engine: LocalEngine, policy: PolicyRef) -> PolicyRef:
    request = request_after(policy, commit_batch(engine.store, policy), lr=0.05)
    return (await engine.take_gradient_step(request)).policy


async def logprobs_of_trainer(engine: LocalEngine, policy: PolicyRef, drawn: list[Completion]) -> list[list[float]]:
    sequences = [
        TokenSequence(prompt + one.token_ids, [0.0] * len(prompt) + [1.0] * len(one.token_ids))
        for prompt, one in zip(PROMPTS, drawn, strict=True)
    ]
    return await engine.logprobs(LogprobsRequest(policy, sequences))


async def test_two_policies_sample_at_the_same_time_and_the_older_one_stays(
    engine: LocalEngine, tiny_folder: Path, worklog: Path
) -> None:
    first = await new_policy(engine, tiny_folder, trainable=ADAPTER)
    other = await new_policy(engine, tiny_folder, run="other", trainable=ADAPTER, init_seed=3)
    await engine.generate(GenerateRequest(first, PROMPTS, [1, 2], SAMPLING))  # the base is loaded
    second = await step(engine, first)
    meeting = Meeting()
    of_first, of_second = await asyncio.gather(meeting.sample(engine, first), meeting.sample(engine, second))
    # two runs share the base in the same way
    meeting = Meeting()
    of_other, _ = await asyncio.gather(meeting.sample(engine, other), meeting.sample(engine, second))
    # each from its own adapter; the ids that may not end a completion yet are held back: -ln(1 - p), p about 1/259
    for policy, drawn in ((first, of_first), (second, of_second), (other, of_other)):
        expected = await logprobs_of_trainer(engine, policy, drawn)
        for one, logprobs in zip(drawn, expected, strict=True):
            assert one.logprobs == pytest.approx(logprobs, abs=0.05)
    assert [one.logprobs for one in of_first] != [one.logprobs for one in of_second]
    # each adapter was loaded once, and the policy that the chain has left was not restored for the sampler
    syncs = [(line["policy"].rpartition("/")[0], line["step"]) for line in events(worklog, "sync")]
    assert len(syncs) == len(set(syncs)) == 3


async def test_a_completion_that_has_begun_gets_a_place_before_others(tmp_path: Path, tiny_folder: Path) -> None:
    spec = spec_of(replicas=1, kv_cache_gib=0.125).model_copy(update={"max_rows": 1})
    engine = LocalEngine(f"file://{tmp_path}/one-place", spec)
    policy = await new_policy(engine, tiny_folder)
    first_tokens: list[str] = []
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def sample(name: str, tokens: int, sampled: list[int] | None) -> None:
        def on_token(index: int, token: int, logprob: float) -> None:
            if name not in first_tokens:
                first_tokens.append(name)
                loop.call_soon_threadsafe(begun.set)

        params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
        request = GenerateRequest(policy, [[10, 20]], [1], params, sampled=None if sampled is None else [sampled])
        await engine.generate(request, on_token=on_token)

    running = asyncio.create_task(sample("runs", 450, None))
    await begun.wait()
    await asyncio.gather(running, sample("new", 4, None), sample("cut", 4, [5, 6]))
    await engine.close(checkpoint=False)
    assert first_tokens == ["runs", "cut", "new"]
