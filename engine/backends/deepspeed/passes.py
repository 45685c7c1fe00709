"""The plan of the passes over a batch: which rank computes which rows, in which forward pass.

The engine's process has all rows, and makes the plan. Each rank gets only the rows of its own passes. Ranks that share
each row (sequence parallelism) are one group in the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from engine.backends.torch.packing import Packable, micro_batches

Row = TypeVar("Row", bound=Packable)
Passes = list[list[list[int] | None]]
"""[pass][group of ranks] -> indices of the rows of one micro-batch, or None for an empty pass."""
RankPasses = list[list[Row] | None]
"""[pass] -> the rows of the micro-batch of one group of ranks, or None for an empty pass."""
SEARCH_STEPS = 6
"""How often the batch is split again to find an even split."""


def distribute(samples: Sequence[Packable], *, max_tokens: int, ranks: int, whole_groups: bool = False) -> Passes:
    """The plan for `ranks` groups of ranks. There is at least one pass, and there are no more than `max_tokens` per
    forward pass requires.

    Micro-batches are built over the samples of all ranks, then distributed by length, so that the micro-batches of one
    pass have similar lengths.
    """
    # Micro-batches of all ranks, longest first. Equal lengths keep their order, so that a redo makes the same plan.
    batches: list[list[int]] = []
    if samples:
        batches = _split_evenly(samples, max_tokens, ranks, whole_groups)
        batches.sort(key=lambda batch: -_tokens(samples, batch))

    # Each pass takes one micro-batch per rank. The last one may not have enough.
    passes: Passes = []
    for begin in range(0, max(len(batches), 1), ranks):
        row: list[list[int] | None] = [*batches[begin : begin + ranks]]
        row += [None] * (ranks - len(row))
        # The order alternates, so that no rank always has the longest.
        if len(passes) % 2 == 1:
            row.reverse()
        passes.append(row)
    return passes


def rows_by_group(rows: Sequence[Row], passes: Passes) -> list[RankPasses[Row]]:
    """The rows of each group of ranks."""
    groups: list[RankPasses[Row]] = [[] for _ in passes[0]]
    for batches in passes:
        for group, indices in zip(groups, batches, strict=True):
            group.append(None if indices is None else [rows[index] for index in indices])
    return groups


def in_order_of_rows(results_by_group: Sequence[Iterable[Any]], passes: Passes) -> list[Any]:
    """One result per row, in the order of the rows. A group's results are in the order of its passes."""
    iterators = [iter(results) for results in results_by_group]
    result_of: dict[int, Any] = {}
    for batches in passes:
        for results, indices in zip(iterators, batches, strict=True):
            for index in indices or ():
                result_of[index] = next(results)
    return [result_of[index] for index in range(len(result_of))]


def _tokens(samples: Sequence[Packable], batch: Sequence[int]) -> int:
    """Number of tokens of the samples with these indices, each counted in full."""
    return sum(len(samples[index].token_ids) for index in batch)


def _split_evenly(samples: Sequence[Packable], max_tokens: int, ranks: int, whole_groups: bool) -> list[list[int]]:
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
