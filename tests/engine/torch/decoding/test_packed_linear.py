"""Packed linear layers compute the products, biases and sums of the layers that they were made of, also in the form for
one row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from engine.backends.torch.decoding.lean_decoder import PackedLinear, can_pack
from tests.fixtures.rounding import rounding

CPU = torch.device("cpu")
INPUTS = 24
OUTPUTS = (71, 5, 64)
"""Sizes of the layers' outputs. Together they are no multiple of a group's 64, and a layer lies in two groups."""
BIASES = {"none": (False, False, False), "all": (True, True, True), "some": (False, True, False)}

pytestmark = [
    pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str),
    pytest.mark.parametrize("has_bias", BIASES.values(), ids=BIASES.keys()),
    pytest.mark.parametrize("rows", [1, 2, 7]),
]


def new_layers(has_bias: tuple[bool, ...], dtype: torch.dtype, seed: int) -> list[nn.Linear]:
    """Layers with random weights and biases of the size of the outputs."""
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for outputs, bias in zip(OUTPUTS, has_bias, strict=True):
        layer = nn.Linear(INPUTS, outputs, bias=bias).requires_grad_(False)
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        layers.append(layer.to(dtype))
    return layers


def check(actual_NO: Tensor, layers: list[nn.Linear], x_NI: Tensor, residual_NO: Tensor | None = None) -> None:
    """Compares with the sums in float64, within the rounding of the sums and of the result."""
    parts, sizes = [], []
    for layer in layers:
        weight, bias = layer.weight.double(), torch.zeros(layer.out_features, dtype=torch.float64)
        if layer.bias is not None:
            bias = layer.bias.double()
        parts.append(x_NI.double() @ weight.T + bias)
        sizes.append(x_NI.double().abs() @ weight.T.abs() + bias.abs())
    expected_NO, size_NO = torch.cat(parts, dim=1), torch.cat(sizes, dim=1)
    if residual_NO is not None:
        expected_NO, size_NO = expected_NO + residual_NO.double(), size_NO + residual_NO.double().abs()
    assert actual_NO.dtype == x_NI.dtype and actual_NO.shape == expected_NO.shape
    # The sums are in float32. The bias, the residual and the result are rounded to the dtype at most once each.
    of_sums_NO = size_NO * rounding(terms=INPUTS + 2, size=1.0)
    of_result_NO = size_NO * rounding(terms=1, size=1.0, dtype=x_NI.dtype)
    assert ((actual_NO.double() - expected_NO).abs() <= of_sums_NO + of_result_NO).all()


def inputs(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(inputs, residual)"""
    generator = torch.Generator().manual_seed(rows)
    x_NI = torch.randn(rows, INPUTS, generator=generator)
    residual_NO = torch.randn(rows, sum(OUTPUTS), generator=generator)
    return x_NI.to(dtype), residual_NO.to(dtype)


def skip_if_unsupported(dtype: torch.dtype) -> None:
    if not can_pack(dtype, CPU):
        pytest.skip("oneDNN does not compute in this dtype on this CPU")


@torch.inference_mode()
def test_the_outputs_are_those_of_the_layers(dtype: torch.dtype, has_bias: tuple[bool, ...], rows: int) -> None:
    skip_if_unsupported(dtype)
    x_NI, residual_NO = inputs(rows, dtype)
    layers = new_layers(has_bias, dtype, seed=0)
    packed, before_NO = PackedLinear(layers), residual_NO.clone()
    assert packed.out_features == sum(OUTPUTS)
    check(packed(x_NI), layers, x_NI)
    check(packed.add_to(residual_NO, x_NI), layers, x_NI, before_NO)
    # The product of some of the columns of a wider tensor, as attention gives it.
    wide_N2I = torch.cat([x_NI, x_NI.neg()], dim=1)
    check(packed(wide_N2I[:, INPUTS:]), layers, x_NI.neg())


@torch.inference_mode()
def test_weights_that_are_packed_again_replace_the_old_ones(
    dtype: torch.dtype, has_bias: tuple[bool, ...], rows: int
) -> None:
    """The new weights come from float32 layers, as a trainer has them. They are rounded to the dtype."""
    skip_if_unsupported(dtype)
    x_NI, residual_NO = inputs(rows, dtype)
    packed = PackedLinear(new_layers(has_bias, dtype, seed=0))
    masters = new_layers(has_bias, torch.float32, seed=1)
    packed.pack(masters)
    rounded = [layer.to(dtype) for layer in masters]
    check(packed(x_NI), rounded, x_NI)
    check(packed.add_to(residual_NO.clone(), x_NI), rounded, x_NI, residual_NO)
