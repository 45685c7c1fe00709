"""The losses by kind: a literal dictionary one can read; a test holds it against the spec union."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from engine.errors import BadSpec
from engine.losses.cross_entropy import cross_entropy_loss
from engine.losses.inputs import LossInputs, TokenLoss
from engine.losses.policy_gradient import grpo_loss
from engine.losses.spec import GRPOSpec


def _cross_entropy(inputs: LossInputs, _: Any) -> TokenLoss:
    return cross_entropy_loss(inputs.logprobs_N)


def _grpo(inputs: LossInputs, spec: GRPOSpec) -> TokenLoss:
    return grpo_loss(
        inputs.logprobs_N,
        _needed(inputs.old_N, "old logprobs"),
        _needed(inputs.reference_N, "reference logprobs") if spec.kl_beta > 0 else inputs.reference_N,
        _needed(inputs.advantages_N, "advantages"),
        spec=spec,
    )


def _needed(column: Tensor | None, what: str) -> Tensor:
    if column is None:
        raise BadSpec(f"the loss needs {what}, and the batch has none; prepare the batch for this loss")
    return column


LOSSES: dict[str, Callable[[LossInputs, Any], TokenLoss]] = {"cross_entropy": _cross_entropy, "grpo": _grpo}
