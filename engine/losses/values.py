"""Losses of scalar models. Axes: N trained token"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.losses.inputs import LossInputs, TokenLoss
from engine.losses.spec import MSESpec, TrustRegionMSESpec


def mse_loss(inputs: LossInputs, _: MSESpec) -> TokenLoss:
    """(v - return)²."""
    values_N, returns_N = inputs.needed("values_N"), inputs.needed("returns_N")
    return TokenLoss((values_N - returns_N).square(), _sums(values_N, returns_N))


def trust_region_mse_loss(inputs: LossInputs, spec: TrustRegionMSESpec) -> TokenLoss:
    """max((v - R)², (clip(v, v_old ± c) - R)²): a value gains nothing by leaving the old one by more than c."""
    values_N, returns_N, old_N = (inputs.needed(name) for name in ("values_N", "returns_N", "old_values_N"))
    near_N = values_N.clamp(old_N - spec.clip, old_N + spec.clip)
    free_N, bound_N = (values_N - returns_N).square(), (near_N - returns_N).square()
    sums = {**_sums(values_N, returns_N), "clip_fraction_sum": (bound_N > free_N).sum()}
    return TokenLoss(torch.maximum(free_N, bound_N), sums)


def _sums(values_N: Tensor, returns_N: Tensor) -> dict[str, Tensor]:
    return {"value_sum": values_N.detach().sum(), "return_sum": returns_N.sum()}
