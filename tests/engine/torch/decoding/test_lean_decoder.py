"""The lean forward pass computes what the decoder of transformers computes, for every architecture that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.backends.protocol import sync
from engine.backends.torch.attention import IMPLEMENTATION, PackedLayout, register_attention
from engine.backends.torch.causal_lm import CausalLM, frozen_copy
from engine.backends.torch.decoding.lean_decoder import MODEL_TYPES, LeanModel, can_be_lean, has_one_row_form
from engine.backends.torch.packing import PrefixGroup
from engine.backends.torch.sampler import TorchSampler
from engine.backends.torch.trainer_samplers import TorchSamplerBackend, WholeModelSampler
from engine.protocol import SamplingParams
from engine.specs.engine import LocalEngineSpec
from tests.fixtures.adapters import backend, train

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
PROMPTS = [[5, 6, 7], [40], [9, 9, 9, 9, 200, 3], [5, 6, 7], list(range(3, 60))]
SEEDS = [1, 2, 3, 4, 5]
LIMITS = {"max_rows": 8, "max_prefill_tokens": 512}


def tiny_module(model_type: str, **config: Any) -> nn.Module:
    """A model with random weights, norms and biases included: their initial values, 1 and 0, would hide an error."""
    from transformers import AutoConfig, AutoModelForCausalLM

    register_attention()
    settings = AutoConfig.for_model(model_type, **SIZES, **config)
    settings.sliding_window = config.get("sliding_window")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(settings, dtype=torch.float32, attn_implementation=IMPLEMENTATION)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return module.eval().requires_grad_(False)


def hidden(model: CausalLM) -> torch.Tensor:
    """Hidden states of two sequences of different lengths in one packed row."""
    ids_1T = torch.arange(3, 40).unsqueeze(0)
    positions_1T = torch.tensor([*range(25), *range(12)]).unsqueeze(0)
    layout = PackedLayout([PrefixGroup(0, 25), PrefixGroup(25, 12)], device=CPU)
    return model.hidden(ids_1T, positions_1T, layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        *((model_type, {}) for model_type in MODEL_TYPES),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ],
)
@torch.inference_mode()
def test_hidden_states_and_logits_are_those_of_transformers(
    model_type: str, config: dict[str, Any], dtype: torch.dtype
) -> None:
    exact = CausalLM(tiny_module(model_type, **config), compute_dtype=torch.float32)
    plain = CausalLM(frozen_copy(exact.module, dtype), compute_dtype=dtype)
    if not can_be_lean(plain, dtype):
        pytest.skip("oneDNN does not compute in this dtype on this CPU")
    lean = LeanModel(plain).model
    expected, by_plain, by_lean = hidden(exact), hidden(plain), hidden(lean)
    if dtype == torch.float32:
        assert torch.allclose(by_lean, expected, atol=2e-5)
        assert torch.allclose(lean.logits(by_lean[0]), exact.logits(expected[0]), atol=1e-4)
    else:  # its rounding errors are at most as large as those of transformers in this precision
        assert (by_lean - expected).abs().mean() <= 1.2 * (by_plain - expected).abs().mean()
        difference = (lean.logits(by_lean[0]) - exact.logits(expected[0])).abs().mean()
        assert difference <= 1.2 * (plain.logits(by_plain[0]) - exact.logits(expected[0])).abs().mean()


def test_other_decoders_are_left_as_they_are() -> None:
    window = CausalLM(tiny_module("mistral", sliding_window=16), compute_dtype=torch.float32)
    gemma = CausalLM(tiny_module("gemma"), compute_dtype=torch.float32)  # its norms scale by 1 + weight
    assert not can_be_lean(window, torch.float32)
    assert not can_be_lean(gemma, torch.float32)
    plain = CausalLM(tiny_module("llama"), compute_dtype=torch.float64)
    assert not can_be_lean(plain, torch.float64)


@pytest.mark.parametrize("min_new_tokens", [0, 12])
def test_float32_completions_are_those_of_the_plain_sampler(tiny_folder: Path, min_new_tokens: int) -> None:
    """Also after the weights have changed."""
    trainer = backend().load(tiny_folder)
    sampler = WholeModelSampler(trainer, torch.float32, **LIMITS)
    params = SamplingParams(max_new_tokens=12, min_new_tokens=min_new_tokens, temperature=0.8, stop_token_ids=(77,))
    for state in ("first", "second"):
        sync(sampler, trainer, state)
        drawn = sampler.sample(PROMPTS, SEEDS, params)
        expected = TorchSampler(trainer.model).sample(PROMPTS, SEEDS, params)
        for completion, plain in zip(drawn, expected, strict=True):
            assert (completion.token_ids, completion.stop_reason) == (plain.token_ids, plain.stop_reason)
            assert completion.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
        train(trainer, 0)


def test_the_reported_bytes_are_those_of_the_weights(tiny_folder: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        trainer = backend(dtype).load(tiny_folder)
        compute = trainer.model.compute_dtype
        if not can_be_lean(trainer.model, compute):
            continue
        samplers = TorchSamplerBackend(LocalEngineSpec(), compute_dtype=compute, device=CPU)
        sampler = samplers.new_sampler(trainer)
        sync(sampler, trainer, "state")
        # 4 layers: q and o of 128 x 128, k and v of 64 x 128, gate, up and down of 512 x 128. The head is tied.
        linear = 4 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 512 * 128) + 259 * 128
        expected = linear * compute.itemsize
        if dtype == "bfloat16":  # a second form for one row; embedding and norms are copied, too
            expected += linear * 2 * has_one_row_form(compute) + 2 * (259 * 128 + 9 * 128)
        assert sampler.nbytes() == expected == samplers.added_bytes(trainer)
