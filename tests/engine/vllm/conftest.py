"""One vLLM engine in this process, for every test of a file; a pool of two servers likewise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.tiny import build_tiny_model
from engine.backends.torch_backend import TorchBackend
from engine.backends.torch_trainer import TorchTrainer
from engine.backends.vllm.manifest import manifest_of_files
from engine.backends.vllm.opening import pool_of
from engine.backends.vllm.pool import VllmPool
from engine.protocol import Completion
from engine.sampler_spec import VllmSpec
from tests.engine.vllm.gating import move, spec_of
from tests.engine.vllm.pools import (
    LONG,
    OPTIONS,
    PROMPTS,
    SEEDS,
    SHORT,
    PlantedPlan,
    Weights,
    group_of,
    load,
    members,
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
    sampler = backend.sampler(trainer)
    sampler.sync(trainer, "state-0")
    move(trainer)
    yield sampler
    sampler.close()


# -- servers ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[Weights]:
    """Two models of one architecture."""
    made = []
    for seed in (0, 1):
        folder = build_tiny_model(tmp_path_factory.mktemp("weights") / f"tiny-{seed}", seed=seed)
        files = sorted(folder.glob("*.safetensors"))
        made.append(Weights(files, manifest_of_files(files), f"state-{seed}"))
    return made


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, weights: list[Weights], faults: Path) -> Iterator[VllmPool]:
    spec = VllmSpec(servers=2, answer_seconds=15, start_seconds=300)
    config, folder = weights[0].files[0].parent, tmp_path_factory.mktemp("pool")
    opened = pool_of(PlantedPlan(spec, OPTIONS, config, folder, "a" * 32, faults))
    groups = [group_of(server) for server in opened.servers]
    yield opened
    groups += [group_of(server) for server in opened.servers]
    opened.close()
    assert not [group for group in groups if members(group)]


@pytest.fixture
def loaded(pool: VllmPool, weights: list[Weights]) -> VllmPool:
    """Both servers up, with weights 0."""
    until(lambda: all(server.phase == "up" for server in pool.servers))
    load(pool, weights[0])
    assert [server.held for server in pool.servers] == ["state-0", "state-0"]
    return pool


@pytest.fixture(scope="module")
def expected(pool: VllmPool, weights: list[Weights]) -> dict[int, list[Completion]]:
    """What one server alone draws, by max_new_tokens."""
    load(pool, weights[0])
    two = pool.servers[1]
    two.held = None
    found = {params.max_new_tokens: pool.generate(PROMPTS, SEEDS, params) for params in (SHORT, LONG)}
    pool.check("state-0")
    return found
