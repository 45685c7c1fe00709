"""Properties of every loss over any minibatch: changes that leave loss and gradient as they are, and numbers that stay
finite. They are tested in float64, through the torch trainer's forward and backward pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backends.protocol import Objective
from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.packing import longest_unit
from engine.backends.torch.trainer import TorchTrainer
from engine.errors import BadSpec
from engine.losses.base import PairLoss
from engine.losses.inputs import LossInputs, Outputs
from engine.losses.policy_gradient import GRPOSpec
from engine.losses.spec import LossSpec
from engine.models.samples import Sample
from tests.engine.losses.cases import SPECS, loss_of, samples_near, teacher_top
from tests.engine.torch.gradients import WHOLE, Grads, distance, update

EXACTLY = 1e-10
FEW = settings(max_examples=20, deadline=None)
MANY = settings(max_examples=60, deadline=None)


@st.composite
def minibatches(draw: st.DrawFn, *, scalar: bool) -> list[Sample]:
    """One to three pairs whose samples share a prompt. Each sample has one to six trained tokens, with gaps between
    them."""
    number = st.floats(-1.5, 1.5).map(lambda x: round(x, 3))
    samples = []
    for pair in range(draw(st.integers(1, 3))):
        prompt = draw(st.lists(st.integers(3, 40), min_size=1, max_size=4))
        for preferred in draw(st.permutations([True, False])):
            tail = draw(st.lists(st.tuples(st.integers(3, 40), st.booleans()), max_size=5))
            tail.insert(draw(st.integers(0, len(tail))), (draw(st.integers(3, 40)), True))
            trained = sum(taught for _, taught in tail)

            def column(trained: int = trained, around: float = 0.0) -> list[float]:
                return [around + x for x in draw(st.lists(number, min_size=trained, max_size=trained))]

            names = ("returns", "old_values") if scalar else ("advantages", "tangents", "selected")
            columns = {name: column() for name in names}
            if not scalar:
                columns |= {f"{name}_logprobs": column(around=-5.5) for name in ("old", "reference", "sampler")}
            ids = prompt + [token for token, _ in tail]
            weights = [0.0] * len(prompt) + [float(taught) for _, taught in tail]
            if not scalar:
                columns |= teacher_top(Sample(ids, weights))
            samples.append(Sample(ids, weights, f"pair-{pair}", preferred=preferred, kl_baseline=0.3, **columns))
    return samples


def reordered(samples: list[Sample], data: st.DataObject) -> list[Sample]:
    return data.draw(st.permutations(samples))


def padded(samples: list[Sample], data: st.DataObject) -> list[Sample]:
    """Appends tokens after the last trained one, to which no trained token attends."""
    longer = []
    for s in samples:
        extra = data.draw(st.lists(st.integers(3, 40), max_size=4))
        longer.append(replace(s, token_ids=[*s.token_ids, *extra], loss_mask=[*s.loss_mask, *[False] * len(extra)]))
    return longer


def ungrouped(samples: list[Sample], data: st.DataObject) -> list[Sample]:
    """Gives each sample a group of its own, or none, so that every prompt is computed once per sample."""
    named = data.draw(st.booleans())
    return [replace(s, group=f"alone-{i}" if named else "") for i, s in enumerate(samples)]


CHANGES: dict[str, Any] = {"order": reordered, "padding": padded, "grouping": ungrouped, "packing": lambda s, _: s}


@pytest.mark.parametrize("change", CHANGES)
@FEW
@given(data=st.data())
def test_nothing_depends_on(change: str, data: st.DataObject, exact: CausalLM, exact_scalar: CausalLM) -> None:
    name = data.draw(st.sampled_from(sorted(SPECS)))
    spec = SPECS[name]
    trainer = TorchTrainer(exact_scalar if spec.reads == "values" else exact)
    samples = data.draw(minibatches(scalar=trainer.model.scalar))
    expected_loss, expected = loss_and_gradient(trainer, samples, spec, WHOLE)
    if not (change == "grouping" and spec.pairwise):
        samples = CHANGES[change](samples, data)
    least = longest_unit(samples, whole_groups=spec.pairwise)
    most = sum(len(s.token_ids) for s in samples)
    loss, gradient = loss_and_gradient(trainer, samples, spec, data.draw(st.integers(least, max(least, most))))
    assert distance(gradient, expected) <= EXACTLY
    assert loss == pytest.approx(expected_loss, rel=EXACTLY, abs=EXACTLY)


def loss_and_gradient(
    trainer: TorchTrainer, samples: list[Sample], spec: LossSpec, max_tokens: int
) -> tuple[float, Grads]:
    report, grads = update(trainer, samples, Objective(spec), max_tokens=max_tokens)
    return report.metrics["loss"], grads


PER_TOKEN = {name: spec for name, spec in SPECS.items() if not spec.pairwise}


@pytest.mark.parametrize("spec", PER_TOKEN.values(), ids=PER_TOKEN.keys())
def test_a_mask_of_zeros_teaches_nothing(spec: LossSpec, exact: CausalLM, exact_scalar: CausalLM) -> None:
    """A sample without trained tokens counts as a sequence in a mean over sequences, and changes nothing else. A
    minibatch of only such samples is refused."""
    trainer = TorchTrainer(exact_scalar if spec.reads == "values" else exact)
    samples = samples_near(lambda bare: [-5.0] * bare.trained, scalar=trainer.model.scalar)
    columns = {name: [] for name in PER_TOKEN_COLUMNS if getattr(samples[0], name) is not None}
    blank = Sample([1, 2, 3], [0.0] * 3, "a", preferred=True, kl_baseline=0.4, **columns)
    expected_loss, expected = loss_and_gradient(trainer, samples, spec, WHOLE)
    loss, gradient = loss_and_gradient(trainer, [blank, *samples], spec, WHOLE)
    share = len(samples) / (len(samples) + 1) if getattr(spec, "norm", "") in ("sequence_mean", "constant") else 1
    assert distance(gradient, {name: share * grad for name, grad in expected.items()}) <= EXACTLY
    assert loss == pytest.approx(share * expected_loss, rel=EXACTLY)
    with pytest.raises(BadSpec, match="no token of the minibatch is trained"):
        update(trainer, [blank], Objective(spec))


PER_TOKEN_COLUMNS = (
    "advantages", "tangents", "selected", "old_logprobs", "reference_logprobs", "sampler_logprobs", "returns",
    "old_values", "teacher_top_ids", "teacher_top_logprobs",
)  # fmt: skip
POLICY = {name: spec for name, spec in SPECS.items() if hasattr(spec, "clip_low")}


@pytest.mark.parametrize("spec", POLICY.values(), ids=POLICY.keys())
def test_equal_rewards_leave_the_kl_and_the_entropy_alone(spec: Any, exact: CausalLM) -> None:
    """With advantages of zero, the policy's part of the gradient is zero for any ratios. The rest does not depend on
    the ratios, except a KL term that is multiplied by them."""
    trainer = TorchTrainer(exact)
    samples = samples_near(lambda bare: [-5.0] * bare.trained, scalar=False)
    flat = [replace(s, advantages=[0.0] * s.trained) for s in samples]
    _, gradient = loss_and_gradient(trainer, flat, spec, WHOLE)
    moved = [replace(s, old_logprobs=[x - 0.9 for x in s.old_logprobs]) for s in flat]
    _, same = loss_and_gradient(trainer, moved, spec, WHOLE)
    assert (distance(same, gradient) <= EXACTLY) is not spec.kl_importance
    assert any(grad.any() for grad in gradient.values()) == (spec.kl_beta > 0 or spec.entropy_coef > 0)


EXTREME = st.floats(-50, 50)
DTYPES = st.sampled_from([torch.float32, torch.float64])


@pytest.mark.parametrize("spec", POLICY.values(), ids=POLICY.keys())
@MANY
@given(st.lists(st.tuples(EXTREME, EXTREME, EXTREME, st.floats(-3, 3)), min_size=1, max_size=4), DTYPES)
def test_ratios_of_fifty_nats_stay_finite(
    spec: LossSpec, gaps: list[tuple[float, float, float, float]], dtype: torch.dtype
) -> None:
    """e^50 is 5e21, which float32 holds: loss and gradient are numbers, and so are the metrics. kl_importance
    multiplies two such ratios, and float32 holds e^80."""
    old, reference, sampler, advantages = (torch.tensor(column, dtype=dtype) for column in zip(*gaps, strict=True))
    if spec.kl_importance:  # type: ignore[union-attr]
        old, reference = 0.8 * old, 0.8 * reference
    logprobs_N = torch.full_like(old, -60.0).requires_grad_()
    entropy_N = torch.ones_like(old).requires_grad_()
    inputs = LossInputs(
        Outputs(logprobs_N, entropy_N=entropy_N),
        (len(gaps),),
        old_N=-60 - old,
        reference_N=-60 - reference,
        sampler_N=-60 - old - sampler,
        advantages_N=advantages,
        selected_N=(advantages > 1).to(dtype),
    )
    loss = spec.compute(inputs)
    assert not isinstance(loss, PairLoss)
    loss.values_N.sum().backward()
    for numbers in (loss.values_N, logprobs_N.grad, *loss.sums.values()):
        assert numbers.isfinite().all()


def test_an_extreme_ratio_reaches_the_weights_finite(exact: CausalLM) -> None:
    """With log-ratios of ±50 nats on every token, the gradient of the model is finite, and an update is made."""
    for gap in (50.0, -50.0):
        samples = samples_near(lambda bare: [-5.6] * bare.trained, scalar=False)
        far = [replace(s, old_logprobs=[-5.6 - gap] * s.trained) for s in samples]
        report, grads = update(TorchTrainer(exact), far, Objective(GRPOSpec(kl_beta=0.0)))
        assert not report.skipped and all(grad.isfinite().all() for grad in grads.values())


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.pairwise])
@MANY
@given(st.lists(st.tuples(EXTREME, EXTREME), min_size=1, max_size=3), DTYPES)
def test_margins_of_fifty_nats_stay_finite(
    name: str, margins: list[tuple[float, float]], dtype: torch.dtype
) -> None:
    spec = SPECS[name]
    numbers_N = torch.tensor([x for pair in margins for x in pair], dtype=dtype, requires_grad=True)
    outputs = Outputs(values_N=numbers_N) if spec.reads == "values" else Outputs(numbers_N)
    samples = [
        Sample([1, 2], [0.0, 1.0], f"{pair}", preferred=preferred, reference_logprobs=[0.0])
        for pair in range(len(margins))
        for preferred in (True, False)
    ]
    loss = loss_of(spec, samples, outputs)
    loss.backward()
    assert loss.isfinite() and numbers_N.grad.isfinite().all()
