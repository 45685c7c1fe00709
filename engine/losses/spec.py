"""Which loss a step minimises, as plain data. No torch here: configs and requests carry it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from storage.bounds import LARGEST, Coefficient, Divisor, Positive
from storage.records import Frozen

LossNorm = Literal["token_mean", "sequence_mean", "token_sum", "constant"]
KLEstimator = Literal["k1", "abs", "k2", "k3"]
DPOVariant = Literal["sigmoid", "ipo", "cdpo"]


class _Loss(Frozen):
    """What the trainer asks of every loss before it runs a pass."""

    model_config = ConfigDict(allow_inf_nan=False)  # a request is JSON, which cannot say them

    reads: ClassVar[Literal["logprobs", "values"]] = "logprobs"
    """values: of a model with a scalar head (engine.specs.adapters)."""
    pairwise: ClassVar[bool] = False
    """Its unit is a pair: two samples of one group, one of them preferred. They are never split."""

    @property
    def needs_entropy(self) -> bool:
        """Whether it reads the entropy of each trained token's distribution, which costs a pass over the logits."""
        return False


class _Normalised(_Loss):
    """What a loss per token says about its normalisation over the whole minibatch (engine.losses.normalisation)."""

    norm: LossNorm = "token_mean"
    """token_mean: over all trained tokens · sequence_mean: over each sequence's tokens, then over sequences ·
    token_sum: not at all · constant: by sequences x norm_constant."""
    norm_constant: Divisor | None = None
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


class TangentsSpec(_Loss):
    """Σ tangent · logprob, whose gradient is that of any loss whose d(loss)/d(logprob) the tangents are: the derivative
    itself, not its negative, so that an optimizer step descends the loss."""

    kind: Literal["tangents"] = "tangents"


class _PolicyGradient(_Normalised):
    """What the policy-gradient losses share; with ρ = exp(l - o)."""

    clip_low: float = Field(0.1, gt=0, le=1)
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: Positive = 0.1
    """The ratio is clipped from above at 1 + clip_high."""
    kl_beta: Coefficient = 0.01
    """Coefficient of the KL term; 0 needs no reference logprobs."""
    kl_estimator: KLEstimator = "k3"
    kl_importance: bool = Field(False, exclude_if=lambda weighted: not weighted)  # absent from requests made before it
    """The KL term is multiplied by the ratio (of a sequence: GSPO), whose gradient counts: with k3 it is then an
    unbiased estimate, and so is its gradient, of the KL to the reference (arXiv:2512.02556)."""
    entropy_coef: Coefficient = 0.0
    """Each token's entropy times this is taken off its loss."""
    importance_cap: Positive | None = None
    """The policy's part of the loss is weighted by min(exp(o - sampler), cap), without gradient: truncated importance
    weights against the distribution that was sampled from (fengyao.notion.site/off-policy-rl)."""

    @model_validator(mode="after")
    def _importance_goes_with_a_kl_term(self) -> Self:
        if self.kl_importance and self.kl_beta == 0:
            raise ValueError(
                "kl_importance weighs the KL term of the loss, which has none with kl_beta=0 or kl_in='reward'; leave "
                "it out, or give kl_beta"
            )
        return self

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coef > 0


class GRPOSpec(_PolicyGradient):
    """The clipped policy gradient per token with a KL term (arXiv:2402.03300); PPO's (arXiv:1707.06347) at
    kl_beta=0."""

    kind: Literal["grpo"] = "grpo"
    dual_clip: float | None = Field(None, gt=1, le=LARGEST)
    """Lower bound c·A of the objective where A < 0 (arXiv:1912.09729)."""


class GSPOSpec(_PolicyGradient):
    """The same with one ratio per sequence, s = exp(mean(l - o)) (arXiv:2507.18071)."""

    kind: Literal["gspo"] = "gspo"
    norm: LossNorm = "sequence_mean"
    clip_low: float = Field(0.01, gt=0, le=1)
    """The ratio of a sequence is clipped from below at 1 - clip_low."""
    clip_high: Positive = 0.01
    """The ratio of a sequence is clipped from above at 1 + clip_high."""


class CISPOSpec(_PolicyGradient):
    """-clip(ρ)·A·l with the ratio held constant: every token keeps a gradient (arXiv:2506.13585)."""

    kind: Literal["cispo"] = "cispo"


class DPOSpec(_Loss):
    """Direct preference optimisation over pairs, h = β[(L⁺ - L⁻) - (Lref⁺ - Lref⁻)], as a mean over pairs."""

    pairwise: ClassVar[bool] = True
    kind: Literal["dpo"] = "dpo"
    beta: Divisor = 0.1
    variant: DPOVariant = "sigmoid"
    """sigmoid: -log σ(h) (arXiv:2305.18290) · ipo: (h/β - 1/(2β))² (arXiv:2310.12036), of summed logprobs · cdpo: the
    sigmoid of labels that are wrong with probability label_smoothing (ericmitchell.ai/cdpo.pdf)."""
    label_smoothing: float | None = Field(None, gt=0, lt=0.5)

    @model_validator(mode="after")
    def _smoothing_goes_with_cdpo(self) -> Self:
        if (self.variant == "cdpo") != (self.label_smoothing is not None):
            raise ValueError(
                f"variant={self.variant!r} and label_smoothing={self.label_smoothing}: the one that has it is 'cdpo', "
                "and it needs one below 0.5, such as 0.1"
            )
        return self


class RankingSpec(_Loss):
    """-log σ(s⁺ - s⁻) of a scalar model's scores, as a mean over pairs (Bradley-Terry; arXiv:2203.02155)."""

    reads: ClassVar[Literal["logprobs", "values"]] = "values"
    pairwise: ClassVar[bool] = True
    kind: Literal["ranking"] = "ranking"


class MSESpec(_Normalised):
    """(v - return)² of a scalar model at every trained token."""

    reads: ClassVar[Literal["logprobs", "values"]] = "values"
    kind: Literal["mse"] = "mse"


class TrustRegionMSESpec(_Normalised):
    """max((v - return)², (clip(v, v_old - clip, v_old + clip) - return)²): PPO's clipped value loss
    (arXiv:1707.06347, as in openai/baselines)."""

    reads: ClassVar[Literal["logprobs", "values"]] = "values"
    kind: Literal["trust_region_mse"] = "trust_region_mse"
    clip: Positive = 0.2


LossSpec = Annotated[
    CrossEntropySpec
    | TangentsSpec
    | GRPOSpec
    | GSPOSpec
    | CISPOSpec
    | DPOSpec
    | RankingSpec
    | MSESpec
    | TrustRegionMSESpec,
    Field(discriminator="kind"),
]
