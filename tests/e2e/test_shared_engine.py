"""Tests of four flows on one engine server over HTTP: each ends as it does alone on its own engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.local.engine import LocalEngine
from flows.configs.common import GRPOConfig
from flows.grpo import grpo
from storage.chain.records import Chain, CommitRecord, StepRequest
from storage.store.objects import open_store
from tests.fixtures.engines import DETERMINISTIC
from tests.fixtures.servers.http_engine import running_server
from tests.fixtures.toy import toy_config

STEPS, COMPLETIONS, TOKENS = 4, 16, 6
"""Of each run; completions of a step, tokens of a completion."""

RUNS: dict[str, dict[str, Any]] = {
    "one": {"seed": 1},
    "two": {"seed": 2, "algorithm__kl_beta": 0.0},
    "three": {"seed": 3, "algorithm__samples_per_mini_batch": 8},
    "adapter": {"seed": 1, "model__adapter": {"rank": 4}, "optimizer__lr": 1e-2},
}
"""Run key -> what it has to itself. Three train all weights of one model, the last an adapter on it."""


class InStep(LocalEngine):
    """Takes no step k before every run asks for its step k: nothing can pass by running one after the other."""

    def __init__(self, store_url: str) -> None:
        super().__init__(store_url, DETERMINISTIC)
        self.everyone = asyncio.Barrier(len(RUNS))

    async def take_gradient_step(self, request: StepRequest, *, epoch: int = 0) -> CommitRecord:
        async with asyncio.timeout(120):  # a flow that failed never comes
            await self.everyone.wait()
        return await super().take_gradient_step(request, epoch=epoch)


def config(run: str, folder: Path, tiny_folder: Path, engine: dict[str, Any]) -> GRPOConfig:
    folder.mkdir(exist_ok=True)
    # a reward that an untrained model varies in: every step moves the weights
    changes = {"grader__path": "tests.fixtures.grading:even_share", **RUNS[run]}
    toy = toy_config(folder, tiny_folder, run=run, **changes)
    return GRPOConfig.model_validate(toy | {"engine": engine})


def records(folder: Path, run: str) -> list[CommitRecord]:
    chain = Chain(open_store(str(folder / "data")), run, "0-grpo", "policy")
    return list(chain.records(after=0, until=STEPS))


@pytest.fixture(scope="module")
def alone(
    tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path, prefect_server: str
) -> dict[str, list[CommitRecord]]:
    """Every run by itself, with an embedded engine and a store of its own."""
    records_of = {}
    for run in RUNS:
        folder = tmp_path_factory.mktemp(f"alone-{run}")
        asyncio.run(grpo(config(run, folder, tiny_folder, DETERMINISTIC.model_dump())))
        records_of[run] = records(folder, run)
    return records_of


def metrics_of(page: str) -> dict[str, float]:
    """Sample -> value, summed over its labels."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


@pytest.mark.slow
def test_four_runs_on_one_server_end_as_each_does_alone(
    tmp_path: Path, tiny_folder: Path, alone: dict[str, list[CommitRecord]]
) -> None:
    async def all_at_once(url: str) -> None:
        reach = {"kind": "http", "url": url}
        await asyncio.gather(*(grpo(config(run, tmp_path, tiny_folder, reach)) for run in RUNS))

    with running_server(InStep(str(tmp_path / "data"))) as spec:
        asyncio.run(all_at_once(spec.url))
        metrics = metrics_of(httpx.get(f"{spec.url}/metrics").text)

    shared = {run: records(tmp_path, run) for run in RUNS}
    for run in RUNS:
        assert [record.state for record in shared[run]] == [record.state for record in alone[run]], run
        assert [record.weights_digest for record in shared[run]] == [r.weights_digest for r in alone[run]], run
    digests: list[str | None] = []
    for run in RUNS:
        digests += [record.weights_digest for record in shared[run]]
    assert None not in digests
    assert len(set(digests)) == len(RUNS) * STEPS  # no run stood still, and none is another's copy

    assert metrics["ostinato_gradient_steps_total"] == len(RUNS) * STEPS
    assert metrics["ostinato_generated_tokens_total"] == len(RUNS) * STEPS * COMPLETIONS * TOKENS
    assert metrics["ostinato_calls_waiting"] == 0
    assert 0 < metrics["ostinato_memory_used_bytes"] <= metrics["ostinato_memory_bytes"]
