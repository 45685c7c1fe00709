"""The last proof of a weight sync: sampler and trainer give the same sequences the same logprobs.

Checksums prove that bytes arrived; this proves that both compute the same function of them: attention, rotary
frequencies, precision, the adapter in use.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.backends.protocol import Trainer
from engine.errors import SamplerOutOfSync
from engine.protocol import TokenIds, TokenSequence

Score = Callable[[Sequence[TokenIds]], list[list[float]]]
"""Nats of every token but the first, at temperature 1."""

PROBES, PROBE_TOKENS = 2, 32
_PROBE_SEED = 20_260_101

GAP_FLOAT32, GAP_LOWER = 1e-3, 0.15
"""Mean |difference| of logprobs, nats, that rounding explains: measured 6e-6 and 0.05 on a trained 135M model."""


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """|logprob of the sampler - logprob of the trainer| over the probes, nats."""

    mean: float
    max: float
    tokens: int


def allowed_gap(gap: float | str, *dtypes: torch.dtype) -> float:
    """What a spec's `gap` means where trainer and sampler compute in these precisions."""
    if isinstance(gap, float):
        return gap
    return GAP_FLOAT32 if all(dtype.itemsize >= 4 for dtype in dtypes) else GAP_LOWER


def probe_sequences(vocab_size: int, context: int, prompts: Sequence[TokenIds] = ()) -> list[TokenIds]:
    """Fixed sequences of ids of the vocabulary, and the given prompts, cut to the context and to at most 4."""
    rng = random.Random(_PROBE_SEED)
    length = min(PROBE_TOKENS, context - 1)
    fixed = [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(PROBES)]
    return fixed + [list(prompt[: context - 1]) for prompt in prompts[:4] if len(prompt) > 1]


def check_logprob_gap(trainer: Trainer, score: Score, probes: Sequence[TokenIds], *, max_gap: float) -> LogprobGap:
    """Scores the probes with both.

    Raises:
        SamplerOutOfSync: the mean difference passes `max_gap`, or is not a number.
    """
    sequences = [TokenSequence(list(ids), [0.0, *[1.0] * (len(ids) - 1)]) for ids in probes]
    longest = max(len(ids) for ids in probes)
    ours = trainer.logprobs(sequences, temperature=1.0, max_tokens=max(longest, PROBES * PROBE_TOKENS))
    theirs = score(probes)
    gaps = [abs(a - b) for mine, other in zip(ours, theirs, strict=True) for a, b in zip(mine, other, strict=True)]
    gap = LogprobGap(sum(gaps) / len(gaps), max(gaps), len(gaps))
    if not gap.mean <= max_gap:
        worst = max(range(len(gaps)), key=lambda index: gaps[index])
        raise SamplerOutOfSync(
            f"the sampler's logprobs differ from the trainer's by {gap.mean:.3g} nats on average over {gap.tokens} "
            f"probe tokens (at most {gap.max:.3g}, at probe token {worst}), tolerated are {max_gap:g}: it does not "
            "compute what the trainer does"
        )
    return gap
