"""Which loss a step minimises, as plain data. No torch here: configs and requests carry it."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from storage.models import Frozen

LossNorm = Literal["token_mean", "sequence_mean", "token_sum", "constant"]
KLEstimator = Literal["k1", "abs", "k2", "k3"]


class _Normalised(Frozen):
    """What every loss says about its normalisation over the whole minibatch (engine.losses.normalisation)."""

    norm: LossNorm = "token_mean"
    """token_mean: over all trained tokens · sequence_mean: over each sequence's tokens, then over sequences ·
    token_sum: not at all · constant: by sequences x norm_constant."""
    norm_constant: float | None = Field(None, gt=0)
    """Tokens per sequence that norm="constant" divides by, besides the number of sequences (arXiv:2503.20783)."""

    @model_validator(mode="after")
    def _constant_goes_with_its_norm(self) -> Self:
        if self.norm == "constant" and self.norm_constant is None:
            raise ValueError("norm='constant' divides by norm_constant tokens per sequence; give norm_constant")
        if self.norm != "constant" and self.norm_constant is not None:
            raise ValueError(
                f"norm={self.norm!r} does not use norm_constant, given {self.norm_constant}; leave it out, or set "
                "norm='constant'"
            )
        return self


class CrossEntropySpec(_Normalised):
    """-log p of the trained tokens."""

    kind: Literal["cross_entropy"] = "cross_entropy"


class GRPOSpec(_Normalised):
    """The clipped policy gradient with a KL term (arXiv:2402.03300)."""

    kind: Literal["grpo"] = "grpo"
    clip_low: float = Field(0.1, gt=0, le=1)
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: float = Field(0.1, gt=0)
    """The ratio is clipped from above at 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """Lower bound c·A of the objective where A < 0 (arXiv:1912.09729)."""
    kl_beta: float = Field(0.01, ge=0)
    """Coefficient of the KL term; 0 needs no reference logprobs."""
    kl_estimator: KLEstimator = "k3"


LossSpec = Annotated[CrossEntropySpec | GRPOSpec, Field(discriminator="kind")]
