"""Two DeepSpeed ranks send their weights to a vLLM replica: no file is written, and every gate of a sync holds."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.deepspeed import backend as backend_module
from engine.backends.deepspeed.backend import DeepSpeedBackend, DeepSpeedTrainer
from engine.backends.protocol import Objective, sync
from engine.backends.vllm import sampler as sampler_module
from engine.backends.vllm.backend import VllmSamplers
from engine.cluster.connection import Cluster
from engine.errors import SamplerOutOfSync, WorkerDied
from engine.losses.likelihood import CrossEntropySpec
from engine.specs.engine import DeepSpeedSpec
from tests.engine.deepspeed.conftest import ADAMW, some_samples
from tests.engine.deepspeed.lab import TARGET
from tests.engine.vllm.gating import assert_drawn_from, draw, spec_of
from tests.engine.vllm.planted import PLANTED

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ZERO = DeepSpeedSpec(ranks=2, zero_stage=3, start_seconds=300, hang_seconds=120)
SPEC = spec_of(replicas=1, transport="nccl", sync_seconds=30, answer_seconds=60, start_seconds=300).model_copy(
    update={"trainer": ZERO}
)


@pytest.fixture(scope="module")
def ranks(cluster: Cluster) -> Iterator[DeepSpeedBackend]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend_module, "RANK_CLASS", TARGET)
        backend = DeepSpeedBackend(SPEC)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def samplers(cluster: Cluster) -> Iterator[VllmSamplers]:
    samplers = VllmSamplers(SPEC, compute_dtype=torch.float32, device=torch.device("cpu"), extension=PLANTED)
    yield samplers
    samplers.close()


@pytest.fixture
def on_ranks(ranks: DeepSpeedBackend, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> DeepSpeedTrainer:
    monkeypatch.setattr(sampler_module, "staging_folder", lambda *_, **__: pytest.fail("weights were staged in files"))
    return ranks.load(tiny_folder)


@pytest.fixture
def sampler(samplers: VllmSamplers, on_ranks: DeepSpeedTrainer) -> Iterator[Any]:
    sampler = samplers.new_sampler(on_ranks)
    yield sampler
    sampler.close()


def take_step(trainer: DeepSpeedTrainer) -> None:
    trainer.update(some_samples(), Objective(CrossEntropySpec()), ADAMW, max_tokens=64)


def test_it_samples_from_the_weights_of_every_step(sampler: Any, on_ranks: DeepSpeedTrainer) -> None:
    pool, digests = sampler._shared.ensure_running(), set()
    for number in range(3):
        sync(sampler, on_ranks, f"state-{number}")
        assert_drawn_from(on_ranks, draw(sampler))
        assert sampler.load_proof.tensors == 38
        digests.add(sampler._digest)
        take_step(on_ranks)
    assert len(digests) == 3
    # The group has the ranks and the worker. The engine's process is no member.
    assert pool._delivery.group.size == 3 and pool._delivery._engine_sender.member is None


@pytest.mark.parametrize("fault", ["off by 1e-2", "swapped", "one byte", "a shard of another step", "stale head"])
def test_a_planted_fault_is_refused(
    fault: str, sampler: Any, on_ranks: DeepSpeedTrainer, ranks: DeepSpeedBackend
) -> None:
    older = on_ranks.hold_weights(dtype=torch.float32)
    take_step(on_ranks)
    staged = sampler.stage(on_ranks, "state-1")
    ranks.group.call("spoil_held", staged.source.number, fault, older.number)
    with pytest.raises(SamplerOutOfSync, match="arrived with other bytes"):
        sampler.load(staged)
    assert sampler.loaded_state is None
    sync(sampler, on_ranks, "state-1")
    assert_drawn_from(on_ranks, draw(sampler))


def test_a_rank_that_is_killed_in_the_middle(
    sampler: Any, on_ranks: DeepSpeedTrainer, ranks: DeepSpeedBackend, tiny_folder: Path
) -> None:
    staged = sampler.stage(on_ranks, "state-1")
    ranks.group.call("spoil_held", staged.source.number, "dies", staged.source.number)
    with pytest.raises((WorkerDied, SamplerOutOfSync)):
        sampler.load(staged)
    staged.close()
    assert sampler.loaded_state is None and not on_ranks.alive
    # the engine loads the policy again, on new ranks
    again = ranks.load(tiny_folder)
    sync(sampler, again, "state-1")
    assert_drawn_from(again, draw(sampler))


def test_a_rank_that_is_gone_before_the_load(
    sampler: Any, on_ranks: DeepSpeedTrainer, ranks: DeepSpeedBackend, tiny_folder: Path
) -> None:
    staged = sampler.stage(on_ranks, "state-1")
    os.kill(ranks.group.pids[0], signal.SIGKILL)
    with pytest.raises(WorkerDied):
        sampler.load(staged)
    staged.close()
    again = ranks.load(tiny_folder)
    sync(sampler, again, "state-1")
    assert_drawn_from(again, draw(sampler))
