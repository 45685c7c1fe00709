"""Linear layers whose frozen weight is held in 4 bits (QLoRA, arXiv:2305.14314), by bitsandbytes.

A weight is cut into blocks of 64 numbers. bitsandbytes keeps the largest magnitude of a block in float32, and the
index of the nearest of the 16 NF4 values for each number: 4.5 bits per weight. A forward or backward pass dequantises
the weight of one layer at a time. The largest magnitudes are not quantised a second time ("double quantisation").
A layer keeps its plain weight if its input size is no multiple of 64.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

from engine.backends.torch.lora import LoraLinear
from engine.errors import BadSpec

BLOCK = 64
"""Numbers that share a scale: bitsandbytes' default, and that of the paper."""


def four_bit_layer(original: nn.Linear, *, device: torch.device) -> LoraLinear:
    """The layer in 4 bits, or with its plain weight if its input size is no multiple of 64."""
    # On CPUs with AVX-512, bitsandbytes 0.50.2 dequantises such weights wrongly: of shape (3, 96), for example.
    if original.in_features % BLOCK:
        return LoraLinear(original)
    return LoraLinear4bit(original, device=device)


class LoraLinear4bit(LoraLinear):
    """A LoraLinear whose weight is quantised on `device`. It is dequantised to the dtype that it had."""

    def __init__(self, original: nn.Linear, *, device: torch.device) -> None:
        from bitsandbytes.nn import Params4bit

        super().__init__(original)
        self.dtype = original.weight.dtype
        plain: Any = Params4bit(original.weight.data, blocksize=BLOCK, quant_type="nf4", compress_statistics=False)
        self.weight: Any = plain.to(device)  # which quantises it

    def base_output(self, input: Tensor) -> Tensor:
        from bitsandbytes import matmul_4bit

        # Autocast does not reach into matmul_4bit, so cast as autocast would.
        return matmul_4bit(input.to(self.dtype), self.weight, bias=self.bias, quant_state=self.weight.quant_state)

    def base_weight(self) -> Tensor:
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(self.weight, self.weight.quant_state)

    @property
    def scales_nbytes(self) -> int:
        """Bytes of the largest magnitudes of the blocks."""
        return self.weight.quant_state.absmax.nbytes


def check_four_bit(device: torch.device, dtype: torch.dtype) -> None:
    """Raises BadSpec unless bitsandbytes is installed and computes with 4-bit weights on this device."""
    beginning = "load_in_4bit=true was given, "
    try:
        installed = version("bitsandbytes")
    except PackageNotFoundError:
        raise BadSpec(
            f"{beginning}and the package bitsandbytes is not installed where the engine runs; install it with "
            "pip install 'ostinato[qlora]', or leave load_in_4bit out"
        ) from None
    try:
        layer = LoraLinear4bit(nn.Linear(BLOCK, 1, bias=False, dtype=dtype), device=device)
        layer(torch.zeros(1, BLOCK, dtype=dtype, device=device))
    except Exception as error:  # the boundary to bitsandbytes: a missing kernel may raise any type of exception
        raise BadSpec(
            f"{beginning}and bitsandbytes {installed} does not compute with 4-bit weights in {dtype} on the device "
            f"{str(device)!r}: {error}. Install a version that supports the device, or leave load_in_4bit out"
        ) from error
