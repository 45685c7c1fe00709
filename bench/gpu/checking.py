"""Parts that are right or wrong: gradients and logprobs against the definition in float64, packing kernels against each
other, equal steps, DeepSpeed against torch.
"""

from __future__ import annotations

import copy
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
from engine.backends.torch.packing import PrefixGroup
from engine.backends.torch.trainer import TorchTrainer
from engine.backends.weight_files.digests import digest_tensors
from engine.losses.likelihood import CrossEntropySpec
from engine.losses.policy_gradient import GRPOSpec
from engine.models.samples import Sample
from engine.protocol import TokenSequence
from storage.chain.records import OptimizerSpec

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Relative L2 distance of the whole gradient from the definition's in float64. bfloat16 has 8 bits: each of some ten
roundings a layer is 0.2 to 0.4 %, a random walk of them over 12 layers 3 to 5 %."""
LOGPROB_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest |difference| of a logprob, nats, of a model of random weights."""
OBJECTIVES = {
    "sft": Objective(CrossEntropySpec()),
    "grpo": Objective(GRPOSpec(clip_low=CLIP, clip_high=CLIP, kl_beta=BETA)),
}
STILL = OptimizerSpec(lr=0, max_grad_norm=1e9)
"""An update that moves nothing and clips nothing."""


def gradient_of_update(
    trainer: TorchTrainer, samples: Sequence[Sample], objective: Objective, *, max_tokens: int
) -> Grads:
    """The gradient at the door of the optimizer, in the master dtype."""
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
    """The torch trainer on the device: gradients of both losses and logprobs, packed and one sample at a time."""
    for name in setting.checked:
        model = model_of(name, setting, compute_dtype=torch.float32)
        twin = exact_twin(model.module)
        batches = {
            "sft": sft_samples(name, (4, 20, 60)),
            "grpo": near_policy(grpo_samples(name, (2, 3, 12, 5, 20)), twin),
        }
        expected = {loss: gradient(twin, samples, loss) for loss, samples in batches.items()}
        with torch.no_grad():
            exact = [trained_logprobs(twin, sample).tolist() for sample in batches["grpo"]]
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
            found = gradient_of_update(trainer, samples, OBJECTIVES[loss], max_tokens=max_tokens)
            gap = distance(found, expected[loss])
            yield Row(
                "correct",
                f"{name} {_short(dtype)} {loss} gradient, {packing}",
                gap,
                "relative",
                f"at most {TOLERANCE[dtype]:g}",
                gap <= TOLERANCE[dtype],
            )


def _logprobs(name: str, trainer: TorchTrainer, samples: list[Sample], exact: list[list[float]]) -> Row:
    dtype = trainer.model.compute_dtype
    sequences = [TokenSequence(s.token_ids, s.weights, s.group) for s in samples]
    found = trainer.logprobs(sequences, temperature=1.0, max_tokens=4096)
    gap = max(abs(a - b) for f, e in zip(found, exact, strict=True) for a, b in zip(f, e, strict=True))
    bound = LOGPROB_TOLERANCE[dtype]
    return Row("correct", f"{name} {_short(dtype)} logprobs", gap, "nats", f"at most {bound:g}", gap <= bound)


# -- packing ---------------------------------------------------------------------------------------------------


def packing(setting: Setting) -> Iterator[Row]:
    """One variable-length call beside SDPA: equal values and gradients, and tokens per second of a pass."""
    kernel = kernel_for(setting)
    if kernel is None:
        yield Row("packing", "variable-length kernel", "none found: SDPA is used", ok=False)
        return
    yield from _equal(setting, kernel)
    for loss, samples in (
        ("sft", sft_samples(setting.small, setting.sft)),
        ("grpo", grpo_samples(setting.small, setting.grpo)),
    ):
        tokens = sum(len(sample.token_ids) for sample in samples)
        rates = {}
        for way, chosen in (("sdpa", None), ("varlen", kernel)):
            trainer = TorchTrainer(model_of(setting.small, setting))

            def step(trainer: TorchTrainer = trainer, loss: str = loss, samples: list[Sample] = samples) -> None:
                trainer.update(samples, OBJECTIVES[loss], STILL, max_tokens=setting.max_tokens)

            with attention_by(chosen):
                rates[way] = tokens / seconds(step, setting.device, repeats=setting.repeats)
            yield Row("packing", f"{setting.small} {loss} update by {way}", rates[way], "tokens/s", "of the samples")
            del trainer
        yield Row("packing", f"{setting.small} {loss}: varlen / sdpa", rates["varlen"] / rates["sdpa"], "x")


def _equal(setting: Setting, kernel: Any) -> Iterator[Row]:
    """Both in bfloat16 against SDPA in float32: the kernel may be off by at most twice what SDPA is."""
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

    def run(dtype: torch.dtype, chosen: Any) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        with attention_by(None):
            out = PackedLayout(groups, device=setting.device, kernel=chosen).attend(0, *leaves, 0.125)
        return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]

    exact, plain, found = run(torch.float32, None), run(torch.bfloat16, None), run(torch.bfloat16, kernel)
    for name, e, p, f in zip(("output", "d query", "d key", "d value"), exact, plain, found, strict=True):
        off, allowed = (((x.float() - e).norm() / e.norm()).item() for x in (f, p))
        note = f"sdpa itself: {allowed:.2g}; at most twice that"
        yield Row("packing", f"varlen bfloat16 {name}", off, "relative", note, off <= 2 * allowed + 1e-6)


# -- equal steps -----------------------------------------------------------------------------------------------


def determinism(setting: Setting) -> Iterator[Row]:
    """Two trainers with equal weights take two equal steps: are the bytes equal? Only the last is expected to be."""
    samples = grpo_samples(setting.checked[-1], (2, 3, 12, 5, 20))
    cases = [(torch.bfloat16, False), (torch.float32, False), (torch.float32, True)]
    for dtype, forced in cases:
        torch.use_deterministic_algorithms(forced)
        base = model_of(setting.checked[-1], setting, compute_dtype=dtype).module
        digests = [_after_two_steps(CausalLM(copy.deepcopy(base), compute_dtype=dtype), samples) for _ in range(2)]
        equal = digests[0] == digests[1]
        what = f"two equal steps, {_short(dtype)}" + (", deterministic algorithms" if forced else "")
        yield Row("determinism", what, "equal bytes" if equal else "different bytes", ok=equal if forced else None)
    torch.use_deterministic_algorithms(False)


def _after_two_steps(model: CausalLM, samples: list[Sample]) -> str:
    trainer = TorchTrainer(model)
    for _ in range(2):
        trainer.update(samples, OBJECTIVES["grpo"], OptimizerSpec(lr=1e-3), max_tokens=4096)
    return digest_tensors(model.named_weights())[0]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
