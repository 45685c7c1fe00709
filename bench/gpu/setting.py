"""Sizes, models with random weights, batches and clocks, which all parts of the GPU bench share."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Any

import torch
from torch import nn

from bench.gpu.reference import trained_logprobs
from engine.backends.torch import attention
from engine.backends.torch.attention import IMPLEMENTATION, register_attention
from engine.backends.torch.causal_lm import CausalLM
from engine.memory_plan.shape import PRESETS, ModelShape, shape_of
from engine.models.samples import Sample


def _qwen2(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocab: int) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "1M": _qwen2(128, 4, 4, 2, 512, 259),
    "54M": _qwen2(512, 12, 8, 2, 2048, 16384),
    "0.5B": PRESETS["0.5B"][1] | {"bos_token_id": 1, "eos_token_id": 2},
    "1.5B": PRESETS["1.5B"][1] | {"bos_token_id": 1, "eos_token_id": 2},
}


@dataclass(frozen=True)
class Setting:
    """The sizes of one run of the bench: realistic ones on a GPU, or small ones for a quick run on the CPU."""

    device: torch.device
    smoke: bool
    checked: tuple[str, ...]
    """Models whose gradients are compared."""
    small: str
    """The model of most figures."""
    large: str
    repeats: int
    max_tokens: int
    """Packed tokens of one forward pass."""
    sft: tuple[int, int, int]
    """(samples, tokens of the shortest, tokens of the longest)."""
    grpo: tuple[int, int, int, int, int]
    """(prompts, completions of each, prompt tokens, shortest, longest completion)."""
    sampling: tuple[int, int, int, int]
    """(prompts, completions of each, prompt tokens, new tokens)."""

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.bfloat16

    def shape(self, model: str) -> ModelShape:
        return shape_of(CONFIGS[model], model)


ON_CPU = Setting(
    device=torch.device("cpu"),
    smoke=True,
    checked=("1M",),
    small="1M",
    large="1M",
    repeats=1,
    max_tokens=256,
    sft=(4, 20, 60),
    grpo=(2, 3, 12, 5, 20),
    sampling=(2, 2, 12, 6),
)
ON_GPU = Setting(
    device=torch.device("cuda", 0),
    smoke=False,
    checked=("1M", "54M"),
    small="0.5B",
    large="1.5B",
    repeats=3,
    max_tokens=8192,
    sft=(32, 256, 1024),
    grpo=(8, 16, 256, 64, 512),
    sampling=(8, 8, 256, 128),
)


def setting_of(*, smoke: bool) -> Setting:
    return ON_CPU if smoke else ON_GPU


def module_of(model: str, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> nn.Module:
    """Makes a model with random weights on the device. The global random state does not change."""
    from transformers import AutoConfig, AutoModelForCausalLM

    register_attention()
    sizes = {key: value for key, value in CONFIGS[model].items() if key != "model_type"}
    config = AutoConfig.for_model(CONFIGS[model]["model_type"], **sizes)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        module: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=IMPLEMENTATION)
    return module


def model_of(model: str, setting: Setting, *, compute_dtype: torch.dtype | None = None, seed: int = 0) -> CausalLM:
    """Makes a model with random master weights in float32."""
    module = module_of(model, dtype=torch.float32, device=setting.device, seed=seed)
    return CausalLM(module, compute_dtype=compute_dtype or setting.compute_dtype)


def exact_twin(module: nn.Module) -> nn.Module:
    """Returns a float64 copy of the module on the CPU with the attention of transformers. Its norms round to
    float32."""
    twin: Any = copy.deepcopy(module).to("cpu", torch.float64)
    twin.set_attn_implementation("sdpa")
    return twin  # type: ignore[no-any-return]


# -- batches ---------------------------------------------------------------------------------------------------


def sft_samples(model: str, sizes: tuple[int, int, int], *, seed: int = 0) -> list[Sample]:
    """Returns sequences of random ids. The first quarter of each is not trained."""
    random, vocab = Random(seed), CONFIGS[model]["vocab_size"]
    count, shortest, longest = sizes
    lengths = [random.randint(shortest, longest) for _ in range(count)]
    samples = []
    for length in lengths:
        untrained = max(1, length // 4)
        weights = [0.0] * untrained + [1.0] * (length - untrained)
        samples.append(Sample(_ids(random, length, vocab), weights))
    return samples


def grpo_samples(model: str, sizes: tuple[int, int, int, int, int], *, seed: int = 0) -> list[Sample]:
    """Returns groups of completions that share a prompt, all of random ids.

    Advantages are random. Old and reference logprobs are those of a uniform distribution, which are close to those of a
    model with random weights.
    """
    random, vocab = Random(seed), CONFIGS[model]["vocab_size"]
    prompts, completions, prompt_tokens, shortest, longest = sizes
    # the logprob of each token under a uniform distribution
    uniform = -torch.tensor(float(vocab)).log().item()
    samples = []
    for group in range(prompts):
        prompt = _ids(random, prompt_tokens, vocab)
        for index in range(completions):
            completion = _ids(random, random.randint(shortest, longest), vocab)
            count = len(completion)
            sample = Sample(
                [*prompt, *completion],
                [0.0] * len(prompt) + [1.0] * count,
                f"g{group}",
                index,
                advantages=[random.gauss(0, 1)] * count,
                old_logprobs=[uniform] * count,
                reference_logprobs=[uniform] * count,
            )
            samples.append(sample)
    return samples


def near_policy(samples: list[Sample], module: nn.Module) -> list[Sample]:
    """Returns the samples with old and reference logprobs within 0.3 of the module's, so that some ratios are
    clipped."""
    random = Random(1)
    near_samples = []
    for sample in samples:
        with torch.no_grad():
            logprobs = trained_logprobs(module, sample).tolist()
        near_sample = Sample(
            sample.token_ids,
            sample.loss_mask,
            sample.group,
            sample.completion,
            advantages=sample.advantages,
            old_logprobs=[logprob + random.uniform(-0.3, 0.3) for logprob in logprobs],
            reference_logprobs=[logprob + random.uniform(-0.3, 0.3) for logprob in logprobs],
        )
        near_samples.append(near_sample)
    return near_samples


def _ids(random: Random, count: int, vocab: int) -> list[int]:
    """Returns random token ids without the special ids 0, 1 and 2."""
    return [random.randrange(3, vocab) for _ in range(count)]


# -- clocks and memory -----------------------------------------------------------------------------------------


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(run: Callable[[], object], device: torch.device, *, repeats: int, warm_up: int = 1) -> float:
    """Returns the median wall seconds of a call, including the work that it leaves on the device."""
    for _ in range(warm_up):
        run()
    times = []
    for _ in range(repeats):
        wait(device)
        start = time.perf_counter()
        run()
        wait(device)
        times.append(time.perf_counter() - start)
    return median(times)


def reset_peak(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float | None:
    """Returns the peak GiB of the device's tensors since the last reset. None on the CPU, which does not count them."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


@contextmanager
def attention_by(kernel: attention.VarlenKernel | None) -> Iterator[None]:
    """Makes packed rows use this kernel in the block, or SDPA for None."""
    original = attention.find_varlen
    attention.find_varlen = lambda query: kernel  # type: ignore[assignment]
    try:
        yield
    finally:
        attention.find_varlen = original


def kernel_for(setting: Setting) -> attention.VarlenKernel | None:
    """Returns the kernel of the device, or None. On the CPU it returns the reference, so that the part can run."""
    from bench.gpu.reference import attention_by_pairs

    if setting.smoke:
        return attention_by_pairs
    return attention.find_varlen(torch.empty(1, 1, 1, 64, dtype=torch.bfloat16, device=setting.device))
