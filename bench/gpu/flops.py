"""Floating-point operations of one training step, and the share of the device's peak that they are.

With T packed tokens, N trained tokens, M elements of all layers' matrices, V x H of the head, L layers, Q features of a
token's queries, and A pairs (query, key) that attend:

    forward  = 2 M T  +  2 V H N  +  4 L Q A        (a matrix element: one product and one sum; a pair: scores, values)
    model    = 3 x forward: the backward pass is two products for each of the forward's. For full sequences that is
               6 x parameters x tokens plus the attention term, 12 L Q A; A is half the square of a causal sequence's
               length, not the whole.
    hardware = model + what is computed again: with recomputing 2 M T + 4 L Q A (8 x parameters x tokens in all); of
               the head alone, 2 V H N, where its logits are chunked (engine.backends.torch.causal_lm.CHUNK_ELEMENTS).

MFU (arXiv:2204.02311, appendix B) is model operations over the step's seconds and the device's peak: nothing that is
computed twice counts for it. A shared prompt is computed once, and counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.backends.torch.packing import Packable, PrefixGroup, micro_batches, pack
from engine.memory_plan.shape import ModelShape

NOMINAL = {"H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12}
"""Dense bfloat16 operations a second by the makers' datasheets."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one pass over a batch does, however it is split."""

    tokens: int
    """Packed: a shared prompt counts once in a micro-batch."""
    pairs: int
    trained: int


def work_of(samples: Sequence[Packable], *, max_tokens: int) -> Work:
    import torch

    rows = [[samples[i] for i in index] for index in micro_batches(samples, max_tokens=max_tokens)]
    packed = [pack(row, device=torch.device("cpu")) for row in rows]
    return Work(
        tokens=sum(len(row.token_ids_T) for row in packed),
        pairs=sum(pairs_of(row.groups) for row in packed),
        trained=sum(len(row.source_N) for row in packed),
    )


def pairs_of(groups: Iterable[PrefixGroup]) -> int:
    """A token attends to itself and what is before it in its segment; a branch's to the prompt too."""

    def causal(length: int) -> int:
        return length * (length + 1) // 2

    return sum(causal(f.prefix) + sum(n * f.prefix + causal(n) for _, n in f.branches) for f in groups)


def forward_flops(shape: ModelShape, work: Work) -> float:
    layers = 2.0 * shape.layers * (shape.layer_linear * work.tokens + 2 * shape.queries * work.pairs)
    return layers + _head(shape, work)


def model_flops(shape: ModelShape, work: Work) -> float:
    return 3 * forward_flops(shape, work)


def hardware_flops(shape: ModelShape, work: Work, *, recompute: bool = False, chunked_head: bool = False) -> float:
    again = forward_flops(shape, work) - _head(shape, work) if recompute else 0.0
    return model_flops(shape, work) + again + (_head(shape, work) if chunked_head else 0.0)


def _head(shape: ModelShape, work: Work) -> float:
    return 2.0 * shape.embedding * work.trained


def nominal_peak(device_name: str) -> float | None:
    """Operations a second of a known GPU."""
    return next((peak for name, peak in NOMINAL.items() if name in device_name), None)
