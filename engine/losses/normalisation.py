"""Normalisation: how the losses of tokens become one number, independent of the micro-batches.

Axes: N trained token · S sequence
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.losses.base import LossNorm


def token_weights(
    lengths_S: Sequence[int],
    *,
    norm: LossNorm,
    total_tokens: int,
    total_sequences: int,
    constant: float | None = None,
) -> Tensor:
    """Weight of each trained token (N,), in float64, with which the loss is Σ value·weight over *all* micro-batches.

    token_mean: 1 / total_tokens. sequence_mean: 1 / (total_sequences · length of the token's sequence). token_sum: 1.
    constant: 1 / (total_sequences · constant), as Dr. GRPO (arXiv:2503.20783) divides. The totals are those of the
    whole minibatch.

    Raises ValueError when the totals are smaller than those of this micro-batch alone, or the constant is missing.
    """
    if total_tokens < max(1, sum(lengths_S)) or total_sequences < max(1, len(lengths_S)):
        raise ValueError(
            f"totals of {total_tokens} tokens and {total_sequences} sequences, but this micro-batch has "
            f"{sum(lengths_S)} and {len(lengths_S)}; give the totals of the whole minibatch"
        )
    # float64, since the inverse of a large total loses digits in float32. Each token has the weight of its sequence.
    lengths = torch.tensor(list(lengths_S), dtype=torch.long)
    if norm == "token_mean":
        weights_S = torch.full((len(lengths),), 1 / total_tokens, dtype=torch.float64)
    elif norm == "sequence_mean":
        # A sequence without trained tokens has no weights, so its length of 0 must not divide.
        weights_S = 1 / (total_sequences * lengths.clamp(min=1).double())
    elif norm == "token_sum":
        weights_S = torch.ones(len(lengths), dtype=torch.float64)
    else:
        if constant is None:
            raise ValueError("norm='constant' needs the constant it divides by")
        weights_S = torch.full((len(lengths),), 1 / (total_sequences * constant), dtype=torch.float64)
    return weights_S.repeat_interleave(lengths)
