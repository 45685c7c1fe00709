"""Losses of scalar models, by hand, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.losses.base import TokenLoss
from engine.losses.inputs import LossInputs, Outputs
from engine.losses.values import MSESpec, TrustRegionMSESpec


def value_loss(
    values_N: Tensor, returns: list[float], old: list[float], spec: MSESpec | TrustRegionMSESpec
) -> TokenLoss:
    f64 = {"dtype": torch.float64}
    inputs = LossInputs(
        Outputs(values_N=values_N),
        (len(returns),),
        returns_N=torch.tensor(returns, **f64),
        old_values_N=torch.tensor(old, **f64),
    )
    loss = spec.compute(inputs)
    assert isinstance(loss, TokenLoss)
    return loss


def test_mse() -> None:
    values_N = torch.tensor([1.0, -0.5], dtype=torch.float64, requires_grad=True)
    loss = value_loss(values_N, [3.0, -1.0], [0.0, 0.0], MSESpec())
    loss.values_N.sum().backward()
    assert loss.values_N.tolist() == [4.0, 0.25]
    assert values_N.grad.tolist() == [-4.0, 1.0]
    assert {name: float(value) for name, value in loss.sums.items()} == {"value_sum": 0.5, "return_sum": 2.0}
    assert not any(value.requires_grad for value in loss.sums.values())


@pytest.mark.parametrize(
    ("value", "target", "loss", "slope", "clipped"),
    [
        # old value 0, clip 0.2; within it: the plain square
        (0.1, 1.0, 0.81, -1.8, 0),
        # went beyond towards the target: no more to gain, (0.2 - 1)²
        (0.5, 1.0, 0.64, 0.0, 1),
        (-0.5, -1.0, 0.64, 0.0, 1),
        # went beyond away from it: the free one is the worse, and pulls back
        (-0.5, 1.0, 2.25, -3.0, 0),
        # passed the target by more than the bound misses it: pulled back
        (0.9, 0.3, 0.36, 1.2, 0),
    ],
)
def test_the_trust_region(value: float, target: float, loss: float, slope: float, clipped: int) -> None:
    values_N = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    token_loss = value_loss(values_N, [target], [0.0], TrustRegionMSESpec(clip=0.2))
    token_loss.values_N.sum().backward()
    assert token_loss.values_N.item() == pytest.approx(loss)
    assert values_N.grad.item() == pytest.approx(slope)
    assert token_loss.sums["clip_fraction_sum"].item() == clipped
