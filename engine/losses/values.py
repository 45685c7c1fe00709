"""Losses of models with a scalar head. v is the model's value, R the return.

Axes: N trained token
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from engine.losses.base import NormalisedLossSpec, TokenLoss
from storage.serialization import Positive

if TYPE_CHECKING:
    from torch import Tensor

    from engine.losses.inputs import LossInputs


class MSESpec(NormalisedLossSpec):
    """The squared error of a scalar model's values against the returns."""

    reads: ClassVar[Literal["logprobs", "values"]] = "values"
    kind: Literal["mse"] = "mse"

    def compute(self, inputs: LossInputs) -> TokenLoss:
        """(v - R)², at every trained token."""
        values_N, returns_N = inputs.require("values_N"), inputs.require("returns_N")
        return TokenLoss((values_N - returns_N).square(), _metrics(values_N, returns_N))


class TrustRegionMSESpec(NormalisedLossSpec):
    """PPO's clipped value loss (arXiv:1707.06347; the clipping is that of openai/baselines)."""

    reads: ClassVar[Literal["logprobs", "values"]] = "values"
    kind: Literal["trust_region_mse"] = "trust_region_mse"
    clip: Positive = 0.2
    """Largest distance from the old value within which a better value lowers the loss."""

    def compute(self, inputs: LossInputs) -> TokenLoss:
        """max((v - R)², (clip(v, v_old - c, v_old + c) - R)²): a value gains nothing by moving away from the old value
        by more than c. Unlike baselines, without the factor 1/2.
        """
        values_N, returns_N = inputs.require("values_N"), inputs.require("returns_N")
        old_N = inputs.require("old_values_N")
        # The larger of the two errors counts, so clipping never lowers the loss.
        clipped_values_N = values_N.clamp(old_N - self.clip, old_N + self.clip)
        free_N = (values_N - returns_N).square()
        clipped_N = (clipped_values_N - returns_N).square()
        sums = {**_metrics(values_N, returns_N), "clip_fraction_sum": (clipped_N > free_N).sum()}
        return TokenLoss(free_N.maximum(clipped_N), sums)


def _metrics(values_N: Tensor, returns_N: Tensor) -> dict[str, Tensor]:
    return {"value_sum": values_N.detach().sum(), "return_sum": returns_N.sum()}


ValueSpec = MSESpec | TrustRegionMSESpec
"""Every loss of this module. A new one is added here."""
