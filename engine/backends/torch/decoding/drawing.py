"""Draws tokens from logits, with one stream of random numbers per completion.

A token is drawn in two stages over fixed blocks of the vocabulary: first the block, whose probability is the sum of its
tokens' probabilities, then the token within the block. Each stage is a draw by Gumbel-max, argmax(log p + G) with G
from the standard Gumbel distribution, which is equal to a categorical draw (Maddison et al., arXiv:1411.0030). So the
distribution over tokens is exact, and a token needs a few hundred random numbers instead of one per vocabulary entry.

Blocks and noise depend on token ids and on the completion's seed only. Unlike an inverse CDF, an argmax does not
depend on the rounding of a cumulative sum. So in float32 the tokens of a completion do not depend on the other
completions of its batch.

Axes: B row · V vocabulary · K block of the vocabulary · J token of a block · S drawn token
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.protocol import SamplingParams

BLOCK_TOKENS = 256
"""Number of token ids in a block."""
TOKENS_AHEAD = 16
"""Number of tokens whose noise is computed at once. A call for every token of every row would cost more than the
numbers themselves."""


class NoiseStream:
    """The noise of one completion: for each token, one Gumbel number per block and one per place in a block."""

    def __init__(self, seed: int, *, vocab_size: int, device: torch.device) -> None:
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._shape = (TOKENS_AHEAD, _blocks(vocab_size) + BLOCK_TOKENS)
        self._noise_S: list[Tensor] = []

    def next(self) -> Tensor:
        """The noise of the next token: (K + J,) in float64."""
        if not self._noise_S:
            uniform = torch.empty(self._shape, dtype=torch.float64, device=self._generator.device)
            uniform.uniform_(generator=self._generator)
            gumbel = uniform.log_().neg_().log_().neg_()
            self._noise_S = list(gumbel.unbind(0))[::-1]
        return self._noise_S.pop()


def draw_tokens(logits_BV: Tensor, params: SamplingParams, streams: Sequence[NoiseStream]) -> tuple[Tensor, Tensor]:
    """(tokens, their log-probabilities in nats): (B,) each. At temperature 0, the tokens are the likeliest ones, and
    the streams are not read."""
    logits_BV = processed_logits(logits_BV, params)
    rows, vocab_size = logits_BV.shape
    blocks = _blocks(vocab_size)
    # The last block is filled up with tokens of probability 0.
    padded_BV, missing = logits_BV, blocks * BLOCK_TOKENS - vocab_size
    if missing:
        padded_BV = pad(logits_BV, (0, missing), value=-torch.inf)
    logits_BKJ = padded_BV.unflatten(1, (blocks, BLOCK_TOKENS))
    blocks_BK = logits_BKJ.logsumexp(-1)
    if params.temperature > 0:
        noise_B = torch.stack([stream.next() for stream in streams])
        block_B = (blocks_BK + noise_B[:, :blocks]).argmax(-1)
        logits_BJ = logits_BKJ[torch.arange(rows, device=block_B.device), block_B]
        tokens_B = block_B * BLOCK_TOKENS + (logits_BJ + noise_B[:, blocks:]).argmax(-1)
    else:
        tokens_B = logits_BV.argmax(-1)
    logprobs_B = logits_BV.gather(1, tokens_B.unsqueeze(1)).squeeze(1) - blocks_BK.logsumexp(-1)
    return tokens_B, logprobs_B


def _blocks(vocab_size: int) -> int:
    return -(-vocab_size // BLOCK_TOKENS)


def processed_logprobs(logits_BV: Tensor, params: SamplingParams) -> Tensor:
    """Log-probabilities of the distribution that is sampled from: temperature first, then top-k, then top-p."""
    return processed_logits(logits_BV, params).log_softmax(-1)


def processed_logits(logits_BV: Tensor, params: SamplingParams) -> Tensor:
    """Logits of the distribution that is sampled from. Tokens that may not be drawn have -inf."""
    if params.temperature not in (0, 1):
        logits_BV = logits_BV / params.temperature
    if 0 < params.top_k < logits_BV.shape[1]:
        kth_B1 = logits_BV.topk(params.top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < kth_B1, -torch.inf)
    if params.top_p < 1:
        # Top-p keeps the tokens before which less than top_p of the probability lies.
        sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True)
        probabilities_BV = sorted_BV.softmax(-1)
        dropped_BV = _running_sum(probabilities_BV) - probabilities_BV >= params.top_p
        dropped_BV[:, 0] = False  # a top_p below the smallest float32 is 0 here, and would keep no token
        drop_BV = torch.zeros_like(dropped_BV).scatter(1, order_BV, dropped_BV)
        logits_BV = logits_BV.masked_fill(drop_BV, -torch.inf)
    return logits_BV


def _running_sum(x_BV: Tensor) -> Tensor:
    """Cumulative sum. Where deterministic kernels are in use, it is computed on the CPU, because torch has none for a
    GPU, and may raise for it (also under `warn_only`, while another thread computes a gradient:
    engine.backends.torch.determinism)."""
    if x_BV.is_cuda and torch.are_deterministic_algorithms_enabled():
        return x_BV.cpu().cumsum(-1).to(x_BV.device)
    return x_BV.cumsum(-1)
