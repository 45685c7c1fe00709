"""Sizes, models of random weights, batches and clocks: what every part starts from."""

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
from engine.backends.torch import varlen
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
    """One run of the bench: on a GPU with sizes that say something, or on the CPU with sizes that are quick."""

    device: torch.device
    smoke: bool
    checked: tuple[str, ...]
    """Models whose gradients are compared."""
    small: str
    """The model that most figures are of."""
    large: str
    repeats: int
    max_tokens: int
    """Packed tokens of one forward."""
    sft: tuple[int, int, int]
    """(samples, shortest, longest)."""
    grpo: tuple[int, int, int, int, int]
    """(prompts, completions of each, prompt tokens, shortest, longest completion)."""
    sampling: tuple[int, int, int, int]
    """(prompts, completions of each, prompt tokens, new tokens)."""

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.bfloat16

    def shape(self, model: str) -> ModelShape:
        return shape_of(CONFIGS[model], model)


def setting_of(*, smoke: bool) -> Setting:
    if smoke:
        return Setting(
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
    return Setting(
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


def module_of(model: str, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> nn.Module:
    """Random weights, made on the device; the global random state is left as it was."""
    from transformers import AutoConfig, AutoModelForCausalLM

    register_attention()
    sizes = {key: value for key, value in CONFIGS[model].items() if key != "model_type"}
    config = AutoConfig.for_model(CONFIGS[model]["model_type"], **sizes)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        module: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=IMPLEMENTATION)
    return module


def model_of(model: str, setting: Setting, *, compute_dtype: torch.dtype | None = None, seed: int = 0) -> CausalLM:
    """Master weights in float32."""
    module = module_of(model, dtype=torch.float32, device=setting.device, seed=seed)
    return CausalLM(module, compute_dtype=compute_dtype or setting.compute_dtype)


def exact_twin(module: nn.Module) -> nn.Module:
    """The same weights in float64 on the CPU, with transformers' own attention. Its norms round to float32."""
    twin: Any = copy.deepcopy(module).to("cpu", torch.float64)
    twin.set_attn_implementation("sdpa")
    return twin  # type: ignore[no-any-return]


# -- batches ---------------------------------------------------------------------------------------------------


def sft_samples(model: str, sizes: tuple[int, int, int], *, seed: int = 0) -> list[Sample]:
    """Unrelated sequences of random ids; the first quarter of each is not trained."""
    random, vocab = Random(seed), CONFIGS[model]["vocab_size"]
    lengths = [random.randint(sizes[1], sizes[2]) for _ in range(sizes[0])]
    return [
        Sample(_ids(random, n, vocab), [0.0 if place < max(1, n // 4) else 1.0 for place in range(n)])
        for n in lengths
    ]


def grpo_samples(model: str, sizes: tuple[int, int, int, int, int], *, seed: int = 0) -> list[Sample]:
    """Groups that share a prompt, of random ids; advantages, and old and reference logprobs near those of a model
    that knows nothing."""
    random, vocab = Random(seed), CONFIGS[model]["vocab_size"]
    near = -torch.tensor(float(vocab)).log().item()
    made = []
    for group in range(sizes[0]):
        prompt = _ids(random, sizes[2], vocab)
        for place in range(sizes[1]):
            own = _ids(random, random.randint(sizes[3], sizes[4]), vocab)
            made.append(
                Sample(
                    [*prompt, *own],
                    [0.0] * len(prompt) + [1.0] * len(own),
                    f"g{group}",
                    place,
                    advantages=[random.gauss(0, 1)] * len(own),
                    old_logprobs=[near] * len(own),
                    reference_logprobs=[near] * len(own),
                )
            )
    return made


def near_policy(samples: list[Sample], module: nn.Module) -> list[Sample]:
    """The same with old and reference logprobs within 0.3 of the module's own: ratios on both sides of the clip."""
    random, made = Random(1), []
    for s in samples:
        with torch.no_grad():
            now = trained_logprobs(module, s).tolist()
        old, reference = ([value + random.uniform(-0.3, 0.3) for value in now] for _ in range(2))
        made.append(
            Sample(
                s.token_ids,
                s.weights,
                s.group,
                s.completion,
                advantages=s.advantages,
                old_logprobs=old,
                reference_logprobs=reference,
            )
        )
    return made


def _ids(random: Random, count: int, vocab: int) -> list[int]:
    """None of the special ids 0, 1 and 2."""
    return [random.randrange(3, vocab) for _ in range(count)]


# -- clocks and memory -----------------------------------------------------------------------------------------


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(run: Callable[[], object], device: torch.device, *, repeats: int, warm_up: int = 1) -> float:
    """Median wall seconds, the device waited for."""
    for _ in range(warm_up):
        run()
    found = []
    for _ in range(repeats):
        wait(device)
        start = time.perf_counter()
        run()
        wait(device)
        found.append(time.perf_counter() - start)
    return median(found)


def reset_peak(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float | None:
    """Of the device's tensors since the last reset; None on the CPU, whose allocator does not count."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


@contextmanager
def attention_by(kernel: varlen.VarlenKernel | None) -> Iterator[None]:
    """Packed rows attend by this kernel, or by SDPA for None, whatever the device has."""
    found = varlen.find_varlen
    varlen.find_varlen = lambda query: kernel  # type: ignore[assignment]
    try:
        yield
    finally:
        varlen.find_varlen = found


def kernel_for(setting: Setting) -> varlen.VarlenKernel | None:
    """The device's kernel; on the CPU the definition of one, so that the part runs."""
    from bench.gpu.reference import attention_by_pairs

    if setting.smoke:
        return attention_by_pairs
    return varlen.find_varlen(torch.empty(1, 1, 1, 64, dtype=torch.bfloat16, device=setting.device))
