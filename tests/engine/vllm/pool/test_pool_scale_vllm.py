"""A pool of real vLLM replicas that shrinks and grows during calls: no token is lost, and all weights are proven."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.backends.replicas.pool import ReplicaPool
from engine.cluster.connection import Cluster
from engine.local.engine import LocalEngine
from engine.protocol import ActorCount, Completion, GenerateRequest, LogprobsRequest, SamplerScale, TokenSequence
from storage.chain.records import PolicyRef
from tests.engine.vllm.gating import spec_of
from tests.engine.vllm.pools import (
    LONG,
    PROMPTS,
    SEEDS,
    SHORT,
    WeightFiles,
    alive,
    count_requests,
    load,
    processes_of,
    until,
)
from tests.fixtures.engines import commit_batch, new_policy, request_after

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

GREEDY = LONG.model_copy(update={"temperature": 0.0})
"""Its tokens do not depend on seeds, so a completion that was cut must be the one that was not."""


def sample_to_the_end(pool: ReplicaPool, counts: Sequence[int]) -> tuple[list[Completion], int]:
    """The completions of all prompts, and the number of calls. The n-th call changes the number of replicas to
    `counts[n]` when 100 tokens have come. Interrupted completions continue as the segments of a shard do."""
    sampled: list[list[int]] = [[] for _ in PROMPTS]
    logprobs: list[list[float]] = [[] for _ in PROMPTS]
    told: list[list[int]] = [[] for _ in PROMPTS]
    stops = ["interrupted"] * len(PROMPTS)
    calls, arrived, unfinished = 0, 0, list[int]()

    def on_token(position: int, token: int, logprob: float) -> None:
        nonlocal arrived
        told[unfinished[position]].append(token)
        arrived += 1
        if arrived == 100 and calls < len(counts):
            pool.scale(counts[calls])

    while "interrupted" in stops:
        unfinished = [index for index, stop in enumerate(stops) if stop == "interrupted"]
        arrived = 0
        new = pool.generate(
            [PROMPTS[index] for index in unfinished], [1000 * calls + index for index in unfinished], GREEDY, on_token,
            sampled=[sampled[index] for index in unfinished], interrupted=lambda: False,
        )  # fmt: skip
        pool.check("state-0")
        for index, completion in zip(unfinished, new, strict=True):
            sampled[index] = sampled[index] + completion.token_ids
            logprobs[index] = logprobs[index] + completion.logprobs
            stops[index] = completion.stop_reason
        calls += 1
    assert told == sampled  # each token was told once
    return [Completion(*parts) for parts in zip(sampled, logprobs, stops, strict=True)], calls  # type: ignore[arg-type]


def test_two_replicas_become_one_then_three_then_two_while_calls_run(
    loaded: ReplicaPool, weights: list[WeightFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls = sample_to_the_end(loaded, [])
    assert calls == 1 and {len(completion.token_ids) for completion in whole} == {400}
    request_counts = count_requests(monkeypatch)
    processes = {replica.name: processes_of(replica) for replica in loaded.replicas}

    def assert_whole(completions: list[Completion]) -> None:
        for one, other in zip(completions, whole, strict=True):
            assert (one.token_ids, one.stop_reason) == (other.token_ids, other.stop_reason)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)

    # 2 -> 1 cuts the first call, 1 -> 3 cuts nothing: the second call ends on the replica that stayed.
    completions, calls = sample_to_the_end(loaded, [1, 3])
    assert_whole(completions)
    assert calls == 2
    assert sorted(request_counts) == ["replica-0", "replica-1"]
    assert sum(request_counts.values()) > len(PROMPTS)
    # The replica that left has ended with all its processes, and those that join hold proven weights.
    until(lambda: [replica.name for replica in loaded.replicas] == ["replica-0", "replica-2", "replica-3"])
    assert not alive(processes["replica-1"])
    until(lambda: [replica.loaded_state for replica in loaded.replicas] == ["state-0"] * 3)
    loaded.check("state-0", full=True)

    # 3 -> 2 while all three sample.
    request_counts.clear()
    completions, calls = sample_to_the_end(loaded, [2])
    assert_whole(completions)
    assert calls == 2 and {"replica-2", "replica-3"} <= set(request_counts)
    until(lambda: [replica.name for replica in loaded.replicas] == ["replica-0", "replica-2"])
    loaded.check("state-0", full=True)
    load(loaded, weights[1])
    assert [replica.loaded_state for replica in loaded.replicas] == ["state-1"] * 2
    loaded.check("state-1", full=True)


async def test_an_engine_scales_its_samplers_between_steps(
    tiny_folder: Path, tmp_path: Path, cluster: Cluster
) -> None:
    engine = LocalEngine(f"file://{tmp_path}/store", spec_of(replicas=1, kv_cache_gib=0.125))

    async def draw(policy: PolicyRef) -> None:
        """Samples, and compares the logprobs with the trainer's."""
        drawn = await engine.generate(GenerateRequest(policy, PROMPTS, SEEDS, SHORT))
        sequences = [
            TokenSequence(prompt + one.token_ids, [0.0] * len(prompt) + [1.0] * len(one.token_ids))
            for prompt, one in zip(PROMPTS, drawn, strict=True)
        ]
        expected = await engine.logprobs(LogprobsRequest(policy, sequences))
        for one, logprobs in zip(drawn, expected, strict=True):
            # The ids that may not end a completion yet are held back: -ln(1 - p), p about 1/259.
            assert one.logprobs == pytest.approx(logprobs, abs=0.05)

    async def replicas() -> ActorCount:
        info = await engine.info()
        assert info.cluster is not None
        return info.cluster.replicas

    async def wait_for(count: ActorCount) -> None:
        for _ in range(600):
            if await replicas() == count:
                return
            await asyncio.sleep(0.5)
        raise AssertionError(await replicas())

    try:
        policy = await new_policy(engine, tiny_folder)
        await draw(policy)
        scaled = await engine.scale_samplers(2)
        assert scaled == SamplerScale(before=1, replicas=ActorCount(wanted=2, alive=1))
        await draw(policy)
        await wait_for(ActorCount(wanted=2, alive=2))
        request = request_after(policy, commit_batch(engine.store, policy), lr=0.05)
        policy = (await engine.take_gradient_step(request)).policy
        with pytest.MonkeyPatch.context() as patch:
            request_counts = count_requests(patch)
            await draw(policy)
            assert sorted(request_counts) == ["replica-0", "replica-1"]
        scaled = await engine.scale_samplers(1)
        assert scaled.before == 2 and scaled.replicas.wanted == 1
        await draw(policy)
        await wait_for(ActorCount(wanted=1, alive=1))
        await draw(policy)
    finally:
        await engine.close(checkpoint=False)
