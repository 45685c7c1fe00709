"""Which rank runs which micro-batch: the same number of passes everywhere, similar lengths at the same time.

In ZeRO 3 the ranks gather weights together, layer by layer, so a rank without work runs a pass that counts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.backends.packing import Packable, micro_batches
from engine.samples import Sample

EMPTY_PASS = Sample(token_ids=[0, 0], weights=[0.0, 1.0])


def deal(samples: Sequence[Packable], *, max_tokens: int, ranks: int) -> list[list[list[int] | None]]:
    """[pass][rank] -> indices of `samples`, or None for an empty pass. At least one pass.

    Micro-batches are made over all ranks' samples, then dealt by length; where all of them would make fewer than
    there are ranks, they are cut smaller, so that nobody waits.
    """
    longest = max((len(sample.token_ids) for sample in samples), default=0)
    total = sum(len(sample.token_ids) for sample in samples)
    even = -(-total // ranks)
    batches = micro_batches(samples, max_tokens=min(max_tokens, max(longest, even)) if samples else max_tokens)
    tokens = [sum(len(samples[i].token_ids) for i in batch) for batch in batches]
    order = sorted(range(len(batches)), key=lambda index: (-tokens[index], index))
    passes: list[list[list[int] | None]] = []
    for begin in range(0, max(len(order), 1), ranks):
        row: list[list[int] | None] = [batches[index] for index in order[begin : begin + ranks]]
        row += [None] * (ranks - len(row))
        passes.append(row if len(passes) % 2 == 0 else row[::-1])
    return passes
