"""Losses of preferences: golden values and gradients in float64, and values by hand."""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backends.protocol import Objective
from engine.backends.torch.packing import Packed
from engine.backends.torch.updates import count_totals, micro_batch_loss, update_metrics, validate_batch
from engine.errors import BadSpec
from engine.losses.base import PairLoss
from engine.losses.inputs import LossInputs, Outputs
from engine.losses.pairs import DPOSpec, KTOSpec, ORPOSpec, PairSpec, RankingSpec, SimPOSpec
from engine.models.samples import Sample
from tests.engine.losses.cases import loss_of


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def pair_loss(inputs: LossInputs, spec: PairSpec) -> PairLoss:
    loss = spec.compute(inputs)
    assert isinstance(loss, PairLoss)
    return loss


def one_pair(logprobs_N: Tensor, reference_N: Tensor) -> LossInputs:
    """A pair whose first sample, of two tokens, is not preferred; the preferred one has three tokens."""
    return LossInputs(
        Outputs(logprobs_N),
        (2, 3),
        reference_N=reference_N,
        preferred_P=torch.tensor([1]),
        dispreferred_P=torch.tensor([0]),
    )


# (w, l) = (-10, -12), reference (-11, -11.5): margin 1.5. h = 0.15: σ(h) = 0.53742985, σ(-h) = 0.46257015
@pytest.mark.parametrize(
    ("options", "value", "slope"),
    [
        ({"beta": 0.1}, 0.62095705, -0.1 * 0.46257015),
        ({"beta": 0.05}, 0.65635014, -0.05 * 0.48125878),  # σ(-0.075)
        ({"beta": 0.1, "variant": "cdpo", "label_smoothing": 0.1}, 0.63595705,
         -0.1 * (0.9 * 0.46257015 - 0.1 * 0.53742985)),
        ({"beta": 0.1, "variant": "ipo"}, 12.25, 2 * (1.5 - 5)),
    ],
    ids=["beta_0.1", "beta_0.05", "cdpo", "ipo"],
)  # fmt: skip
def test_golden_dpo(options: dict[str, Any], value: float, slope: float) -> None:
    """Every token of the preferred sample has the slope of the margin, and every token of the other its negative."""
    logprobs_N = f64(-5.5, -6.5, -2.0, -3.0, -5.0).requires_grad_()
    loss = pair_loss(one_pair(logprobs_N, f64(-5.0, -6.5, -1.0, -4.0, -6.0)), DPOSpec(**options))
    loss.values_P.sum().backward()
    assert loss.values_P.tolist() == pytest.approx([value], abs=5.1e-9)
    assert logprobs_N.grad.tolist() == pytest.approx([-slope, -slope, slope, slope, slope], abs=1e-8)


@pytest.mark.parametrize("spec", [DPOSpec(), DPOSpec(variant="cdpo", label_smoothing=0.2)], ids=["sigmoid", "cdpo"])
def test_at_the_reference_it_is_ln_2(spec: DPOSpec) -> None:
    same = f64(-1.0, -2.5, -0.3, -4.0, -0.2)
    loss = pair_loss(one_pair(same, same), spec)
    assert loss.values_P.tolist() == pytest.approx([log(2)], abs=1e-15)
    assert float(loss.sums["reward_margin_per_pair"]) == 0
    assert float(loss.sums["accuracy_per_pair"]) == 0  # a tie is not right


def test_rewards_are_the_implicit_ones() -> None:
    # β (L - Lref): 0.1 · (-10 + 11) and 0.1 · (-12 + 11.5)
    loss = pair_loss(one_pair(f64(-5.5, -6.5, -2, -3, -5), f64(-5, -6.5, -1, -4, -6)), DPOSpec(beta=0.1))
    sums = {name: float(value) for name, value in loss.sums.items()}
    assert sums == pytest.approx(
        {
            "reward_chosen_per_pair": 0.1,
            "reward_rejected_per_pair": -0.05,
            "reward_margin_per_pair": 0.15,
            "accuracy_per_pair": 1.0,
        }
    )


def test_metrics_carry_no_gradient() -> None:
    logprobs_N = f64(-5.5, -6.5, -2.0, -3.0, -5.0).requires_grad_()
    dpo = pair_loss(one_pair(logprobs_N, f64(0, 0, 0, 0, 0)), DPOSpec())
    assert not any(value.requires_grad for value in dpo.sums.values())
    inputs = LossInputs(
        Outputs(values_N=logprobs_N[:2]), (1, 1), preferred_P=torch.tensor([0]), dispreferred_P=torch.tensor([1])
    )
    assert not any(value.requires_grad for value in pair_loss(inputs, RankingSpec()).sums.values())


def test_simpo_by_hand() -> None:
    """Mean logprobs -10/3 and -6, β 2, γ 1: margin 16/3, h = 13/3, -log σ(h) = 0.01303836, 1 - σ(h) = 0.01295373."""
    logprobs_N = f64(-5.5, -6.5, -2.0, -3.0, -5.0).requires_grad_()
    inputs = LossInputs(
        Outputs(logprobs_N), (2, 3), preferred_P=torch.tensor([1]), dispreferred_P=torch.tensor([0])
    )
    loss = pair_loss(inputs, SimPOSpec())
    loss.values_P.sum().backward()
    assert loss.values_P.tolist() == pytest.approx([0.01303836], abs=1e-8)
    # β (1 - σ(h)) divided by the tokens of each sequence
    slope = 2 * 0.01295373
    assert logprobs_N.grad.tolist() == pytest.approx([slope / 2] * 2 + [-slope / 3] * 3, abs=1e-8)
    sums = {name: float(value) for name, value in loss.sums.items()}
    assert sums == pytest.approx(
        {
            "reward_chosen_per_pair": -20 / 3,
            "reward_rejected_per_pair": -12.0,
            "reward_margin_per_pair": 16 / 3,
            "accuracy_per_pair": 1.0,
        }
    )
    assert not any(value.requires_grad for value in loss.sums.values())


@pytest.mark.parametrize(
    ("options", "value", "rejected", "chosen"),
    [
        # means 1/3 and -1/4 of the log-ratios: margin 7/12, h 0.05833333, σ(-h) = 0.48542080
        ({"length_normalised": True}, 0.66440580, 0.1 * 0.48542080 / 2, -0.1 * 0.48542080 / 3),
        ({"length_normalised": True, "variant": "ipo"}, 19.50694444, -2 * (7 / 12 - 5) / 2, 2 * (7 / 12 - 5) / 3),
        # the golden loss plus 0.5 · 10/3
        ({"rpo_alpha": 0.5}, 0.62095705 + 1.66666667, 0.046257015, -0.046257015 - 0.5 / 3),
        # h = 0.1 (-10 + 12) = 0.2: -log σ(h) = 0.59813887, σ(-h) = 0.45016600
        ({"reference_free": True}, 0.59813887, 0.04501660, -0.04501660),
    ],
    ids=["means", "ipo_of_means", "rpo", "reference_free"],
)
def test_the_further_settings_of_dpo_by_hand(
    options: dict[str, Any], value: float, rejected: float, chosen: float
) -> None:
    logprobs_N = f64(-5.5, -6.5, -2.0, -3.0, -5.0).requires_grad_()
    inputs = one_pair(logprobs_N, f64(-5.0, -6.5, -1.0, -4.0, -6.0))
    loss = pair_loss(inputs, DPOSpec(**options))
    loss.values_P.sum().backward()
    assert loss.values_P.tolist() == pytest.approx([value], abs=1e-8)
    assert logprobs_N.grad.tolist() == pytest.approx([rejected] * 2 + [chosen] * 3, abs=1e-8)
    if DPOSpec(**options).reference_free:
        assert pair_loss(replace(inputs, reference_N=None), DPOSpec(**options)).values_P.item() == loss.values_P.item()


def test_orpo_by_hand() -> None:
    """Probabilities exp(-1) = 0.36787944 and exp(-2) = 0.13533528: log odds -0.54132485 and -1.85458654, ratio x =
    1.31326169, -log σ(x) = 0.23818303, σ(-x) = 0.21194156. d log odds / d l is 1/(1 - p): 1.58197671, 1.15651764."""
    logprobs_N = f64(-1.5, -2.5, -0.5, -1.0, -1.5).requires_grad_()
    inputs = LossInputs(
        Outputs(logprobs_N), (2, 3), preferred_P=torch.tensor([1]), dispreferred_P=torch.tensor([0])
    )
    loss = pair_loss(inputs, ORPOSpec(beta=0.1))
    loss.values_P.sum().backward()
    assert loss.values_P.tolist() == pytest.approx([1 + 0.1 * 0.23818303], abs=1e-8)
    chosen, rejected = -1 - 0.1 * 0.21194156 * 1.58197671, 0.1 * 0.21194156 * 1.15651764
    assert logprobs_N.grad.tolist() == pytest.approx([rejected / 2] * 2 + [chosen / 3] * 3, abs=1e-8)
    assert float(loss.sums["reward_margin_per_pair"]) == pytest.approx(0.1)
    # an answer that is certain has infinite odds, and still a finite gradient
    certain_N = f64(0.0, 0.0, -0.5, -1.0, -1.5).requires_grad_()
    pair_loss(replace(inputs, outputs=Outputs(certain_N)), ORPOSpec()).values_P.sum().backward()
    assert certain_N.grad.isfinite().all()


def test_kto_by_hand() -> None:
    """β 0.1, z 0.2. Desirable, r = 1: x = 0.1 (1 - 0.2) = 0.08, 1 - σ(x) = 0.48001066, slope -β σ(x) (1 - σ(x)) =
    -0.02496004. Undesirable, r = -0.5: x = 0.1 (0.2 + 0.5) = 0.07, 1 - σ(x) = 0.48250714, slope 0.02496940."""
    logprobs_N = f64(-5.5, -6.5, -2.0, -3.0, -5.0).requires_grad_()
    samples = [
        Sample([1, 2, 3], [0, 1, 1], "a", reference_logprobs=[-5.0, -6.5], preferred=False, kl_baseline=0.2),
        Sample([1, 2, 3, 4], [0, 1, 1, 1], "b", reference_logprobs=[-1, -4, -6], preferred=True, kl_baseline=0.2),
    ]
    loss = loss_of(KTOSpec(beta=0.1, undesirable_weight=2.0), samples, Outputs(logprobs_N))
    loss.backward()
    assert loss.item() == pytest.approx((0.48001066 + 2 * 0.48250714) / 2, abs=1e-8)
    slopes = [2 * 0.02496940 / 2] * 2 + [-0.02496004 / 2] * 3
    assert logprobs_N.grad.tolist() == pytest.approx(slopes, abs=1e-8)


def test_the_metrics_of_kto_are_means_of_each_label_and_its_baseline() -> None:
    samples = [
        Sample([1, 2], [0, 1], reference_logprobs=[-reference], preferred=reference > 1, kl_baseline=0.2)
        for reference in (1.0, 2.0, 4.0)
    ]
    totals = count_totals(samples)

    def forward(_: Packed) -> Outputs:
        return Outputs(f64(-1.5, -1.5, -1.5))

    _, sums = micro_batch_loss(forward, samples, Objective(KTOSpec()), totals, device=torch.device("cpu"))
    metrics = update_metrics(dict(sums) | {"loss": 0.0}, forward_samples=samples, totals=totals)
    expected = {"reward_chosen_mean": 0.1 * 1.5, "reward_rejected_mean": 0.1 * -0.5, "kl_baseline_mean": 0.2}
    assert metrics == pytest.approx(expected | {"loss": 0.0, "tokens": 3.0})
    # a minibatch of one label has no mean of the other
    one = update_metrics({"reward_rejected_per_other": 0.0, "loss": 0.0}, forward_samples=samples[1:], totals=totals)
    assert "reward_rejected_mean" not in one


def test_kto_needs_labels_and_a_baseline() -> None:
    columns = {"reference_logprobs": [-1.0], "preferred": True, "kl_baseline": 0.2}
    for missing, message in (("preferred", "labels of the samples"), ("kl_baseline", "a KL baseline")):
        bare = Sample([1, 2], [0, 1], **{name: value for name, value in columns.items() if name != missing})
        with pytest.raises(BadSpec, match=f"needs {message}"):
            validate_batch([bare], Objective(KTOSpec()))
        with pytest.raises(BadSpec, match=f"some samples of the batch have {missing} and some have none"):
            validate_batch([Sample([1, 2], [0, 1], **columns), bare], Objective(KTOSpec()))


def test_ranking_by_hand() -> None:
    # s⁺ - s⁻ = 1 and -2: -log σ = 0.31326169 and 2.12692801; slopes -(1 - σ) = -0.26894142 and -0.88079708
    scores_S = f64(0.5, -0.5, 3.0, 1.0).requires_grad_()
    inputs = LossInputs(
        Outputs(values_N=scores_S),
        (1, 1, 1, 1),
        preferred_P=torch.tensor([0, 3]),
        dispreferred_P=torch.tensor([1, 2]),
    )
    loss = pair_loss(inputs, RankingSpec())
    loss.values_P.sum().backward()
    assert loss.values_P.tolist() == pytest.approx([0.31326169, 2.12692801], abs=1e-8)
    assert scores_S.grad.tolist() == pytest.approx([-0.26894142, 0.26894142, 0.88079708, -0.88079708], abs=1e-8)
    sums = {name: float(value) for name, value in loss.sums.items()}
    assert sums == {"score_chosen_per_pair": 1.5, "score_rejected_per_pair": 2.5, "accuracy_per_pair": 1.0}
