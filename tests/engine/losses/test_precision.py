"""In float32, and in bfloat16 over float32 weights, an update is about as exact as plain `transformers` under autograd,
one sample at a time. The same holds for logprobs and entropies. The errors are distances from float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backends.protocol import Objective
from engine.backends.torch import causal_lm
from engine.backends.torch.loading import load_model
from engine.backends.torch.packing import longest_unit, micro_batches, pack
from engine.backends.torch.trainer import TorchTrainer
from engine.losses.spec import LossSpec
from engine.models.samples import Sample
from engine.protocol import TokenSequence
from tests.engine.losses.cases import SPECS, samples_near
from tests.engine.losses.conftest import CPU
from tests.engine.losses.plain import DEFINITIONS, Out, Plain
from tests.engine.torch.gradients import WHOLE, distance, update
from tests.fixtures.rounding import rounding

T = 0.8
TIMES = 2.0
"""Our error may be this many times that of transformers: both are sums of rounding errors in different orders."""
CHUNK = 5
"""Trained tokens of one chunk of the head, where it is chunked."""
PROMPT = list(range(10, 80))
LONG: list[tuple[list[int], list[float], str]] = [
    (PROMPT, [1.0] * 9, "a"),
    (PROMPT, [1.0] * 70, "a"),
    ([20, 21], [1.0, 1.0, 0.0, 0.0, 1.0], ""),
    (PROMPT, [1.0] * 1, "a"),
    ([30], [1.0] * 100, ""),
]
"""(prompt, weights after it, group): a prompt and completions that are longer than the attention's block of 64 queries,
and short ones."""


class Autocast(Plain):
    """A load of the folder whose forward passes are those of `torch.autocast`."""

    def out(self, sample: Sample, temperature: float = 1.0) -> Out:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().out(sample, temperature)


@dataclass
class Precision:
    """One computation in three ways."""

    exact: Plain
    """transformers in float64."""
    plain: Plain
    """transformers in the precision that is tested."""
    trainer: TorchTrainer


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def precision(request: pytest.FixtureRequest, small_folder: Path) -> Precision:
    plain = Autocast if request.param == torch.bfloat16 else Plain
    model = load_model(small_folder, dtype=torch.float32, compute_dtype=request.param, device=CPU)
    return Precision(Plain(small_folder, torch.float64), plain(small_folder, torch.float32), TorchTrainer(model))


@pytest.fixture(params=["whole", "split", "chunked"])
def split(request: pytest.FixtureRequest, precision: Precision, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether micro-batches are as small as they can be. Within `chunked`, the head is computed in chunks."""
    if request.param == "chunked":
        model = precision.trainer.model
        monkeypatch.setattr(causal_lm, "CHUNK_BYTES", CHUNK * model.vocab_size * model.compute_dtype.itemsize)
    yield request.param == "split"


def with_own_logprobs(plain: Plain, samples: list[Sample]) -> list[Sample]:
    """The samples with old logprobs by the model before the step."""
    with torch.no_grad():
        return [replace(s, old_logprobs=plain.out(s, T).logprobs.tolist()) for s in samples]


def loss_errors(precision: Precision, spec: LossSpec, by_exact: list[Sample], by_plain: list[Sample]) -> float:
    """Sum of the errors of transformers in the loss of each group alone, none of which cancel."""
    total = 0.0
    for group in {s.group for s in by_exact}:
        losses = []
        for plain, samples in ((precision.exact, by_exact), (precision.plain, by_plain)):
            members = [s for s in samples if s.group == group]
            with torch.no_grad():
                losses.append(DEFINITIONS[spec.kind](spec, members, [plain.out(s, T) for s in members]).item())
        total += abs(losses[0] - losses[1])
    return total


@pytest.mark.parametrize(
    ("name", "old_logprobs"),
    [
        ("cross_entropy-token_mean", "trainer"),
        ("dpo-sigmoid", "trainer"),
        ("grpo-all", "trainer"),
        ("grpo-all", "forward"),
        ("gspo-all", "forward"),
        ("cispo-all", "forward"),
    ],
)
def test_an_update_is_as_exact_as_by_transformers(
    precision: Precision, split: bool, name: str, old_logprobs: Any
) -> None:
    """`all`: with entropy, KL and the cap of the importance weight."""
    spec: LossSpec = SPECS[name]
    samples = samples_near(precision.exact.numbers, scalar=False)
    by_exact, by_plain = samples, samples
    if old_logprobs == "forward":
        by_exact, by_plain = (with_own_logprobs(plain, samples) for plain in (precision.exact, precision.plain))
        samples = [replace(s, old_logprobs=None) for s in samples]
    exact_loss, exact = precision.exact.loss_and_gradient(spec, by_exact, T)
    _, plain = precision.plain.loss_and_gradient(spec, by_plain, T)

    max_tokens = longest_unit(samples, whole_groups=spec.pairwise) if split else WHOLE
    report, gradient = update(precision.trainer, samples, Objective(spec, T, old_logprobs), max_tokens=max_tokens)
    assert (report.micro_batches > 1) == split
    assert distance(gradient, exact) <= TIMES * distance(plain, exact)
    # The inputs of the loss are in float32 at least, and so is its own sum.
    within = TIMES * loss_errors(precision, spec, by_exact, by_plain)
    within += rounding(terms=sum(s.trained for s in samples), size=1 + abs(exact_loss))
    assert report.metrics["loss"] == pytest.approx(exact_loss, rel=0, abs=within)


def error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Root mean square of the differences."""
    return (torch.cat(actual).double() - torch.cat(expected)).square().mean().sqrt().item()


@torch.no_grad()
def test_logprobs_and_entropies_are_as_exact_as_by_transformers(precision: Precision, split: bool) -> None:
    samples = []
    for prompt, weights, group in LONG:
        own = [(17 * len(weights) + 7 * place) % precision.trainer.model.vocab_size for place in range(len(weights))]
        samples.append(Sample(prompt + own, [0.0] * len(prompt) + weights, group))
    exact, plain = ([by.out(s, T) for s in samples] for by in (precision.exact, precision.plain))
    max_tokens = longest_unit(samples, whole_groups=False) if split else WHOLE

    sequences = [TokenSequence(s.token_ids, s.loss_mask, s.group) for s in samples]
    logprobs = precision.trainer.logprobs(sequences, temperature=T, max_tokens=max_tokens)
    error_of_plain = error([out.logprobs for out in plain], [out.logprobs for out in exact])
    ours = [torch.tensor(own) for own in logprobs]
    assert error(ours, [out.logprobs for out in exact]) <= TIMES * error_of_plain

    # Logprobs with entropies, of the same micro-batches
    model = precision.trainer.model
    order: list[int] = []
    both: list[tuple[Tensor, Tensor]] = []
    with model.cached_casts():
        for indices in micro_batches(samples, max_tokens=max_tokens):
            both.append(model.logprobs_and_entropy(pack([samples[i] for i in indices], device=CPU), temperature=T))
            order += indices
    assert torch.equal(torch.cat([logprobs_N for logprobs_N, _ in both]), torch.cat([ours[i] for i in order]))
    entropies = [exact[i].entropies for i in order]
    error_of_plain = error([plain[i].entropies for i in order], entropies)
    assert error([entropy_N for _, entropy_N in both], entropies) <= TIMES * error_of_plain
