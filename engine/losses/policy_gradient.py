"""The clipped policy gradient, per token. Axes: N trained token."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.losses.inputs import TokenLoss
from engine.losses.kl import KL_ESTIMATORS
from engine.losses.spec import GRPOSpec


def grpo_loss(
    logprobs_N: Tensor, old_N: Tensor, reference_N: Tensor | None, advantages_N: Tensor, *, spec: GRPOSpec
) -> TokenLoss:
    """-min(ρA, clip(ρ, 1-ε, 1+ε')A) + β·KL(l, q),  ρ = exp(l - o)   (arXiv:2402.03300).

    With `dual_clip` c, a token of negative advantage counts at most -cA (arXiv:1912.09729). `reference_N` may be
    None only when β is 0.

    Raises:
        ValueError: β > 0 without reference logprobs.
    """
    ratio_N = (logprobs_N - old_N).exp()
    clipped_N = ratio_N.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    free_N, bound_N = -ratio_N * advantages_N, -clipped_N * advantages_N
    values_N = torch.maximum(free_N, bound_N)
    sums = {
        "clip_fraction_sum": (bound_N > free_N).sum(),
        "ratio_sum": ratio_N.detach().sum(),
    }
    if spec.dual_clip is not None:
        worst_N = -spec.dual_clip * advantages_N
        values_N = torch.where(advantages_N < 0, torch.minimum(values_N, worst_N), values_N)
    if reference_N is not None:
        kl_N = KL_ESTIMATORS[spec.kl_estimator](logprobs_N, reference_N)
        sums["kl_sum"] = kl_N.detach().sum()
        values_N = values_N + spec.kl_beta * kl_N
    elif spec.kl_beta > 0:
        raise ValueError(f"kl_beta={spec.kl_beta} needs reference logprobs, and the batch has none; set kl_beta=0")
    return TokenLoss(values_N, sums)
