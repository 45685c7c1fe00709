"""Linear sketches of weights, which estimate the distance between two models from a few numbers per tensor.

The sketch of a tensor is a count sketch (Charikar, Chen and Farach-Colton, "Finding frequent items in data streams",
2002; Thorup and Zhang, "Tabulation-based 5-independent hashing with applications to linear probing and second moment
estimation", 2012): each element is multiplied by a pseudo-random sign and added to one of `BUCKETS` sums. It is linear:
the sketch of a difference is the difference of the sketches, and ranks add the sketches of their parts. The length of a
sketch estimates the length (L2 norm) of the tensor without bias, with a relative error of about sqrt(1 / (2 BUCKETS)):
17 %, and less over many tensors.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.weight_files.digests import splitmix64, whole_blocks

Sketch = NDArray[np.float64]
"""Of one tensor: shape (BUCKETS,). Of a model: shape (tensors, BUCKETS), in the order of the tensors' names."""

BUCKETS = 17
"""An element's bucket is its position modulo this number. It is a prime, so that the elements of a column of a matrix,
which may be larger than all others, get into all buckets."""
BLOCK_ROWS = 1 << 12
BLOCK = BLOCK_ROWS * BUCKETS
"""Elements whose signs differ at random. The signs of all elements of a later block are flipped together, or none."""
BLOCKS_AT_ONCE = 16


def sketch_of_tensors(tensors: Iterable[tuple[str, Tensor]]) -> Sketch:
    """The sketch of a model whose (name, tensor) pairs are sorted by name."""
    return np.array([tensor_sketch(tensor) for _, tensor in tensors]).reshape(-1, BUCKETS)


@torch.no_grad()
def tensor_sketch(part: Tensor, *, start: int = 0) -> Sketch:
    """The sketch of the elements [start, start + numel) of a flattened tensor, which are `part`. It is computed on the
    device of the elements. Tensors of integers have a sketch of zeros."""
    sketch = np.zeros(BUCKETS)
    if not part.is_floating_point():
        return sketch
    # Products with signs are exact in the dtype, and the sums are in float64. Fewer bits would hide small updates.
    values = part.detach().contiguous().reshape(-1)
    dtype = torch.float64 if part.dtype == torch.float64 else torch.float32
    signs = torch.from_numpy(_signs()).to(part.device, dtype)
    for first_block, blocks in whole_blocks(values, start, BLOCK, at_once=BLOCKS_AT_ONCE):
        rows = blocks.to(dtype).view(-1, BLOCK_ROWS, BUCKETS)
        sums = (rows * signs).sum(1, dtype=torch.float64).cpu().numpy()
        numbers = np.arange(first_block, first_block + len(sums), dtype=np.uint64) + np.uint64(1 << 41)
        sketch += _signs_of(numbers) @ sums
    return sketch


@torch.no_grad()
def multiply_by_noise(tensor: Tensor, relative: float, generator: torch.Generator) -> None:
    """Multiplies each element in place by 1 + `relative` or by 1 - `relative`, at random. Integers stay as they are."""
    if not tensor.is_floating_point():
        return
    for chunk in tensor.detach().view(-1).split(BLOCK * BLOCKS_AT_ONCE):
        chunk.mul_(1 - relative + 2 * relative * torch.empty_like(chunk).bernoulli_(generator=generator))


@cache
def _signs() -> NDArray[np.float64]:
    """The sign of each element of a block: shape (BLOCK_ROWS, BUCKETS)."""
    return _signs_of(np.arange(BLOCK, dtype=np.uint64) + np.uint64(1 << 42)).reshape(BLOCK_ROWS, BUCKETS)


def _signs_of(numbers: NDArray[np.uint64]) -> NDArray[np.float64]:
    return np.where(splitmix64(numbers) >> np.uint64(63), 1.0, -1.0)


def sketch_to_text(sketch: Sketch) -> str:
    """The sketch of an update as base64 of float32 numbers, for a commit record."""
    return base64.b64encode(sketch.astype("<f4").tobytes()).decode()


def sketch_from_text(text: str) -> Sketch | None:
    """The sketch of a commit record. None if it has none, or one that is damaged."""
    try:
        numbers = np.frombuffer(base64.b64decode(text, validate=True), dtype="<f4")
    except (binascii.Error, ValueError):
        return None
    if not len(numbers) or len(numbers) % BUCKETS or not np.isfinite(numbers).all():
        return None
    return numbers.astype(np.float64).reshape(-1, BUCKETS)
