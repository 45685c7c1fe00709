"""The attention of packed rows on the CPU has the values and gradients of the definition: a softmax over the tokens
that a token sees.

Axes: T packed token · H query head · K key/value head · D head dimension
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.backends.torch import flash_attention
from engine.backends.torch.attention import PackedLayout
from engine.backends.torch.flash_attention import FlashAttention
from engine.backends.torch.packing import PrefixGroup
from tests.engine.torch.test_varlen import LAYOUTS

LONGER = {
    "more queries than a block": [
        PrefixGroup(0, 9),
        PrefixGroup(9, 5, ((14, 7), (21, 1), (22, 6))),
        PrefixGroup(28, 2),
    ],
    "neighbours of equal length": [PrefixGroup(0, 3), PrefixGroup(3, 3), PrefixGroup(6, 3), PrefixGroup(9, 4)],
    "branches of equal length": [PrefixGroup(0, 6, ((6, 5), (11, 5), (16, 5)))],
}
ALL_LAYOUTS = LAYOUTS | LONGER


def seen(groups: list[PrefixGroup]) -> Tensor:
    """(T, T): whether the row's token attends to the column's."""
    tokens = sum(group.tokens for group in groups)
    seen_TT = torch.zeros(tokens, tokens, dtype=torch.bool)
    for group in groups:
        for start, length in ((group.start, group.prefix), *group.branches):
            seen_TT[start : start + length, start : start + length] = torch.ones(length, length).tril().bool()
        for start, length in group.branches:
            seen_TT[start : start + length, group.start : group.start + group.prefix] = True
    return seen_TT


def by_definition(groups: list[PrefixGroup], query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor) -> Tensor:
    heads = query_THD.shape[1] // key_TKD.shape[1]
    key_THD, value_THD = (x.repeat_interleave(heads, 1) for x in (key_TKD, value_TKD))
    scores_HTT = torch.einsum("qhd,shd->hqs", query_THD, key_THD) * 0.3
    weights_HTT = scores_HTT.masked_fill(~seen(groups), -torch.inf).softmax(-1)
    return torch.einsum("hqs,shd->qhd", weights_HTT, value_THD)


def inputs(groups: list[PrefixGroup], key_heads: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values (T, heads, D), which are not contiguous, as a decoder gives them."""
    tokens = sum(group.tokens for group in groups)
    generator = torch.Generator().manual_seed(0)

    def random(heads: int) -> Tensor:
        x_HTD = 2 * torch.randn(heads, tokens, 8, dtype=torch.float64, generator=generator)
        return x_HTD.to(dtype).transpose(0, 1).requires_grad_()

    return [random(4), random(key_heads), random(key_heads)]


def gradients(output_THD: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    weights_THD = torch.randn(output_THD.shape, dtype=torch.float64, generator=generator).to(output_THD.dtype)
    return torch.autograd.grad((output_THD * weights_THD).sum(), leaves)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.03)]
)
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("groups", ALL_LAYOUTS.values(), ids=ALL_LAYOUTS)
def test_values_and_gradients_are_those_of_the_definition(
    groups: list[PrefixGroup],
    key_heads: int,
    dtype: torch.dtype,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flash_attention, "QUERY_BLOCK", 4)
    leaves = inputs(groups, key_heads, dtype)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = by_definition(groups, *exact)
    actual = FlashAttention(groups).attend(*leaves, 0.3)
    assert actual.dtype == dtype
    pairs = zip((actual, *gradients(actual, leaves)), (expected, *gradients(expected, exact)), strict=True)
    for actual_THD, expected_THD in pairs:
        distance = (actual_THD.double() - expected_THD).norm() / expected_THD.norm()
        assert distance <= tolerance


@pytest.mark.parametrize("groups", ALL_LAYOUTS.values(), ids=ALL_LAYOUTS)
def test_sdpa_computes_the_same_where_there_is_no_flash_kernel(
    groups: list[PrefixGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = inputs(groups, 2, torch.float64)
    rows = [leaf.transpose(0, 1).unsqueeze(0) for leaf in leaves]
    monkeypatch.setattr(flash_attention, "is_supported", lambda query: False)
    actual = PackedLayout(groups, device=torch.device("cpu")).attend(0, *rows, 0.3)[0]
    expected = by_definition(groups, *leaves)
    pairs = zip((actual, *gradients(actual, leaves)), (expected, *gradients(expected, leaves)), strict=True)
    for actual_THD, expected_THD in pairs:
        torch.testing.assert_close(actual_THD, expected_THD, rtol=1e-12, atol=1e-12)


def test_scores_far_above_the_logsumexp_of_the_mask_give_no_nan() -> None:
    """A masked score may be larger than the logsumexp of what is seen by more than an exponential holds."""
    groups = [PrefixGroup(0, 2)]
    query_THD = torch.tensor([[[100.0]], [[1.0]]], requires_grad=True)
    key_TKD = torch.tensor([[[-10.0]], [[10.0]]], requires_grad=True)
    value_TKD = torch.tensor([[[1.0]], [[2.0]]], requires_grad=True)
    output_THD = FlashAttention(groups).attend(query_THD, key_TKD, value_TKD, 1.0)
    leaves = torch.autograd.grad(output_THD.sum(), (query_THD, key_TKD, value_TKD))
    assert all(leaf.isfinite().all() for leaf in leaves)
    # the first token sees only itself
    assert output_THD[0].item() == 1.0 and leaves[0][0].item() == 0.0
