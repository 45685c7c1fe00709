"""Digests of weights: the formula, parts of tensors, planted faults."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.backends.weight_files import digests
from engine.backends.weight_files.digests import BLOCK_WORDS, Sums, digest_tensor, tensor_sums

LENGTH = 2 * BLOCK_WORDS + 12_345  # three blocks of float32, the last one incomplete
MASK = 2**64 - 1


def mix(number: int) -> int:
    """SplitMix64 in Python's integers."""
    value = (number + 1) * 0x9E3779B97F4A7C15 & MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


def sums_by_definition(tensor: Tensor) -> list[int]:
    """The two sums, word by word in Python's integers."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    words = np.frombuffer(data + bytes(-len(data) % 4), dtype="<i4").tolist()
    sums = [0, 0]
    for lane in range(2):
        for number, word in enumerate(words):
            block, position = divmod(number, BLOCK_WORDS)
            factor = mix(2 * block + lane + (1 << 40)) | 1
            sums[lane] += factor * mix(lane * BLOCK_WORDS + position) * word
    return [total & MASK for total in sums]


def test_splitmix64_gives_the_published_numbers() -> None:
    # the first outputs of the reference generator (prng.di.unimi.it/splitmix64.c) for the seed 0
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert digests.splitmix64(np.arange(3, dtype=np.uint64)).tolist() == published


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_the_sums_follow_the_formula(dtype: torch.dtype) -> None:
    tensor = (torch.randn(LENGTH) * 50).to(dtype)
    assert tensor_sums(tensor).tolist() == sums_by_definition(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_the_sums_of_parts_add_up_to_those_of_the_tensor(dtype: torch.dtype) -> None:
    tensor = (torch.randn(LENGTH) * 50).to(dtype)
    whole = tensor_sums(tensor)
    cuts = [0, 1, 7, 4_003, BLOCK_WORDS, 2 * BLOCK_WORDS + 1, LENGTH]
    on_cpu: Sums = np.zeros(2, dtype=np.uint64)
    on_device: Sums = np.zeros(2, dtype=np.uint64)
    for begin, end in itertools.pairwise(cuts):
        part = tensor[begin:end]
        on_cpu += tensor_sums(part, start=begin)
        # the code for other devices, which runs on a CPU too
        on_device += digests._sums_on_device(part.view(torch.uint8), begin * part.element_size())
    assert on_cpu.tolist() == on_device.tolist() == whole.tolist()


def test_threads_change_no_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "BLOCKS_PER_RANGE", 1)
    tensor = torch.randn(LENGTH)
    one_thread = tensor_sums(tensor).tolist()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert tensor_sums(tensor).tolist() == one_thread


def test_every_planted_fault_changes_the_digest() -> None:
    tensor = torch.randn(300, 400)
    intact = digest_tensor(tensor)
    # One element off by the last bit, the sign of a single zero, two swapped elements, rows and blocks.
    off = tensor.clone()
    off.view(torch.int32)[17, 3] ^= 1
    negated = tensor.clone()
    negated[100:102, 7] *= -1  # only the highest bits of two words change
    swapped_rows = tensor[[1, 0, *range(2, 300)]]
    blocks = tensor.reshape(-1)[: 2 * BLOCK_WORDS].reshape(2, -1)
    swapped_blocks = torch.cat([blocks[1], blocks[0], tensor.reshape(-1)[2 * BLOCK_WORDS :]]).view(300, 400)
    converted = [tensor * 1.01, tensor.t().contiguous(), tensor.to(torch.bfloat16)]
    faults = [off, negated, swapped_rows, swapped_blocks, *converted]
    changed = {digest_tensor(fault) for fault in faults}
    assert len(changed) == len(faults) and intact not in changed
    zeros = torch.zeros(5)
    assert digest_tensor(zeros) != digest_tensor(-zeros) != digest_tensor(torch.zeros(6))


def test_a_view_has_the_digest_of_its_copy() -> None:
    tensor = torch.randn(64, 48)
    assert digest_tensor(tensor.t()) == digest_tensor(tensor.t().contiguous())
