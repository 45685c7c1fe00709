"""Digests of weights. They do not depend on how a model is divided over processes: each rank computes sums over its own
part of each tensor, at the same time as the others, and the sums of all parts are added.

The hash of a tensor is Multilinear (Lemire and Kaser, "Strongly universal string hashing is fast", arXiv:1202.4961)
over the 32-bit words of its row-major bytes:

    sum over words j of block b: factor[b] * multiplier[j] * word[b, j]   (mod 2^64)

There are two such sums with independent pseudo-random multipliers. A difference in one block stays undetected with a
probability of at most 2^-66, differences in several blocks with at most 2^-52. The hash finds faults. It is not
cryptographic: files in the store have their sha256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Sums = NDArray[np.uint64]
"""The two sums of a tensor, or of a part of one: shape (2,). The sums of parts are added."""

WORD_BYTES = 4
BLOCK_WORDS = 1 << 15
BLOCKS_PER_RANGE = 64
"""Blocks that a thread, or the device, sums at once: 8 MiB."""


def digest_tensors(tensors: Iterable[tuple[str, Tensor]], *, base: str = "") -> tuple[str, dict[str, str]]:
    """(digest of all tensors, digest of each by name). The tensors are sorted by name. `base` is the digest of the
    weights that these add to, such as those under an adapter."""
    digests = {name: digest_tensor(tensor) for name, tensor in tensors}
    return combine_digests(digests, base=base)


def digest_tensor(tensor: Tensor) -> str:
    """64 hex digits for dtype, shape and bytes of the tensor."""
    return digest_of_sums(tensor.dtype, tuple(tensor.shape), tensor_sums(tensor))


def digest_of_sums(dtype: torch.dtype, shape: tuple[int, ...], sums: Sums) -> str:
    """The digest of a tensor whose parts have these sums."""
    return hashlib.sha256(f"{dtype} {shape} {sums[0]:016x}{sums[1]:016x}".encode()).hexdigest()


def combine_digests(digests: Mapping[str, str], *, base: str = "") -> tuple[str, dict[str, str]]:
    """(digest of all, `digests`) for digests by name, which are sorted by name."""
    lines = [f"base {base}\n"] if base else []
    lines += [f"{name} {digest}\n" for name, digest in digests.items()]
    return hashlib.sha256("".join(lines).encode()).hexdigest(), dict(digests)


@torch.no_grad()
def tensor_sums(part: Tensor, *, start: int = 0) -> Sums:
    """The sums of the elements [start, start + numel) of a flattened tensor, which are `part`.

    They are computed where the elements are: on a CPU by as many threads as torch uses, else by the device."""
    data = part.detach().contiguous().reshape(-1).view(torch.uint8)
    first_byte = start * part.element_size()
    if part.device.type == "cpu":
        return _sums_on_cpu(data.numpy(), first_byte)
    return _sums_on_device(data, first_byte)


# -- on the CPU ---------------------------------------------------------------------------------------------------


def _sums_on_cpu(data: NDArray[np.uint8], first_byte: int) -> Sums:
    # A part may begin or end inside a word. The bytes of the word that it lacks count as zero.
    before = first_byte % WORD_BYTES
    after = -(before + len(data)) % WORD_BYTES
    if before or after:
        data = np.pad(data, (before, after))
    words = data.view(np.int32)
    ranges = _ranges(len(words), first_byte // WORD_BYTES)
    threads = torch.get_num_threads()
    if threads > 1 and len(ranges) > 1:
        parts = _thread_pool(threads).map(lambda bounds: _range_sums(words, *bounds), ranges)
    else:
        parts = map(lambda bounds: _range_sums(words, *bounds), ranges)
    return sum(parts, np.zeros(2, dtype=np.uint64))


@cache
def _thread_pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="ostinato-digest")


def _ranges(count: int, first_word: int) -> list[tuple[int, int, int]]:
    """(begin, end, first word) of ranges of `count` words, of which the first has the number `first_word`. Each range
    ends at the end of a block."""
    size, ranges, begin = BLOCK_WORDS * BLOCKS_PER_RANGE, [], 0
    while begin < count:
        word = first_word + begin
        end = min(count, begin + size - word % size)
        ranges.append((begin, end, word))
        begin = end
    return ranges


def _range_sums(words: NDArray[np.int32], begin: int, end: int, first_word: int) -> Sums:
    """The sums of words[begin:end]. numpy releases the interpreter's lock in the copies and in the products."""
    multipliers = _multipliers()
    first_block, offset = divmod(first_word, BLOCK_WORDS)
    blocks = -(-(offset + end - begin) // BLOCK_WORDS)
    products = np.empty((blocks, 2), dtype=np.int64)
    wide = np.empty(BLOCK_WORDS, dtype=np.int64)
    for block in range(blocks):
        length = min(BLOCK_WORDS - offset, end - begin)
        np.copyto(wide[:length], words[begin : begin + length])
        for lane in range(2):
            products[block, lane] = np.dot(wide[:length], multipliers[lane, offset : offset + length])
        begin, offset = begin + length, 0
    return _times_factors(products.view(np.uint64), first_block)


def _times_factors(block_sums: Sums, first_block: int) -> Sums:
    """The sums of consecutive blocks, whose own sums are given: shapes (blocks, 2) -> (2,)."""
    numbers = np.arange(2 * first_block, 2 * (first_block + len(block_sums)), dtype=np.uint64)
    factors = splitmix64(numbers + np.uint64(1 << 40)).reshape(-1, 2) | np.uint64(1)
    return (block_sums * factors).sum(0, dtype=np.uint64)


# -- on another device --------------------------------------------------------------------------------------------


def _sums_on_device(data: Tensor, first_byte: int) -> Sums:
    multipliers_2W = torch.from_numpy(_multipliers()).to(data.device)
    sums = np.zeros(2, dtype=np.uint64)
    for first_block, blocks_BY in whole_blocks(data, first_byte, BLOCK_WORDS * WORD_BYTES, at_once=BLOCKS_PER_RANGE):
        words_BW = blocks_BY.view(torch.int32)
        block_sums = torch.stack([(words_BW * multipliers_W).sum(1) for multipliers_W in multipliers_2W], dim=1)
        sums += _times_factors(block_sums.cpu().numpy().view(np.uint64), first_block)
    return sums


def whole_blocks(values: Tensor, start: int, block: int, *, at_once: int) -> Iterator[tuple[int, Tensor]]:
    """Divides the elements [start, start + len(values)) of a flattened tensor into blocks of `block` elements. Yields
    (number of the first block, up to `at_once` blocks as (blocks, block)). Zeros fill the first and the last block."""
    first_block, before = divmod(start, block)
    position = 0
    while position < len(values):
        chunk = values[position : position + block * at_once - before]
        position += len(chunk)
        after = -(before + len(chunk)) % block
        filled = torch.nn.functional.pad(chunk, (before, after)) if before or after else chunk
        blocks = filled.view(-1, block)
        yield first_block, blocks
        first_block, before = first_block + len(blocks), 0


# -- pseudo-random numbers ----------------------------------------------------------------------------------------


@cache
def _multipliers() -> NDArray[np.int64]:
    """The multiplier of each word of a block: shape (2, BLOCK_WORDS)."""
    return splitmix64(np.arange(2 * BLOCK_WORDS, dtype=np.uint64)).view(np.int64).reshape(2, BLOCK_WORDS)


def splitmix64(numbers: Sums) -> Sums:
    """Pseudo-random numbers of 64 bits, one for each number: SplitMix64 (Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014)."""
    mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
