"""Losses of pairs, one of each preferred. Axes: N trained token · S sequence · P pair"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from engine.losses.inputs import LossInputs, PairLoss
from engine.losses.segments import sum_by_sequence
from engine.losses.spec import DPOSpec, RankingSpec


def dpo_loss(inputs: LossInputs, spec: DPOSpec) -> PairLoss:
    """-log σ(h), h = β[(L⁺ - L⁻) - (Lref⁺ - Lref⁻)], L the summed logprob of a sequence (arXiv:2305.18290); `ipo`:
    (h/β - 1/(2β))² (arXiv:2310.12036); `cdpo`: the sigmoid loss under labels that are wrong with probability ε.

    The rewards among the metrics are the implicit ones, β(L - Lref).
    """
    lead_S = sum_by_sequence(inputs.needed("logprobs_N") - inputs.needed("reference_N"), inputs.lengths_S)
    good_P, bad_P = _pairs_of(lead_S, inputs)
    margin_P = good_P - bad_P
    logit_P = spec.beta * margin_P
    if spec.variant == "ipo":
        values_P = (margin_P - 1 / (2 * spec.beta)).square()
    else:
        wrong = spec.label_smoothing or 0.0
        values_P = -(1 - wrong) * logsigmoid(logit_P) - wrong * logsigmoid(-logit_P)
    return PairLoss(
        values_P,
        {
            "reward_chosen_per_pair": spec.beta * good_P.detach().sum(),
            "reward_rejected_per_pair": spec.beta * bad_P.detach().sum(),
            "reward_margin_per_pair": logit_P.detach().sum(),
            "accuracy_per_pair": (logit_P > 0).sum(),
        },
    )


def ranking_loss(inputs: LossInputs, _: RankingSpec) -> PairLoss:
    """-log σ(s⁺ - s⁻), s the score of a sequence: the sum of its values, of which it has one."""
    good_P, bad_P = _pairs_of(sum_by_sequence(inputs.needed("values_N"), inputs.lengths_S), inputs)
    return PairLoss(
        -logsigmoid(good_P - bad_P),
        {
            "score_chosen_per_pair": good_P.detach().sum(),
            "score_rejected_per_pair": bad_P.detach().sum(),
            "accuracy_per_pair": (good_P > bad_P).sum(),
        },
    )


def _pairs_of(values_S: Tensor, inputs: LossInputs) -> tuple[Tensor, Tensor]:
    preferred_P, dispreferred_P = inputs.needed("preferred_P"), inputs.needed("dispreferred_P")
    return values_S.index_select(0, preferred_P), values_S.index_select(0, dispreferred_P)
