"""The gradient of every loss is the slope that central differences measure, in float64, away from its kinks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import pytest
import torch
from torch import Tensor

from engine.backends.protocol import Objective
from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.packing import pack
from engine.backends.torch.updates import count_totals, make_forward, micro_batch_loss
from engine.losses.inputs import Outputs
from engine.losses.spec import LossSpec
from engine.models.samples import Sample
from tests.engine.losses.cases import SPECS, loss_of, samples_near

STEP = 1e-5
"""Half the width of a central difference, whose error is of the order of STEP²."""
CPU = torch.device("cpu")


def some_outputs(*, scalar: bool) -> tuple[list[Sample], Outputs]:
    """Samples whose ratios are away from every clipping bound, and possible outputs for their trained tokens, as
    leaves."""

    def numbers(bare: Sample) -> list[float]:
        return [-0.4 - 0.3 * (int(token) % 7) for token in bare.token_ids[bare.loss_mask]]

    samples = samples_near(numbers, scalar=scalar)
    leaf_N = torch.tensor(list(chain(*map(numbers, samples))), dtype=torch.float64, requires_grad=True)
    if scalar:
        return samples, Outputs(values_N=leaf_N)
    # logprobs of three tokens, which together have less than all of the probability
    top_NK = (leaf_N.detach().unsqueeze(1) / 5 - torch.tensor([1.3, 1.7, 2.4], dtype=torch.float64)).requires_grad_()
    return samples, Outputs(leaf_N, entropy_N=(leaf_N.detach() / -2).requires_grad_(), top_NK=top_NK)


def differences(spec: LossSpec, samples: list[Sample], outputs: Outputs, leaf_N: Tensor) -> list[float]:
    numbers = leaf_N.detach().view(-1)  # shares the leaf's memory

    def at(index: int, step: float) -> float:
        held = spec.kind == "cispo" and leaf_N is outputs.logprobs_N
        with torch.no_grad():
            numbers[index] += step
            value = loss_of(spec, ratios_held(samples, index, step) if held else samples, outputs).item()
            numbers[index] -= step
        return value

    return [(at(i, STEP) - at(i, -STEP)) / (2 * STEP) for i in range(len(numbers))]


def ratios_held(samples: list[Sample], index: int, step: float) -> list[Sample]:
    """The samples with the old and the sampler's logprob of one token moved by the same step as its own logprob. Ratio
    and importance weight then stay constant, as CISPO requires, whose weights have no gradient."""
    moved = []
    for s in samples:
        steps = [step * (place == index) for place in range(s.trained)]
        index -= s.trained
        columns = {
            name: [value + move for value, move in zip(getattr(s, name), steps, strict=True)]
            for name in ("old_logprobs", "sampler_logprobs")
        }
        moved.append(replace(s, **columns))
    return moved


def grad_of(leaf_N: Tensor) -> list[float]:
    return [0.0] * leaf_N.numel() if leaf_N.grad is None else leaf_N.grad.flatten().tolist()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_of_logprobs_entropies_and_values(spec: LossSpec) -> None:
    samples, outputs = some_outputs(scalar=spec.reads == "values")
    loss_of(spec, samples, outputs).backward()
    given = (outputs.logprobs_N, outputs.values_N, outputs.entropy_N, outputs.top_NK)
    leaves = [leaf for leaf in given if leaf is not None]
    assert any(any(grad_of(leaf_N)) for leaf_N in leaves)
    for leaf_N in leaves:
        assert grad_of(leaf_N) == pytest.approx(differences(spec, samples, outputs, leaf_N), rel=1e-7, abs=1e-8)


SLOPES = {name: spec for name, spec in SPECS.items() if spec.kind != "cispo"}


@pytest.mark.parametrize("spec", SLOPES.values(), ids=SLOPES.keys())
def test_of_the_model_s_weights(spec: LossSpec, exact: CausalLM, exact_scalar: CausalLM) -> None:
    """The slope of the loss over a model's weights, along the gradient and along an unrelated direction."""
    model = exact_scalar if spec.reads == "values" else exact
    temperature = 1.0 if model.scalar else 0.7
    samples = near(model, temperature)
    objective, totals = Objective(spec, temperature), count_totals(samples)

    def loss() -> Tensor:
        return micro_batch_loss(make_forward(model, objective), samples, objective, totals, device=CPU)[0]

    parameters = list(model.module.parameters())
    gradient = torch.autograd.grad(loss(), parameters)
    assert all(part.any() for part in gradient)
    generator = torch.Generator().manual_seed(5)
    noise = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]
    for direction in (gradient, noise):
        length = torch.stack([d.square().sum() for d in direction]).sum().sqrt()
        unit = [d / length for d in direction]
        expected = sum((g * u).sum().item() for g, u in zip(gradient, unit, strict=True))
        high, low = (moved(parameters, unit, step, loss) for step in (10 * STEP, -10 * STEP))
        assert (high - low) / (20 * STEP) == pytest.approx(expected, rel=1e-5)


def near(model: CausalLM, temperature: float) -> list[Sample]:
    def numbers(bare: Sample) -> list[float]:
        packed = pack([bare], device=CPU)
        with torch.no_grad():
            output_N = model.values(packed) if model.scalar else model.logprobs(packed, temperature=temperature)
        return output_N.tolist()

    return samples_near(numbers, scalar=model.scalar)


@torch.no_grad()
def moved(parameters: list[Tensor], unit: list[Tensor], step: float, loss: Callable[[], Tensor]) -> float:
    before = [p.clone() for p in parameters]
    for p, u in zip(parameters, unit, strict=True):
        p += step * u
    value = loss().item()
    for p, b in zip(parameters, before, strict=True):
        p.copy_(b)
    return value


def test_the_samples_are_clear_of_every_kink() -> None:
    """No ratio may be near a bound that some variant clips at, because a difference across a kink is no slope."""
    samples, outputs = some_outputs(scalar=False)
    assert outputs.logprobs_N is not None
    parts = outputs.logprobs_N.detach().split([s.trained for s in samples])
    ratios = []
    for s, part in zip(samples, parts, strict=True):
        gap_N = part - torch.tensor(s.old_logprobs, dtype=torch.float64)
        ratios += [*gap_N.exp().tolist(), gap_N.mean().exp().item()]
    bounds = (0.8, 0.9, 1.1, 1.2, 1.28, 3.0)
    assert min(abs(ratio - bound) for ratio in ratios for bound in bounds) > 100 * STEP
    assert {True, False} == {ratio > 1.28 for ratio in ratios} and min(ratios) < 0.8 and max(ratios) > 3
