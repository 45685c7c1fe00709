"""Packed attention and cached decoding compute what the model's own forward pass computes for each sample alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.decoding.drawing import processed_logprobs
from engine.backends.torch.loading import load_model
from engine.backends.torch.packing import pack
from engine.backends.torch.sampler import TorchSampler
from engine.backends.torch.trainer import TorchTrainer
from engine.errors import BadSpec, SampleTooLong
from engine.protocol import SamplingParams, TokenSequence

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> CausalLM:
    return load_model(tiny_folder, dtype=torch.float64, compute_dtype=torch.float64, device=CPU)


def own_logprobs(model: CausalLM, ids: list[int]) -> torch.Tensor:
    """log p of tokens 1.. by the Hugging Face model itself, unpacked and alone."""
    module = model.module
    implementation = module.config._attn_implementation
    module.set_attn_implementation("sdpa")  # eager rounds its softmax to float32
    with torch.no_grad():
        logits = module(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()
    module.set_attn_implementation(implementation)
    return logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)


SEQUENCES = [
    TokenSequence([10, 11, 12, 13, 20, 21], [0, 0, 0, 0, 1, 1], "a"),
    TokenSequence([10, 11, 12, 13, 30, 31, 32], [0, 0, 0, 0, 1, 1, 1], "a"),
    TokenSequence([40, 41, 42, 50], [0, 0, 0, 1], "b"),
    TokenSequence([10, 60, 61], [0, 1, 1], ""),
    TokenSequence([10, 11, 12, 13, 22], [0, 0, 0, 0, 1], "a"),
]


@pytest.mark.parametrize("max_tokens", [7, 12, 1000])
def test_packed_logprobs_are_those_of_each_sequence_alone(model: CausalLM, max_tokens: int) -> None:
    logprobs = TorchTrainer(model).logprobs(SEQUENCES, temperature=1.0, max_tokens=max_tokens)
    for sequence, values in zip(SEQUENCES, logprobs, strict=True):
        alone = own_logprobs(model, sequence.token_ids)
        expected = [alone[i - 1].item() for i, weight in enumerate(sequence.loss_mask) if weight > 0]
        assert values == pytest.approx(expected, abs=1e-12)


def test_chunked_logits_change_neither_value_nor_gradient(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> tuple[float, torch.Tensor]:
        model.module.zero_grad()
        total = model.logprobs(pack(SEQUENCES, device=CPU)).sum()
        total.backward()
        return total.item(), model.head.weight.grad.clone()

    whole, whole_gradient = run()
    monkeypatch.setattr("engine.backends.torch.causal_lm.CHUNK_BYTES", 2 * model.vocab_size * 8)
    chunked, chunked_gradient = run()
    assert chunked == pytest.approx(whole, abs=1e-12)
    assert torch.allclose(chunked_gradient, whole_gradient, atol=1e-12)


def test_sampled_logprobs_are_the_trainers(model: CausalLM) -> None:
    prompts = [[10, 11, 12], [10, 11, 12], [40, 41], [7]]
    done = TorchSampler(model).sample(prompts, [1, 2, 3, 4], SamplingParams(max_new_tokens=9, temperature=0.7))
    assert len({tuple(c.token_ids) for c in done[:2]}) == 2  # equal prompts, different seeds
    sequences = [
        TokenSequence(p + c.token_ids, [0.0] * len(p) + [1.0] * len(c.token_ids))
        for p, c in zip(prompts, done, strict=True)
    ]
    scored = TorchTrainer(model).logprobs(sequences, temperature=0.7, max_tokens=100)
    for completion, values in zip(done, scored, strict=True):
        assert completion.logprobs == pytest.approx(values, abs=1e-12)


def test_a_completion_does_not_depend_on_its_batch(model: CausalLM) -> None:
    prompts = [[10, 11, 12], [40, 41], [7], [10, 11, 12]]
    params = SamplingParams(max_new_tokens=12)
    together = TorchSampler(model).sample(prompts, [1, 2, 3, 4], params)
    for index, prompt in enumerate(prompts):
        alone = TorchSampler(model).sample([prompt], [index + 1], params)[0]
        assert alone.token_ids == together[index].token_ids


def test_sampling_follows_the_distribution(model: CausalLM) -> None:
    # 4,000 draws of one next token: the share of the likeliest token is within 5 sigma of its probability
    one_token = SamplingParams(max_new_tokens=1)
    draws = TorchSampler(model, max_rows=500).sample([[10, 11, 12]] * 4000, list(range(4000)), one_token)
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in draws]), minlength=model.vocab_size)
    token = int(counts.argmax())
    probability = own_logprobs(model, [10, 11, 12, token])[-1].exp().item()
    sigma = (probability * (1 - probability) / 4000) ** 0.5
    assert abs(counts[token].item() / 4000 - probability) < 5 * sigma


def test_greedy_is_the_argmax(model: CausalLM) -> None:
    done = TorchSampler(model).sample([[10, 11, 12]], [0], SamplingParams(max_new_tokens=1, temperature=0))[0]
    best = max(range(model.vocab_size), key=lambda token: own_logprobs(model, [10, 11, 12, token])[-1].item())
    assert done.token_ids == [best]


def test_top_k_and_top_p_keep_the_right_tokens() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    top_k = processed_logprobs(logits, SamplingParams(top_k=2)).exp()[0]
    assert top_k.tolist() == pytest.approx([0.625, 0.375, 0, 0])
    # 0.5 < 0.6 <= 0.8: the smallest set that reaches 0.6 is the first two
    top_p = processed_logprobs(logits, SamplingParams(top_p=0.6)).exp()[0]
    assert top_p.tolist() == pytest.approx([0.625, 0.375, 0, 0])
    cold = processed_logprobs(logits, SamplingParams(temperature=0.5)).exp()[0]
    assert cold.tolist() == pytest.approx([x / 0.365 for x in (0.25, 0.09, 0.0225, 0.0025)])


def test_min_new_tokens_holds_back_the_end(model: CausalLM) -> None:
    params = SamplingParams(max_new_tokens=6, min_new_tokens=6, temperature=5.0)
    done = TorchSampler(model).sample([[10, 11]] * 50, list(range(50)), params)
    assert all(len(completion.token_ids) == 6 for completion in done)


@pytest.mark.parametrize(
    ("prompts", "seeds", "error", "message"),
    [
        ([[]], [1], BadSpec, "prompt 0 has no tokens"),
        ([[1, 10**6]], [1], BadSpec, "token ids outside"),
        ([[1]], [1, 2], BadSpec, "1 prompts were given with 2 seeds"),
        ([[1] * 100_000], [1], SampleTooLong, "passes the model's context"),
    ],
)
def test_bad_prompts_are_refused(model: CausalLM, prompts: list, seeds: list, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        TorchSampler(model).sample(prompts, seeds, SamplingParams(max_new_tokens=4))
