"""Losses of pairs, in each of which one sequence is preferred. Each is a mean over pairs.

Axes: N trained token · S sequence · P pair
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from engine.losses.base import BaseLossSpec, PairLoss
from storage.serialization import Coefficient, Divisor

if TYPE_CHECKING:
    from engine.losses.inputs import LossInputs

DPOVariant = Literal["sigmoid", "ipo", "cdpo"]


class DPOSpec(BaseLossSpec):
    """Direct preference optimisation (arXiv:2305.18290) and two variants of it."""

    pairwise: ClassVar[bool] = True
    uses_sampling_temperature: ClassVar[bool] = True
    kind: Literal["dpo"] = "dpo"
    beta: Divisor = 0.1
    """Strength β of the implicit KL constraint to the reference policy."""
    variant: DPOVariant = "sigmoid"
    """Loss of a pair with logit h. sigmoid: -log σ(h) (arXiv:2305.18290). ipo: (h/β - 1/(2β))² (arXiv:2310.12036), of
    summed logprobs. cdpo: the sigmoid loss for labels that are wrong with probability label_smoothing
    (ericmitchell.ai/cdpo.pdf)."""
    label_smoothing: float | None = Field(None, gt=0, lt=0.5)
    """Probability that a label is wrong. variant="cdpo" needs it; the other variants do not take it."""

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
        return True

    def compute(self, inputs: LossInputs) -> PairLoss:
        """-log σ(h) of each pair, h = β[(L⁺ - L⁻) - (Lref⁺ - Lref⁻)] (arXiv:2305.18290).

        L is the summed logprob of a sequence, Lref that of the reference. `ipo` is (h/β - 1/(2β))²
        (arXiv:2310.12036). `cdpo` is -(1 - ε) log σ(h) - ε log σ(-h), ε the probability of a wrong label. The reward
        metrics are the implicit rewards β(L - Lref).
        """
        # The summed log-ratios of the two sequences of each pair.
        log_ratio_N = inputs.require("logprobs_N") - inputs.require("reference_N")
        chosen_P, rejected_P = inputs.by_preference(inputs.sum_by_sequence(log_ratio_N))
        margin_P = chosen_P - rejected_P
        logit_P = self.beta * margin_P

        # The sigmoid loss is that of cdpo without label smoothing.
        if self.variant == "ipo":
            values_P = (margin_P - 1 / (2 * self.beta)).square()
        else:
            wrong = self.label_smoothing or 0.0
            values_P = -(1 - wrong) * inputs.log_sigmoid(logit_P) - wrong * inputs.log_sigmoid(-logit_P)

        # The metrics must not keep the graph of the forward pass alive.
        sums = {
            "reward_chosen_per_pair": self.beta * chosen_P.detach().sum(),
            "reward_rejected_per_pair": self.beta * rejected_P.detach().sum(),
            "reward_margin_per_pair": logit_P.detach().sum(),
            "accuracy_per_pair": (logit_P > 0).sum(),
        }
        return PairLoss(values_P, logit_P.detach(), sums)


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
        margin_P = chosen_P - rejected_P
        sums = {
            "reward_chosen_per_pair": chosen_P.detach().sum(),
            "reward_rejected_per_pair": rejected_P.detach().sum(),
            "reward_margin_per_pair": margin_P.detach().sum(),
            "accuracy_per_pair": (margin_P > 0).sum(),
        }
        return PairLoss(-inputs.log_sigmoid(margin_P - self.gamma), margin_P.detach(), sums)


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


PairSpec = DPOSpec | SimPOSpec | RankingSpec
"""Every loss of this module. A new one is added here."""
