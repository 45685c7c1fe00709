"""Loss and gradient of every loss are those of its formula over plain forwards of transformers, one sample at a time,
however the samples are packed and split: to 1e-10 in float64, to 1e-5 in float32."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch

from engine.backends.protocol import Objective
from engine.backends.torch.packing import longest_unit
from engine.backends.torch.trainer import TorchTrainer
from engine.losses.spec import LossSpec
from tests.engine.losses.cases import SPECS, VARIANTS, samples_near
from tests.engine.losses.conftest import load
from tests.engine.losses.plain import DEFINITIONS, Plain
from tests.engine.torch.gradients import WHOLE, distance, update

WITHIN = {torch.float64: 1e-10, torch.float32: 1e-5}


def test_every_loss_is_tested() -> None:
    kinds = {member.model_fields["kind"].default for member in get_args(get_args(LossSpec)[0])}
    assert set(VARIANTS) == set(DEFINITIONS) == kinds - {"own"}  # tests/engine/losses/test_own_loss.py


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=["float64", "float32"])
def pair(request: pytest.FixtureRequest, small_folder: Path, small_scalar_folder: Path) -> dict:
    """What the loss reads -> (plain model, trainer, samples, tolerance)."""
    setups = {}
    for reads, folder in (("logprobs", small_folder), ("values", small_scalar_folder)):
        plain = Plain(folder, request.param, scalar=reads == "values")
        samples = samples_near(plain.numbers, scalar=plain.scalar)
        setups[reads] = (plain, TorchTrainer(load(folder, request.param)), samples, WITHIN[request.param])
    return setups


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_the_gradient_is_that_of_the_formula(pair: dict, spec: LossSpec) -> None:
    plain, trainer, samples, within = pair[spec.reads]
    temperature = 0.8 if spec.reads == "logprobs" else 1.0
    loss, expected = plain.loss_and_gradient(spec, samples, temperature)
    least = longest_unit(samples, whole_groups=spec.pairwise)
    for max_tokens, least_micro_batches in ((WHOLE, 1), (least, 3)):
        report, gradient = update(trainer, samples, Objective(spec, temperature), max_tokens=max_tokens)
        assert report.micro_batches >= least_micro_batches
        assert distance(gradient, expected) <= within
        # gains and losses of size 1 may cancel each other, their rounding errors do not
        assert report.metrics["loss"] == pytest.approx(loss, rel=within, abs=within)
