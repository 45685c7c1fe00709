"""Tangents, which are d(loss)/d(logprob) of any loss per trained token: an optimizer step descends that loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.backends.protocol import Objective
from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.packing import longest_unit
from engine.backends.torch.trainer import TorchTrainer
from engine.losses.inputs import Outputs
from engine.losses.likelihood import TangentsSpec
from engine.losses.spec import LossSpec
from engine.models.samples import Sample
from engine.protocol import TokenSequence
from storage.chain.records import OptimizerSpec
from tests.engine.losses.cases import ON_LOGPROBS, loss_of, samples_near
from tests.engine.losses.conftest import load
from tests.engine.torch.gradients import WHOLE, distance, update

OF_LOGPROBS = {
    name: spec
    for name, spec in ON_LOGPROBS.items()
    if spec.kind != "tangents" and not spec.needs_entropy and not spec.needs_teacher_top
}


def logprobs_of(trainer: TorchTrainer, *samples: Sample) -> list[list[float]]:
    sequences = [TokenSequence(token_ids=s.token_ids, loss_mask=s.loss_mask) for s in samples]
    return [row.tolist() for row in trainer.logprobs(sequences, temperature=1.0, max_tokens=WHOLE)]


def with_tangents(
    trainer: TorchTrainer, samples: list[Sample], loss: Callable[[Tensor], Tensor]
) -> tuple[list[Sample], float]:
    """(the samples with d(loss)/d(logprob) at the trainer's weights, computed with autograd as a user would; the
    loss)."""
    flat = [value for row in logprobs_of(trainer, *samples) for value in row]
    logprobs_N = torch.tensor(flat, dtype=torch.float64, requires_grad=True)
    value = loss(logprobs_N)
    value.backward()
    parts = logprobs_N.grad.split([s.trained for s in samples])
    return [replace(s, tangents=part.tolist()) for s, part in zip(samples, parts, strict=True)], value.item()


@pytest.mark.parametrize("spec", OF_LOGPROBS.values(), ids=OF_LOGPROBS.keys())
def test_with_a_loss_s_own_gradient_they_are_that_loss(exact: CausalLM, spec: LossSpec) -> None:
    trainer = TorchTrainer(exact)
    samples = samples_near(lambda bare: logprobs_of(trainer, bare)[0], scalar=False)
    _, expected = update(trainer, samples, Objective(spec))
    taught, _ = with_tangents(trainer, samples, lambda logprobs_N: loss_of(spec, samples, Outputs(logprobs_N)))
    for max_tokens in (WHOLE, longest_unit(samples, whole_groups=False)):
        _, gradient = update(trainer, taught, Objective(TangentsSpec()), max_tokens=max_tokens)
        assert distance(gradient, expected) <= 1e-10


def test_an_optimizer_step_descends_the_loss(small_folder: Path) -> None:
    """Σ (l + 4)²: logprobs of a fresh model over 259 ids are near -5.6, so that the step raises them; the negated
    tangents would lower them."""
    samples = [Sample([1, 2, 3, 4], [0.0, 1.0, 1.0, 1.0]), Sample([5, 6, 7], [0.0, 0.0, 1.0])]

    def loss(logprobs_N: Tensor) -> Tensor:
        return (logprobs_N + 4).square().sum()

    for sign in (1, -1):
        trainer = TorchTrainer(load(small_folder, torch.float64))
        taught, before = with_tangents(trainer, samples, loss)
        assert all(tangent < 0 for s in taught for tangent in s.tangents)
        signed = [replace(s, tangents=[sign * tangent for tangent in s.tangents]) for s in taught]
        trainer.update(signed, Objective(TangentsSpec()), OptimizerSpec(lr=1e-3, weight_decay=0.0), max_tokens=WHOLE)
        _, after = with_tangents(trainer, samples, loss)
        assert (after < before) == (sign == 1)
