"""Policy-gradient losses per token, and the terms that each of them may add.

A new policy loss is a subclass of `BasePolicyGradientSpec` with a `kind`, its own settings and `compute`, and one more
member of the union `PolicyGradientSpec` at the end of this module. A loss outside this repository is a subclass of
`OwnLossSpec`.

l is the logprob of a token under the weights in training, o under the old policy, A the advantage; ρ = exp(l - o).

Axes: N trained token · S sequence
"""

from __future__ import annotations

from functools import cache
from inspect import isabstract, isclass
from math import exp
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, model_validator

from engine import import_paths
from engine.losses.base import KL_ESTIMATORS, KLEstimator, LossNorm, NormalisedLossSpec, TermsNorm, TokenLoss
from storage.serialization import MAX_COEFFICIENT, Coefficient, Frozen, Positive

if TYPE_CHECKING:
    from torch import Tensor

    from engine.losses.inputs import LossInputs


MAX_LOG_RATIO = 20.0
"""Bound of the logarithm of SAPO's ratio, beyond which the gate is flat, and of importance weights without a cap. It
keeps the exponentials finite."""


LowestRatio = Annotated[float, Field(ge=0, le=1)]
HighestRatio = Annotated[float, Field(ge=1, le=MAX_COEFFICIENT, allow_inf_nan=False)]


class _RatioMask(Frozen):
    """Base class of masks by the ratio k = exp(o - sampler) of the old policy and the one that sampled. A ratio of 1
    is always within the bounds."""

    low: LowestRatio
    high: HighestRatio

    def _log_ratio(self, inputs: LossInputs) -> Tensor:
        return inputs.require("old_N") - inputs.require("sampler_N")

    def _in_bounds(self, ratio: Tensor) -> Tensor:
        return (ratio >= self.low) & (ratio <= self.high)


class TokenRatioMask(_RatioMask):
    """Masks the tokens whose ratio k is outside [low, high] (IcePop, arXiv:2510.18855). k is the probability under the
    policy before the step divided by the probability under the policy that sampled."""

    kind: Literal["token_ratio"] = "token_ratio"
    low: LowestRatio = 0.5
    """Smallest ratio of a token that is trained."""
    high: HighestRatio = 5.0
    """Largest ratio of a token that is trained."""

    def kept(self, inputs: LossInputs) -> Tensor:
        """Bool (N,): low <= exp(o - sampler) <= high."""
        return self._in_bounds(self._log_ratio(inputs).exp())


class SequenceRatioMask(_RatioMask):
    """Masks the completions for which the geometric mean of their tokens' ratios k is outside [low, high]
    (richardli.xyz/rl-collapse). k is as in token_ratio. The mean does not depend on the length of a completion."""

    kind: Literal["sequence_ratio"] = "sequence_ratio"
    low: LowestRatio = 0.999
    """Smallest geometric mean of the ratios of a completion that is trained."""
    high: HighestRatio = 1.002
    """Largest geometric mean of the ratios of a completion that is trained."""

    def kept(self, inputs: LossInputs) -> Tensor:
        """Bool (N,): low <= exp(mean_t(o - sampler)) <= high, for each token of the sequence."""
        mean_S = inputs.mean_by_sequence(self._log_ratio(inputs))
        return inputs.spread(self._in_bounds(mean_S.exp()))


class ProbabilityMask(Frozen):
    """Masks the tokens whose probability has already moved far in the direction of their advantage: with an advantage
    above 0 by more than `high` above the probability under the policy that sampled, with one below 0 by more than `low`
    below it (DPPO with the binary total variation, arXiv:2602.04879)."""

    kind: Literal["probability"] = "probability"
    low: float = Field(0.2, gt=0, le=1)
    """Largest decrease of a token's probability with which it is trained, for tokens with an advantage below 0."""
    high: float = Field(0.2, gt=0, le=1)
    """Largest increase of a token's probability with which it is trained, for tokens with an advantage above 0."""

    def kept(self, inputs: LossInputs) -> Tensor:
        """Bool (N,), with p = exp(l) - exp(sampler): p <= high where A > 0, p >= -low where A < 0."""
        advantages_N = inputs.require("advantages_N")
        moved_N = inputs.require("logprobs_N").detach().exp() - inputs.require("sampler_N").exp()
        too_high_N = (advantages_N > 0) & (moved_N > self.high)
        too_low_N = (advantages_N < 0) & (moved_N < -self.low)
        return ~(too_high_N | too_low_N)


ImportanceMask = Annotated[TokenRatioMask | SequenceRatioMask | ProbabilityMask, Field(discriminator="kind")]
"""Which tokens the policy's part of the loss leaves out, by how far the policy is from the one that sampled them."""


class BasePolicyGradientSpec(NormalisedLossSpec):
    """Settings and terms that all policy-gradient losses share."""

    uses_sampling_temperature: ClassVar[bool] = True
    kl_beta: Coefficient = 0.01
    """Coefficient of the KL term. With 0 there is no KL term, and the batch needs no reference logprobs."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of the KL divergence per token (engine.losses.base)."""
    kl_importance: bool = Field(False, exclude_if=lambda weighted: not weighted)  # absent from older requests
    """Whether the KL term is multiplied by the ratio (GSPO: by the ratio of the sequence), with gradient. With k3, the
    term and its gradient are then unbiased estimates for the KL divergence to the reference (arXiv:2512.02556)."""
    entropy_coef: Coefficient = 0.0
    """Coefficient of the entropy bonus: this times the entropy is subtracted from each token's loss."""
    terms_norm: TermsNorm | None = Field(None, exclude_if=lambda norm: norm is None)  # absent from older requests
    """How the KL and entropy terms of the tokens become one number, if not by `norm`."""
    importance_cap: Positive | None = None
    """Upper bound of the truncated importance weights min(exp(o - sampler), cap), which multiply the policy's part of
    the loss, without gradient. They correct for the distribution that was sampled from
    (fengyao.notion.site/off-policy-rl). None: with an `importance_mask`, the bound is e^MAX_LOG_RATIO; without one,
    there are no weights."""
    importance_mask: ImportanceMask | None = Field(None, exclude_if=lambda mask: mask is None)
    """Tokens whose policy part of the loss is 0. The other tokens have importance weights. The mask does not change
    what the loss is normalised by. None: all tokens are kept."""

    @model_validator(mode="after")
    def _importance_goes_with_a_kl_term(self) -> Self:
        if self.kl_importance and self.kl_beta == 0:
            raise ValueError(
                "kl_importance weighs the KL term of the loss, which has none with kl_beta=0 or kl_in='reward'; leave "
                "it out, or give kl_beta"
            )
        return self

    @property
    def needs_reference(self) -> bool:
        return self.kl_beta > 0

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coef > 0

    @property
    def zero_without_advantage(self) -> bool:
        return self.kl_beta == 0 and not self.needs_entropy

    def _add_terms(self, values_N: Tensor, ratio_N: Tensor, sums: dict[str, Tensor], inputs: LossInputs) -> TokenLoss:
        """Weighs and masks the policy's loss, then adds the KL term, then the entropy bonus."""
        logprobs_N = inputs.require("logprobs_N")
        values_N = self._weigh(values_N, ratio_N.detach(), sums, inputs)

        # The terms are added to the policy's part, or kept apart if they have a norm of their own.
        terms_N = values_N
        if self.terms_norm is not None:
            terms_N = values_N.new_zeros(len(values_N))

        # The KL term. With beta 0 it is only a metric.
        if self.kl_beta > 0 or inputs.reference_N is not None:
            kl_N = KL_ESTIMATORS[self.kl_estimator](logprobs_N, inputs.require("reference_N"))
            sums["kl_sum"] = kl_N.detach().sum()
            if self.kl_beta > 0:  # 0 times an overflow would be NaN
                term_N = ratio_N * kl_N if self.kl_importance else kl_N
                terms_N = terms_N + self.kl_beta * term_N

        # The entropy bonus: a larger entropy lowers the loss.
        if self.entropy_coef > 0:
            entropy_N = inputs.require("entropy_N")
            sums["entropy_sum"] = entropy_N.detach().sum()
            terms_N = terms_N - self.entropy_coef * entropy_N
        if self.terms_norm is None:
            return TokenLoss(terms_N, sums)
        return TokenLoss(values_N, sums, (terms_N, self.terms_norm))

    def _weigh(self, values_N: Tensor, ratio_N: Tensor, sums: dict[str, Tensor], inputs: LossInputs) -> Tensor:
        """The policy's loss of each token times its importance weight, and 0 for a masked token. Adds to `sums` the
        weights, the masked tokens, and the sums of which the effective sample size follows."""
        if self.importance_cap is not None or self.importance_mask is not None:
            log_weight_N = inputs.require("old_N") - inputs.require("sampler_N")
            cap = exp(MAX_LOG_RATIO) if self.importance_cap is None else self.importance_cap
            weight_N = log_weight_N.exp().clamp(max=cap)
            values_N = values_N * weight_N
            if self.importance_mask is not None:
                masked_N = ~self.importance_mask.kept(inputs)
                values_N, weight_N = values_N.masked_fill(masked_N, 0.0), weight_N.masked_fill(masked_N, 0.0)
                sums["masked_fraction_sum"] = masked_N.sum()
            sums["importance_weight_sum"] = weight_N.sum()
            ratio_N = ratio_N * weight_N
        elif not inputs.old_is_sampler:
            return values_N

        # Weights of tokens with respect to the policy that sampled. Their squares need more range than float32 has.
        sums["effective_weight_sum"] = ratio_N.double().sum()
        sums["effective_weight_square_sum"] = ratio_N.double().square().sum()
        return values_N


class ClippedPolicyGradientSpec(BasePolicyGradientSpec):
    """Settings of the losses that clip the ratio."""

    clip_low: float = Field(0.1, gt=0, le=1)
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: Positive = 0.1
    """The ratio is clipped from above at 1 + clip_high."""

    def _pessimistic(self, ratio_N: Tensor, advantages_N: Tensor) -> tuple[Tensor, Tensor]:
        """(-min(ρA, clip(ρ)A), whether the clipped one is the minimum), both (N,)."""
        # The maximum of the losses is the minimum of the objectives: clipping never makes a token look better.
        free_N = -ratio_N * advantages_N
        clipped_N = -ratio_N.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages_N
        return free_N.maximum(clipped_N), clipped_N > free_N


class GRPOSpec(ClippedPolicyGradientSpec):
    """GRPO's clipped policy gradient per token with a KL term (arXiv:2402.03300). With kl_beta=0 it is PPO's
    (arXiv:1707.06347)."""

    kind: Literal["grpo"] = "grpo"
    dual_clip: float | None = Field(None, gt=1, le=MAX_COEFFICIENT)
    """Lower bound c·A of the objective of tokens with a negative advantage A (arXiv:1912.09729). None: no bound."""

    def compute(self, inputs: LossInputs) -> TokenLoss:
        """-min(ρA, clip(ρ, 1-ε, 1+ε')A) + β·KL(l, q),  ρ = exp(l - o)   (arXiv:2402.03300).

        q is the logprob under the reference. With `dual_clip` c, the loss of a token with a negative advantage is at
        most -cA (arXiv:1912.09729). Departures from the paper: the two clips may differ (arXiv:2503.14476), and the
        default normalisation is the mean over tokens; the paper's is norm="sequence_mean".
        """
        logprobs_N, old_N = inputs.require("logprobs_N"), inputs.require("old_N")
        advantages_N = inputs.require("advantages_N")
        ratio_N = (logprobs_N - old_N).exp()
        values_N, clipped_N = self._pessimistic(ratio_N, advantages_N)
        if self.dual_clip is not None:
            # For A < 0 the loss -ρA grows without bound with ρ, so a single token could decide the gradient.
            bound_N = -self.dual_clip * advantages_N
            values_N = values_N.minimum(bound_N).where(advantages_N < 0, values_N)
        sums = {"clip_fraction_sum": clipped_N.sum(), "ratio_sum": ratio_N.detach().sum()}
        return self._add_terms(values_N, ratio_N, sums, inputs)


class GSPOSpec(ClippedPolicyGradientSpec):
    """GSPO's policy gradient, which is clipped by one ratio per sequence (arXiv:2507.18071)."""

    kind: Literal["gspo"] = "gspo"
    norm: LossNorm = "sequence_mean"
    clip_low: float = Field(0.01, gt=0, le=1)
    """The ratio of a sequence is clipped from below at 1 - clip_low."""
    clip_high: Positive = 0.01
    """The ratio of a sequence is clipped from above at 1 + clip_high."""

    def compute(self, inputs: LossInputs) -> TokenLoss:
        """-min(sA, clip(s, 1-ε, 1+ε')A) of each sequence,  s = exp(mean_t(l - o))   (arXiv:2507.18071).

        The loss of a sequence is the loss of each of its tokens, so norm="sequence_mean" is the paper's mean over
        sequences. The gradient flows through s. Departures from the paper: advantages may differ by token, and the KL
        and entropy terms, which the paper does not have, are per token.
        """
        logprobs_N, old_N = inputs.require("logprobs_N"), inputs.require("old_N")
        advantages_N = inputs.require("advantages_N")
        # The geometric mean of the tokens' ratios, so that long sequences are not clipped more often.
        ratio_S = inputs.mean_by_sequence(logprobs_N - old_N).exp()
        ratio_N = inputs.spread(ratio_S)
        values_N, clipped_N = self._pessimistic(ratio_N, advantages_N)
        sums = {"clip_fraction_sum": clipped_N.sum(), "ratio_sum": ratio_N.detach().sum()}
        return self._add_terms(values_N, ratio_N, sums, inputs)


class CISPOSpec(ClippedPolicyGradientSpec):
    """CISPO's policy gradient: the ratio is clipped and held constant, so every token keeps a gradient
    (arXiv:2506.13585)."""

    kind: Literal["cispo"] = "cispo"

    def compute(self, inputs: LossInputs) -> TokenLoss:
        """-clip(ρ, 1-ε, 1+ε')·A·l, the clipped ratio without gradient   (arXiv:2506.13585).

        Departures from the paper: the lower clip, which the paper switches off, applies, and a KL term, which the paper
        leaves out, is added unless kl_beta=0.
        """
        logprobs_N, old_N = inputs.require("logprobs_N"), inputs.require("old_N")
        advantages_N = inputs.require("advantages_N")
        ratio_N = (logprobs_N - old_N).exp()
        # Detached: clipping the ratio of min(ρA, clip(ρ)A) would remove the gradient of clipped tokens.
        constant_ratio_N = ratio_N.detach()
        weight_N = constant_ratio_N.clamp(1 - self.clip_low, 1 + self.clip_high)
        clipped_N = weight_N != constant_ratio_N
        sums = {"clip_fraction_sum": clipped_N.sum(), "ratio_sum": constant_ratio_N.sum()}
        return self._add_terms(-weight_N * advantages_N * logprobs_N, ratio_N, sums, inputs)


class GMPOSpec(ClippedPolicyGradientSpec):
    """GMPO's policy gradient: the geometric mean of a sequence's ratios, each of them clipped (arXiv:2507.20673)."""

    kind: Literal["gmpo"] = "gmpo"
    norm: LossNorm = "sequence_mean"
    clip_low: float = Field(0.4, gt=0, le=1)
    """The logarithm of the ratio of a token is clipped from below at -clip_low."""
    clip_high: Positive = 0.4
    """The logarithm of the ratio of a token is clipped from above at clip_high."""

    def compute(self, inputs: LossInputs) -> TokenLoss:
        """-A·exp(mean_t m) of each sequence   (arXiv:2507.20673).

        With d = l - o, m is min(d, clip(d, -ε, ε')) where A > 0, else max(d, clip(d, -ε, ε')).

        The loss of a sequence is the loss of each of its tokens, so norm="sequence_mean" is the paper's mean over
        sequences. Departures from the paper: advantages may differ by token, and a KL term, which the paper leaves out,
        is added unless kl_beta=0.
        """
        advantages_N = inputs.require("advantages_N")
        log_ratio_N = inputs.require("logprobs_N") - inputs.require("old_N")
        # As in GRPO, clipping never makes a token look better.
        bounded_N = log_ratio_N.clamp(-self.clip_low, self.clip_high)
        worse_N = log_ratio_N.minimum(bounded_N).where(advantages_N > 0, log_ratio_N.maximum(bounded_N))
        ratio_N = inputs.spread(inputs.mean_by_sequence(worse_N).exp())
        clipped_N = worse_N != log_ratio_N
        sums = {"clip_fraction_sum": clipped_N.sum(), "ratio_sum": ratio_N.detach().sum()}
        return self._add_terms(-ratio_N * advantages_N, ratio_N, sums, inputs)


class SAPOSpec(BasePolicyGradientSpec):
    """SAPO's policy gradient: a smooth gate on the ratio takes the place of the clips (arXiv:2511.20347)."""

    kind: Literal["sapo"] = "sapo"
    norm: LossNorm = "sequence_mean"
    tau_positive: Positive = 1.0
    """Temperature of the gate of tokens with an advantage above 0. A larger one closes the gate earlier."""
    tau_negative: Positive = 1.05
    """Temperature of the gate of the other tokens."""

    def compute(self, inputs: LossInputs) -> TokenLoss:
        """-(4/τ)·σ(τ(ρ - 1))·A,  τ = tau_positive where A > 0, else tau_negative   (arXiv:2511.20347).

        At ρ = 1 the gradient is that of the unclipped ρA. The paper's mean is norm="sequence_mean". Departure from the
        paper: a KL term is added unless kl_beta=0.
        """
        advantages_N = inputs.require("advantages_N")
        log_ratio_N = inputs.require("logprobs_N") - inputs.require("old_N")
        ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        tau_N = ratio_N.new_full((len(ratio_N),), self.tau_negative).masked_fill(advantages_N > 0, self.tau_positive)
        gate_N = (tau_N * (ratio_N - 1)).sigmoid() * 4 / tau_N
        return self._add_terms(-gate_N * advantages_N, ratio_N, {"ratio_sum": ratio_N.detach().sum()}, inputs)


class ClipCovSpec(ClippedPolicyGradientSpec):
    """The clipped policy gradient without some tokens of a large covariance (Clip-Cov, arXiv:2505.22617). The batch
    says which tokens: tasks.batches.advantages.TokenSelection."""

    kind: Literal["clip_cov"] = "clip_cov"

    def compute(self, inputs: LossInputs) -> TokenLoss:
        """-min(ρA, clip(ρ, 1-ε, 1+ε')A), and 0 without gradient of the selected tokens   (arXiv:2505.22617).

        The selected tokens count in what the loss is normalised by, as in the code of the paper's authors. Departure
        from the paper: a KL term is added unless kl_beta=0, also to the selected tokens.
        """
        ratio_N = (inputs.require("logprobs_N") - inputs.require("old_N")).exp()
        values_N, clipped_N = self._pessimistic(ratio_N, inputs.require("advantages_N"))
        selected_N = inputs.require("selected_N") > 0
        sums = {
            "clip_fraction_sum": clipped_N.sum(),
            "selected_fraction_sum": selected_N.sum(),
            "ratio_sum": ratio_N.detach().sum(),
        }
        return self._add_terms(values_N.masked_fill(selected_N, 0.0), ratio_N, sums, inputs)


class KLCovSpec(BasePolicyGradientSpec):
    """The policy gradient without clips, with a KL penalty on the tokens of the largest covariance (KL-Cov,
    arXiv:2505.22617). The batch says which tokens: tasks.batches.advantages.TokenSelection."""

    kind: Literal["kl_cov"] = "kl_cov"
    cov_kl: Positive = 1.0
    """Coefficient of the penalty on the selected tokens."""

    @property
    def zero_without_advantage(self) -> bool:
        return False  # a selected token has the penalty, whatever its advantage

    def compute(self, inputs: LossInputs) -> TokenLoss:
        """-ρA of each token, and + cov_kl·|l - o| of the selected ones,  ρ = exp(l - o)   (arXiv:2505.22617).

        The paper has the KL divergence of the old policy to the new one; the absolute log-ratio is the estimate of its
        authors' code, whose gradient is 0 where the ratio is 1. Departure from the paper: a KL term to a reference is
        added unless kl_beta=0.
        """
        log_ratio_N = inputs.require("logprobs_N") - inputs.require("old_N")
        selected_N = inputs.require("selected_N") > 0
        ratio_N = log_ratio_N.exp()
        penalty_N = (self.cov_kl * log_ratio_N.abs()).where(selected_N, ratio_N.new_zeros(()))
        sums = {"selected_fraction_sum": selected_N.sum(), "ratio_sum": ratio_N.detach().sum()}
        return self._add_terms(penalty_N - ratio_N * inputs.require("advantages_N"), ratio_N, sums, inputs)


class OwnLossSpec(BasePolicyGradientSpec):
    """Base class of a policy-gradient loss of one's own, which configs and requests name by its import path.

    A subclass has its settings as fields, and `compute`. A step request has the path, the settings and the digest of
    the source file, so that all of them decide the state after the step."""

    kind: Literal["own"] = "own"
    path: str = Field(pattern=import_paths.PATTERN)
    """The subclass as package.module:name. Every process that computes the loss must be able to import it."""
    source_digest: str | None = None
    """sha256 of the module's source file when the step was requested. None: the module has no source file."""

    @property
    def zero_without_advantage(self) -> bool:
        return False  # a subclass whose loss is 0 for advantages of 0 may override this, which saves forward passes

    @model_validator(mode="wrap")
    @classmethod
    def _as_the_class_at_the_path(cls, settings: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Validates settings as those of the class that `path` names. Raises ValueError if its source has changed."""
        path = settings.get("path") if isinstance(settings, dict) else None
        if cls is not OwnLossSpec or not isinstance(path, str):
            return validate(settings)
        loss_type, digest = load_own_loss(path)
        given = settings.get("source_digest")
        if given != digest:
            raise ValueError(
                f"the source file of {path!r} was changed: the step was requested with sha256 {str(given)[:12]}, and "
                f"this process has {str(digest)[:12]}; restore the file as it was, or fork the run from a step before"
            )
        return loss_type.model_validate(settings)  # type: ignore[return-value]


@cache
def load_own_loss(path: str) -> tuple[type[OwnLossSpec], str | None]:
    """The loss at an import path, and the digest of its source file as this process first loaded it. Raises ValueError
    if there is no subclass of OwnLossSpec at the path."""
    try:
        digest, target = import_paths.source_digest(path), import_paths.load_object(path)
    except import_paths.ImportPathError as error:
        raise ValueError(f"policy loss {error}") from error
    if not isclass(target) or not issubclass(target, OwnLossSpec) or isabstract(target):
        raise ValueError(f"policy loss {path!r}: given {target!r:.60}; expected a subclass of OwnLossSpec with compute")
    return target, digest


PolicyGradientSpec = (
    GRPOSpec | GSPOSpec | CISPOSpec | GMPOSpec | SAPOSpec | ClipCovSpec | KLCovSpec | OwnLossSpec
)
"""Every loss of this module. A new one is added here."""

PolicyLoss = Literal["clip", "cispo", "gmpo", "sapo", "clip_cov", "kl_cov"]
"""The names of the built-in losses that a config of GRPO or PPO chooses from."""
POLICY_LOSSES: dict[str, type[PolicyGradientSpec]] = {
    "clip": GRPOSpec, "cispo": CISPOSpec, "gmpo": GMPOSpec, "sapo": SAPOSpec, "clip_cov": ClipCovSpec,
    "kl_cov": KLCovSpec,
}  # fmt: skip
"""The loss of each name. A config of GSPO has no choice: its loss is GSPOSpec."""
