"""The parts of the GPU bench that are right or wrong: gradients and logprobs against a reference in float64, packing
kernels against each other, and the determinism of steps.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bench.gpu.reference import BETA, CLIP, Grads, distance, gradient, trained_logprobs
from bench.gpu.rows import Row
from bench.gpu.setting import (
    Setting,
    attention_by,
    exact_twin,
    grpo_samples,
    kernel_for,
    model_of,
    near_policy,
    seconds,
    sft_samples,
)
from engine.backends.protocol import Objective
from engine.backends.torch.attention import PackedLayout
from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.determinism import repeats_sums, small_update_repeats
from engine.backends.torch.packing import PrefixGroup
from engine.backends.torch.trainer import TorchTrainer
from engine.backends.weight_files.digests import digest_tensors
from engine.losses.likelihood import CrossEntropySpec
from engine.losses.policy_gradient import GRPOSpec
from engine.models.samples import Sample
from engine.protocol import TokenSequence
from storage.chain.records import OptimizerSpec

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Allowed relative L2 distance of the whole gradient from the reference in float64. bfloat16 has 8 bits: each of about
ten roundings per layer is 0.2 to 0.4 %, and a random walk of them over 12 layers is 3 to 5 %."""
LOGPROB_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Allowed absolute difference of a logprob, in nats, for a model with random weights."""
OBJECTIVES = {
    "sft": Objective(CrossEntropySpec()),
    "grpo": Objective(GRPOSpec(clip_low=CLIP, clip_high=CLIP, kl_beta=BETA)),
}
STILL = OptimizerSpec(lr=0, max_grad_norm=1e9)
"""An optimizer that neither changes the weights nor clips the gradient."""


def gradient_of_update(
    trainer: TorchTrainer, samples: Sequence[Sample], objective: Objective, *, max_tokens: int
) -> Grads:
    """Returns the gradient that the optimizer receives, in the dtype of the master weights."""
    names = {id(p): name for name, p in trainer.model.module.named_parameters()}
    caught: Grads = {}

    def catch(adamw: torch.optim.Optimizer, *_: Any) -> None:
        for group in adamw.param_groups:
            caught.update({names[id(p)]: p.grad.clone() for p in group["params"] if p.grad is not None})

    hook = register_optimizer_step_pre_hook(catch)
    try:
        trainer.update(samples, objective, STILL, max_tokens=max_tokens)
    finally:
        hook.remove()
    return caught


def correctness(setting: Setting) -> Iterator[Row]:
    """Compares the torch trainer on the device with the reference: gradients of both losses, and logprobs, packed and
    one sample at a time."""
    for name in setting.checked:
        # the reference in float64
        model = model_of(name, setting, compute_dtype=torch.float32)
        twin = exact_twin(model.module)
        batches = {
            "sft": sft_samples(name, (4, 20, 60)),
            "grpo": near_policy(grpo_samples(name, (2, 3, 12, 5, 20)), twin),
        }
        expected = {loss: gradient(twin, samples, loss) for loss, samples in batches.items()}
        with torch.no_grad():
            exact = [trained_logprobs(twin, sample).tolist() for sample in batches["grpo"]]
        # the trainer in both dtypes
        for dtype in (torch.float32, torch.bfloat16):
            trainer = TorchTrainer(CausalLM(model.module, compute_dtype=dtype))
            yield from _compare(name, trainer, batches, expected)
            yield _logprobs(name, trainer, batches["grpo"], exact)


def _compare(
    name: str, trainer: TorchTrainer, batches: dict[str, list[Sample]], expected: dict[str, Grads]
) -> Iterator[Row]:
    dtype = trainer.model.compute_dtype
    for loss, samples in batches.items():
        longest = max(len(sample.token_ids) for sample in samples)
        for packing, max_tokens in (("packed", 4096), ("one at a time", longest)):
            actual = gradient_of_update(trainer, samples, OBJECTIVES[loss], max_tokens=max_tokens)
            gap = distance(actual, expected[loss])
            yield Row(
                "correct",
                f"{name} {_short(dtype)} {loss} gradient, {packing}",
                gap,
                "relative",
                f"at most {TOLERANCE[dtype]:g}",
                gap <= TOLERANCE[dtype],
            )


def largest_gap(actual: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> float:
    """Returns the largest absolute difference between two lists of rows of the same lengths."""
    gap = 0.0
    for actual_row, expected_row in zip(actual, expected, strict=True):
        for a, b in zip(actual_row, expected_row, strict=True):
            gap = max(gap, abs(float(a) - float(b)))
    return gap


def _logprobs(name: str, trainer: TorchTrainer, samples: list[Sample], exact: list[list[float]]) -> Row:
    dtype = trainer.model.compute_dtype
    sequences = [TokenSequence(s.token_ids, s.loss_mask, s.group) for s in samples]
    gap = largest_gap(trainer.logprobs(sequences, temperature=1.0, max_tokens=4096), exact)
    bound = LOGPROB_TOLERANCE[dtype]
    return Row("correct", f"{name} {_short(dtype)} logprobs", gap, "nats", f"at most {bound:g}", gap <= bound)


# -- packing ---------------------------------------------------------------------------------------------------


def packing(setting: Setting) -> Iterator[Row]:
    """Compares the variable-length kernel with SDPA: values, gradients, and tokens per second of an update."""
    kernel = kernel_for(setting)
    if kernel is None:
        yield Row("packing", "variable-length kernel", "none found: SDPA is used", ok=False)
        return
    yield from _compare_kernels(setting, kernel)
    # throughput of both losses by both kernels
    for loss, samples in (
        ("sft", sft_samples(setting.small, setting.sft)),
        ("grpo", grpo_samples(setting.small, setting.grpo)),
    ):
        tokens = sum(len(sample.token_ids) for sample in samples)
        rates = {}
        for kernel_name, chosen_kernel in (("sdpa", None), ("varlen", kernel)):
            trainer = TorchTrainer(model_of(setting.small, setting))

            def step(trainer: TorchTrainer = trainer, loss: str = loss, samples: list[Sample] = samples) -> None:
                trainer.update(samples, OBJECTIVES[loss], STILL, max_tokens=setting.max_tokens)

            with attention_by(chosen_kernel):
                rates[kernel_name] = tokens / seconds(step, setting.device, repeats=setting.repeats)
            name = f"{setting.small} {loss} update by {kernel_name}"
            yield Row("packing", name, rates[kernel_name], "tokens/s", "of the samples")
            # two trainers do not fit together
            del trainer
        yield Row("packing", f"{setting.small} {loss}: varlen / sdpa", rates["varlen"] / rates["sdpa"], "x")


def _compare_kernels(setting: Setting, kernel: Any) -> Iterator[Row]:
    """Compares both kernels in bfloat16 with SDPA in float32. The error of the variable-length kernel may be at most
    twice that of SDPA."""
    # a plain sequence, a prompt with three completions, and a short sequence
    scale = 1 if setting.smoke else 16
    groups = [
        PrefixGroup(0, 20 * scale),
        PrefixGroup(20 * scale, 8 * scale, ((28 * scale, 5), (28 * scale + 5, 9 * scale), (37 * scale + 5, 3 * scale))),
        PrefixGroup(40 * scale + 5, 7),
    ]
    generator = torch.Generator(device=setting.device).manual_seed(0)
    inputs = [
        torch.randn(1, heads, groups[-1].start + 7, 64, device=setting.device, generator=generator)
        for heads in (14, 2, 2)
    ]

    def run(dtype: torch.dtype, chosen_kernel: Any) -> list[Tensor]:
        """Returns the output and the gradients of query, key and value."""
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        with attention_by(None):
            out = PackedLayout(groups, device=setting.device, kernel=chosen_kernel).attend(0, *leaves, 0.125)
        return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]

    def error(tensor: Tensor, exact: Tensor) -> float:
        return ((tensor.float() - exact).norm() / exact.norm()).item()

    exact_tensors = run(torch.float32, None)
    sdpa_tensors = run(torch.bfloat16, None)
    varlen_tensors = run(torch.bfloat16, kernel)
    names = ("output", "d query", "d key", "d value")
    for name, exact, sdpa, varlen in zip(names, exact_tensors, sdpa_tensors, varlen_tensors, strict=True):
        varlen_error, sdpa_error = error(varlen, exact), error(sdpa, exact)
        note = f"sdpa itself: {sdpa_error:.2g}; at most twice that"
        ok = varlen_error <= 2 * sdpa_error + 1e-6
        yield Row("packing", f"varlen bfloat16 {name}", varlen_error, "relative", note, ok)


# -- equal steps -----------------------------------------------------------------------------------------------


def determinism(setting: Setting) -> Iterator[Row]:
    """Checks whether two trainers with equal weights end with equal bytes after two equal steps. They must if the
    device repeats a small update in this precision: the engine relies on that."""
    cases = [(setting.checked[-1], (2, 3, 12, 5, 20)), (setting.small, setting.grpo)]
    for size, shape in cases:
        samples = grpo_samples(size, shape)
        for dtype, deterministic in itertools.product((torch.bfloat16, torch.float32), (False, True)):
            torch.use_deterministic_algorithms(deterministic, warn_only=True)
            base = model_of(size, setting, compute_dtype=dtype).module
            digests = []
            for _ in range(2):
                model = CausalLM(copy.deepcopy(base), compute_dtype=dtype)
                digests.append(_after_two_steps(model, samples, setting.max_tokens))
            small_update_repeats.cache_clear()
            repeats = repeats_sums(setting.device, dtype)
            equal = digests[0] == digests[1]
            name = f"{size} {_short(dtype)}, {'deterministic' if deterministic else 'default'} kernels, two equal steps"
            result = "equal bytes" if equal else "different bytes"
            yield Row("determinism", name, result, "", f"repeats a small update: {repeats}", equal or not repeats)
    torch.use_deterministic_algorithms(False)


def _after_two_steps(model: CausalLM, samples: list[Sample], max_tokens: int) -> str:
    trainer = TorchTrainer(model)
    for _ in range(2):
        trainer.update(samples, OBJECTIVES["grpo"], OptimizerSpec(lr=1e-3), max_tokens=max_tokens)
    return digest_tensors(model.named_weights())[0]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
