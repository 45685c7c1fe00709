"""The lean sampler's completions are those of the plain model, for every architecture, also after a weight update."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.backends.protocol import sync
from engine.backends.torch.causal_lm import CausalLM, frozen_copy
from engine.backends.torch.decoding.lean_decoder import can_be_lean
from engine.backends.torch.sampler import TorchSampler
from engine.backends.torch.trainer import TorchTrainer
from engine.backends.torch.trainer_samplers import WholeModelSampler
from engine.protocol import Completion, SamplingParams
from tests.engine.torch.decoding.test_lean_decoder import LIMITS, PROMPTS, SEEDS, tiny_module
from tests.fixtures.adapters import train

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"tie_word_embeddings": False}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),  # biases of queries, keys and values only
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False}),  # norms of the heads
}
PARAMS = SamplingParams(max_new_tokens=12, temperature=0.8, stop_token_ids=tuple(range(60, 90)))
"""One token in ten ends a completion, so that completions differ in length."""

pytestmark = pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())


def new_trainer(architecture: tuple[str, dict[str, Any]], compute_dtype: torch.dtype) -> TorchTrainer:
    model_type, config = architecture
    module = tiny_module(model_type, **config).requires_grad_(True)
    model = CausalLM(module, compute_dtype=compute_dtype)
    if not can_be_lean(model, compute_dtype):
        pytest.skip("oneDNN does not compute in this dtype on this CPU")
    return TorchTrainer(model)


@torch.no_grad()
def gaps(module: nn.Module, drawn: list[Completion]) -> Tensor:
    """Each drawn token's logprob minus its logprob by the module, which computes each completion with its prompt alone
    and without a cache."""
    gaps = []
    for prompt, completion in zip(PROMPTS, drawn, strict=True):
        ids_1T = torch.tensor([prompt + completion.token_ids])
        logits_TV = module(input_ids=ids_1T, use_cache=False).logits[0, len(prompt) - 1 : -1].double()
        logprobs_TV = (logits_TV / PARAMS.temperature).log_softmax(-1)
        logprobs_T = logprobs_TV.gather(1, ids_1T[0, len(prompt) :].unsqueeze(1)).squeeze(1)
        gaps.append(torch.tensor(completion.logprobs, dtype=torch.float64) - logprobs_T)
    return torch.cat(gaps)


def plain_copy(module: nn.Module, *, rounded_to: torch.dtype) -> Any:
    """The module with weights of that dtype, computed by transformers alone."""
    copy: Any = frozen_copy(module, rounded_to)
    copy.set_attn_implementation("sdpa")
    return copy


def test_float32_completions_are_those_of_the_plain_sampler(architecture: tuple[str, dict[str, Any]]) -> None:
    trainer = new_trainer(architecture, torch.float32)
    sampler = WholeModelSampler(trainer, torch.float32, **LIMITS)
    seen = set()
    for state in ("first", "second"):
        sync(sampler, trainer, state)
        drawn = sampler.sample(PROMPTS, SEEDS, PARAMS)
        expected = TorchSampler(trainer.model, **LIMITS).sample(PROMPTS, SEEDS, PARAMS)
        for completion, plain in zip(drawn, expected, strict=True):
            assert (completion.token_ids, completion.stop_reason) == (plain.token_ids, plain.stop_reason)
        assert gaps(plain_copy(trainer.model.module, rounded_to=torch.float64), drawn).abs().max() <= 1e-5
        seen.add(str([completion.token_ids for completion in drawn]))
        train(trainer, 20)
    assert len(seen) == 2  # the update changes completions
    assert len({len(completion.token_ids) for completion in drawn}) > 1


def test_bfloat16_logprobs_are_as_exact_as_those_of_transformers(architecture: tuple[str, dict[str, Any]]) -> None:
    """The reference has the rounded weights, and computes in float64. Tokens are not compared, because those of two
    computations in bfloat16 may differ. The completions have their full length, because the mean error of a few tokens
    is noise."""
    trainer = new_trainer(architecture, torch.bfloat16)
    params = SamplingParams(max_new_tokens=40, temperature=PARAMS.temperature)
    sampler = WholeModelSampler(trainer, torch.bfloat16, **LIMITS)
    for state in ("first", "second"):
        sync(sampler, trainer, state)
        drawn = sampler.sample(PROMPTS, SEEDS, params)
        plain = plain_copy(trainer.model.module, rounded_to=torch.bfloat16)
        exact = plain_copy(plain, rounded_to=torch.float64)
        error_N = gaps(exact, drawn)
        plain_error_N = error_N - gaps(plain, drawn)
        assert error_N.square().mean() <= 1.5**2 * plain_error_N.square().mean()
        train(trainer, 20)
