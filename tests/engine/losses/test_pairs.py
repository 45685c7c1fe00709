"""Losses of pairs: golden values and gradients in float64, and values by hand."""

from __future__ import annotations

from math import log
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.losses.base import PairLoss
from engine.losses.inputs import LossInputs, Outputs
from engine.losses.pairs import DPOSpec, PairSpec, RankingSpec, SimPOSpec


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def pair_loss(inputs: LossInputs, spec: PairSpec) -> PairLoss:
    loss = spec.compute(inputs)
    assert isinstance(loss, PairLoss)
    return loss


def one_pair(logprobs_N: Tensor, reference_N: Tensor) -> LossInputs:
    """A pair whose first sample, of two tokens, is not preferred; the preferred one has three tokens."""
    return LossInputs(
        Outputs(logprobs_N),
        (2, 3),
        reference_N=reference_N,
        preferred_P=torch.tensor([1]),
        dispreferred_P=torch.tensor([0]),
    )


# (w, l) = (-10, -12), reference (-11, -11.5): margin 1.5. h = 0.15: σ(h) = 0.53742985, σ(-h) = 0.46257015
@pytest.mark.parametrize(
    ("options", "value", "slope"),
    [
        ({"beta": 0.1}, 0.62095705, -0.1 * 0.46257015),
        ({"beta": 0.05}, 0.65635014, -0.05 * 0.48125878),  # σ(-0.075)
        ({"beta": 0.1, "variant": "cdpo", "label_smoothing": 0.1}, 0.63595705,
         -0.1 * (0.9 * 0.46257015 - 0.1 * 0.53742985)),
        ({"beta": 0.1, "variant": "ipo"}, 12.25, 2 * (1.5 - 5)),
    ],
    ids=["beta_0.1", "beta_0.05", "cdpo", "ipo"],
)  # fmt: skip
def test_golden_dpo(options: dict[str, Any], value: float, slope: float) -> None:
    """Every token of the preferred sample has the slope of the margin, and every token of the other its negative."""
    logprobs_N = f64(-5.5, -6.5, -2.0, -3.0, -5.0).requires_grad_()
    loss = pair_loss(one_pair(logprobs_N, f64(-5.0, -6.5, -1.0, -4.0, -6.0)), DPOSpec(**options))
    loss.values_P.sum().backward()
    assert loss.values_P.tolist() == pytest.approx([value], abs=5.1e-9)
    assert logprobs_N.grad.tolist() == pytest.approx([-slope, -slope, slope, slope, slope], abs=1e-8)


@pytest.mark.parametrize("spec", [DPOSpec(), DPOSpec(variant="cdpo", label_smoothing=0.2)], ids=["sigmoid", "cdpo"])
def test_at_the_reference_it_is_ln_2(spec: DPOSpec) -> None:
    same = f64(-1.0, -2.5, -0.3, -4.0, -0.2)
    loss = pair_loss(one_pair(same, same), spec)
    assert loss.values_P.tolist() == pytest.approx([log(2)], abs=1e-15)
    assert float(loss.sums["reward_margin_per_pair"]) == 0
    assert float(loss.sums["accuracy_per_pair"]) == 0  # a tie is not right


def test_rewards_are_the_implicit_ones() -> None:
    # β (L - Lref): 0.1 · (-10 + 11) and 0.1 · (-12 + 11.5)
    loss = pair_loss(one_pair(f64(-5.5, -6.5, -2, -3, -5), f64(-5, -6.5, -1, -4, -6)), DPOSpec(beta=0.1))
    sums = {name: float(value) for name, value in loss.sums.items()}
    assert sums == pytest.approx(
        {
            "reward_chosen_per_pair": 0.1,
            "reward_rejected_per_pair": -0.05,
            "reward_margin_per_pair": 0.15,
            "accuracy_per_pair": 1.0,
        }
    )


def test_metrics_carry_no_gradient() -> None:
    logprobs_N = f64(-5.5, -6.5, -2.0, -3.0, -5.0).requires_grad_()
    dpo = pair_loss(one_pair(logprobs_N, f64(0, 0, 0, 0, 0)), DPOSpec())
    assert not any(value.requires_grad for value in dpo.sums.values())
    inputs = LossInputs(
        Outputs(values_N=logprobs_N[:2]), (1, 1), preferred_P=torch.tensor([0]), dispreferred_P=torch.tensor([1])
    )
    assert not any(value.requires_grad for value in pair_loss(inputs, RankingSpec()).sums.values())


def test_simpo_by_hand() -> None:
    """Mean logprobs -10/3 and -6, β 2, γ 1: margin 16/3, h = 13/3, -log σ(h) = 0.01303836, 1 - σ(h) = 0.01295373."""
    logprobs_N = f64(-5.5, -6.5, -2.0, -3.0, -5.0).requires_grad_()
    inputs = LossInputs(
        Outputs(logprobs_N), (2, 3), preferred_P=torch.tensor([1]), dispreferred_P=torch.tensor([0])
    )
    loss = pair_loss(inputs, SimPOSpec())
    loss.values_P.sum().backward()
    assert loss.values_P.tolist() == pytest.approx([0.01303836], abs=1e-8)
    # β (1 - σ(h)) divided by the tokens of each sequence
    slope = 2 * 0.01295373
    assert logprobs_N.grad.tolist() == pytest.approx([slope / 2] * 2 + [-slope / 3] * 3, abs=1e-8)
    sums = {name: float(value) for name, value in loss.sums.items()}
    assert sums == pytest.approx(
        {
            "reward_chosen_per_pair": -20 / 3,
            "reward_rejected_per_pair": -12.0,
            "reward_margin_per_pair": 16 / 3,
            "accuracy_per_pair": 1.0,
        }
    )
    assert not any(value.requires_grad for value in loss.sums.values())


def test_ranking_by_hand() -> None:
    # s⁺ - s⁻ = 1 and -2: -log σ = 0.31326169 and 2.12692801; slopes -(1 - σ) = -0.26894142 and -0.88079708
    scores_S = f64(0.5, -0.5, 3.0, 1.0).requires_grad_()
    inputs = LossInputs(
        Outputs(values_N=scores_S),
        (1, 1, 1, 1),
        preferred_P=torch.tensor([0, 3]),
        dispreferred_P=torch.tensor([1, 2]),
    )
    loss = pair_loss(inputs, RankingSpec())
    loss.values_P.sum().backward()
    assert loss.values_P.tolist() == pytest.approx([0.31326169, 2.12692801], abs=1e-8)
    assert scores_S.grad.tolist() == pytest.approx([-0.26894142, 0.26894142, 0.88079708, -0.88079708], abs=1e-8)
    sums = {name: float(value) for name, value in loss.sums.items()}
    assert sums == {"score_chosen_per_pair": 1.5, "score_rejected_per_pair": 2.5, "accuracy_per_pair": 1.0}
