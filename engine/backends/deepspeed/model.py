"""The model as DeepSpeed sees it: one module whose forward answers what is asked of a packed row.

Everything goes through modules' own forwards, because ZeRO 3 gathers a module's weights when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from engine.backends.deepspeed.ulysses import SequenceGroup, UlyssesLayout
from engine.backends.torch.attention import Layout, PackedLayout
from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.packing import Packed
from engine.backends.torch.scalar_lm import values_of
from engine.errors import BadSpec
from engine.models.images import Images


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
        sequence: SequenceGroup | None = None,
    ) -> None:
        """`sequence`: the ranks that compute each row together."""
        super().__init__(module, compute_dtype=compute_dtype, master_dtype=master_dtype)
        self._sequence = sequence
        self.scalar = self.head is None
        """Its head gives one number per token, not logits."""
        if self.scalar:
            self.head = module.score  # type: ignore[assignment]
        self.device = device  # not that of the first parameter, which may be offloaded
        self._offload = checkpointing == "offload"
        if checkpointing != "none":
            _checkpoint_layers(module)

    @property
    def vocab_size(self) -> int:
        return int(self.module.config.vocab_size) if self.scalar else super().vocab_size  # type: ignore[union-attr, arg-type]

    def hidden(self, token_ids: Tensor, positions: Tensor, layout: Layout, images: Images = ()) -> Tensor:
        with self._kept_activations():
            return super().hidden(token_ids, positions, layout, images)

    def logprobs(self, packed: Packed, *, temperature: float = 1.0) -> Tensor:
        """Of all trained tokens, also where other ranks compute some of them; those come without gradient."""
        return self._at_sources(packed, lambda hidden, target: self._token_logprobs(hidden, target, temperature))

    def logprobs_and_entropy(self, packed: Packed, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """The same with the entropies."""

        def both(hidden: Tensor, target: Tensor) -> Tensor:
            return self._in_chunks(partial(self._logprob_and_entropy, temperature), hidden, target)

        both_N2 = self._at_sources(packed, both)
        return both_N2[:, 0], both_N2[:, 1]

    def values(self, packed: Packed) -> Tensor:
        """A scalar head's numbers (N,), as `ScalarLM.values`; those of other ranks come without gradient."""
        return self._at_sources(packed, lambda hidden, _target: values_of(self.head, hidden))

    def _at_sources(self, packed: Packed, head: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """`head` of the hidden states (n, H) before trained tokens and of those tokens (n,): (N, …) over all ranks."""
        if self._sequence is None:
            with self.autocast():
                hidden_TH = self.packed_hidden(packed)
                return head(hidden_TH.index_select(0, packed.source_N), packed.target_N)
        row = len(packed.token_ids_T)
        ulysses = UlyssesLayout(PackedLayout(packed.fans, device=self.device), self._sequence, row=row)
        index_N, own_N = self._sequence.own(packed.source_N, row=row)
        with self.autocast():
            ids_C, positions_C = self._sequence.run(packed.token_ids_T), self._sequence.run(packed.positions_T)
            hidden_CH = self.hidden(ids_C.unsqueeze(0), positions_C.unsqueeze(0), ulysses, packed.images)[0]
            own = head(hidden_CH.index_select(0, own_N), packed.target_N[index_N])
            return self._sequence.gather(own, index_N, total=len(packed.source_N))

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


def fuse_kernels(module: nn.Module, wanted: bool | str, device: torch.device) -> None:
    """Puts Liger's fused kernels into the module. "auto": where they are installed and the device is a GPU.

    Raises BadSpec where they are asked for and cannot run."""
    installed = find_spec("liger_kernel") is not None
    if wanted is False or (wanted == "auto" and not (installed and device.type == "cuda")):
        return
    if not installed or device.type != "cuda":
        raise BadSpec(
            f"trainer.liger=true needs the package liger-kernel ({'installed' if installed else 'not installed'}) and "
            f"a GPU (the device is {device.type}); install it, or set trainer.liger='auto'"
        )
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    # the head stays ours: it never sees all logits at once, and knows temperatures
    _apply_liger_kernel_to_instance(model=module, cross_entropy=False, fused_linear_cross_entropy=False)


class Asked(nn.Module):
    """forward(ask) is ask(model): whatever is asked goes through the one forward that DeepSpeed hooks into."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module
        self.model: RankModel | None = None
        """Set once DeepSpeed has taken the weights over."""

    def forward(self, ask: Callable[[RankModel], Tensor]) -> Tensor:
        assert self.model is not None
        return ask(self.model)
