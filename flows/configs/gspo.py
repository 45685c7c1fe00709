"""Config of the `gspo` flow: that of `grpo`, with a ratio per completion."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from engine.losses.base import LossNorm
from engine.losses.policy_gradient import GSPOSpec, PolicyLoss
from flows.configs.common import GRPOAlgorithm, GRPOConfig
from flows.configs.defaults import default_of
from flows.configs.titles import training_title


class GSPOAlgorithm(GRPOAlgorithm):
    """GSPO (arXiv:2507.18071). `samples_*` count completions."""

    clip_range: float = Field(default_of(GSPOSpec, "clip_low"), gt=0, le=1)
    """How far the ratio of a completion's new and old probability, a mean over its tokens, may leave 1 and still have a
    gradient."""
    dual_clip: float | None = Field(None, gt=1)
    """Of GRPO alone: leave it empty."""
    loss_norm: LossNorm = default_of(GSPOSpec, "norm")
    """Over what the loss is a mean. sequence_mean weighs every completion alike, however long."""

    @model_validator(mode="after")
    def _no_ratio_per_token(self) -> Self:
        check_has_gspo(self.dual_clip)
        return self


def check_has_gspo(dual_clip: float | None, policy_loss: PolicyLoss = "clip") -> None:
    """Raises ValueError for what GRPO has and GSPO does not."""
    if dual_clip is not None:
        raise ValueError(f"dual_clip={dual_clip} bounds a ratio per token, which GSPO does not have; leave it out")
    if policy_loss != "clip":
        raise ValueError(f"policy_loss={policy_loss!r} is of ratios per token, which GSPO does not have; leave it out")


class GSPOConfig(GRPOConfig):
    """`ostinato run gspo`: reinforcement learning from graded rollouts, one ratio per completion."""

    algorithm: GSPOAlgorithm = GSPOAlgorithm()

    @model_validator(mode="after")
    def _no_loss_per_token(self) -> Self:
        check_has_gspo(None, self.regularisation.policy_loss)
        return self

    @property
    def title(self) -> str:
        """The flow run's name."""
        return training_title("gspo", self.model.key, self.data.train, self.seed)
