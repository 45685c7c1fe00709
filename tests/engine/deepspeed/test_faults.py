"""Failures in an update: gradients that are not finite, a rank that runs out of memory, a rank that dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.backends.deepspeed.backend import DeepSpeedBackend
from engine.backends.protocol import Objective
from engine.cluster.rank_group import RankGroup
from engine.errors import NonFiniteGradient, OutOfMemory, WorkerDied
from engine.losses.likelihood import CrossEntropySpec
from engine.losses.policy_gradient import GRPOSpec
from engine.models.samples import Sample
from engine.specs.engine import DeepSpeedSpec, LocalEngineSpec
from tests.engine.deepspeed.conftest import (
    ADAMW,
    OnRanks,
    assert_weights_close,
    make_group,
    planned_rows,
    same_bytes,
    some_samples,
    state_of,
    torch_trainer,
)

GRPO = Objective(GRPOSpec(kl_beta=0.0), skip_nan_gradients=True)
CE = Objective(CrossEntropySpec())
Load = Callable[..., OnRanks]
OTHERS: list[dict[str, object]] = [
    {"zero_stage": 0},
    {"zero_stage": 1},
    {"zero_stage": 3},
    {"zero_stage": 2, "offload_optimizer": "cpu"},
    {"zero_stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
]


def poisoned() -> list[Sample]:
    """One of five samples has an infinite advantage: one rank's gradient is not finite."""
    samples = some_samples()
    samples[3] = replace(samples[3], advantages=[float("inf")] * samples[3].trained)
    return samples


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spec", [{"zero_stage": 2}, *OTHERS], ids=str)
def test_a_gradient_that_is_no_number_moves_nothing(
    spec: dict[str, object], dtype: str, two_ranks: RankGroup, on_ranks: Load, tiny_folder: Path
) -> None:
    trainer = on_ranks(two_ranks, tiny_folder, dtype=dtype, **spec)
    trainer.update(some_samples(), GRPO, ADAMW, 30)
    before = state_of(trainer.checkpoint())
    report = trainer.update(poisoned(), GRPO, ADAMW, 30)
    assert report.skipped
    with pytest.raises(NonFiniteGradient):
        trainer.update(poisoned(), replace(GRPO, skip_nan_gradients=False), ADAMW, 30)
    assert same_bytes(state_of(trainer.checkpoint()), before)
    # nothing of it is left for the next update
    clean = on_ranks(two_ranks, tiny_folder, dtype=dtype, **spec)
    clean.update(some_samples(), GRPO, ADAMW, 30)
    for each in (trainer, clean):
        assert not each.update(some_samples(), GRPO, ADAMW, 30).skipped
    assert trainer.digest() == clean.digest()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_memory_that_does_not_do_on_one_rank_halves_the_passes_of_all(
    stage: int, two_ranks: RankGroup, on_ranks: Load, tiny_folder: Path
) -> None:
    samples = some_samples([10] * 8, prompt=1)
    reference, trainer = torch_trainer(tiny_folder), on_ranks(two_ranks, tiny_folder, zero_stage=stage)
    trainer.call("limit_memory", 25, 1)
    report = trainer.update(samples, CE, ADAMW, 40)
    assert (report.max_tokens, report.micro_batches) == (20, 4)
    assert trainer.call("rows_of_last_update") == planned_rows(samples, 20, 2)
    reference.update(samples, CE, ADAMW, max_tokens=40)
    weights = state_of(trainer.checkpoint())
    assert_weights_close({name: weights[name] for name, _ in reference.weights()}, dict(reference.weights()))
    # It is the same step, to the byte, as one with these passes from the start.
    other = on_ranks(two_ranks, tiny_folder, zero_stage=stage)
    other.update(samples, CE, ADAMW, 20)
    before = trainer.digest()
    assert other.digest() == before
    trainer.call("limit_memory", 9, 0)
    with pytest.raises(OutOfMemory, match="rank 0"):
        trainer.update(samples, CE, ADAMW, 40)
    with pytest.raises(OutOfMemory, match="rank 0"):
        trainer.trainer.logprobs(samples, temperature=1.0, max_tokens=40)
    assert trainer.digest() == before


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_the_others_wait_for_ends_the_group(stage: int, on_ranks: Load, tiny_folder: Path) -> None:
    """In ZeRO 2 and 3 a rank cannot tell the others, which are exchanging gradients. The engine starts the group
    again."""
    group = make_group(2)
    try:
        trainer = on_ranks(group, tiny_folder, zero_stage=stage)
        trainer.call("limit_memory", 25, 1)
        with pytest.raises(WorkerDied, match="ran out of memory"):
            trainer.update(some_samples([10] * 8, prompt=1), CE, ADAMW, 40)
        assert not group.alive
    finally:
        group.close()


@pytest.mark.slow
def test_a_killed_rank_is_an_error_and_the_group_starts_again(tiny_folder: Path, tmp_path: Path) -> None:
    spec = DeepSpeedSpec(ranks=2, zero_stage=3, start_seconds=240, hang_seconds=120)
    backend = DeepSpeedBackend(LocalEngineSpec(trainer=spec, device="cpu", compute_dtype="float32", threads=1))
    try:
        trainer = backend.load(tiny_folder)
        heard: list[int] = []
        report = trainer.update(
            some_samples(), CE, ADAMW, max_tokens=30, on_micro_batch=lambda: heard.append(1)
        )  # fmt: skip
        assert len(heard) >= report.micro_batches // 2
        files = trainer.write_checkpoint(tmp_path / "before")
        digest, parts = trainer.weights_digest()
        assert set(parts) == set(dict(torch_trainer(tiny_folder).weights()))
        os.kill(backend.group.pids[1], signal.SIGKILL)
        with pytest.raises(WorkerDied):
            trainer.update(some_samples(), CE, ADAMW, max_tokens=30)
        assert not trainer.alive
        with pytest.raises(WorkerDied):
            trainer.weights_digest()
        again = backend.load(tiny_folder)
        assert again.alive and not trainer.alive
        again.read_checkpoint(files, optimizer=True)
        assert again.weights_digest()[0] == digest
    finally:
        backend.close()


@pytest.mark.slow
def test_a_rank_killed_in_the_middle_of_an_update(on_ranks: Load, tiny_folder: Path) -> None:
    group = make_group(2)
    try:
        trainer = on_ranks(group, tiny_folder, zero_stage=2)
        files = trainer.checkpoint()
        trainer.call("die_in_backward")
        with pytest.raises(WorkerDied, match="rank 1 died"):
            trainer.update(some_samples(), CE, ADAMW, 30)
        again = on_ranks(group, tiny_folder, zero_stage=2)
        again.call("read_checkpoint", files, True)
        assert not again.update(some_samples(), CE, ADAMW, 30).skipped
    finally:
        group.close()

