"""Sketches of weights: linear, the same in parts, and as long as the tensor on average."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from engine.backends.weight_files.sketches import (
    BLOCK,
    BUCKETS,
    multiply_by_noise,
    sketch_from_text,
    sketch_of_tensors,
    sketch_to_text,
    tensor_sketch,
)


def test_the_parts_of_a_tensor_add_up_to_its_sketch() -> None:
    tensor = torch.randn(2 * BLOCK + 5_000)
    cuts = [0, 1, 18, BLOCK - 3, 2 * BLOCK + 17, len(tensor)]
    parts = [tensor_sketch(tensor[begin:end], start=begin) for begin, end in itertools.pairwise(cuts)]
    np.testing.assert_allclose(sum(parts), tensor_sketch(tensor), rtol=0, atol=1e-9)


def test_the_sketch_of_a_difference_is_the_difference_of_the_sketches() -> None:
    before, update = torch.randn(3 * BLOCK).double(), 1e-6 * torch.randn(3 * BLOCK).double()
    difference = tensor_sketch(before + update) - tensor_sketch(before)
    np.testing.assert_allclose(difference, tensor_sketch(update), rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", ["dense", "one column", "one row"])
def test_its_squared_length_is_that_of_the_tensor_on_average(kind: str) -> None:
    """Over 200 tensors the mean has a standard error of sqrt(2 / 17 / 200) = 0.024. A bucket that took a whole column
    would give 0.1 and far larger errors."""
    ratios = []
    for seed in range(200):
        matrix = torch.randn(300, 64, generator=torch.Generator().manual_seed(seed))
        if kind == "one column":
            matrix[:, 7] *= 100
        elif kind == "one row":
            matrix[7] *= 100
        ratios.append(float(np.square(tensor_sketch(matrix)).sum() / matrix.double().square().sum()))
    assert abs(np.mean(ratios) - 1) < 4 * 0.024
    assert np.std(ratios) < 0.5  # sqrt(2 / 17) = 0.34 in theory


def test_integers_have_no_sketch_and_no_noise() -> None:
    counts = torch.arange(10)
    multiply_by_noise(counts, 0.5, torch.Generator())
    assert counts.tolist() == list(range(10)) and not tensor_sketch(counts).any()


def test_a_record_keeps_a_sketch_in_float32() -> None:
    sketch = sketch_of_tensors([("a", torch.randn(50)), ("b", torch.randn(3, 4))])
    assert sketch.shape == (2, BUCKETS)
    kept = sketch_from_text(sketch_to_text(sketch))
    assert kept is not None
    np.testing.assert_array_equal(kept, sketch.astype(np.float32))


@pytest.mark.parametrize("text", ["", "not base64!", "AAAA", sketch_to_text(np.full((1, BUCKETS), np.nan))])
def test_a_damaged_sketch_is_none(text: str) -> None:
    assert sketch_from_text(text) is None
