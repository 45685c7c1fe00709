"""Cross-entropy of the trained tokens. Axes: N trained token."""

from __future__ import annotations

from torch import Tensor

from engine.losses.inputs import TokenLoss


def cross_entropy_loss(logprobs_N: Tensor) -> TokenLoss:
    """-log p(token)."""
    return TokenLoss(-logprobs_N)
