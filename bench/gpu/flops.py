"""Computes the floating-point operations of one training step, and their share of the device's peak (MFU).

Notation: T packed tokens, N trained tokens, M elements of all layers' matrices, V x H elements of the head, L layers, Q
features of a token's queries, A attended pairs (query, key):

    forward  = 2 M T  +  2 V H N  +  4 L Q A
               A matrix element is one product and one sum. A pair is that for its score and again for its value.
    model    = 3 x forward
               The backward pass has two products for each product of the forward pass. For full sequences this is
               6 x parameters x tokens plus the attention term 12 L Q A. For a causal sequence, A is half the square of
               its length.
    hardware = model + what is computed twice
               With recomputation 2 M T + 4 L Q A, so 8 x parameters x tokens in all. If the logits of the head are
               chunked, 2 V H N (engine.backends.torch.causal_lm.CHUNK_BYTES).

MFU (arXiv:2204.02311, appendix B) is the model operations per second, divided by the device's peak. What is computed
twice counts once. A shared prompt is computed once and counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.backends.torch.packing import Packable, PrefixGroup, micro_batches, pack
from engine.memory_plan.shape import ModelShape

NOMINAL = {"H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12}
"""Dense bfloat16 operations per second, from the data sheets."""


@dataclass(frozen=True, slots=True)
class Work:
    """The sizes on which the operations of one pass over a batch depend."""

    tokens: int
    """Packed tokens. A shared prompt counts once in a micro-batch."""
    pairs: int
    """Attended pairs (query, key)."""
    trained: int
    """Trained tokens."""


def work_of(samples: Sequence[Packable], *, max_tokens: int) -> Work:
    """Returns the work of one pass over the samples, packed into micro-batches."""
    import torch

    tokens = pairs = trained = 0
    for indices in micro_batches(samples, max_tokens=max_tokens):
        packed = pack([samples[index] for index in indices], device=torch.device("cpu"))
        tokens += len(packed.token_ids_T)
        pairs += pairs_of(packed.groups)
        trained += len(packed.source_N)
    return Work(tokens=tokens, pairs=pairs, trained=trained)


def pairs_of(groups: Iterable[PrefixGroup]) -> int:
    """Returns the number of attended pairs. A token attends to itself and to the tokens before it in its segment; a
    token of a branch also attends to the whole prompt."""

    def causal(length: int) -> int:
        return length * (length + 1) // 2

    pairs = 0
    for group in groups:
        pairs += causal(group.prefix)
        for _, length in group.branches:
            pairs += length * group.prefix + causal(length)
    return pairs


def forward_flops(shape: ModelShape, work: Work) -> float:
    layers = 2.0 * shape.layers * (shape.layer_linear * work.tokens + 2 * shape.queries * work.pairs)
    return layers + _head(shape, work)


def model_flops(shape: ModelShape, work: Work) -> float:
    return 3 * forward_flops(shape, work)


def hardware_flops(shape: ModelShape, work: Work, *, recompute: bool = False, chunked_head: bool = False) -> float:
    """Returns the operations that the device computes, which include those that are computed twice."""
    operations = model_flops(shape, work)
    if recompute:
        operations += forward_flops(shape, work) - _head(shape, work)
    if chunked_head:
        operations += _head(shape, work)
    return operations


def _head(shape: ModelShape, work: Work) -> float:
    return 2.0 * shape.embedding * work.trained


def nominal_peak(device_name: str) -> float | None:
    """Returns the operations per second of a known GPU, or None."""
    for name, peak in NOMINAL.items():
        if name in device_name:
            return peak
    return None
