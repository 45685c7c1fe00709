"""Attention over packed rows and over a KV cache, for any Hugging Face decoder.

A decoder of `transformers` passes its projected queries, keys and values to a function that it finds by name. The
function here takes a *layout* from the keyword arguments of the forward call and lets it attend. So one decoder serves
packed training, prefill and decoding, and a mask over a whole row is never built.

Axes: B row · H query head · K key/value head · T packed token · L token of a segment · G branch of a prefix group
· Q token of the longest branch · P prompt token · N branch token · S cached position · D head dimension
· R cache row that is filled (`DecodeLayout.fill`), or query head per key head (`DecodeLayout.attend`)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from engine.backends.torch import varlen
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
    scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
    # Under autocast, the rotation leaves queries and keys in float32, while values are in the lower precision already.
    query, key = query.to(value.dtype), key.to(value.dtype)
    return layout.attend(int(module.layer_idx), query, key, value, scale), None  # type: ignore[arg-type]


# -- packed rows ------------------------------------------------------------------------------------------------


class _PackedAttention(Protocol):
    def attend(self, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scale: float) -> Tensor: ...


class PackedLayout:
    """Attention within the prefix groups of one packed row (B = 1).

    It uses a variable-length flash kernel where there is one for the device and the dtype of the first queries, and
    SDPA otherwise. Both have the same mask."""

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
        if kernel is None:
            return _SDPAByLength(self._groups, self._device)
        return varlen.VarlenAttention(self._groups, device=self._device, kernel=kernel)


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


class DecodeLayout:
    """One new token per row, over a preallocated KV cache. Rows may have different lengths."""

    def __init__(self, *, rows: int, capacity: int, device: torch.device) -> None:
        """`capacity` is the largest length of a row."""
        self.capacity = capacity
        self.lengths_B = torch.zeros(rows, dtype=torch.long, device=device)
        # A copy of the lengths on the host: to read those on a GPU would wait for the GPU at every token.
        self._host_lengths = [0] * rows
        self.longest = 0
        self._cache: dict[int, tuple[Tensor, Tensor]] = {}
        self._mask_B11S: Tensor | None = None
        self._rows_B = torch.arange(rows, device=device)

    def fill(self, prefill: PrefillLayout, spans: dict[int, tuple[int, int]]) -> None:
        """Sets the first keys and values of some rows: those at spans[row] = (start, length) of the prefilled row."""
        # Set the lengths, on the host and on the device.
        rows = list(spans)
        for row, (_, length) in spans.items():
            self._host_lengths[row] = length
        device = self.lengths_B.device
        rows_R = torch.tensor(rows, device=device)
        starts_R, lengths_R = torch.tensor(list(spans.values()), device=device).unbind(1)
        self.lengths_B[rows_R] = lengths_R
        # Past its end, a shorter row repeats its last token: no query attends to it, and new tokens overwrite it.
        longest = max(length for _, length in spans.values())
        offsets_S = torch.arange(longest, device=device)
        index_RS = starts_R.unsqueeze(1) + torch.minimum(offsets_S, lengths_R.unsqueeze(1) - 1)
        # The cache of a layer is allocated at its first use, with the prefill's heads and dtype.
        for layer, (key_KTD, value_KTD) in prefill.keys_and_values.items():
            if layer not in self._cache:
                shape = (len(self._rows_B), key_KTD.shape[0], self.capacity, key_KTD.shape[2])
                self._cache[layer] = (key_KTD.new_zeros(shape), value_KTD.new_zeros(shape))
            keys_BKSD, values_BKSD = self._cache[layer]
            keys_BKSD[rows_R, :, :longest] = key_KTD[:, index_RS].transpose(0, 1)
            values_BKSD[rows_R, :, :longest] = value_KTD[:, index_RS].transpose(0, 1)

    def advance(self) -> Tensor:
        """Adds one token to every row; returns its positions (B,)."""
        positions_B = self.lengths_B.clone()
        self.lengths_B += 1
        self._host_lengths = [length + 1 for length in self._host_lengths]
        self.longest = max(self._host_lengths)
        # A shorter row does not attend to the unused end of its cache.
        cached_S = torch.arange(self.longest, device=positions_B.device)
        self._mask_B11S = (cached_S < self.lengths_B.unsqueeze(1))[:, None, None, :]
        return positions_B

    def keep_rows(self, rows_B: Tensor) -> None:
        """Drops all rows but these, so that finished completions are not computed further."""
        self.lengths_B = self.lengths_B[rows_B]
        self._host_lengths = [self._host_lengths[row] for row in rows_B.tolist()]
        self._rows_B = torch.arange(len(rows_B), device=rows_B.device)
        self._cache = {layer: (keys[rows_B], values[rows_B]) for layer, (keys, values) in self._cache.items()}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        # Write the new token's key and value.
        keys_BKSD, values_BKSD = self._cache[layer]
        last_B = self.lengths_B - 1
        keys_BKSD[self._rows_B, :, last_B] = key[:, :, 0]
        values_BKSD[self._rows_B, :, last_B] = value[:, :, 0]

        # The query heads of one key head take the place of the query axis, so that no key is copied per query head.
        heads, key_heads = query.shape[1], key.shape[1]
        query_BKRD = query[:, :, 0].unflatten(1, (key_heads, heads // key_heads))
        output_BKRD = sdpa(
            query_BKRD,
            keys_BKSD[:, :, : self.longest],
            values_BKSD[:, :, : self.longest],
            attn_mask=self._mask_B11S,
            scale=scale,
        )
        return output_BKRD.flatten(1, 2).unsqueeze(1)
