"""Tests of graders on a Ray cluster: grades are computed on several machines, survive the loss of one, and change no
artifact."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from engine.text.threads import StringThread
from flows.configs.common import GRPOConfig
from flows.grpo import grpo
from storage.chain.records import Chain
from storage.store.objects import ObjectStore, open_store
from tasks.graders.base import BaseGrader
from tasks.graders.running.grade_threads import grade_threads
from tasks.graders.spec import build, grader_spec
from tests.fixtures.ray_nodes import ray_nodes
from tests.fixtures.toy import toy_config

pytestmark = pytest.mark.slow


async def grade_on_nodes(grader: BaseGrader, count: int) -> Counter[str]:
    """How many of `count` grades were given on each node. The grader names the actor of its node in the reason."""
    threads = [StringThread(turns=[("user", "q"), ("assistant", str(number))]) for number in range(count)]
    outcomes = await grade_threads(grader, threads, retries=5, timeout_seconds=300)
    assert [outcome.reward for outcome in outcomes] == [float(number) for number in range(count)]
    return Counter(outcome.reason for outcome in outcomes)


async def test_grades_are_given_on_both_nodes_and_survive_the_loss_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with ray_nodes(nodes=1) as cluster:
        lost = cluster.add_node(num_cpus=2)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        grader = build(grader_spec("tests.fixtures.grading:NumberAndActor", {"grader_key": "n"}, workers="cluster"))
        await grader.setup()
        try:
            before = await grade_on_nodes(grader, 40)
            assert len(before) == 2
            grading = asyncio.ensure_future(grade_on_nodes(grader, 400))
            while not grading.done() and grader.get_logs().get("graded/count", 0) < 60:
                await asyncio.sleep(0)
            assert not grading.done(), "the node is to be lost while grades are given"
            cluster.remove_node(lost, allow_graceful=False)
            await grading
            after = await grade_on_nodes(grader, 20)
            assert set(after) < set(before) and len(after) == 1
            cluster.add_node(num_cpus=2)
            monkeypatch.setattr("engine.cluster.workers.DISCOVERY_INTERVAL", 0.0)
            while len(await grade_on_nodes(grader, 20)) == 1:
                await asyncio.sleep(0.1)
        finally:
            await grader.teardown()


def run_toy(folder: Path, tiny_folder: Path, cluster: dict[str, Any] | None = None, **grader: Any) -> ObjectStore:
    config = toy_config(folder, tiny_folder, run="toy", engine__cluster=cluster or {})
    arguments = {"limits": {"seconds": 60}}
    config["grader"] = {"path": "tests.fixtures.grading:CodeOfCompletion", "arguments": arguments} | grader
    config["grader"]["timeout_seconds"] = 600
    asyncio.run(grpo(GRPOConfig.model_validate(config)))
    return open_store(folder / "data")


def test_a_run_graded_on_the_cluster_equals_one_graded_in_its_process(
    tmp_path: Path, tiny_folder: Path, prefect_server: str
) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    here = run_toy(tmp_path / "here", tiny_folder)
    with ray_nodes() as cluster:
        # the engine computes in this process: its `cluster` is only where its graders run
        there = run_toy(tmp_path / "there", tiny_folder, {"address": cluster.address}, workers="cluster")
    chains = [list(Chain(store, "toy", "0-grpo", "policy").records(after=0, until=4)) for store in (here, there)]
    assert [record.state for record in chains[0]] == [record.state for record in chains[1]]
    assert [record.weights_digest for record in chains[0]] == [record.weights_digest for record in chains[1]]
    assert len({record.weights_digest for record in chains[0]}) == 4, "every step moved the weights"
