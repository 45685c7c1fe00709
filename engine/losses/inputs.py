"""What a loss takes and gives. Axes: N trained token of one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Flat over the micro-batch's trained tokens; what the batch does not have is None."""

    logprobs_N: Tensor
    """Under the weights in training, nats; carries the gradient."""
    old_N: Tensor | None = None
    """Under the policy that is being improved on."""
    reference_N: Tensor | None = None
    advantages_N: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss per token, and metrics as sums over tokens, so that they add over micro-batches."""

    values_N: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
