"""Which loss a step minimises, as plain data. No torch here: configs and requests carry it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from storage.models import Frozen

LossNorm = Literal["token_mean", "sequence_mean", "token_sum", "constant"]
KLEstimator = Literal["k1", "abs", "k2", "k3"]


class CrossEntropySpec(Frozen):
    """-log p of the trained tokens."""

    kind: Literal["cross_entropy"] = "cross_entropy"
    norm: LossNorm = "token_mean"
    norm_constant: float | None = Field(None, gt=0)


class GRPOSpec(Frozen):
    """The clipped policy gradient with a KL term (arXiv:2402.03300)."""

    kind: Literal["grpo"] = "grpo"
    clip_low: float = Field(0.1, gt=0)
    clip_high: float = Field(0.1, gt=0)
    dual_clip: float | None = Field(None, gt=1)
    """Lower bound c·A of the objective where A < 0 (arXiv:1912.09729)."""
    kl_beta: float = Field(0.01, ge=0)
    kl_estimator: KLEstimator = "k3"
    norm: LossNorm = "token_mean"
    norm_constant: float | None = Field(None, gt=0)
    """Tokens per sequence that norm="constant" divides by, besides the number of sequences (arXiv:2503.20783)."""

    @model_validator(mode="after")
    def _constant_is_given(self) -> GRPOSpec:
        if self.norm == "constant" and self.norm_constant is None:
            raise ValueError("norm='constant' divides by norm_constant tokens per sequence; give norm_constant")
        return self


LossSpec = Annotated[CrossEntropySpec | GRPOSpec, Field(discriminator="kind")]
