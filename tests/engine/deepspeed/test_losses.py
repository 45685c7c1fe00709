"""Every loss on two ranks, which share samples or each row, as the torch trainer computes it: entropies, sequences that
two ranks hold a part of, and pairs included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from engine.backends.protocol import Objective
from engine.backends.torch.loading import load_model
from engine.backends.torch.trainer import TorchTrainer
from engine.backends.weight_files.pieces import open_checkpoint
from engine.cluster.rank_group import RankGroup
from engine.errors import BadSpec
from engine.losses.pairs import DPOSpec
from storage.chain.records import OptimizerSpec
from tests.engine.deepspeed.conftest import OnRanks, assert_weights_close, whole
from tests.engine.losses.cases import SPECS, samples_near

pytestmark = pytest.mark.slow
ADAMW = OptimizerSpec(lr=1e-3, eps=1e-3, max_grad_norm=0.5)
MAX_TOKENS = 22
"""Tokens of the longest pair, so that each rank has one micro-batch per pass, and one rank waits in the last pass."""
LAYOUTS = [{"zero_stage": 3}, {"zero_stage": 2}, {"zero_stage": 3, "sequence_parallel": 2}]
Load = Callable[..., OnRanks]


@pytest.fixture(scope="module")
def scalar_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "scalar"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForSequenceClassification.from_pretrained(tiny_folder, num_labels=1).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("reads", ["logprobs", "values"])
@pytest.mark.parametrize("spec", LAYOUTS, ids=str)
def test_every_loss_trains_on_two_ranks_as_on_one(
    reads: str, spec: dict[str, object], two_ranks: RankGroup, on_ranks: Load, tiny_folder: Path, scalar_folder: Path
) -> None:
    folder, scalar = (scalar_folder, True) if reads == "values" else (tiny_folder, False)
    cpu, f32 = torch.device("cpu"), torch.float32
    reference = TorchTrainer(load_model(folder, dtype=f32, compute_dtype=f32, device=cpu))
    trainer = on_ranks(two_ranks, folder, **spec)
    samples = samples_near(lambda bare: [0.0 if scalar else -5.5] * bare.trained, scalar=scalar)
    for name, loss in SPECS.items():
        if loss.reads != reads:
            continue
        objective = Objective(loss, 1.0 if scalar else 0.8)
        expected = reference.update(samples, objective, ADAMW, max_tokens=MAX_TOKENS)
        report = trainer.update(samples, objective, ADAMW, MAX_TOKENS)
        assert report.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-5), name
        assert loss.needs_entropy == ("entropy_mean" in report.metrics), name
    weights = whole(open_checkpoint(trainer.checkpoint()).weights)
    assert_weights_close(weights, dict(reference.weights()), updates=len(SPECS))


@pytest.mark.parametrize("spec", LAYOUTS, ids=str)
def test_the_old_logprobs_of_the_forward_pass(
    spec: dict[str, object], two_ranks: RankGroup, on_ranks: Load, tiny_folder: Path
) -> None:
    cpu, f32 = torch.device("cpu"), torch.float32
    reference = TorchTrainer(load_model(tiny_folder, dtype=f32, compute_dtype=f32, device=cpu))
    trainer = on_ranks(two_ranks, tiny_folder, **spec)
    samples = []
    for sample in samples_near(lambda bare: [-5.5] * bare.trained, scalar=False):
        samples.append(replace(sample, old_logprobs=None))
    for name in ("grpo-all", "gspo-all"):
        objective = Objective(SPECS[name], 0.8, "forward")
        expected = reference.update(samples, objective, ADAMW, max_tokens=MAX_TOKENS)
        report = trainer.update(samples, objective, ADAMW, MAX_TOKENS)
        assert report.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-5), name
        assert report.metrics["logprob_gap_mean"] > 0
    weights = whole(open_checkpoint(trainer.checkpoint()).weights)
    assert_weights_close(weights, dict(reference.weights()), updates=2)


def test_what_is_no_pair_leaves_the_ranks_alive(two_ranks: RankGroup, on_ranks: Load, tiny_folder: Path) -> None:
    trainer = on_ranks(two_ranks, tiny_folder, zero_stage=3)
    samples = samples_near(lambda bare: [-5.5] * bare.trained, scalar=False)
    with pytest.raises(BadSpec, match=r"the group 'a' has 1 samples, preferred: \[False\]"):
        trainer.update(samples[:2] + samples[3:], Objective(DPOSpec()), ADAMW, MAX_TOKENS)
    assert trainer.update(samples, Objective(DPOSpec()), ADAMW, MAX_TOKENS).micro_batches >= 2
