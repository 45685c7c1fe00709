"""The gap between the log-probabilities of a sampler and those of its trainer: what rounding explains, and the probe
sequences by which a sampler shows that it computes what the trainer does."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.backends.protocol import Trainer
from engine.errors import SamplerOutOfSync
from engine.models.samples import FloatArray
from engine.protocol import TokenIds, TokenSequence

Score = Callable[[Sequence[TokenIds]], list[list[float]]]
"""Returns the logprob, in nats at temperature 1, of every token but the first of each sequence."""

PROBES, PROBE_TOKENS = 2, 32
MAX_PROMPT_PROBES = 4
_PROBE_SEED = 20_260_101

GAP_FLOAT32, GAP_LOWER = 1e-3, 0.15
"""Mean |difference| of logprobs, in nats, that rounding explains in float32 and in lower precision. Measured on a
trained 135M model: 6e-6 and 0.05."""


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """|logprob of the sampler - logprob of the trainer| over the probe tokens, in nats."""

    mean: float
    max: float
    tokens: int


def allowed_gap(gap: float | str, *dtypes: torch.dtype) -> float:
    """The largest mean gap that a spec's `gap` allows when trainer and sampler compute in `dtypes`."""
    if isinstance(gap, float):
        return gap
    is_float32 = all(dtype.itemsize >= 4 for dtype in dtypes)
    return GAP_FLOAT32 if is_float32 else GAP_LOWER


def probe_sequences(vocab_size: int, context: int, prompts: Sequence[TokenIds] = ()) -> list[TokenIds]:
    """Fixed random sequences of token ids, followed by at most 4 of the given prompts, cut to the context."""
    generator = random.Random(_PROBE_SEED)
    length = min(PROBE_TOKENS, context - 1)
    # Random ids reach all of the vocabulary, and real prompts the inputs that matter.
    probes = []
    for _ in range(PROBES):
        probes.append([generator.randrange(vocab_size) for _ in range(length)])
    for prompt in prompts[:MAX_PROMPT_PROBES]:
        if len(prompt) > 1:
            probes.append(list(prompt[: context - 1]))
    return probes


def trainer_logprobs(trainer: Trainer, probes: Sequence[TokenIds]) -> list[FloatArray]:
    """The trainer's logprobs, in nats at temperature 1, of every token but the first of each probe."""
    sequences: list[TokenSequence] = []
    for ids in probes:
        # Nothing predicts the first token.
        loss_mask = np.arange(len(ids)) > 0
        sequences.append(TokenSequence(np.array(ids, np.int32), loss_mask))
    longest = max(len(ids) for ids in probes)
    return trainer.logprobs(sequences, temperature=1.0, max_tokens=max(longest, PROBES * PROBE_TOKENS))


def check_logprob_gap(
    expected_logprobs: Sequence[FloatArray], score: Score, probes: Sequence[TokenIds], *, tolerance: float
) -> LogprobGap:
    """Scores the probes with the sampler, and compares the logprobs with those of `trainer_logprobs`.

    Raises:
        SamplerOutOfSync: the mean difference is above `tolerance`, in nats, or it is NaN.
    """
    differences: list[float] = []
    for expected, actual in zip(expected_logprobs, score(probes), strict=True):
        for expected_logprob, actual_logprob in zip(expected, actual, strict=True):
            differences.append(abs(expected_logprob - actual_logprob))
    gap = LogprobGap(sum(differences) / len(differences), max(differences), len(differences))
    if not gap.mean <= tolerance:  # also true for NaN
        worst = max(range(len(differences)), key=lambda index: differences[index])
        raise SamplerOutOfSync(
            f"the sampler's logprobs differ from the trainer's by {gap.mean:.3g} nats on average over {gap.tokens} "
            f"probe tokens (at most {gap.max:.3g}, at probe token {worst}), and {tolerance:g} is allowed: it does not "
            "compute what the trainer does"
        )
    return gap
