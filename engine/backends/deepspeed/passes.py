"""Distribution of micro-batches over the ranks: the same number of passes on every rank, with similar lengths at the
same time.

In ZeRO 3 the ranks gather weights together, layer by layer. A rank without work therefore runs an empty pass, whose
loss does not count.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.backends.torch.packing import Packable, micro_batches
from engine.models.samples import Sample

EMPTY_PASS = Sample(token_ids=[0, 0], weights=[0.0, 1.0])
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
    # micro-batches of all ranks, longest first
    batches = _split_evenly(samples, max_tokens, ranks, whole_groups) if samples else []
    tokens = [sum(len(samples[index].token_ids) for index in batch) for batch in batches]
    longest_first = sorted(range(len(batches)), key=lambda batch: (-tokens[batch], batch))
    passes: list[list[list[int] | None]] = []
    for begin in range(0, max(len(longest_first), 1), ranks):
        row: list[list[int] | None] = [batches[batch] for batch in longest_first[begin : begin + ranks]]
        row += [None] * (ranks - len(row))
        # the order alternates, so that no rank always has the longest
        passes.append(row if len(passes) % 2 == 0 else row[::-1])
    return passes


def _split_evenly(
    samples: Sequence[Packable], max_tokens: int, ranks: int, whole_groups: bool
) -> list[list[int]]:
    """Micro-batches that are as small as possible without one more pass, so that ranks that would wait take a part of
    the work instead. A binary search over the largest number of tokens."""
    best = micro_batches(samples, max_tokens=max_tokens, whole_groups=whole_groups)
    slots = -(-len(best) // ranks) * ranks
    if len(best) == slots:
        return best
    # bounds of the search: a micro-batch must have room for the longest unit, and for an even share of the tokens
    lengths = _unit_lengths(samples, whole_groups)
    longest, total = max(lengths), sum(lengths)
    # `enough` tokens per micro-batch give at most `slots` of them; `too_few` do not
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
