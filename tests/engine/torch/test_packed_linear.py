"""Products with packed weights are those of the linear layers, also in the form for one row."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.backends.torch.decoding.packed_linear import PackedLinear, can_pack

CPU = torch.device("cpu")


def layers(dtype: torch.dtype, *, bias: bool) -> list[nn.Linear]:
    """Two layers of the same input. Together they have 171 outputs, which is no multiple of a group's 64."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return [nn.Linear(48, outputs, bias=bias and outputs == 71, dtype=dtype) for outputs in (100, 71)]


def exact(linears: list[nn.Linear], x: torch.Tensor) -> torch.Tensor:
    """The outputs in float64."""
    outputs = []
    for layer in linears:
        bias = 0.0 if layer.bias is None else layer.bias.double()
        outputs.append(x.double() @ layer.weight.double().T + bias)
    return torch.cat(outputs, dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7])
@torch.inference_mode()
def test_products_are_those_of_the_layers(dtype: torch.dtype, bias: bool, rows: int) -> None:
    """Also after other weights were packed. The errors are those of rounding the outputs."""
    if not can_pack(dtype, CPU):
        pytest.skip("oneDNN does not compute in this dtype on this CPU")
    linears, generator = layers(dtype, bias=bias), torch.Generator().manual_seed(1)
    x = torch.randn(rows, 48, generator=generator).to(dtype)
    residual = torch.randn(rows, 171, generator=generator).to(dtype)
    packed, rounding = PackedLinear(linears), 4 * torch.finfo(dtype).eps
    for _ in range(2):
        expected = exact(linears, x)
        torch.testing.assert_close(packed(x).double(), expected, rtol=rounding, atol=rounding)
        added = packed.add_to(residual, x).double()
        torch.testing.assert_close(added, expected + residual.double(), rtol=rounding, atol=rounding)
        for layer in linears:
            layer.weight.mul_(-2)
        packed.pack(linears)
