"""A pool whose private Ray is killed: it counts as dead, closes, and its successor runs on another Ray."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.backends.vllm.backend import open_pool
from engine.cluster.connection import Cluster, connect
from engine.specs.engine import ClusterSpec, VllmSpec
from tests.engine.vllm.planted import FOLDER_ENV
from tests.engine.vllm.pools import (
    OPTIONS,
    PROMPTS,
    ROOT,
    SEEDS,
    SHORT,
    WeightFiles,
    alive,
    load,
    processes_of,
    same,
    until,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture
def private_ray(faults: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv(FOLDER_ENV, str(faults))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    cluster = connect(ClusterSpec())
    yield cluster
    cluster.release()


@pytest.mark.parametrize("process", ["raylet", "gcs_server"])
def test_a_pool_of_a_lost_ray_is_dead_and_the_next_one_samples_the_same(
    process: str, weights: list[WeightFiles], private_ray: Cluster
) -> None:
    spec = VllmSpec(replicas=1, answer_seconds=15, start_seconds=300)
    pool = open_pool(spec, weights[0].files[0].parent, OPTIONS)
    load(pool, weights[0])
    before = pool.generate(PROMPTS, SEEDS, SHORT)
    processes = processes_of(pool.replicas[0])
    private_ray.processes[process].kill()
    private_ray.processes[process].wait()
    assert not pool.alive
    pool.close()

    again = open_pool(spec, weights[0].files[0].parent, OPTIONS)
    try:
        load(again, weights[0])
        same(again.generate(PROMPTS, SEEDS, SHORT), before)
        until(lambda: not alive(processes), seconds=60)
    finally:
        again.close()
