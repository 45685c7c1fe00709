"""The GRPO loss against published fixtures: values and gradients, in float64.

Two sequences of 2 and 4 tokens, advantages +1 and -1. The numbers are golden values of the project's algorithm notes,
checked there against independent implementations; none comes from this code.
"""

from __future__ import annotations

import pytest
import torch

from engine.errors import BadSpec
from engine.losses.inputs import LossInputs, Outputs, TokenLoss
from engine.losses.kl import KL_ESTIMATORS
from engine.losses.normalisation import token_weights
from engine.losses.policy_gradient import grpo_loss as loss_of
from engine.losses.spec import GRPOSpec

OLD = torch.tensor([-2, -2, -2, -0.3, -2, -2], dtype=torch.float64)
NEW = torch.tensor([-1.78, -2.1, -0.5, -0.7, -2.0, -2.05], dtype=torch.float64)
ADVANTAGES = torch.tensor([1, 1, -1, -1, -1, -1], dtype=torch.float64)
LENGTHS = [2, 4]


def grpo_loss(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    reference: torch.Tensor | None,
    advantages: torch.Tensor,
    *,
    spec: GRPOSpec,
) -> TokenLoss:
    outputs = Outputs(logprobs_N=logprobs)
    return loss_of(LossInputs(outputs, old_N=old, reference_N=reference, advantages_N=advantages), spec)


def loss_and_gradient(norm_constant: float | None = None, norm: str = "token_mean", **options: float) -> tuple:
    spec = GRPOSpec(
        **{"clip_low": 0.2, "clip_high": 0.2, "kl_beta": 0.0} | options, norm=norm, norm_constant=norm_constant
    )
    logprobs = NEW.clone().requires_grad_()
    token = grpo_loss(logprobs, OLD, None, ADVANTAGES, spec=spec)
    weights = token_weights(LENGTHS, norm=norm, total_tokens=6, total_sequences=2, constant=norm_constant)
    loss = (token.values_N * weights).sum()
    loss.backward()
    return loss.item(), logprobs.grad.tolist()


@pytest.mark.parametrize(
    ("options", "value", "gradient"),
    [
        ({"dual_clip": 3.0}, 0.60773200, [0, -0.150806, 0, 0, 0.166667, 0.158538]),
        ({}, 0.85468018, [0, -0.150806, 0.746948, 0, 0.166667, 0.158538]),
        ({"clip_high": 0.28}, 0.84700072, [-0.207679, -0.150806, 0.746948, 0, 0.166667, 0.158538]),
        ({"norm": "sequence_mean"}, 0.37790546, [0, -0.226209, 0.560211, 0, 0.125, 0.118904]),
        ({"norm": "token_sum"}, 5.12808108, [0, -0.904837, 4.481689, 0, 1.0, 0.951229]),
        ({"norm": "constant", "norm_constant": 8}, 0.32050507, [0, -0.056552, 0.280106, 0, 0.0625, 0.059452]),
    ],
    ids=["dual_clip", "token_mean", "clip_higher", "sequence_mean", "token_sum", "constant"],
)
def test_golden_values_and_gradients(options: dict, value: float, gradient: list[float]) -> None:
    loss, found = loss_and_gradient(**options)
    assert loss == pytest.approx(value, abs=5e-9)
    assert found == pytest.approx(gradient, abs=5e-7)


@pytest.mark.parametrize(
    ("name", "mean"), [("k1", 0.05833333), ("abs", 0.55 / 6), ("k2", 0.00604167), ("k3", 0.00580099)]
)
def test_golden_kl(name: str, mean: float) -> None:
    gaps = torch.tensor([0.2, -0.1, 0.1, 0.1, 0, 0.05], dtype=torch.float64)
    assert KL_ESTIMATORS[name](gaps, torch.zeros(6, dtype=torch.float64)).mean().item() == pytest.approx(mean, abs=5e-9)


def test_the_kl_term_pulls_towards_the_reference() -> None:
    # d k3 / d l = 1 - exp(q - l); l above q: positive, so descent lowers l
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-2.0], dtype=torch.float64)
    token = grpo_loss(
        logprobs, logprobs.detach(), reference, torch.zeros(1, dtype=torch.float64), spec=GRPOSpec(kl_beta=0.5)
    )
    token.values_N.sum().backward()
    assert logprobs.grad.item() == pytest.approx(0.5 * (1 - 0.36787944), abs=1e-8)
    assert token.sums["kl_sum"].item() == pytest.approx(0.36787944 + 1 - 1, abs=1e-8)


def test_kl_without_a_reference_is_refused() -> None:
    with pytest.raises(BadSpec, match="needs reference logprobs"):
        grpo_loss(NEW, OLD, None, ADVANTAGES, spec=GRPOSpec(kl_beta=0.1))


def test_constant_norm_needs_its_constant() -> None:
    with pytest.raises(ValueError, match="give norm_constant"):
        GRPOSpec(norm="constant")


@pytest.mark.parametrize(
    ("name", "gradient"),
    # at l - q = 0.5: d k1 = 1, d |l-q| = 1, d k2 = l - q, d k3 = 1 - exp(q - l)
    [("k1", 1.0), ("abs", 1.0), ("k2", 0.5), ("k3", 1 - 0.60653066)],
)
def test_the_gradient_of_each_kl_estimator(name: str, gradient: float) -> None:
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    KL_ESTIMATORS[name](logprobs, torch.tensor([-1.5], dtype=torch.float64)).sum().backward()
    assert logprobs.grad.item() == pytest.approx(gradient, abs=1e-8)


@pytest.mark.parametrize("name", ["abs", "k2", "k3"])
def test_kl_is_zero_at_the_reference_and_positive_on_both_sides(name: str) -> None:
    gaps = torch.tensor([-0.7, 0.0, 0.7], dtype=torch.float64)
    below, at, above = KL_ESTIMATORS[name](gaps, torch.zeros(3, dtype=torch.float64)).tolist()
    assert at == 0 and below > 0 and above > 0


@pytest.mark.parametrize(
    ("gap", "advantage", "value", "gradient", "clipped"),
    [
        # clip 0.2 / 0.2; e^0.5 = 1.64872127, e^-0.5 = 0.60653066. A clipped token has no gradient …
        (0.5, 1.0, -1.2, 0.0, 1),
        (-0.5, -1.0, 0.8, 0.0, 1),
        # … but one that went the wrong way keeps its own: the minimum is pessimistic
        (0.5, -1.0, 1.64872127, 1.64872127, 0),
        (-0.5, 1.0, -0.60653066, -0.60653066, 0),
        # on policy the gradient is -A
        (0.0, 1.0, -1.0, -1.0, 0),
        (0.0, -2.0, 2.0, 2.0, 0),
    ],
)
def test_one_token(gap: float, advantage: float, value: float, gradient: float, clipped: int) -> None:
    logprobs = torch.tensor([-1.0 + gap], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.0], dtype=torch.float64)
    spec = GRPOSpec(clip_low=0.2, clip_high=0.2, kl_beta=0.0)
    token = grpo_loss(logprobs, old, None, torch.tensor([advantage], dtype=torch.float64), spec=spec)
    token.values_N.sum().backward()
    assert token.values_N.item() == pytest.approx(value, abs=1e-8)
    assert logprobs.grad.item() == pytest.approx(gradient, abs=1e-8)
    assert token.sums["clip_fraction_sum"].item() == clipped


def test_the_dual_clip_never_touches_a_positive_advantage() -> None:
    # ρ = e^-2 with A = +1 and ρ = e^2 with A = -1: only the second is bounded, at 3
    old = torch.zeros(2, dtype=torch.float64)
    logprobs = torch.tensor([-2.0, 2.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    spec = GRPOSpec(clip_low=0.2, clip_high=0.2, kl_beta=0.0, dual_clip=3.0)
    values = grpo_loss(logprobs, old, None, advantages, spec=spec).values_N
    assert values.tolist() == pytest.approx([-0.13533528, 3.0], abs=1e-8)


def test_metrics_carry_no_gradient_and_add_over_micro_batches() -> None:
    reference = torch.full((6,), -1.9, dtype=torch.float64)
    logprobs = NEW.clone().requires_grad_()
    spec = GRPOSpec(clip_low=0.2, clip_high=0.2, kl_beta=0.1)
    whole = grpo_loss(logprobs, OLD, reference, ADVANTAGES, spec=spec)
    assert not any(value.requires_grad for value in whole.sums.values())
    parts = [grpo_loss(NEW[p], OLD[p], reference[p], ADVANTAGES[p], spec=spec) for p in (slice(0, 2), slice(2, 6))]
    for name, value in whole.sums.items():
        assert float(value) == pytest.approx(sum(float(part.sums[name]) for part in parts), rel=1e-12)
    # by hand: token 0 (ρ 1.246 > 1.2, A > 0) and token 3 (ρ 0.670 < 0.8, A < 0)
    assert float(whole.sums["clip_fraction_sum"]) == 2


@pytest.mark.parametrize("norm", ["token_mean", "sequence_mean", "token_sum", "constant"])
def test_loss_and_gradient_do_not_depend_on_micro_batching(norm: str) -> None:
    constant = 8.0 if norm == "constant" else None
    loss, gradient = loss_and_gradient(norm=norm, norm_constant=constant, kl_beta=0.0)
    spec = GRPOSpec(clip_low=0.2, clip_high=0.2, kl_beta=0.0, norm=norm, norm_constant=constant)
    total, logprobs = 0.0, NEW.clone().requires_grad_()
    for part, length in ((slice(0, 2), 2), (slice(2, 6), 4)):
        token = grpo_loss(logprobs[part], OLD[part], None, ADVANTAGES[part], spec=spec)
        weights = token_weights([length], norm=norm, total_tokens=6, total_sequences=2, constant=constant)
        micro = (token.values_N * weights).sum()
        micro.backward()
        total += micro.item()
    assert total == pytest.approx(loss, rel=1e-12)
    assert logprobs.grad.tolist() == pytest.approx(gradient, rel=1e-12)
