"""One vLLM engine in this process, for every test of a file; a pool of two replicas likewise, on one private Ray."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.protocol import sync
from engine.backends.replicas.pool import ReplicaPool
from engine.backends.replicas.runtime import manifest_of_files
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.tiny import build_tiny_model
from engine.backends.torch.trainer import TorchTrainer
from engine.backends.vllm.backend import open_pool
from engine.cluster.connection import Cluster, connect
from engine.protocol import Completion
from engine.specs.engine import ClusterSpec, VllmSpec
from tests.engine.vllm.gating import move, spec_of
from tests.engine.vllm.planted import FOLDER_ENV
from tests.engine.vllm.pools import (
    LONG,
    OPTIONS,
    PROMPTS,
    ROOT,
    SEEDS,
    SHORT,
    WeightFiles,
    alive,
    load,
    processes_of,
    until,
)

# -- in this process ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def backend() -> Iterator[Any]:
    pytest.importorskip("vllm")
    from engine.backends.vllm.backend import VllmSamplers

    backend = VllmSamplers(spec_of(sleep=True), compute_dtype=torch.float32, device=torch.device("cpu"))
    yield backend
    backend.close()


@pytest.fixture
def trainer(tiny_folder: Path) -> TorchTrainer:
    return TorchBackend(spec_of()).load(tiny_folder)


@pytest.fixture
def sampler(backend: Any, trainer: TorchTrainer) -> Iterator[Any]:
    """Holds state-0; the trainer has gone on to other weights."""
    sampler = backend.new_sampler(trainer)
    sync(sampler, trainer, "state-0")
    move(trainer)
    yield sampler
    sampler.close()


# -- replicas ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[WeightFiles]:
    """Two models of one architecture."""
    models = []
    for seed in (0, 1):
        folder = build_tiny_model(tmp_path_factory.mktemp("weights") / f"tiny-{seed}", seed=seed)
        files = sorted(folder.glob("*.safetensors"))
        models.append(WeightFiles(files, manifest_of_files(files), f"state-{seed}"))
    return models


@pytest.fixture(scope="session")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that planted.Planted looks into."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def cluster(faults: Path) -> Iterator[Cluster]:
    """One private Ray for a file: a pool that opens shares it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_ENV, str(faults))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        connection = connect(ClusterSpec())
    yield connection
    connection.release()


@pytest.fixture(scope="module")
def pool(cluster: Cluster, weights: list[WeightFiles]) -> Iterator[ReplicaPool]:
    spec = VllmSpec(replicas=2, answer_seconds=15, start_seconds=300)
    opened = open_pool(spec, weights[0].files[0].parent, OPTIONS)
    processes = [process for replica in opened.replicas for process in processes_of(replica)]
    yield opened
    processes += [process for replica in opened.replicas if replica.actor for process in processes_of(replica)]
    opened.close()
    assert not alive(processes)


@pytest.fixture
def loaded(pool: ReplicaPool, weights: list[WeightFiles]) -> ReplicaPool:
    """Both replicas up, with weights 0."""
    until(lambda: all(replica.phase == "up" for replica in pool.replicas))
    load(pool, weights[0])
    assert [replica.loaded_state for replica in pool.replicas] == ["state-0", "state-0"]
    return pool


@pytest.fixture(scope="module")
def expected(pool: ReplicaPool, weights: list[WeightFiles]) -> dict[int, list[Completion]]:
    """What one replica alone draws, by max_new_tokens."""
    load(pool, weights[0])
    pool.replicas[1].loaded_state = None
    drawn = {params.max_new_tokens: pool.generate(PROMPTS, SEEDS, params) for params in (SHORT, LONG)}
    pool.check("state-0")
    return drawn
