"""vLLM in the environment of another interpreter: this one needs no vLLM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.protocol import sync
from engine.backends.vllm.backend import VllmSamplers
from engine.cluster.connection import Cluster
from tests.engine.vllm.gating import assert_drawn_from, draw, move, spec_of
from tests.engine.vllm.pools import ROOT, process_of

PYTHON = Path(os.environ.get("OSTINATO_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason=f"there is no {PYTHON}: make .venv-vllm/.ready")
def test_a_replica_runs_in_the_interpreter_that_is_named(cluster: Cluster, trainer: Any) -> None:
    spec = spec_of(replicas=1, python=str(PYTHON), start_seconds=300)
    backend = VllmSamplers(spec, compute_dtype=torch.float32, device=torch.device("cpu"))
    try:
        sampler = backend.new_sampler(trainer)
        for number in range(2):
            sync(sampler, trainer, f"state-{number}")
            assert_drawn_from(trainer, draw(sampler))
            move(trainer, seed=number)
        (replica,) = sampler._shared.ensure_running().replicas  # type: ignore[union-attr]
        libraries = {mapping.path for mapping in process_of(replica).memory_maps()}
        environment = str(PYTHON.parent.parent.resolve())
        assert any(path.startswith(environment) for path in libraries)
    finally:
        backend.close()
