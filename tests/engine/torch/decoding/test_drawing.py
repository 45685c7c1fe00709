"""Tests of the drawing of tokens: its distribution, its log-probabilities, and its independence of other rows."""

from __future__ import annotations

import pytest
import torch

from engine.backends.torch.decoding.drawing import (
    BLOCK_TOKENS,
    TOKENS_AHEAD,
    NoiseStream,
    draw_tokens,
    processed_logprobs,
)
from engine.protocol import SamplingParams

CPU = torch.device("cpu")
VOCAB = 2 * BLOCK_TOKENS + 77  # three blocks, the last one not full
STREAMS, TOKENS = 500, 2 * TOKENS_AHEAD
DRAWS = STREAMS * TOKENS
CHI_SQUARE_SIGMAS = 4.5


def streams(count: int, vocab_size: int = VOCAB) -> list[NoiseStream]:
    return [NoiseStream(seed, vocab_size=vocab_size, device=CPU) for seed in range(count)]


def logits_of(vocab_size: int, spread: float) -> torch.Tensor:
    return torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(3)) * spread


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=1),
        SamplingParams(max_new_tokens=1, temperature=0.6),
        SamplingParams(max_new_tokens=1, temperature=1.5, top_k=300),
        SamplingParams(max_new_tokens=1, top_p=0.7),
    ],
    ids=str,
)
def test_draws_follow_the_softmax(params: SamplingParams) -> None:
    """Pearson's chi-square of the counts: its mean is the degrees of freedom n, and its variance 2 n. Tokens that are
    expected less than five times count as one."""
    logits_1V = logits_of(VOCAB, 1.5)
    of_streams = streams(STREAMS)
    draws = [draw_tokens(logits_1V.expand(STREAMS, -1), params, of_streams) for _ in range(TOKENS)]
    tokens_B, logprobs_B = (torch.cat(parts) for parts in zip(*draws, strict=True))
    expected_V = processed_logprobs(logits_1V, params)[0]
    assert torch.allclose(logprobs_B, expected_V[tokens_B], atol=1e-5)

    counts_V = torch.bincount(tokens_B, minlength=VOCAB).double()
    means_V = DRAWS * expected_V.double().exp()
    rare_V = means_V < 5
    observed = torch.cat([counts_V[~rare_V], counts_V[rare_V].sum(0, keepdim=True)])
    means = torch.cat([means_V[~rare_V], means_V[rare_V].sum(0, keepdim=True)])
    observed, means = observed[means > 0], means[means > 0]
    freedom = len(means) - 1
    statistic = ((observed - means) ** 2 / means).sum().item()
    assert abs(statistic - freedom) < CHI_SQUARE_SIGMAS * (2 * freedom) ** 0.5
    assert counts_V[means_V == 0].sum() == 0


def test_a_draw_depends_neither_on_other_rows_nor_on_rounding() -> None:
    generator = torch.Generator().manual_seed(5)
    logits_BV = torch.randn(64, VOCAB, generator=generator) * 3
    params = SamplingParams(max_new_tokens=1, temperature=0.9)
    together, _ = draw_tokens(logits_BV, params, streams(64))
    rounded_BV = logits_BV + 1e-6 * torch.randn(64, VOCAB, generator=generator)
    for row in reversed(range(64)):
        alone, _ = draw_tokens(rounded_BV[row : row + 1], params, [streams(row + 1)[-1]])
        assert alone.item() == together[row].item()


def test_greedy_draws_are_the_likeliest_tokens_with_their_logprobs() -> None:
    logits_BV = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(6))
    tokens_B, logprobs_B = draw_tokens(logits_BV, SamplingParams(max_new_tokens=1, temperature=0), streams(5))
    assert torch.equal(tokens_B, logits_BV.argmax(-1))
    expected_B = logits_BV.log_softmax(-1).amax(-1)
    assert torch.allclose(logprobs_B, expected_B, atol=1e-6)


def test_forbidden_tokens_are_never_drawn() -> None:
    """Also where a whole block is forbidden."""
    logits_1V = logits_of(VOCAB, 1.0)
    logits_1V[:, BLOCK_TOKENS:] = -torch.inf
    logits_1V[:, :3] = -torch.inf
    tokens_B, logprobs_B = draw_tokens(logits_1V.expand(3000, -1), SamplingParams(max_new_tokens=1), streams(3000))
    assert tokens_B.min() >= 3 and tokens_B.max() < BLOCK_TOKENS
    assert logprobs_B.isfinite().all()
