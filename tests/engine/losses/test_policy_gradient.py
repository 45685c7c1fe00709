"""The policy gradients against published fixtures: values and gradients, in float64.

Two sequences of 2 and 4 tokens, advantages +1 and -1. The numbers are golden values of the project's algorithm notes,
checked there against independent implementations; none comes from this code.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from engine.backends.torch.updates import token_weights
from engine.errors import BadSpec
from engine.losses.base import KL_ESTIMATORS, TokenLoss
from engine.losses.inputs import LossInputs, Outputs
from engine.losses.policy_gradient import (
    CISPOSpec,
    ClipCovSpec,
    GRPOSpec,
    GSPOSpec,
    ImportanceMask,
    KLCovSpec,
    ProbabilityMask,
    SequenceRatioMask,
    TokenRatioMask,
)
from tests.engine.losses.cases import SPECS


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


OLD = f64(-2, -2, -2, -0.3, -2, -2)
NEW = f64(-1.78, -2.1, -0.5, -0.7, -2.0, -2.05)
ADVANTAGES = f64(1, 1, -1, -1, -1, -1)
LENGTHS = (2, 4)
BY_02: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2, "kl_beta": 0.0}

PolicySpec = GRPOSpec | GSPOSpec | CISPOSpec


def fixture_inputs(logprobs_N: Tensor, reference_N: Tensor | None = None) -> LossInputs:
    outputs = Outputs(logprobs_N=logprobs_N)
    return LossInputs(outputs, LENGTHS, old_N=OLD, reference_N=reference_N, advantages_N=ADVANTAGES)


def one_token(logprob: Tensor, old: float, advantage: float, **columns: Tensor) -> LossInputs:
    return LossInputs(Outputs(logprob), (1,), old_N=f64(old), advantages_N=f64(advantage), **columns)


def token_loss(inputs: LossInputs, spec: PolicySpec) -> TokenLoss:
    loss = spec.compute(inputs)
    assert isinstance(loss, TokenLoss)
    return loss


def loss_and_gradient(spec: PolicySpec) -> tuple[float, list[float]]:
    logprobs_N = NEW.clone().requires_grad_()
    token = token_loss(fixture_inputs(logprobs_N), spec)
    weights_N = token_weights(
        LENGTHS, norm=spec.norm, total_tokens=6, total_sequences=2, constant=spec.norm_constant
    )
    loss = (token.values_N * weights_N).sum()
    loss.backward()
    return loss.item(), logprobs_N.grad.tolist()


GOLDEN = {
    "dual_clip": (GRPOSpec(**BY_02, dual_clip=3.0), 0.60773200, [0, -0.150806, 0, 0, 0.166667, 0.158538]),
    "token_mean": (GRPOSpec(**BY_02), 0.85468018, [0, -0.150806, 0.746948, 0, 0.166667, 0.158538]),
    "clip_higher": (
        GRPOSpec(**BY_02 | {"clip_high": 0.28}),
        0.84700072,
        [-0.207679, -0.150806, 0.746948, 0, 0.166667, 0.158538],
    ),
    "sequence_mean": (
        GRPOSpec(**BY_02, norm="sequence_mean"),
        0.37790546,
        [0, -0.226209, 0.560211, 0, 0.125, 0.118904],
    ),
    "token_sum": (GRPOSpec(**BY_02, norm="token_sum"), 5.12808108, [0, -0.904837, 4.481689, 0, 1.0, 0.951229]),
    "constant": (
        GRPOSpec(**BY_02, norm="constant", norm_constant=8),
        0.32050507,
        [0, -0.056552, 0.280106, 0, 0.0625, 0.059452],
    ),
    "gspo_narrow": (
        GSPOSpec(clip_low=3e-4, clip_high=4e-4, kl_beta=0.0),
        0.14988823,
        [0, 0, 0.162522, 0.162522, 0.162522, 0.162522],
    ),
    "gspo_wide": (
        GSPOSpec(**BY_02),
        0.11916996,
        [-0.265459, -0.265459, 0.162522, 0.162522, 0.162522, 0.162522],
    ),
    "cispo": (CISPOSpec(**BY_02), -0.17897696, [-0.2, -0.150806, 0.2, 0.133333, 0.166667, 0.158538]),
}


@pytest.mark.parametrize(("spec", "value", "gradient"), GOLDEN.values(), ids=GOLDEN.keys())
def test_golden_values_and_gradients(spec: PolicySpec, value: float, gradient: list[float]) -> None:
    loss, actual = loss_and_gradient(spec)
    assert loss == pytest.approx(value, abs=5.1e-9)  # all of the digits that the notes give
    assert actual == pytest.approx(gradient, abs=5.1e-7)


@pytest.mark.parametrize(
    ("name", "mean"), [("k1", 0.05833333), ("abs", 0.55 / 6), ("k2", 0.00604167), ("k3", 0.00580099)]
)
def test_golden_kl(name: str, mean: float) -> None:
    gaps = f64(0.2, -0.1, 0.1, 0.1, 0, 0.05)
    assert KL_ESTIMATORS[name](gaps, torch.zeros_like(gaps)).mean().item() == pytest.approx(mean, abs=5e-9)


def test_the_kl_term_pulls_towards_the_reference() -> None:
    # d k3 / d l = 1 - exp(q - l); l above q: positive, so descent lowers l
    logprob = f64(-1.0).requires_grad_()
    token = token_loss(one_token(logprob, -1.0, 0.0, reference_N=f64(-2.0)), GRPOSpec(kl_beta=0.5))
    token.values_N.sum().backward()
    assert logprob.grad.item() == pytest.approx(0.5 * (1 - 0.36787944), abs=1e-8)
    assert token.sums["kl_sum"].item() == pytest.approx(0.36787944 + 1 - 1, abs=1e-8)


KL_GAPS = (0.2, -0.1, 0.1, 0.1, 0, 0.05)
"""l - q of the golden KL values."""


@pytest.mark.parametrize(
    ("spec", "values"),
    [
        # by hand: k3 is 0.01873075, 0.00517092, 0.00483742 (twice), 0, 0.00122942; the ratios are e^ of 0.22, -0.1,
        # 1.5, -0.4, 0, -0.05, and of the sequences' means, 0.06 and 0.2625
        (GRPOSpec(kl_beta=0.5, kl_importance=True), [0.02333996, 0.00467884, 0.02167980, 0.00324262, 0, 0.00116946]),
        (CISPOSpec(kl_beta=0.5, kl_importance=True), [0.02333996, 0.00467884, 0.02167980, 0.00324262, 0, 0.00116946]),
        (GSPOSpec(kl_beta=0.5, kl_importance=True), [0.01988900, 0.00549067, 0.00628950, 0.00628950, 0, 0.00159847]),
    ],
    ids=["grpo", "cispo", "gspo"],
)
def test_a_kl_term_under_the_ratio(spec: PolicySpec, values: list[float]) -> None:
    """Tokens have no advantage, so the loss is the KL term alone."""
    reference_N = NEW - f64(*KL_GAPS)
    logprobs_N = NEW.clone().requires_grad_()
    inputs = replace(fixture_inputs(logprobs_N, reference_N), advantages_N=torch.zeros(6, dtype=torch.float64))
    token = token_loss(inputs, spec)
    assert token.values_N.tolist() == pytest.approx([0.5 * value for value in values], abs=5.1e-9)
    assert token.sums["kl_sum"].item() == pytest.approx(6 * 0.00580099, abs=5e-8)  # what is measured has no weights
    token.values_N.sum().backward()
    if spec.kind != "gspo":  # d rho k3 / d l = rho (k3 + 1 - exp(q - l)) = rho (l - q)
        slopes = [0.24921535, -0.09048374, 0.44816891, 0.06703200, 0, 0.04756147]
        assert logprobs_N.grad.tolist() == pytest.approx([0.5 * slope for slope in slopes], abs=5.1e-9)


def test_the_kl_term_under_the_ratio_and_its_gradient_are_unbiased() -> None:
    """Over a vocabulary of four, the mean of the token loss under the old policy is the KL divergence itself."""
    logits_V = f64(0.3, -0.5, 1.2, 0.1).requires_grad_()
    old_V, reference_V = f64(0.1, 0.4, 0.3, 0.2), f64(0.25, 0.25, 0.3, 0.2)
    log_p_V = logits_V.log_softmax(0)
    divergence = (log_p_V.exp() * (log_p_V - reference_V.log())).sum()
    (exact_V,) = torch.autograd.grad(divergence, logits_V, retain_graph=True)
    by_weighting = {}
    for weighted in (True, False):
        inputs = LossInputs(
            Outputs(log_p_V), (4,), old_N=old_V.log(), reference_N=reference_V.log(), advantages_N=torch.zeros(4),
        )  # fmt: skip
        token = token_loss(inputs, GRPOSpec(kl_beta=1.0, kl_importance=weighted))
        mean = (old_V * token.values_N).sum()
        by_weighting[weighted] = mean.item(), torch.autograd.grad(mean, logits_V, retain_graph=True)[0].tolist()
    assert by_weighting[True][0] == pytest.approx(divergence.item(), rel=1e-12)
    assert by_weighting[True][1] == pytest.approx(exact_V.tolist(), rel=1e-12)
    assert by_weighting[False][1] != pytest.approx(exact_V.tolist(), rel=0.1)  # the plain term's is another direction


def test_kl_without_a_reference_is_refused() -> None:
    with pytest.raises(BadSpec, match="needs reference logprobs"):
        token_loss(fixture_inputs(NEW), GRPOSpec(kl_beta=0.1))


def test_a_reference_without_a_kl_term_is_only_measured() -> None:
    # q - l = 800: exp overflows even in float64, and 0 times that would be NaN
    logprob = f64(-801.0).requires_grad_()
    token = token_loss(one_token(logprob, -801.0, 2.0, reference_N=f64(-1.0)), GRPOSpec(kl_beta=0.0))
    token.values_N.sum().backward()
    assert (token.values_N.item(), logprob.grad.item()) == (-2.0, -2.0)
    assert token.sums["kl_sum"].isinf()


@pytest.mark.parametrize(
    ("name", "gradient"),
    # at l - q = 0.5: d k1 = 1, d |l-q| = 1, d k2 = l - q, d k3 = 1 - exp(q - l)
    [("k1", 1.0), ("abs", 1.0), ("k2", 0.5), ("k3", 1 - 0.60653066)],
)
def test_the_gradient_of_each_kl_estimator(name: str, gradient: float) -> None:
    logprob = f64(-1.0).requires_grad_()
    KL_ESTIMATORS[name](logprob, f64(-1.5)).sum().backward()
    assert logprob.grad.item() == pytest.approx(gradient, abs=1e-8)


@pytest.mark.parametrize("name", ["abs", "k2", "k3"])
def test_kl_is_zero_at_the_reference_and_positive_on_both_sides(name: str) -> None:
    below, at_zero, above = KL_ESTIMATORS[name](f64(-0.7, 0.0, 0.7), f64(0, 0, 0)).tolist()
    assert at_zero == 0 and below > 0 and above > 0


@pytest.mark.parametrize(
    ("gap", "advantage", "value", "gradient", "clipped"),
    [
        # clip 0.2 / 0.2; e^0.5 = 1.64872127, e^-0.5 = 0.60653066. A clipped token has no gradient …
        (0.5, 1.0, -1.2, 0.0, 1),
        (-0.5, -1.0, 0.8, 0.0, 1),
        # … but one that went the wrong way keeps its own: the minimum is pessimistic
        (0.5, -1.0, 1.64872127, 1.64872127, 0),
        (-0.5, 1.0, -0.60653066, -0.60653066, 0),
        # on policy the gradient is -A
        (0.0, 1.0, -1.0, -1.0, 0),
        (0.0, -2.0, 2.0, 2.0, 0),
    ],
)
@pytest.mark.parametrize("spec", [GRPOSpec(**BY_02), GSPOSpec(**BY_02)], ids=["grpo", "gspo"])
def test_one_token(
    spec: PolicySpec, gap: float, advantage: float, value: float, gradient: float, clipped: int
) -> None:
    """In a sequence of one token, the ratio of the sequence is that of the token."""
    logprob = f64(-1.0 + gap).requires_grad_()
    token = token_loss(one_token(logprob, -1.0, advantage), spec)
    token.values_N.sum().backward()
    assert token.values_N.item() == pytest.approx(value, abs=1e-8)
    assert logprob.grad.item() == pytest.approx(gradient, abs=1e-8)
    assert token.sums["clip_fraction_sum"].item() == clipped


@pytest.mark.parametrize(
    ("gap", "advantage", "value", "gradient", "clipped"),
    [
        # clip 0.2 / 0.2, l = -1 + gap; value -w A l and gradient -w A, whichever side was passed: none is lost
        (0.5, 1.0, 1.2 * 0.5, -1.2, 1),
        (0.5, -1.0, -1.2 * 0.5, 1.2, 1),
        (-0.5, 1.0, 0.8 * 1.5, -0.8, 1),
        (-0.5, -1.0, -0.8 * 1.5, 0.8, 1),
        (0.0, 2.0, 2.0, -2.0, 0),
    ],
)
def test_cispo_keeps_the_gradient_of_every_token(
    gap: float, advantage: float, value: float, gradient: float, clipped: int
) -> None:
    logprob = f64(-1.0 + gap).requires_grad_()
    token = token_loss(one_token(logprob, -1.0, advantage), CISPOSpec(**BY_02))
    token.values_N.sum().backward()
    assert token.values_N.item() == pytest.approx(value, rel=1e-12)
    assert logprob.grad.item() == pytest.approx(gradient, rel=1e-12)
    assert token.sums["clip_fraction_sum"].item() == clipped


def test_the_dual_clip_never_touches_a_positive_advantage() -> None:
    # ρ = e^-2 with A = +1 and ρ = e^2 with A = -1: only the second is bounded, at 3
    inputs = LossInputs(Outputs(f64(-2.0, 2.0)), (2,), old_N=f64(0, 0), advantages_N=f64(1.0, -1.0))
    values = token_loss(inputs, GRPOSpec(**BY_02, dual_clip=3.0)).values_N
    assert values.tolist() == pytest.approx([-0.13533528, 3.0], abs=1e-8)


@pytest.mark.parametrize(
    ("spec", "value", "gradient"),
    [
        # on policy, A = 2, l = -1; o - sampler = ln 1.5 and ln 4, cap 3: weights 1.5 and 3 on the policy's own part
        (GRPOSpec(kl_beta=0.0, importance_cap=3), [-2 * 1.5, -2 * 3], [-2 * 1.5, -2 * 3]),
        (GSPOSpec(kl_beta=0.0, importance_cap=3), [-2 * 1.5, -2 * 3], [-(2 * 1.5 + 2 * 3) / 2] * 2),
        (CISPOSpec(kl_beta=0.0, importance_cap=3), [2 * 1.5, 2 * 3], [-2 * 1.5, -2 * 3]),
        # k2 with l - q = 0.5 adds 0.1 · 0.125, and 0.1 · 0.5 to the gradient, unweighted
        (
            GRPOSpec(kl_beta=0.1, kl_estimator="k2", importance_cap=3),
            [-2 * 1.5 + 0.0125, -2 * 3 + 0.0125],
            [-2 * 1.5 + 0.05, -2 * 3 + 0.05],
        ),
    ],
    ids=["grpo", "gspo", "cispo", "with_kl"],
)
def test_truncated_importance_weights(spec: PolicySpec, value: list[float], gradient: list[float]) -> None:
    logprobs_N = f64(-1.0, -1.0).requires_grad_()
    inputs = LossInputs(
        Outputs(logprobs_N),
        (2,),
        old_N=f64(-1.0, -1.0),
        reference_N=f64(-1.5, -1.5),
        sampler_N=f64(-1.0, -1.0) - f64(1.5, 4.0).log(),
        advantages_N=f64(2.0, 2.0),
    )
    token = token_loss(inputs, spec)
    token.values_N.sum().backward()
    assert token.values_N.tolist() == pytest.approx(value, rel=1e-12)
    assert logprobs_N.grad.tolist() == pytest.approx(gradient, rel=1e-12)
    assert token.sums["importance_weight_sum"].item() == pytest.approx(1.5 + 3)


def masked(spec: PolicySpec, ratios: Tensor, lengths: tuple[int, ...], advantages: Tensor) -> tuple[TokenLoss, Tensor]:
    """The loss and the gradient of tokens with l = o = -1 and these ratios exp(o - sampler)."""
    logprobs_N = torch.full_like(ratios, -1.0).requires_grad_()
    inputs = LossInputs(
        Outputs(logprobs_N),
        lengths,
        old_N=logprobs_N.detach(),
        sampler_N=-1 - ratios.log(),
        advantages_N=advantages,
    )
    token = token_loss(inputs, spec)
    token.values_N.sum().backward()
    return token, logprobs_N.grad


@pytest.mark.parametrize(
    ("cap", "weights"),
    [
        # IcePop: M(k) = k in [0.5, 5], else 0
        (None, [0, 0.51, 4.9, 0]),
        (3.0, [0, 0.51, 3.0, 0]),
    ],
)
def test_the_mask_of_tokens_by_their_ratio(cap: float | None, weights: list[float]) -> None:
    spec = GRPOSpec(kl_beta=0.0, importance_cap=cap, importance_mask=TokenRatioMask())
    token, gradient = masked(spec, f64(0.49, 0.51, 4.9, 5.1), (1, 3), f64(2, 2, -2, -2))
    expected = [0, -2 * weights[1], 2 * weights[2], 0]
    assert token.values_N.tolist() == pytest.approx(expected, rel=1e-12)
    assert gradient.tolist() == pytest.approx(expected, rel=1e-12)
    assert token.sums["masked_fraction_sum"] == 2
    assert token.sums["importance_weight_sum"].item() == pytest.approx(sum(weights))


def test_the_mask_of_sequences_by_the_geometric_mean_of_their_ratios() -> None:
    """Means: (4 · 0.25)^(1/2) = 1; 1.01^(1/3) = 1.0033 > 1.002; 0.99^(1/2) = 0.99499 < 0.999; 1.001."""
    spec = GRPOSpec(kl_beta=0.0, importance_mask=SequenceRatioMask())
    ratios = f64(4, 0.25, 1.01, 1, 1, 0.99, 1, 1.001)
    token, gradient = masked(spec, ratios, (2, 3, 2, 1), torch.full_like(ratios, 2.0))
    expected = [-8, -0.5, 0, 0, 0, 0, 0, -2.002]
    assert token.values_N.tolist() == pytest.approx(expected, rel=1e-12)
    assert gradient.tolist() == pytest.approx(expected, rel=1e-12)
    assert token.sums["masked_fraction_sum"] == 5


def test_the_mask_of_tokens_by_the_change_of_their_probability() -> None:
    """DPPO: a token is masked if its probability went up by more than 0.2 with A > 0, or down by more with A < 0."""
    now, advantages = f64(0.71, 0.69, 0.71, 0.29, 0.31, 0.29, 0.29), f64(1, 1, -1, -1, -1, 1, 0)
    logprobs_N = now.log().requires_grad_()
    inputs = LossInputs(
        Outputs(logprobs_N), (7,), old_N=now.log(), sampler_N=torch.full_like(now, 0.5).log(), advantages_N=advantages
    )
    token = token_loss(inputs, GRPOSpec(kl_beta=0.0, importance_mask=ProbabilityMask()))
    token.values_N.sum().backward()
    # the weight is now / 0.5, the ratio 1
    expected = [0, -1.38, 1.42, 0, 0.62, -0.58, 0]
    assert token.values_N.tolist() == pytest.approx(expected, rel=1e-12)
    assert logprobs_N.grad.tolist() == pytest.approx(expected, rel=1e-12)
    assert token.sums["masked_fraction_sum"] == 2


def test_the_probability_mask_follows_the_weights_in_training() -> None:
    """DPPO bounds the policy in training: with several updates the ratio masks look at the policy before the step."""
    inputs = LossInputs(
        Outputs(f64(0.8).log()), (1,), old_N=f64(0.5).log(), sampler_N=f64(0.5).log(), advantages_N=f64(1.0)
    )
    for mask, masked_tokens in ((ProbabilityMask(), 1), (TokenRatioMask(high=1.5), 0)):
        loss = token_loss(inputs, GRPOSpec(kl_beta=0.0, importance_mask=mask))
        assert loss.sums["masked_fraction_sum"] == masked_tokens


def test_a_masked_token_of_gspo_still_counts_in_the_ratio_of_its_sequence() -> None:
    """s = 1; the loss of token 0 is -s·A·1.5 and has gradient through both tokens, that of token 1 is 0."""
    spec = GSPOSpec(kl_beta=0.0, importance_mask=TokenRatioMask())
    token, gradient = masked(spec, f64(1.5, 6), (2,), f64(2, 2))
    assert token.values_N.tolist() == pytest.approx([-3, 0])
    assert gradient.tolist() == pytest.approx([-1.5, -1.5])


@pytest.mark.parametrize("mask", [TokenRatioMask(), SequenceRatioMask(), ProbabilityMask()], ids=lambda m: m.kind)
def test_without_a_token_that_is_kept_loss_and_gradient_are_zero(mask: ImportanceMask) -> None:
    spec = GRPOSpec(kl_beta=0.0, importance_mask=mask)
    logprobs_N = f64(-0.1, -0.1).requires_grad_()
    inputs = LossInputs(
        Outputs(logprobs_N), (2,), old_N=f64(-0.1, -0.1), sampler_N=f64(-900, -900), advantages_N=f64(1, 1)
    )
    token = token_loss(inputs, spec)
    token.values_N.sum().backward()
    assert token.values_N.tolist() == [0, 0] and logprobs_N.grad.tolist() == [0, 0]
    numbers = {name: value.item() for name, value in token.sums.items()}
    assert numbers["masked_fraction_sum"] == 2
    assert numbers["effective_weight_sum"] == numbers["effective_weight_square_sum"] == 0


def test_a_masked_token_keeps_its_kl_term_and_counts_in_the_mean() -> None:
    """k2 of l - q = 0.5 is 0.125. The mean over both tokens is that of -2·1 + 0.0125 and 0 + 0.0125."""
    inputs = LossInputs(
        Outputs(f64(-1, -1)),
        (2,),
        old_N=f64(-1, -1),
        reference_N=f64(-1.5, -1.5),
        sampler_N=-1 - f64(1, 6).log(),
        advantages_N=f64(2, 2),
    )
    spec = GRPOSpec(kl_beta=0.1, kl_estimator="k2", importance_mask=TokenRatioMask())
    token = token_loss(inputs, spec)
    assert token.values_N.tolist() == pytest.approx([-1.9875, 0.0125])
    weights_N = token_weights((2,), norm="token_mean", total_tokens=2, total_sequences=1)
    assert (token.values_N * weights_N).sum().item() == pytest.approx(-0.9875)


def test_the_sums_of_the_effective_sample_size() -> None:
    """The weights 1, 3 and 0 (masked) times the ratios 2, 1 and 1: (2 + 3)² / (4 + 9) = 1.923 of 3 tokens."""
    inputs = LossInputs(
        Outputs(f64(-1, -1, -1)),
        (3,),
        old_N=f64(-1, -1, -1) - f64(2, 1, 1).log(),
        sampler_N=f64(-1, -1, -1) - f64(2, 1, 1).log() - f64(1, 4, 6).log(),
        advantages_N=f64(1, 1, 1),
    )
    capped = token_loss(inputs, GRPOSpec(kl_beta=0.0, importance_cap=3, importance_mask=TokenRatioMask())).sums
    assert capped["effective_weight_sum"].item() == pytest.approx(5)
    assert capped["effective_weight_square_sum"].item() == pytest.approx(13)
    # with the sampler's logprobs as the old ones, the ratio is the weight
    inputs = replace(inputs, sampler_N=inputs.old_N, old_is_sampler=True)
    ratios = token_loss(inputs, GRPOSpec(kl_beta=0.0)).sums
    assert ratios["effective_weight_sum"].item() == pytest.approx(4)
    assert ratios["effective_weight_square_sum"].item() == pytest.approx(6)
    plain = token_loss(replace(inputs, old_is_sampler=False), GRPOSpec(kl_beta=0.0)).sums
    assert "effective_weight_sum" not in plain


@pytest.mark.parametrize(
    "bounds",
    [
        {"kind": "token_ratio", "low": 1.1}, {"kind": "token_ratio", "high": 0.9},
        {"kind": "sequence_ratio", "low": -1}, {"kind": "probability", "low": 0}, {"kind": "probability", "high": 1.1},
        {"kind": "token_ratio", "other": 1}, {"kind": "icepop"}, {"low": 0.5},
    ],
)  # fmt: skip
def test_a_mask_with_other_settings_is_refused(bounds: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GRPOSpec(importance_mask=bounds)  # type: ignore[arg-type]


def test_entropy_is_taken_off_the_loss() -> None:
    logprob, entropy = f64(-1.0).requires_grad_(), f64(2.0).requires_grad_()
    inputs = LossInputs(Outputs(logprob, entropy_N=entropy), (1,), old_N=f64(-1.0), advantages_N=f64(3.0))
    token = token_loss(inputs, GRPOSpec(kl_beta=0.0, entropy_coef=0.25))
    token.values_N.sum().backward()
    assert token.values_N.item() == pytest.approx(-3.0 - 0.25 * 2.0)
    assert (logprob.grad.item(), entropy.grad.item()) == pytest.approx((-3.0, -0.25))
    assert token.sums["entropy_sum"].item() == 2.0


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if isinstance(spec, PolicySpec)])
def test_metrics_carry_no_gradient_and_add_over_micro_batches(name: str) -> None:
    spec = SPECS[name]

    def inputs(begin: int, end: int, *lengths: int) -> LossInputs:
        part = slice(begin, end)
        leaf_N = NEW[part].clone().requires_grad_()
        return LossInputs(
            Outputs(leaf_N, entropy_N=-leaf_N),
            lengths,
            old_N=OLD[part],
            reference_N=OLD[part] + 0.1,
            sampler_N=OLD[part] - 0.3,
            advantages_N=ADVANTAGES[part],
        )

    whole, first, second = (token_loss(i, spec) for i in (inputs(0, 6, 2, 4), inputs(0, 2, 2), inputs(2, 6, 4)))
    assert torch.equal(whole.values_N, torch.cat([first.values_N, second.values_N]))
    assert whole.sums.keys() == first.sums.keys() == second.sums.keys()
    for metric, value in whole.sums.items():
        assert not value.requires_grad
        assert float(value) == pytest.approx(float(first.sums[metric]) + float(second.sums[metric]), rel=1e-12)


def test_the_clip_fraction_by_hand() -> None:
    # token 0 (ρ 1.246 > 1.2, A > 0) and token 3 (ρ 0.670 < 0.8, A < 0); of the sequences neither
    assert token_loss(fixture_inputs(NEW), GRPOSpec(**BY_02)).sums["clip_fraction_sum"] == 2
    assert token_loss(fixture_inputs(NEW), GSPOSpec(**BY_02)).sums["clip_fraction_sum"] == 0
    # s = e^0.06 and e^0.2625: the first is clipped, and counts for its two tokens
    narrow = GSPOSpec(clip_low=3e-4, clip_high=4e-4, kl_beta=0.0)
    assert token_loss(fixture_inputs(NEW), narrow).sums["clip_fraction_sum"] == 2


@pytest.mark.parametrize(
    ("spec", "value", "gradient"),
    [
        # the golden loss of token_mean without its third token, e^1.5 / 6
        (ClipCovSpec(**BY_02), 0.10773200, [0, -0.150806, 0, 0, 0.166667, 0.158538]),
        # unclipped: (-1.24607673 - 0.90483742 + 4.48168907 + 0.67032005 + 1 + 0.95122942 + 2 · 1.5) / 6
        (KLCovSpec(kl_beta=0, cov_kl=2.0), 1.32538740, [-0.207679, -0.150806, 1.080281, 0.111720, 0.166667, 0.158538]),
    ],
    ids=["clip_cov", "kl_cov"],
)
def test_selected_tokens_by_hand(spec: ClipCovSpec | KLCovSpec, value: float, gradient: list[float]) -> None:
    logprobs_N = NEW.clone().requires_grad_()
    inputs = replace(fixture_inputs(logprobs_N), selected_N=f64(0, 0, 1, 0, 0, 0))
    loss = spec.compute(inputs)
    (loss.values_N.sum() / 6).backward()
    assert loss.values_N.sum().item() / 6 == pytest.approx(value, abs=1e-8)
    assert logprobs_N.grad.tolist() == pytest.approx(gradient, abs=1e-6)
    assert loss.sums["selected_fraction_sum"] == 1
    with pytest.raises(BadSpec, match="needs selected tokens"):
        spec.compute(fixture_inputs(logprobs_N))


def test_constant_norm_needs_its_constant() -> None:
    with pytest.raises(ValueError, match="give norm_constant"):
        GRPOSpec(norm="constant")
