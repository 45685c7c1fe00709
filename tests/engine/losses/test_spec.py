"""Loss specs as data, and the union that must have every one of them."""

from __future__ import annotations

import json
from inspect import isabstract
from typing import get_args

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from engine.errors import BadSpec
from engine.losses.base import KL_ESTIMATORS, BaseLossSpec, KLEstimator
from engine.losses.inputs import LossInputs, Outputs
from engine.losses.likelihood import CrossEntropySpec
from engine.losses.pairs import DPOSpec
from engine.losses.policy_gradient import CISPOSpec, GRPOSpec, GSPOSpec, OwnLossSpec
from engine.losses.spec import LossSpec
from engine.losses.values import MSESpec
from storage.serialization import canonical_json
from tests.engine.losses.cases import SPECS

SPEC = TypeAdapter(LossSpec)


def concrete_subclasses(base: type[BaseLossSpec]) -> set[type[BaseLossSpec]]:
    if base is OwnLossSpec:  # its subclasses are anybody's
        return {base}
    below = set[type[BaseLossSpec]]()
    for child in base.__subclasses__():
        below |= concrete_subclasses(child)
    return below if isabstract(base) else below | {base}


def test_the_union_has_every_loss_spec_and_the_table_every_estimator() -> None:
    assert set(get_args(get_args(LossSpec)[0])) == concrete_subclasses(BaseLossSpec)
    assert set(KL_ESTIMATORS) == set(get_args(KLEstimator))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_a_spec_survives_json(spec: LossSpec) -> None:
    assert SPEC.validate_json(spec.model_dump_json()) == spec
    assert SPEC.validate_python(json.loads(canonical_json(spec))) == spec  # as a step request carries it


def test_the_defaults() -> None:
    spec = GRPOSpec()
    assert (spec.clip_low, spec.clip_high, spec.kl_beta, spec.kl_estimator) == (0.1, 0.1, 0.01, "k3")
    assert (spec.norm, spec.dual_clip) == ("token_mean", None)
    assert CrossEntropySpec().norm == CISPOSpec().norm == MSESpec().norm == "token_mean"
    assert (GSPOSpec().clip_low, GSPOSpec().clip_high, GSPOSpec().norm) == (0.01, 0.01, "sequence_mean")
    assert (DPOSpec().beta, DPOSpec().variant, DPOSpec().label_smoothing) == (0.1, "sigmoid", None)
    off = (spec.entropy_coef, spec.importance_cap, spec.needs_entropy)
    assert off == (0.0, None, False)


def test_requests_of_before_dpo_had_more_settings_are_the_same() -> None:
    assert DPOSpec().model_dump() == {"kind": "dpo", "beta": 0.1, "variant": "sigmoid", "label_smoothing": None}
    assert DPOSpec(rpo_alpha=0.5, reference_free=True).model_dump().keys() >= {"rpo_alpha", "reference_free"}


@pytest.mark.parametrize("make", [GRPOSpec, GSPOSpec, CISPOSpec])
def test_requests_of_before_there_were_masks_and_a_kl_term_under_the_ratio_are_the_same(make: type[GRPOSpec]) -> None:
    assert "importance_mask" not in json.loads(canonical_json(make()))
    assert "kl_importance" not in make().model_dump() and "kl_importance" not in json.loads(canonical_json(make()))
    assert make(kl_importance=True).model_dump()["kl_importance"] is True
    with pytest.raises(ValidationError, match="has none with kl_beta=0"):
        make(kl_beta=0, kl_importance=True)


def test_what_a_loss_says_about_itself() -> None:
    """docs/algorithms.md: which losses read a scalar head, and which are of pairs."""
    assert {spec.kind for spec in SPECS.values() if spec.reads == "values"} == {"ranking", "mse", "trust_region_mse"}
    assert {spec.kind for spec in SPECS.values() if spec.pairwise} == {"dpo", "simpo", "orpo", "ranking"}
    assert {spec.kind for spec in SPECS.values() if spec.labelled} == {"kto"}
    at_one = {spec.kind for spec in SPECS.values() if not spec.uses_sampling_temperature}
    assert at_one == {"cross_entropy", "ranking", "mse", "trust_region_mse"}
    for spec in SPECS.values():
        always = spec.kind in ("dpo", "kto") and not getattr(spec, "reference_free", False)
        assert spec.needs_reference == (always or getattr(spec, "kl_beta", 0) > 0)
    assert {name for name, spec in SPECS.items() if spec.needs_entropy} == {
        "grpo-entropy", "grpo-all", "gspo-all", "cispo-all", "gmpo-all", "sapo-all",
    }  # fmt: skip


@pytest.mark.parametrize(
    "bad",
    [
        {"kind": "gspoo"},
        {"kind": "grpo", "clip": 0.2},
        {"kind": "grpo", "clip_low": 0.0},
        {"kind": "grpo", "clip_low": 1.5},
        {"kind": "grpo", "clip_high": -0.1},
        {"kind": "grpo", "dual_clip": 1.0},
        {"kind": "grpo", "kl_beta": -0.1},
        {"kind": "grpo", "kl_estimator": "k4"},
        {"kind": "grpo", "norm": "mean"},
        {"kind": "grpo", "norm": "constant"},
        {"kind": "grpo", "norm": "token_mean", "norm_constant": 8},
        {"kind": "cross_entropy", "norm": "constant"},
        {"kind": "cross_entropy", "norm": "constant", "norm_constant": 0},
        {"kind": "tangents", "norm": "token_mean"},
        {"kind": "gspo", "dual_clip": 3.0},
        {"kind": "cispo", "dual_clip": 3.0},
        {"kind": "gmpo", "dual_clip": 3.0},
        {"kind": "sapo", "clip_low": 0.2},
        {"kind": "sapo", "tau_positive": 0},
        {"kind": "kl_cov", "clip_low": 0.2},
        {"kind": "kl_cov", "cov_kl": 0},
        {"kind": "gspo", "entropy_coef": -0.1},
        {"kind": "gspo", "importance_cap": 0},
        {"kind": "grpo", "kl_beta": float("nan")},
        {"kind": "grpo", "clip_high": float("inf")},
        {"kind": "dpo", "beta": 0},
        {"kind": "dpo", "beta": float("inf")},
        {"kind": "dpo", "variant": "cdpo"},
        {"kind": "dpo", "label_smoothing": 0.1},
        {"kind": "dpo", "variant": "ipo", "label_smoothing": 0.1},
        {"kind": "dpo", "variant": "cdpo", "label_smoothing": 0.5},
        {"kind": "dpo", "rpo_alpha": -1},
        {"kind": "orpo", "beta": -0.1},
        {"kind": "kto", "beta": 0},
        {"kind": "kto", "desirable_weight": -1},
        {"kind": "ranking", "norm": "token_mean"},
        {"kind": "mse", "clip": 0.2},
        {"kind": "trust_region_mse", "clip": 0},
    ],
    ids=str,
)
def test_what_contradicts_itself_or_has_no_effect_is_refused(bad: dict) -> None:
    with pytest.raises(ValidationError):
        SPEC.validate_python(bad)


def test_cross_entropy_is_minus_the_logprob_and_pushes_it_up() -> None:
    logprobs = torch.tensor([-0.5, -2.0], dtype=torch.float64, requires_grad=True)
    token = CrossEntropySpec().compute(LossInputs(Outputs(logprobs)))
    token.values_N.sum().backward()
    assert token.values_N.tolist() == [0.5, 2.0]
    assert logprobs.grad.tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("missing", ["old_N", "reference_N", "advantages_N"])
def test_grpo_names_the_column_a_batch_lacks(missing: str) -> None:
    columns = {name: torch.zeros(2) for name in ("old_N", "reference_N", "advantages_N") if name != missing}
    name = {"old_N": "old logprobs", "reference_N": "reference logprobs", "advantages_N": "advantages"}[missing]
    with pytest.raises(BadSpec, match=name):
        GRPOSpec().compute(LossInputs(Outputs(torch.zeros(2)), **columns))


def test_grpo_without_a_kl_term_needs_no_reference() -> None:
    inputs = LossInputs(Outputs(torch.zeros(1)), old_N=torch.zeros(1), advantages_N=torch.ones(1))
    assert GRPOSpec(kl_beta=0.0).compute(inputs).values_N.tolist() == [-1.0]


def test_each_column_is_used_in_its_place() -> None:
    # ρ = e^(0.2) = 1.221403 inside the clip, A = 2, q - l = 0.1: k3 = e^0.1 - 0.1 - 1 = 0.00517092
    f64 = {"dtype": torch.float64}
    inputs = LossInputs(
        outputs=Outputs(torch.tensor([-0.8], **f64)),
        old_N=torch.tensor([-1.0], **f64),
        reference_N=torch.tensor([-0.7], **f64),
        advantages_N=torch.tensor([2.0], **f64),
    )
    token = GRPOSpec(clip_high=0.5, clip_low=0.5, kl_beta=0.1).compute(inputs)
    assert token.values_N.item() == pytest.approx(-2 * 1.22140276 + 0.1 * 0.00517092, abs=1e-8)
    assert token.sums["kl_sum"].item() == pytest.approx(0.00517092, abs=1e-8)
    assert token.sums["ratio_sum"].item() == pytest.approx(1.22140276, abs=1e-8)
