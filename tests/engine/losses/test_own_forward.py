"""With old_logprobs="forward", an update takes the old logprobs from its own forward pass: loss, gradient and metrics
are those of a batch whose old logprobs a pass before the update computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.protocol import Objective
from engine.backends.torch.loading import load_model
from engine.backends.torch.packing import longest_unit
from engine.backends.torch.trainer import TorchTrainer
from engine.errors import PermanentEngineError
from engine.losses.policy_gradient import GRPOSpec, PolicyGradientSpec
from engine.losses.values import MSESpec
from engine.models.samples import Sample
from engine.protocol import TokenSequence
from storage.chain.records import OptimizerSpec
from tests.engine.losses.cases import SPECS, samples_near
from tests.engine.losses.conftest import CPU, load
from tests.engine.losses.plain import Plain
from tests.engine.torch.gradients import WHOLE, distance, update

KINDS = ("grpo", "gspo", "cispo", "gmpo", "sapo")
POLICY: dict[str, Any] = {name: spec for name, spec in SPECS.items() if spec.kind in KINDS}
WITHIN = {torch.float64: 1e-10, torch.float32: 1e-5}
T = 0.8


def without_old(samples: list[Sample]) -> list[Sample]:
    return [replace(s, old_logprobs=None) for s in samples]


def forward(spec: PolicyGradientSpec, **settings: Any) -> Objective:
    return Objective(spec, T, "forward", **settings)


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=["float64", "float32"])
def setup(request: pytest.FixtureRequest, small_folder: Path) -> tuple[Plain, TorchTrainer, list[Sample], float]:
    """(plain model, trainer, samples whose old logprobs are the plain model's, tolerance)."""
    plain = Plain(small_folder, request.param)
    samples = []
    for s in samples_near(plain.numbers, scalar=False):
        with torch.no_grad():
            samples.append(replace(s, old_logprobs=plain.out(s, T).logprobs.tolist()))
    return plain, TorchTrainer(load(small_folder, request.param)), samples, WITHIN[request.param]


@pytest.mark.parametrize("spec", POLICY.values(), ids=POLICY.keys())
def test_the_gradient_is_that_of_the_formula(setup: Any, spec: PolicyGradientSpec) -> None:
    plain, trainer, samples, within = setup
    loss, expected = plain.loss_and_gradient(spec, samples, T)
    for max_tokens in (WHOLE, longest_unit(samples, whole_groups=False)):
        report, gradient = update(trainer, without_old(samples), forward(spec), max_tokens=max_tokens)
        assert distance(gradient, expected) <= within
        assert report.metrics["loss"] == pytest.approx(loss, rel=within, abs=within)
        assert report.metrics["ratio_mean"] == pytest.approx(1, rel=1e-6)
        # SAPO has a gate in place of the clips
        assert report.metrics.get("clip_fraction_mean") == (None if spec.kind == "sapo" else 0)


@pytest.mark.parametrize("spec", [SPECS["grpo-all"], SPECS["gspo-all"], SPECS["cispo-all"]], ids=lambda s: s.kind)
@pytest.mark.parametrize(("compute", "within"), [(torch.float32, 1e-6), (torch.bfloat16, 0.02)], ids=str)
def test_it_is_that_of_a_pass_before_the_update(
    small_folder: Path, spec: Any, compute: torch.dtype, within: float
) -> None:
    """A pass over other micro-batches than those of the update, so that it rounds differently."""
    trainer = TorchTrainer(load_model(small_folder, dtype=torch.float32, compute_dtype=compute, device=CPU))
    plain = samples_near(Plain(small_folder, torch.float32).numbers, scalar=False)
    sequences = [TokenSequence(s.token_ids, s.loss_mask, s.group) for s in plain]
    old = trainer.logprobs(sequences, temperature=T, max_tokens=longest_unit(plain, whole_groups=False))
    before = [replace(s, old_logprobs=logprobs) for s, logprobs in zip(plain, old, strict=True)]
    expected, expected_gradient = update(trainer, before, Objective(spec, T))
    report, gradient = update(trainer, without_old(plain), forward(spec))
    assert distance(gradient, expected_gradient) <= within
    gap = report.metrics.pop("logprob_gap_mean")
    assert report.metrics == pytest.approx(expected.metrics, rel=within, abs=within)
    gaps: list[float] = []
    for s in before:
        assert s.sampler_logprobs is not None and s.old_logprobs is not None
        gaps += [abs(one - other) for one, other in zip(s.sampler_logprobs, s.old_logprobs, strict=True)]
    assert gap == pytest.approx(sum(gaps) / len(gaps), rel=within, abs=within)


def test_a_repetition_gives_equal_bits(small_folder: Path) -> None:
    samples = without_old(samples_near(Plain(small_folder, torch.float32).numbers, scalar=False))
    digests, metrics = set(), []
    for _ in range(2):
        trainer = TorchTrainer(load(small_folder, torch.float32))
        report = trainer.update(samples, forward(SPECS["grpo-all"]), OptimizerSpec(lr=1e-2), max_tokens=20)
        digests.add(trainer.weights_digest()[0])
        metrics.append(report.metrics)
    assert len(digests) == 1 and metrics[0] == metrics[1]


def test_the_gap_is_that_of_the_samples_with_a_gradient(setup: Any) -> None:
    """Each sampler's logprob is 0.25 below the trainer's, and 9 below in the samples without advantage."""
    _, trainer, samples, within = setup
    below = []
    for index, s in enumerate(samples):
        away, advantage = (9.0, 0.0) if index % 2 else (0.25, 1.0)
        sampler = [logprob - away for logprob in s.old_logprobs]
        below.append(replace(s, sampler_logprobs=sampler, advantages=[advantage] * s.trained))
    report, _ = update(trainer, without_old(below), forward(GRPOSpec(kl_beta=0)))
    assert report.metrics["logprob_gap_mean"] == pytest.approx(0.25, abs=10 * within)
    # no sample has a gradient, no sample has the sampler's logprobs, the batch has the old logprobs
    flat = [replace(s, advantages=[0.0] * s.trained) for s in below]
    bare = [replace(s, sampler_logprobs=None) for s in below]
    for others, objective in ((flat, forward(GRPOSpec(kl_beta=0))), (bare, forward(GRPOSpec(kl_beta=0)))):
        assert "logprob_gap_mean" not in update(trainer, others, objective)[0].metrics
    assert "logprob_gap_mean" not in update(trainer, below, Objective(GRPOSpec(kl_beta=0), T))[0].metrics


def test_a_loss_on_values_needs_none(small_scalar_folder: Path) -> None:
    trainer = TorchTrainer(load(small_scalar_folder, torch.float32))
    samples = samples_near(Plain(small_scalar_folder, torch.float32, scalar=True).numbers, scalar=True)
    metrics = [update(trainer, samples, Objective(MSESpec(), 1.0, old))[0].metrics for old in ("forward", "trainer")]
    assert metrics[0] == metrics[1]


@pytest.mark.parametrize("skip", [False, True])
def test_weights_that_overflowed_are_no_gradient_to_skip(small_folder: Path, skip: bool) -> None:
    trainer = TorchTrainer(load(small_folder, torch.float32))
    samples = without_old(samples_near(Plain(small_folder, torch.float32).numbers, scalar=False))
    with torch.no_grad():
        next(iter(trainer.model.module.parameters())).fill_(torch.nan)
    with pytest.raises(PermanentEngineError, match=r"gives NaN for the logprobs .* Lower optimizer.lr, and fork"):
        update(trainer, samples, forward(GRPOSpec(kl_beta=0), skip_nan_gradients=skip))
