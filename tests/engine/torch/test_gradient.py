"""The gradient of an update is that of the definition, however it is packed and split; AdamW and clipping are torch's.

Axes: N trained token of one sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from engine.backends.protocol import Objective
from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.loading import load_model
from engine.backends.torch.trainer import TorchTrainer
from engine.backends.torch.updates import token_weights
from engine.backends.weight_files.digests import digest_tensors
from engine.errors import BadSpec, NonFiniteGradient
from engine.losses.likelihood import CrossEntropySpec
from engine.losses.policy_gradient import GRPOSpec
from engine.models.samples import Sample
from storage.chain.records import OptimizerSpec
from tests.engine.torch.gradients import WHOLE, Grads, distance, norm_of, update

CPU = torch.device("cpu")
CLIP, BETA = 0.2, 0.3
SPLIT = 14
"""Tokens of the longest sample, so that groups are split over micro-batches."""
RELATIVE = {torch.float64: 1e-10, torch.float32: 1e-5}


def load(folder: Path, dtype: torch.dtype) -> CausalLM:
    return load_model(folder, dtype=dtype, compute_dtype=dtype, device=CPU)


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=["float64", "float32"])
def model(request: pytest.FixtureRequest, tiny_folder: Path) -> CausalLM:
    """A model in float64. Its weights never change, because every update of these tests has lr 0."""
    return load(tiny_folder, request.param)


@pytest.fixture(scope="module")
def exact(tiny_folder: Path) -> CausalLM:
    return load(tiny_folder, torch.float64)


def sample(prompt: list[int], weights: list[float], group: str, **columns: Any) -> Sample:
    """A sample of the prompt and tokens 100, 101, … after it, which have these weights."""
    first = 100 + 7 * len(weights) + len(prompt)
    return Sample([*prompt, *range(first, first + len(weights))], [0.0] * len(prompt) + weights, group, **columns)


def samples_near(module: nn.Module) -> list[Sample]:
    """Two groups that share prompts and two samples alone, of unequal lengths, one with a gap of untrained tokens."""
    shapes: list[tuple[list[int], list[float], str]] = [
        ([10, 11, 12, 13], [1.0] * 6, "a"),
        ([20, 21], [1.0] * 3, "b"),
        ([10, 11, 12, 13], [1.0] * 1, "a"),
        ([30, 31, 32], [1.0, 1.0, 0.0, 0.0, 1.0], ""),
        ([10, 11, 12, 13], [1.0] * 10, "a"),
        ([20, 21], [1.0] * 7, "b"),
        ([40], [1.0] * 2, ""),
    ]
    random = Random(0)
    rows = []
    for prompt, weights, group in shapes:
        bare = sample(prompt, weights, group)
        near = [value.item() for value in trained_logprobs(module, bare)]
        noisy = {
            name: [value + random.uniform(-0.4, 0.4) for value in near]  # e^0.4 = 1.49: some ratios are clipped
            for name in ("old_logprobs", "reference_logprobs")
        }
        rows.append(sample(prompt, weights, group, advantages=[random.gauss(0, 1) for _ in near], **noisy))
    return rows


# -- the reference: one plain forward per sample, formulas as in the papers ------------------------------------


def trained_logprobs(module: nn.Module, sample: Sample, temperature: float = 1.0) -> Tensor:
    ids = torch.tensor([sample.token_ids])
    logits_TV = module(input_ids=ids, use_cache=False).logits[0, :-1] / temperature
    all_T = logits_TV.log_softmax(-1).gather(1, ids[0, 1:].unsqueeze(1)).squeeze(1)
    return all_T[torch.tensor(sample.loss_mask[1:]) > 0]


def cross_entropy(logprobs_N: Tensor, _: Sample) -> Tensor:
    return -logprobs_N


def grpo(logprobs_N: Tensor, sample: Sample, beta: float = BETA) -> Tensor:
    def column(values: list[float] | None) -> Tensor:
        return torch.tensor(values, dtype=logprobs_N.dtype)

    advantages_N, gap_N = column(sample.advantages), column(sample.reference_logprobs) - logprobs_N
    ratio_N = torch.exp(logprobs_N - column(sample.old_logprobs))
    surrogate_N = torch.minimum(ratio_N * advantages_N, ratio_N.clip(1 - CLIP, 1 + CLIP) * advantages_N)
    return -surrogate_N + beta * (torch.exp(gap_N) - gap_N - 1)


def normalised(values: list[Tensor], norm: str, constant: float) -> Tensor:
    if norm == "token_mean":
        return torch.cat(values).mean()
    if norm == "sequence_mean":
        return torch.stack([value_N.mean() for value_N in values]).mean()
    if norm == "token_sum":
        return torch.cat(values).sum()
    return torch.stack([value_N.sum() / constant for value_N in values]).mean()


def reference(
    module: nn.Module,
    samples: Sequence[Sample],
    loss: Callable[[Tensor, Sample], Tensor],
    *,
    norm: str = "token_mean",
    constant: float = 1.0,
    temperature: float = 1.0,
) -> tuple[float, Grads]:
    values = [loss(trained_logprobs(module, s, temperature), s) for s in samples]
    total = normalised(values, norm, constant)
    parameters = dict(module.named_parameters())
    return total.item(), dict(zip(parameters, torch.autograd.grad(total, list(parameters.values())), strict=True))


@contextmanager
def plain(model: CausalLM) -> Iterator[nn.Module]:
    """The model's own unpacked forward."""
    implementation = model.module.config._attn_implementation
    model.module.set_attn_implementation("sdpa")  # eager rounds its softmax to float32
    try:
        yield model.module
    finally:
        model.module.set_attn_implementation(implementation)


@pytest.fixture(scope="module")
def samples(model: CausalLM) -> list[Sample]:
    with plain(model) as module, torch.no_grad():
        return samples_near(module)


CE = Objective(CrossEntropySpec())
GRPO = Objective(GRPOSpec(clip_low=CLIP, clip_high=CLIP, kl_beta=BETA))


@pytest.mark.parametrize("objective", [CE, GRPO], ids=["cross_entropy", "grpo"])
def test_micro_batches_change_neither_loss_nor_gradient(
    model: CausalLM, samples: list[Sample], objective: Objective
) -> None:
    whole, expected = update(TorchTrainer(model), samples, objective, max_tokens=WHOLE)
    split, gradient = update(TorchTrainer(model), samples, objective, max_tokens=SPLIT)
    assert whole.micro_batches == 1
    assert split.micro_batches >= 4
    assert distance(gradient, expected) <= RELATIVE[model.dtype]
    assert split.metrics == pytest.approx(whole.metrics, rel=10 * RELATIVE[model.dtype])


@pytest.mark.parametrize("max_tokens", [WHOLE, SPLIT])
@pytest.mark.parametrize(
    ("objective", "loss"), [(CE, cross_entropy), (GRPO, grpo)], ids=["cross_entropy", "grpo"]
)
def test_the_gradient_is_that_of_the_definition(
    model: CausalLM,
    samples: list[Sample],
    objective: Objective,
    loss: Callable[[Tensor, Sample], Tensor],
    max_tokens: int,
) -> None:
    with plain(model) as module:
        expected_loss, expected = reference(module, samples, loss)
    report, gradient = update(TorchTrainer(model), samples, objective, max_tokens=max_tokens)
    assert distance(gradient, expected) <= RELATIVE[model.dtype]
    assert report.metrics["loss"] == pytest.approx(expected_loss, rel=RELATIVE[model.dtype])
    assert report.metrics["grad_norm"] == pytest.approx(norm_of(expected), rel=RELATIVE[model.dtype])
    assert report.metrics["tokens"] == 32  # 6 + 3 + 1 + 3 + 10 + 7 + 2


def test_the_gradient_is_that_of_plain_transformers(tiny_folder: Path) -> None:
    """The reference is the folder's model as transformers loads and runs it."""
    module = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        samples = samples_near(module)
    _, expected = reference(module, samples, grpo)
    _, gradient = update(TorchTrainer(load(tiny_folder, torch.float32)), samples, GRPO, max_tokens=SPLIT)
    assert distance(gradient, expected) <= 1e-5


@pytest.mark.parametrize("norm", ["token_mean", "sequence_mean", "token_sum", "constant"])
def test_each_norm_gives_its_gradient_at_any_temperature(exact: CausalLM, norm: str) -> None:
    constant = 5.0 if norm == "constant" else None
    spec = GRPOSpec(clip_low=CLIP, clip_high=CLIP, kl_beta=BETA, norm=norm, norm_constant=constant)
    with plain(exact) as module:
        with torch.no_grad():
            samples = samples_near(module)
        expected_loss, expected = reference(
            module, samples, grpo, norm=norm, constant=constant or 1.0, temperature=0.7
        )
    for max_tokens in (WHOLE, SPLIT):
        report, gradient = update(
            TorchTrainer(exact), samples, Objective(spec, temperature=0.7), max_tokens=max_tokens
        )
        assert distance(gradient, expected) <= 1e-10
        assert report.metrics["loss"] == pytest.approx(expected_loss, rel=1e-10)


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        ("token_mean", [1 / 10] * 10),
        ("sequence_mean", [1 / 4] * 1 + [1 / 12] * 3 + [1 / 24] * 6),
        ("token_sum", [1.0] * 10),
        ("constant", [1 / 20] * 10),
    ],
)
def test_token_weights_by_hand_and_in_parts(norm: str, expected: list[float]) -> None:
    """Sequences of 1, 3, 0 and 6 trained tokens; the empty one counts as a sequence."""

    def weights(*lengths: int) -> list[float]:
        return token_weights(lengths, norm=norm, total_tokens=10, total_sequences=4, constant=5.0).tolist()

    assert weights(1, 3, 0, 6) == pytest.approx(expected)
    assert weights(1) + weights(3, 0) + weights(6) == pytest.approx(expected)


def test_a_mean_weighs_one_in_all() -> None:
    for norm in ("token_mean", "sequence_mean"):
        weights_N = token_weights([2, 5, 4], norm=norm, total_tokens=11, total_sequences=3)
        assert weights_N.sum().item() == pytest.approx(1)


# -- samples without a gradient --------------------------------------------------------------------------------


def with_advantages(sample: Sample, advantages: list[float]) -> Sample:
    return Sample(
        sample.token_ids,
        sample.loss_mask,
        sample.group,
        advantages=advantages,
        old_logprobs=sample.old_logprobs,
        reference_logprobs=sample.reference_logprobs,
    )


@pytest.fixture
def partly_flat(exact: CausalLM) -> list[Sample]:
    """Group b had equal rewards: its advantages are 0."""
    with plain(exact) as module, torch.no_grad():
        samples = samples_near(module)
    return [with_advantages(s, [0.0] * s.trained) if s.group == "b" else s for s in samples]


@pytest.mark.parametrize("norm", ["token_mean", "sequence_mean"])
def test_samples_without_advantage_cost_no_pass_and_change_nothing(
    exact: CausalLM, partly_flat: list[Sample], norm: str
) -> None:
    with plain(exact) as module:
        expected_loss, expected = reference(module, partly_flat, lambda l_N, s: grpo(l_N, s, beta=0), norm=norm)
    free = Objective(GRPOSpec(clip_low=CLIP, clip_high=CLIP, kl_beta=0, norm=norm))
    report, gradient = update(TorchTrainer(exact), partly_flat, free, max_tokens=SPLIT)
    assert distance(gradient, expected) <= 1e-10
    assert report.metrics["loss"] == pytest.approx(expected_loss, rel=1e-10)
    assert report.metrics["tokens"] == 32
    pulled, _ = update(TorchTrainer(exact), partly_flat, GRPO, max_tokens=SPLIT)
    assert report.micro_batches < pulled.micro_batches


def test_the_kl_term_pulls_on_samples_without_advantage(exact: CausalLM, partly_flat: list[Sample]) -> None:
    with plain(exact) as module:
        _, expected = reference(module, partly_flat, grpo)
    _, gradient = update(TorchTrainer(exact), partly_flat, GRPO, max_tokens=SPLIT)
    assert distance(gradient, expected) <= 1e-10


def test_the_mean_ratio_is_one_on_policy_whatever_was_left_out(exact: CausalLM, partly_flat: list[Sample]) -> None:
    on_policy = []
    with plain(exact) as module, torch.no_grad():
        for s in partly_flat:
            now = trained_logprobs(module, s).tolist()
            on_policy.append(Sample(s.token_ids, s.loss_mask, s.group, advantages=s.advantages, old_logprobs=now))
    report, _ = update(TorchTrainer(exact), on_policy, Objective(GRPOSpec(kl_beta=0)))
    assert report.metrics["ratio_mean"] == pytest.approx(1, rel=1e-10)
    assert report.metrics["clip_fraction_mean"] == 0


def test_a_batch_without_any_advantage_is_a_step_with_a_zero_gradient(tiny_folder: Path) -> None:
    model = load(tiny_folder, torch.float64)
    flat = [Sample([1, 2, 3], [0, 1, 1], advantages=[0.0, 0.0], old_logprobs=[-5.0, -5.0])]
    before = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    trainer, objective = TorchTrainer(model), Objective(GRPOSpec(kl_beta=0))
    report, grads = update(trainer, flat, objective, OptimizerSpec(lr=0.1))
    assert (report.metrics["loss"], report.metrics["grad_norm"], report.skipped) == (0, 0, False)
    assert all(not gradient.any() for gradient in grads.values())
    assert all(torch.equal(p, before[name]) for name, p in model.module.named_parameters())
    # with decay, AdamW shrinks the matrices by lr x decay = 1 % though nothing was learnt; norms are left alone
    update(trainer, flat, objective, OptimizerSpec(lr=0.1, weight_decay=0.1))
    for name, parameter in model.module.named_parameters():
        assert torch.allclose(parameter, before[name] * (0.99 if parameter.ndim >= 2 else 1.0), rtol=1e-12)


def test_a_minibatch_without_trained_tokens_is_refused(exact: CausalLM) -> None:
    with pytest.raises(BadSpec, match="no token of the minibatch is trained"):
        update(TorchTrainer(exact), [Sample([1, 2], [0.0, 0.0])], CE)


def test_a_column_that_the_loss_needs_and_the_batch_lacks_is_named(exact: CausalLM) -> None:
    bare = Sample([1, 2], [0.0, 1.0], advantages=[1.0])
    with pytest.raises(BadSpec, match="old logprobs"):
        update(TorchTrainer(exact), [bare], GRPO)
    some = Sample([1, 3], [0.0, 1.0], advantages=[1.0], old_logprobs=[-5.0])
    with pytest.raises(BadSpec, match="some samples of the batch have old_logprobs"):
        update(TorchTrainer(exact), [bare, some], Objective(GRPOSpec(kl_beta=0)))


# -- the optimizer ---------------------------------------------------------------------------------------------


def test_updates_are_those_of_torch_adamw(tiny_folder: Path) -> None:
    model = load(tiny_folder, torch.float64)
    trainer = TorchTrainer(model)
    mine = {name: nn.Parameter(p.detach().clone()) for name, p in model.module.named_parameters()}
    decay = {name: p.ndim == 2 for name, p in mine.items()}
    assert set(decay.values()) == {True, False}
    theirs = torch.optim.AdamW(
        [
            {"params": [p for name, p in mine.items() if decay[name]], "weight_decay": 0.1},
            {"params": [p for name, p in mine.items() if not decay[name]], "weight_decay": 0.0},
        ],
        betas=(0.8, 0.95),
        eps=1e-6,
        foreach=False,
    )
    for lr, ids in [(1e-2, [1, 2, 3]), (5e-3, [4, 5, 6, 7]), (2e-3, [8, 9])]:
        spec = OptimizerSpec(lr=lr, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.1, max_grad_norm=0.5)
        _, grads = update(trainer, [Sample(ids, [0.0] + [1.0] * (len(ids) - 1))], CE, spec)
        for group in theirs.param_groups:
            group["lr"] = lr
        for name, grad in grads.items():
            mine[name].grad = grad
        theirs.step()
    for name, p in model.module.named_parameters():
        torch.testing.assert_close(p, mine[name], rtol=1e-12, atol=1e-14)


def test_clipping_scales_the_whole_gradient_to_the_bound(model: CausalLM, samples: list[Sample]) -> None:
    free, whole = update(TorchTrainer(model), samples, CE)
    bound = norm_of(whole) / 4
    clipped, quarter = update(TorchTrainer(model), samples, CE, OptimizerSpec(lr=0, max_grad_norm=bound))
    assert norm_of(quarter) == pytest.approx(bound, rel=1e-4)  # torch adds 1e-6 to the norm it divides by
    assert distance({name: grad * 4 for name, grad in quarter.items()}, whole) <= 1e-4
    assert clipped.metrics["grad_norm"] == free.metrics["grad_norm"]  # what is reported is the norm before
    _, same = update(TorchTrainer(model), samples, CE, OptimizerSpec(lr=0, max_grad_norm=norm_of(whole) * 1.01))
    assert distance(same, whole) == 0


def test_no_gradient_of_one_update_is_left_for_the_next(exact: CausalLM) -> None:
    trainer = TorchTrainer(exact)
    first, second = Sample([1, 2, 3], [0.0, 1.0, 1.0]), Sample([4, 5], [0.0, 1.0])
    _, expected = update(trainer, [second], CE)
    update(trainer, [first], CE)
    _, gradient = update(trainer, [second], CE)
    assert distance(gradient, expected) == 0


def test_a_gradient_that_is_not_finite_is_an_error_or_skipped(tiny_folder: Path) -> None:
    model = load(tiny_folder, torch.float32)
    trainer = TorchTrainer(model)
    before = digest_tensors(model.named_weights())[0]
    bad = [Sample([1, 2], [0.0, 1.0], advantages=[math.inf], old_logprobs=[-5.0])]
    spec, optimizer = GRPOSpec(kl_beta=0), OptimizerSpec(lr=0.1)
    with pytest.raises(NonFiniteGradient, match="1 samples"):
        update(trainer, bad, Objective(spec), optimizer)
    report, grads = update(trainer, bad, Objective(spec, skip_nan_gradients=True), optimizer)
    assert (report.skipped, grads) == (True, {})
    assert digest_tensors(model.named_weights())[0] == before
    good = [Sample([1, 2], [0.0, 1.0], advantages=[1.0], old_logprobs=[-5.0])]
    report, grads = update(trainer, good, Objective(spec), optimizer)
    assert not report.skipped
    assert all(grad.isfinite().all() for grad in grads.values())
    assert digest_tensors(model.named_weights())[0] != before
