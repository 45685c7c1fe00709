"""Which rank runs which micro-batch: the same number of passes everywhere, similar lengths at the same time.

In ZeRO 3 the ranks gather weights together, layer by layer, so a rank without work runs a pass that counts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.backends.torch.packing import Packable, micro_batches
from engine.models.samples import Sample

EMPTY_PASS = Sample(token_ids=[0, 0], weights=[0.0, 1.0])


SEARCH_STEPS = 6
"""How often a batch is cut again to find an even cut."""


def deal(
    samples: Sequence[Packable], *, max_tokens: int, ranks: int, whole_groups: bool = False
) -> list[list[list[int] | None]]:
    """[pass][rank] -> indices of `samples`, or None for an empty pass. At least one pass, and no more than
    `max_tokens` ask for.

    Micro-batches are made over all ranks' samples, then dealt by length: those of one pass are of similar length.
    """
    batches = _cut_evenly(samples, max_tokens, ranks, whole_groups) if samples else []
    tokens = [sum(len(samples[i].token_ids) for i in batch) for batch in batches]
    order = sorted(range(len(batches)), key=lambda index: (-tokens[index], index))
    passes: list[list[list[int] | None]] = []
    for begin in range(0, max(len(order), 1), ranks):
        row: list[list[int] | None] = [batches[index] for index in order[begin : begin + ranks]]
        row += [None] * (ranks - len(row))
        passes.append(row if len(passes) % 2 == 0 else row[::-1])
    return passes


def _cut_evenly(
    samples: Sequence[Packable], max_tokens: int, ranks: int, whole_groups: bool
) -> list[list[int]]:
    """Micro-batches as small as they can be without another pass: who would wait takes a share instead."""
    best = micro_batches(samples, max_tokens=max_tokens, whole_groups=whole_groups)
    most = -(-len(best) // ranks) * ranks
    if len(best) == most:
        return best
    lengths = [sum(map(len, unit)) for unit in _units(samples, whole_groups)]
    longest, total = max(lengths), sum(lengths)
    enough = min(max_tokens, total)
    short = min(max(longest, -(-total // most)), enough) - 1
    for _ in range(SEARCH_STEPS):
        if enough - short <= 1:
            break
        tried = (short + enough) // 2
        found = micro_batches(samples, max_tokens=tried, whole_groups=whole_groups) if tried >= longest else []
        if found and len(found) <= most:
            best, enough = found, tried
        else:
            short = tried
    return best


def _units(samples: Sequence[Packable], whole_groups: bool) -> list[list[list[int]]]:
    """The token ids of what must stay in one micro-batch."""
    units: dict[str, list[list[int]]] = {}
    for index, sample in enumerate(samples):
        units.setdefault(sample.group if whole_groups else f"#{index}", []).append(sample.token_ids)
    return list(units.values())
