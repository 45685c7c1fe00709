"""Attention over packed rows, for any Hugging Face decoder.

A decoder of `transformers` passes its projected queries, keys and values to a function that it finds by name. The
function here takes a *layout* from the keyword arguments of the forward call and lets it attend. So one decoder serves
packed training, prefill and decoding (engine.backends.torch.decoding.kv_cache), and a mask over a whole row is never
built.

Axes: B row · H query head · K key/value head · T packed token · L token of a segment · G branch of a prefix group
· Q token of the longest branch · P prompt token · N branch token · D head dimension
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from engine.backends.torch import flash_attention, varlen
from engine.backends.torch.packing import PrefixGroup
from engine.errors import BadSpec

IMPLEMENTATION = "ostinato_layout"


class Layout(Protocol):
    """Which tokens attend to which."""

    longest: int
    """Length of the longest sequence."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """(1|B, H, T, D), (1|B, K, T, D) twice -> (1|B, T, H, D)."""
        ...


def register_attention() -> None:
    """Registers `attn_implementation=IMPLEMENTATION` with transformers. May be called more than once."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, _attend)
    AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    """No mask: the layout decides which tokens attend to which, and a mask over the row would only take memory."""


def _attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The function that transformers calls for the attention of each layer."""
    layout: Layout = kwargs["layout"]
    window = kwargs.get("sliding_window")
    # Refuse features of an architecture that layouts do not have.
    if window is not None and layout.longest > window:
        raise BadSpec(
            f"a sequence of {layout.longest} tokens is longer than the model's sliding window of {window}, which "
            "packed attention does not support; lower the sequence length, or use a model with full attention"
        )
    if kwargs.get("softcap") is not None:
        raise BadSpec(
            "the model soft-caps its attention scores, which packed attention does not support; use another model"
        )
    if kwargs.get("s_aux") is not None:  # the logits of the sinks, one per head, as gpt-oss passes them
        raise BadSpec(
            "the model has attention sinks, which packed attention does not support; use a model without sinks"
        )
    scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
    # Under autocast, the rotation leaves queries and keys in float32, while values are in the lower precision already.
    query, key = query.to(value.dtype), key.to(value.dtype)
    return layout.attend(int(module.layer_idx), query, key, value, scale), None  # type: ignore[arg-type]


# -- packed rows ------------------------------------------------------------------------------------------------


class _PackedAttention(Protocol):
    def attend(self, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scale: float) -> Tensor: ...


class PackedLayout:
    """Attention within the prefix groups of one packed row (B = 1).

    It uses a variable-length flash kernel where there is one for the device and the dtype of the first queries, the
    flash kernel of the CPU there, and SDPA otherwise. All have the same mask."""

    def __init__(
        self, groups: Sequence[PrefixGroup], *, device: torch.device, kernel: varlen.VarlenKernel | None = None
    ) -> None:
        """`kernel` is the kernel to use; None searches for one."""
        self.longest = max(_longest_sequence(group) for group in groups)
        self._groups, self._device, self._kernel = groups, device, kernel
        self._attention: _PackedAttention | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        if self._attention is None:  # the dtype is not known earlier
            self._attention = self._choose_attention(query)
        query_THD, key_TKD, value_TKD = (x[0].transpose(0, 1) for x in (query, key, value))
        return self._attention.attend(query_THD, key_TKD, value_TKD, scale).unsqueeze(0)

    def _choose_attention(self, query: Tensor) -> _PackedAttention:
        kernel = self._kernel or varlen.find_varlen(query)
        if kernel is not None:
            return varlen.VarlenAttention(self._groups, device=self._device, kernel=kernel)
        if flash_attention.is_supported(query):
            return flash_attention.FlashAttention(self._groups)
        return _SDPAByLength(self._groups, self._device)


def _longest_sequence(group: PrefixGroup) -> int:
    return group.prefix + max((length for _, length in group.branches), default=0)


class _SDPAByLength:
    """One SDPA call per distinct length of the causal segments, and one per group with branches."""

    def __init__(self, groups: Sequence[PrefixGroup], device: torch.device) -> None:
        # Segments of equal length are computed together.
        starts_by_length: dict[int, list[int]] = defaultdict(list)
        for group in groups:
            if group.prefix:
                starts_by_length[group.prefix].append(group.start)
        self._causal_BL: list[Tensor] = []
        for length, starts in starts_by_length.items():
            segments = [range(start, start + length) for start in starts]
            self._causal_BL.append(torch.tensor(segments, device=device))
        self._branching = [_Branches(group, device) for group in groups if group.branches]

    def attend(self, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scale: float) -> Tensor:
        key_TKD, value_TKD, gqa = _heads_for_sdpa(query_THD, key_TKD, value_TKD)
        # The outputs come in the order of the calls. `places` says where each belongs in the packed row.
        outputs, places = [], []
        for index_BL in self._causal_BL:
            output_BHLD = sdpa(
                query_THD[index_BL].transpose(1, 2),
                key_TKD[index_BL].transpose(1, 2),
                value_TKD[index_BL].transpose(1, 2),
                is_causal=True,
                scale=scale,
                enable_gqa=gqa,
            )
            outputs.append(output_BHLD.transpose(1, 2).flatten(0, 1))
            places.append(index_BL.flatten())
        for branches in self._branching:
            outputs.append(branches.attend(query_THD, key_TKD, value_TKD, scale))
            places.append(branches.places_N)
        packed_THD = outputs[0].new_empty(query_THD.shape)  # every position is in one group, so all of it is set
        return packed_THD.index_copy(0, torch.cat(places), torch.cat(outputs))


def _heads_for_sdpa(query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor) -> tuple[Tensor, Tensor, bool]:
    """(keys, values, whether SDPA shares a key head among query heads). On a GPU, keys and values are repeated for each
    query head: the only fused kernel for float32 or for a mask does not share, and without it all scores would be in
    memory at once."""
    heads_per_key = query_THD.shape[1] // key_TKD.shape[1]
    if heads_per_key == 1 or not query_THD.is_cuda:
        return key_TKD, value_TKD, heads_per_key != 1

    def repeated(x_TKD: Tensor) -> Tensor:  # its gradient is a sum; the gradient of repeat_interleave scatters
        return x_TKD.unsqueeze(2).expand(-1, -1, heads_per_key, -1).flatten(1, 2)

    return repeated(key_TKD), repeated(value_TKD), False


class _Branches:
    """Attention of the branches of one group. Queries are padded to the longest branch, inside attention only."""

    def __init__(self, group: PrefixGroup, device: torch.device) -> None:
        longest = max(length for _, length in group.branches)
        offsets_Q = torch.arange(longest, device=device)
        starts_G1, lengths_G1 = torch.tensor(group.branches, device=device).split(1, dim=1)
        # A padded query repeats the last token of its branch: it attends to something, and its output is dropped.
        self._index_GQ = starts_G1 + torch.minimum(offsets_Q, lengths_G1 - 1)
        self._real_N = (offsets_Q < lengths_G1).flatten().nonzero().squeeze(1)
        self.places_N = self._index_GQ.flatten()[self._real_N]
        self._prompt = slice(group.start, group.start + group.prefix)
        # A query attends to the whole prompt, and causally to its branch.
        causal_QQ = torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
        prompt_QP = torch.ones(longest, group.prefix, dtype=torch.bool, device=device)
        self._mask_QS = torch.cat([prompt_QP, causal_QQ], dim=1)

    def attend(self, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scale: float) -> Tensor:
        """(N, H, D): the outputs at `places_N`."""
        branches = self._index_GQ.shape[0]

        def with_prompt(x_TKD: Tensor) -> Tensor:
            prompt_GPKD = x_TKD[self._prompt].unsqueeze(0).expand(branches, -1, -1, -1)
            return torch.cat([prompt_GPKD, x_TKD[self._index_GQ]], dim=1).transpose(1, 2)

        output_GHQD = sdpa(
            query_THD[self._index_GQ].transpose(1, 2),
            with_prompt(key_TKD),
            with_prompt(value_TKD),
            attn_mask=self._mask_QS,
            scale=scale,
            enable_gqa=query_THD.shape[1] != key_TKD.shape[1],  # False where heads were repeated
        )
        return output_GHQD.transpose(1, 2).flatten(0, 1)[self._real_N]


# -- decoding -----------------------------------------------------------------------------------------------------


class PrefillLayout(PackedLayout):
    """A packed row whose keys and values are kept, layer by layer, for decoding."""

    def __init__(self, groups: Sequence[PrefixGroup], *, device: torch.device) -> None:
        super().__init__(groups, device=device)
        self.keys_and_values: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self.keys_and_values[layer] = (key[0], value[0])
        return super().attend(layer, query, key, value, scale)
