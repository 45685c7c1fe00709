"""Distribution of micro-batches over the ranks: the same number of passes on every rank, with similar lengths at the
same time.

In ZeRO 3 the ranks gather weights together, layer by layer. A rank without work therefore runs an empty pass, whose
loss does not count.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.backends.torch.packing import Packable, micro_batches
from engine.models.samples import Sample

EMPTY_PASS = Sample(np.zeros(2, np.int32), np.array([False, True]))
SEARCH_STEPS = 6
"""How often the batch is split again to find an even split."""


def distribute(
    samples: Sequence[Packable], *, max_tokens: int, ranks: int, whole_groups: bool = False
) -> list[list[list[int] | None]]:
    """[pass][rank] -> indices of the samples, or None for an empty pass. There is at least one pass, and there are no
    more than `max_tokens` per forward pass requires.

    Micro-batches are built over the samples of all ranks, then distributed by length, so that the micro-batches of one
    pass have similar lengths.
    """
    # Micro-batches of all ranks, longest first. Equal lengths keep their order, so that every rank gets the same list.
    batches: list[list[int]] = []
    if samples:
        batches = _split_evenly(samples, max_tokens, ranks, whole_groups)
        batches.sort(key=lambda batch: -_tokens(samples, batch))

    # Each pass takes one micro-batch per rank. The last one may not have enough.
    passes: list[list[list[int] | None]] = []
    for begin in range(0, max(len(batches), 1), ranks):
        row: list[list[int] | None] = [*batches[begin : begin + ranks]]
        row += [None] * (ranks - len(row))
        # The order alternates, so that no rank always has the longest.
        if len(passes) % 2 == 1:
            row.reverse()
        passes.append(row)
    return passes


def _tokens(samples: Sequence[Packable], batch: Sequence[int]) -> int:
    """Number of tokens of the samples with these indices, each counted in full."""
    return sum(len(samples[index].token_ids) for index in batch)


def _split_evenly(
    samples: Sequence[Packable], max_tokens: int, ranks: int, whole_groups: bool
) -> list[list[int]]:
    """Micro-batches that are as small as possible without one more pass, so that ranks that would wait take a part of
    the work instead. A binary search over the largest number of tokens."""
    best = micro_batches(samples, max_tokens=max_tokens, whole_groups=whole_groups)
    slots = -(-len(best) // ranks) * ranks
    if len(best) == slots:
        return best
    # Bounds of the search: a micro-batch must have room for the longest unit, and for an even share of the tokens.
    lengths = _unit_lengths(samples, whole_groups)
    longest, total = max(lengths), sum(lengths)
    # Invariant: `enough` tokens per micro-batch give at most `slots` micro-batches, and `too_few` give more.
    enough = min(max_tokens, total)
    too_few = min(max(longest, -(-total // slots)), enough) - 1
    for _ in range(SEARCH_STEPS):
        if enough - too_few <= 1:
            break
        middle = (too_few + enough) // 2
        batches: list[list[int]] = []
        if middle >= longest:
            batches = micro_batches(samples, max_tokens=middle, whole_groups=whole_groups)
        if batches and len(batches) <= slots:
            best, enough = batches, middle
        else:
            too_few = middle
    return best


def _unit_lengths(samples: Sequence[Packable], whole_groups: bool) -> list[int]:
    """Tokens of each unit that has to stay in one micro-batch: a sample, or with `whole_groups` a group."""
    lengths: dict[str, int] = {}
    for index, sample in enumerate(samples):
        unit = sample.group if whole_groups else f"#{index}"
        lengths[unit] = lengths.get(unit, 0) + len(sample.token_ids)
    return list(lengths.values())
