"""The model as DeepSpeed sees it: one module whose forward gives the logprobs of a packed row.

Everything goes through modules' own forwards, because ZeRO 3 gathers a module's weights when it is called.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from engine.backends.attention import Layout
from engine.backends.causal_lm import CausalLM
from engine.backends.packing import Packed
from engine.errors import BadSpec


class RankModel(CausalLM):
    """A `CausalLM` whose activations may be computed again, and wait in the machine's memory until then."""

    def __init__(
        self,
        module: nn.Module,
        *,
        compute_dtype: torch.dtype,
        master_dtype: torch.dtype,
        device: torch.device,
        checkpointing: str,
    ) -> None:
        super().__init__(module, compute_dtype=compute_dtype, master_dtype=master_dtype)
        self.device = device  # not that of the first parameter, which may be offloaded
        self._offload = checkpointing == "offload"
        if checkpointing != "none":
            _checkpoint_layers(module)

    def hidden(self, token_ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        with self._kept_activations():
            return super().hidden(token_ids, positions, layout)

    def _kept_activations(self) -> AbstractContextManager[Any]:
        if not self._offload or not torch.is_grad_enabled():
            return nullcontext()
        return torch.autograd.graph.save_on_cpu(pin_memory=self.device.type == "cuda")


def _checkpoint_layers(module: nn.Module) -> None:
    """Each decoder layer keeps its input and runs again in the backward pass."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    module.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    layers = [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise BadSpec(
            f"{type(module).__name__} has no layers that can be computed again; set activation_checkpointing='none'"
        )
    for layer in layers:
        layer.training = True  # only then do they; what is inside stays in eval mode, without dropout


class PackedLogprobs(nn.Module):
    """forward(packed, temperature) -> (N,) nats."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module
        self.model: RankModel | None = None
        """Set once DeepSpeed has cast the weights."""

    def forward(self, packed: Packed, temperature: float) -> Tensor:
        assert self.model is not None
        return self.model.logprobs(packed, temperature=temperature)
