"""Tests of a replica of two ranks that share one copy of the model. On the CPU these are two more processes of vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from engine.backends.replicas.pool import ReplicaPool
from engine.backends.vllm.backend import open_pool
from engine.cluster.connection import Cluster
from engine.protocol import Completion
from engine.specs.engine import VllmSpec
from tests.engine.vllm.pools import OPTIONS, PROMPTS, SEEDS, SHORT, WeightFiles, load, named, same, until

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def two_ranks(cluster: Cluster, weights: list[WeightFiles]) -> Iterator[ReplicaPool]:
    spec = VllmSpec(replicas=1, tensor_parallel=2, answer_seconds=60, start_seconds=300)
    opened = open_pool(spec, weights[0].files[0].parent, replace(OPTIONS, tensor_parallel=2))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def drawn(two_ranks: ReplicaPool, weights: list[WeightFiles]) -> list[Completion]:
    load(two_ranks, weights[0])
    completions = two_ranks.generate(PROMPTS, SEEDS, SHORT)
    two_ranks.check("state-0")
    return completions


def test_two_ranks_hold_a_part_each_and_score_what_they_drew(
    two_ranks: ReplicaPool, weights: list[WeightFiles], drawn: list[Completion]
) -> None:
    (replica,) = two_ranks.replicas
    assert len(set(replica.worker_ids)) == 2
    two_ranks.check("state-0", full=True)
    scored = two_ranks.score([p + c.token_ids for p, c in zip(PROMPTS, drawn, strict=True)])
    for prompt, completion, logprobs in zip(PROMPTS, drawn, scored, strict=True):
        assert logprobs[len(prompt) - 1 :] == pytest.approx(completion.logprobs, abs=0.01)


def test_a_rank_that_is_killed_takes_its_replica_with_it_and_both_come_back(
    two_ranks: ReplicaPool, drawn: list[Completion]
) -> None:
    (replica,) = two_ranks.replicas
    before = replica.starts
    ranks = named(replica, "Worker")
    assert len(ranks) == 2
    ranks[1].kill()
    until(lambda: replica.starts > before and replica.phase == "up")
    assert replica.loaded_state == "state-0" and len(set(replica.worker_ids)) == 2
    same(two_ranks.generate(PROMPTS, SEEDS, SHORT), drawn)
    two_ranks.check("state-0")
