"""The policy gradient, per token: clipped by token (GRPO, PPO), by sequence (GSPO), or without a hole in its gradient
(CISPO). l logprob, o old, q reference, A advantage.

Axes: N trained token · S sequence
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.losses.inputs import LossInputs, TokenLoss
from engine.losses.kl import KL_ESTIMATORS
from engine.losses.segments import spread, sum_by_sequence
from engine.losses.spec import CISPOSpec, GRPOSpec, GSPOSpec


def grpo_loss(inputs: LossInputs, spec: GRPOSpec) -> TokenLoss:
    """-min(ρA, clip(ρ, 1-ε, 1+ε')A) + β·KL(l, q),  ρ = exp(l - o)   (arXiv:2402.03300).

    With `dual_clip` c, a token of negative advantage counts at most -cA (arXiv:1912.09729).
    """
    logprobs_N, old_N, advantages_N = (inputs.needed(name) for name in ("logprobs_N", "old_N", "advantages_N"))
    ratio_N = (logprobs_N - old_N).exp()
    values_N, clipped_N = _clipped(ratio_N, advantages_N, spec)
    if spec.dual_clip is not None:
        worst_N = -spec.dual_clip * advantages_N
        values_N = torch.where(advantages_N < 0, torch.minimum(values_N, worst_N), values_N)
    sums = {"clip_fraction_sum": clipped_N.sum(), "ratio_sum": ratio_N.detach().sum()}
    return _with_terms(values_N, ratio_N, sums, inputs, spec)


def gspo_loss(inputs: LossInputs, spec: GSPOSpec) -> TokenLoss:
    """-min(sA, clip(s)A) of each sequence, s = exp(mean(l - o)) (arXiv:2507.18071), as the loss of each of its tokens:
    norm="sequence_mean" then is the mean over sequences. The gradient flows through s; the KL term is per token.
    """
    logprobs_N, old_N, advantages_N = (inputs.needed(name) for name in ("logprobs_N", "old_N", "advantages_N"))
    lengths_S = torch.tensor(inputs.lengths_S, dtype=logprobs_N.dtype, device=logprobs_N.device).clamp(min=1)
    ratio_S = (sum_by_sequence(logprobs_N - old_N, inputs.lengths_S) / lengths_S).exp()
    ratio_N = spread(ratio_S, inputs.lengths_S)
    values_N, clipped_N = _clipped(ratio_N, advantages_N, spec)
    sums = {"clip_fraction_sum": clipped_N.sum(), "ratio_sum": ratio_N.detach().sum()}
    return _with_terms(values_N, ratio_N, sums, inputs, spec)


def cispo_loss(inputs: LossInputs, spec: CISPOSpec) -> TokenLoss:
    """-clip(ρ, 1-ε, 1+ε')·A·l, the clipped ratio without gradient (arXiv:2506.13585)."""
    logprobs_N, old_N, advantages_N = (inputs.needed(name) for name in ("logprobs_N", "old_N", "advantages_N"))
    ratio_N = (logprobs_N - old_N).exp()
    held_N = ratio_N.detach()
    weight_N = held_N.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    sums = {"clip_fraction_sum": (weight_N != held_N).sum(), "ratio_sum": held_N.sum()}
    return _with_terms(-weight_N * advantages_N * logprobs_N, ratio_N, sums, inputs, spec)


def _clipped(ratio_N: Tensor, advantages_N: Tensor, spec: GRPOSpec | GSPOSpec) -> tuple[Tensor, Tensor]:
    """(the pessimistic of the free and the bound loss, where that is the bound one)."""
    free_N = -ratio_N * advantages_N
    bound_N = -ratio_N.clamp(1 - spec.clip_low, 1 + spec.clip_high) * advantages_N
    return torch.maximum(free_N, bound_N), bound_N > free_N


def _with_terms(
    values_N: Tensor,
    ratio_N: Tensor,
    sums: dict[str, Tensor],
    inputs: LossInputs,
    spec: GRPOSpec | GSPOSpec | CISPOSpec,
) -> TokenLoss:
    """What every policy gradient may add: truncated importance weights on its own part, then KL (under the ratio, if
    asked), then entropy."""
    logprobs_N = inputs.needed("logprobs_N")
    if spec.importance_cap is not None:
        weight_N = (inputs.needed("old_N") - inputs.needed("sampler_N")).exp().clamp(max=spec.importance_cap)
        values_N = values_N * weight_N
        sums["importance_weight_sum"] = weight_N.sum()
    if spec.kl_beta > 0 or inputs.reference_N is not None:
        kl_N = KL_ESTIMATORS[spec.kl_estimator](logprobs_N, inputs.needed("reference_N"))
        sums["kl_sum"] = kl_N.detach().sum()
        if spec.kl_beta > 0:  # 0 times an overflow would be NaN
            values_N = values_N + spec.kl_beta * (ratio_N * kl_N if spec.kl_importance else kl_N)
    if spec.entropy_coef > 0:
        entropy_N = inputs.needed("entropy_N")
        sums["entropy_sum"] = entropy_N.detach().sum()
        values_N = values_N - spec.entropy_coef * entropy_N
    return TokenLoss(values_N, sums)
