"""A server of two ranks, which share one copy of the model: on the CPU two processes beside vLLM's engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.backends.vllm.opening import pool_of
from engine.backends.vllm.pool import VllmPool
from engine.protocol import Completion
from engine.sampler_spec import VllmSpec
from tests.engine.vllm.pools import OPTIONS, PROMPTS, SEEDS, SHORT, PlantedPlan, Weights, load, named, same, until

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, weights: list[Weights], faults: Path) -> Iterator[VllmPool]:
    spec = VllmSpec(servers=1, tensor_parallel=2, answer_seconds=60, start_seconds=300)
    config, folder = weights[0].files[0].parent, tmp_path_factory.mktemp("ranks")
    opened = pool_of(PlantedPlan(spec, replace(OPTIONS, tensor_parallel=2), config, folder, "a" * 32, faults))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def drawn(two_ranks: VllmPool, weights: list[Weights]) -> list[Completion]:
    load(two_ranks, weights[0])
    found = two_ranks.generate(PROMPTS, SEEDS, SHORT)
    two_ranks.check("state-0")
    return found


def test_two_ranks_hold_a_part_each_and_score_what_they_drew(
    two_ranks: VllmPool, weights: list[Weights], drawn: list[Completion]
) -> None:
    (server,) = two_ranks.servers
    assert len(set(server.workers)) == 2
    two_ranks.check("state-0", full=True)
    scored = two_ranks.score([p + c.token_ids for p, c in zip(PROMPTS, drawn, strict=True)])
    for prompt, completion, logprobs in zip(PROMPTS, drawn, scored, strict=True):
        assert logprobs[len(prompt) - 1 :] == pytest.approx(completion.logprobs, abs=0.01)


def test_a_rank_that_is_killed_takes_its_server_with_it_and_both_come_back(
    two_ranks: VllmPool, drawn: list[Completion]
) -> None:
    (server,) = two_ranks.servers
    before = server.starts
    ranks = named(server, "Worker")
    assert len(ranks) == 2
    ranks[1].kill()
    until(lambda: server.starts > before and server.phase == "up")
    assert server.held == "state-0" and len(set(server.workers)) == 2
    same(two_ranks.generate(PROMPTS, SEEDS, SHORT), drawn)
    two_ranks.check("state-0")
