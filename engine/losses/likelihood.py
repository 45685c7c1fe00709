"""Losses linear in the logprobs. Axes: N trained token."""

from __future__ import annotations

from engine.losses.inputs import LossInputs, TokenLoss
from engine.losses.spec import CrossEntropySpec, TangentsSpec


def cross_entropy_loss(inputs: LossInputs, _: CrossEntropySpec) -> TokenLoss:
    """-log p(token)."""
    return TokenLoss(-inputs.needed("logprobs_N"))


def tangents_loss(inputs: LossInputs, _: TangentsSpec) -> TokenLoss:
    """tangent · log p(token): its gradient is that of the loss whose d(loss)/d(logprob) the tangents are, so that an
    optimizer step descends that loss. Its value means nothing."""
    return TokenLoss(inputs.needed("tangents_N") * inputs.needed("logprobs_N"))
