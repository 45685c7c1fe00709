"""Linear layers of the same input as one matrix product, with weights that are packed once for oneDNN.

`torch.nn.functional.linear` in bfloat16 packs the weights again at every call. On one core of an AMD EPYC with
avx512_bf16 and the matrices of SmolLM2-135M, a product with packed weights takes 0.5 times as long at 1 row, 0.6 times
at 8 and 0.85 times at 64. In float32, where torch calls MKL, it takes 0.4 to 0.7 times as long at all numbers of rows.

With one row, the time is that of reading the weights, and oneDNN's kernel reads 7 to 14 GB/s of the 18 to 24 GB/s that
a sum reads on that core. The kernel of `embedding_bag` (FBGEMM's) prefetches, and reads 16 to 20 GB/s. The sum of the
rows of a matrix, weighted by x, is the product of x with the matrix. So bfloat16 weights have a second form for one
row, which is made when the first row comes alone.

Axes: N token · I input feature · O output feature of all layers · G group of output features · F output feature of a
group
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

GROUP = 64
"""Output features of a group. The form for one row has the weights of a group one after the other in memory."""


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN computes products with packed weights of this dtype on this device."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def has_one_row_form(dtype: torch.dtype) -> bool:
    """Whether weights of this dtype have a second form for one row."""
    return dtype == torch.bfloat16 and "fbgemm" in torch.backends.quantized.supported_engines


@lru_cache(maxsize=64)
def _bags(groups: int, inputs: int) -> tuple[Tensor, Tensor]:
    """(rows, first row of each group): a group has `inputs` neighbouring rows."""
    rows = torch.arange(groups * inputs, dtype=torch.int32)
    return rows, rows[::inputs].contiguous()


class PackedLinear:
    """The outputs of some linear layers of the same input, side by side."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        """Packs the layers' weights. Later changes of those have no effect until `pack` is called."""
        self.layers = tuple(layers)
        self.out_features = sum(layer.out_features for layer in layers)
        self.pack(layers)

    def pack(self, layers: Sequence[nn.Linear]) -> None:
        """Packs the weights of layers of the same shapes, which may have another dtype."""
        dtype = self.layers[0].weight.dtype
        weight_OI = torch.cat([layer.weight.detach().to(dtype) for layer in layers])
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI)
        self._one_row_GIF: Tensor | None = None
        self._one_row_allowed = has_one_row_form(dtype)
        self._bias_O: Tensor | None = None
        if any(layer.bias is not None for layer in layers):
            biases = []
            for layer in layers:
                bias_O = layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
                biases.append(bias_O.to(dtype))
            self._bias_O = torch.cat(biases)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights, and of their form for one row, which may not be in memory yet."""
        return self._packed.nbytes * (2 if self._one_row_allowed else 1)

    def __call__(self, x_NI: Tensor) -> Tensor:
        if len(x_NI) == 1 and self._one_row_allowed:
            return self._of_one_row(x_NI)
        output_NO: Tensor = torch.ops.mkldnn._linear_pointwise.default(x_NI, self._packed, self._bias_O, "none", [], "")
        return output_NO

    def add_to(self, residual_NO: Tensor, x_NI: Tensor) -> Tensor:
        """`residual_NO` plus the outputs."""
        if len(x_NI) == 1 and self._one_row_allowed:
            return self._of_one_row(x_NI).add_(residual_NO)
        output_NO: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x_NI, residual_NO, self._packed, self._bias_O, "add"
        )
        return output_NO

    def _of_one_row(self, x_1I: Tensor) -> Tensor:
        if self._one_row_GIF is None:
            weight_OI = self._packed.to_dense()
            padded_OI = nn.functional.pad(weight_OI, (0, 0, 0, -self.out_features % GROUP))
            self._one_row_GIF = padded_OI.unflatten(0, (-1, GROUP)).transpose(1, 2).contiguous()
        groups, inputs, _ = self._one_row_GIF.shape
        rows, first_G = _bags(groups, inputs)
        scale = x_1I.expand(groups, -1).flatten()
        weight_RF = self._one_row_GIF.flatten(0, 1)
        output_GF = torch.embedding_bag(weight_RF, rows, first_G, False, 0, False, scale)[0]
        output_1O = output_GF.view(1, -1)[:, : self.out_features]
        return output_1O if self._bias_O is None else output_1O + self._bias_O
