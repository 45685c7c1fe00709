"""The config of the `gspo` flow: that of `grpo`, with one ratio per completion."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from engine.losses.base import LossNorm
from engine.losses.policy_gradient import GSPOSpec
from flows.configs.common import GRPOAlgorithm, GRPOConfig
from flows.configs.defaults import default_of


class GSPOAlgorithm(GRPOAlgorithm):
    """The algorithm GSPO (arXiv:2507.18071). `samples_*` count completions."""

    clip_range: float = Field(default_of(GSPOSpec, "clip_low"), gt=0, le=1)
    """Clip range of the ratio of a whole completion, a mean over its tokens: beyond 1 ± clip_range, a further change
    has no gradient."""
    dual_clip: float | None = Field(None, gt=1)
    """Setting of GRPO, whose ratios are per token. Leave it empty for GSPO."""
    loss_norm: LossNorm = default_of(GSPOSpec, "norm")
    """Normalisation of the loss. sequence_mean: every completion has the same weight, whatever its length. The other
    values are those of GRPO."""

    @model_validator(mode="after")
    def _no_ratio_per_token(self) -> Self:
        check_has_gspo(self.dual_clip)
        return self


def check_has_gspo(dual_clip: float | None, policy_loss: str = "clip") -> None:
    """Raises ValueError for settings of GRPO that GSPO does not have."""
    if dual_clip is not None:
        raise ValueError(f"dual_clip={dual_clip} bounds a ratio per token, which GSPO does not have; leave it out")
    if policy_loss != "clip":
        raise ValueError(f"policy_loss={policy_loss!r} is of ratios per token, which GSPO does not have; leave it out")


class GSPOConfig(GRPOConfig):
    """`ostinato run gspo`: reinforcement learning from graded rollouts, one ratio per completion."""

    flow: ClassVar[str] = "gspo"

    algorithm: GSPOAlgorithm = GSPOAlgorithm()

    @model_validator(mode="after")
    def _no_loss_per_token(self) -> Self:
        check_has_gspo(None, self.regularisation.policy_loss)
        return self
