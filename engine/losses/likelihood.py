"""Losses that are linear in the logprobs of the trained tokens.

Axes: N trained token
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from engine.losses.base import BaseLossSpec, NormalisedLossSpec, TokenLoss

if TYPE_CHECKING:
    from engine.losses.inputs import LossInputs


class CrossEntropySpec(NormalisedLossSpec):
    """The negative log-likelihood of the trained tokens."""

    kind: Literal["cross_entropy"] = "cross_entropy"

    def compute(self, inputs: LossInputs) -> TokenLoss:
        """-log p(token)."""
        return TokenLoss(-inputs.require("logprobs_N"))


class TangentsSpec(BaseLossSpec):
    """A loss whose derivative with respect to each logprob, d(loss)/d(logprob), is given by the batch as its tangents.

    A tangent is the derivative itself, not its negative, so an optimizer step descends the loss.
    """

    uses_sampling_temperature: ClassVar[bool] = True
    kind: Literal["tangents"] = "tangents"

    def compute(self, inputs: LossInputs) -> TokenLoss:
        """tangent · log p(token). The gradient is that of the external loss; the value has no meaning."""
        return TokenLoss(inputs.require("tangents_N") * inputs.require("logprobs_N"))


LikelihoodSpec = CrossEntropySpec | TangentsSpec
"""Every loss of this module. A new one is added here."""
