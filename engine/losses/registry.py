"""The losses by kind: a literal dictionary one can read; a test holds it against the spec union."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.losses.inputs import LossInputs, PairLoss, TokenLoss
from engine.losses.likelihood import cross_entropy_loss, tangents_loss
from engine.losses.pairs import dpo_loss, ranking_loss
from engine.losses.policy_gradient import cispo_loss, grpo_loss, gspo_loss
from engine.losses.values import mse_loss, trust_region_mse_loss

LOSSES: dict[str, Callable[[LossInputs, Any], TokenLoss | PairLoss]] = {
    "cross_entropy": cross_entropy_loss,
    "tangents": tangents_loss,
    "grpo": grpo_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "dpo": dpo_loss,
    "ranking": ranking_loss,
    "mse": mse_loss,
    "trust_region_mse": trust_region_mse_loss,
}
