"""Losses of preferences: of pairs, in each of which one sequence is preferred, as a mean over pairs, and of sequences
that have a label.

Axes: N trained token · S sequence · P pair
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from engine.losses.base import BaseLossSpec, LossNorm, NormalisedLossSpec, PairLoss, TokenLoss
from storage.serialization import Coefficient, Divisor

if TYPE_CHECKING:
    from torch import Tensor

    from engine.losses.inputs import LossInputs

DPOVariant = Literal["sigmoid", "ipo", "cdpo"]
MAX_ODDS_LOGPROB = -1e-6
"""Largest mean logprob, in nats, of which ORPO computes the odds."""


class DPOSpec(BaseLossSpec):
    """Direct preference optimisation (arXiv:2305.18290) and two variants of it."""

    pairwise: ClassVar[bool] = True
    uses_sampling_temperature: ClassVar[bool] = True
    kind: Literal["dpo"] = "dpo"
    beta: Divisor = 0.1
    """Strength β of the implicit KL constraint to the reference policy."""
    variant: DPOVariant = "sigmoid"
    """Loss of a pair with logit h. sigmoid: -log σ(h) (arXiv:2305.18290). ipo: (h/β - 1/(2β))² (arXiv:2310.12036, whose
    L is the sum; TRL's `ipo` has the mean, as with length_normalised). cdpo: the sigmoid loss for labels that are wrong
    with probability label_smoothing (ericmitchell.ai/cdpo.pdf)."""
    label_smoothing: float | None = Field(None, gt=0, lt=0.5)
    """Probability that a label is wrong. variant="cdpo" needs it; the other variants do not take it."""
    # The next three are absent from older requests.
    length_normalised: bool = Field(False, exclude_if=lambda normalised: not normalised)
    """Whether L is the mean logprob of a sequence's tokens instead of their sum (arXiv:2411.15124)."""
    rpo_alpha: Coefficient = Field(0.0, exclude_if=lambda alpha: alpha == 0)
    """Weight α of a further term, the mean negative logprob of the preferred sequence's tokens (arXiv:2404.19733)."""
    reference_free: bool = Field(False, exclude_if=lambda free: not free)
    """Whether Lref is 0 for every sequence, so that there is no reference policy."""

    @model_validator(mode="after")
    def _smoothing_goes_with_cdpo(self) -> Self:
        if (self.variant == "cdpo") != (self.label_smoothing is not None):
            raise ValueError(
                f"variant={self.variant!r} was given with label_smoothing={self.label_smoothing}; variant='cdpo' needs "
                "a label_smoothing below 0.5, such as 0.1, and the other variants take none"
            )
        return self

    @property
    def needs_reference(self) -> bool:
        return not self.reference_free

    def compute(self, inputs: LossInputs) -> PairLoss:
        """-log σ(h) of each pair, h = β[(L⁺ - L⁻) - (Lref⁺ - Lref⁻)] (arXiv:2305.18290).

        L is the summed logprob of a sequence, Lref that of the reference. `ipo` is (h/β - 1/(2β))²
        (arXiv:2310.12036). `cdpo` is -(1 - ε) log σ(h) - ε log σ(-h), ε the probability of a wrong label. rpo_alpha
        adds -α·L⁺/|y⁺|. The reward metrics are the implicit rewards β(L - Lref).
        """
        # The log-ratios of the two sequences of each pair.
        logprobs_N = inputs.require("logprobs_N")
        log_ratio_N = logprobs_N if self.reference_free else logprobs_N - inputs.require("reference_N")
        by_sequence = inputs.mean_by_sequence if self.length_normalised else inputs.sum_by_sequence
        chosen_P, rejected_P = inputs.by_preference(by_sequence(log_ratio_N))
        margin_P = chosen_P - rejected_P
        logit_P = self.beta * margin_P

        # The sigmoid loss is that of cdpo without label smoothing.
        if self.variant == "ipo":
            values_P = (margin_P - 1 / (2 * self.beta)).square()
        else:
            wrong = self.label_smoothing or 0.0
            values_P = -(1 - wrong) * inputs.log_sigmoid(logit_P) - wrong * inputs.log_sigmoid(-logit_P)
        if self.rpo_alpha:
            values_P = values_P - self.rpo_alpha * inputs.by_preference(inputs.mean_by_sequence(logprobs_N))[0]
        return _with_rewards(values_P, self.beta * chosen_P, self.beta * rejected_P)


class SimPOSpec(BaseLossSpec):
    """Simple preference optimisation (arXiv:2405.14734), which needs no reference policy."""

    pairwise: ClassVar[bool] = True
    uses_sampling_temperature: ClassVar[bool] = True
    kind: Literal["simpo"] = "simpo"
    beta: Divisor = 2.0
    """Scale β of the rewards, which are mean logprobs."""
    gamma: Coefficient = 1.0
    """Margin γ by which the reward of the preferred sequence should be greater than that of the other one."""

    def compute(self, inputs: LossInputs) -> PairLoss:
        """-log σ(r⁺ - r⁻ - γ) of each pair, r = β·L/|y| (arXiv:2405.14734).

        L is the summed logprob of a sequence and |y| the number of its trained tokens. The reward metrics are the
        rewards r; a pair is ranked as given where r⁺ > r⁻.
        """
        reward_S = self.beta * inputs.mean_by_sequence(inputs.require("logprobs_N"))
        chosen_P, rejected_P = inputs.by_preference(reward_S)
        return _with_rewards(-inputs.log_sigmoid(chosen_P - rejected_P - self.gamma), chosen_P, rejected_P)


class ORPOSpec(BaseLossSpec):
    """Odds ratio preference optimisation (arXiv:2403.07691): supervised fine-tuning on the preferred sequences, and a
    term that makes them more likely than the others. It needs no reference policy."""

    pairwise: ClassVar[bool] = True
    uses_sampling_temperature: ClassVar[bool] = True
    kind: Literal["orpo"] = "orpo"
    beta: Coefficient = 0.1
    """Weight of the term of the odds ratio: the paper's λ."""

    def compute(self, inputs: LossInputs) -> PairLoss:
        """-l⁺ - β·log σ(log(odds⁺ / odds⁻)) of each pair, odds = p/(1 - p), p = exp(l)   (arXiv:2403.07691).

        l is the mean logprob of a sequence's trained tokens. The reward metrics are βl.
        """
        chosen_P, rejected_P = inputs.by_preference(inputs.mean_by_sequence(inputs.require("logprobs_N")))
        # The odds of a certain answer are infinite, and float32 rounds the mean logprob of a near certain one to 0.
        log_odds_P = chosen_P - rejected_P
        for mean_P, sign in ((chosen_P, -1), (rejected_P, 1)):
            log_odds_P = log_odds_P + sign * (-mean_P.clamp(max=MAX_ODDS_LOGPROB).expm1()).log()
        values_P = -chosen_P - self.beta * inputs.log_sigmoid(log_odds_P)
        return _with_rewards(values_P, self.beta * chosen_P, self.beta * rejected_P)


def _with_rewards(values_P: Tensor, chosen_P: Tensor, rejected_P: Tensor) -> PairLoss:
    """The loss of each pair, with the rewards of its preferred and of its other sequence as metrics. A pair is ranked
    as given where the first is greater."""
    # The metrics must not keep the graph of the forward pass alive.
    chosen_P, rejected_P = chosen_P.detach(), rejected_P.detach()
    margin_P = chosen_P - rejected_P
    sums = {
        "reward_chosen_per_pair": chosen_P.sum(),
        "reward_rejected_per_pair": rejected_P.sum(),
        "reward_margin_per_pair": margin_P.sum(),
        "accuracy_per_pair": (margin_P > 0).sum(),
    }
    return PairLoss(values_P, margin_P, sums)


class RankingSpec(BaseLossSpec):
    """The Bradley-Terry loss of a scalar model's scores, for reward models (arXiv:2203.02155)."""

    reads: ClassVar[Literal["logprobs", "values"]] = "values"
    pairwise: ClassVar[bool] = True
    kind: Literal["ranking"] = "ranking"

    def compute(self, inputs: LossInputs) -> PairLoss:
        """-log σ(s⁺ - s⁻) of each pair (arXiv:2203.02155, with K = 2 completions per prompt).

        s is the score of a sequence: the sum of its values, of which a batch of scores has one per sequence.
        """
        scores_S = inputs.sum_by_sequence(inputs.require("values_N"))
        chosen_P, rejected_P = inputs.by_preference(scores_S)
        sums = {
            "score_chosen_per_pair": chosen_P.detach().sum(),
            "score_rejected_per_pair": rejected_P.detach().sum(),
            "accuracy_per_pair": (chosen_P > rejected_P).sum(),
        }
        margin_P = chosen_P - rejected_P
        return PairLoss(-inputs.log_sigmoid(margin_P), margin_P.detach(), sums)


class KTOSpec(NormalisedLossSpec):
    """Kahneman-Tversky optimisation (arXiv:2402.01306), of answers that are labelled as desirable or undesirable."""

    labelled: ClassVar[bool] = True
    uses_sampling_temperature: ClassVar[bool] = True
    kind: Literal["kto"] = "kto"
    norm: LossNorm = "sequence_mean"
    beta: Divisor = 0.1
    """Strength β of the implicit KL constraint to the reference policy: the paper's risk aversion."""
    desirable_weight: Coefficient = 1.0
    """Weight λ of the loss of desirable answers."""
    undesirable_weight: Coefficient = 1.0
    """Weight λ of the loss of undesirable answers."""

    @property
    def needs_reference(self) -> bool:
        return True

    def compute(self, inputs: LossInputs) -> TokenLoss:
        """λ(1 - σ(β(r - z))) of each desirable sequence, λ(1 - σ(β(z - r))) of each other one   (arXiv:2402.01306).

        r is the summed log-ratio to the reference, and z the KL baseline of the batch, without gradient. The loss of a
        sequence is the loss of each of its tokens, so norm="sequence_mean" is the paper's mean over sequences. The
        reward metrics are βr.
        """
        log_ratio_S = inputs.sum_by_sequence(inputs.require("logprobs_N") - inputs.require("reference_N"))
        desirable_S, baseline_S = inputs.require("preferred_S"), inputs.require("baseline_S")
        gain_S = self.beta * (log_ratio_S - baseline_S)
        # 1 - σ(x) is σ(-x), which keeps its digits for a large x.
        desired_S, undesired_S = (-gain_S).sigmoid(), gain_S.sigmoid()
        loss_S = (self.desirable_weight * desired_S).where(desirable_S, self.undesirable_weight * undesired_S)
        reward_S = self.beta * log_ratio_S.detach()
        sums = {
            "reward_chosen_per_preferred": reward_S[desirable_S].sum(),
            "reward_rejected_per_other": reward_S[~desirable_S].sum(),
            "kl_baseline_sum": inputs.spread(baseline_S).sum(),
        }
        return TokenLoss(inputs.spread(loss_S), sums)


PairSpec = DPOSpec | SimPOSpec | ORPOSpec | RankingSpec
"""Every loss of pairs. A new one is added here."""
PreferenceSpec = PairSpec | KTOSpec
"""Every loss of this module. A new one is added here."""
