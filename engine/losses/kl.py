"""Estimators of KL(policy || reference) per token, from samples of the policy (joschu.net/blog/kl-approx.html).

l is the logprob of a token under the policy, q under the reference. Like the losses, this module does not import torch.

Axes: N trained token
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

KLEstimator = Literal["k1", "abs", "k2", "k3"]


def k1(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """l - q: unbiased; may be negative."""
    return logprobs_N - reference_N


def absolute(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """|l - q|: never negative; biased."""
    return (logprobs_N - reference_N).abs()


def k2(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """(l - q)² / 2: never negative; biased, with low variance."""
    return (logprobs_N - reference_N).square() / 2


def k3(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """exp(q - l) - (q - l) - 1: unbiased and never negative."""
    gap_N = reference_N - logprobs_N
    return gap_N.exp() - gap_N - 1


KL_ESTIMATORS: dict[KLEstimator, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "abs": absolute, "k2": k2, "k3": k3}
