"""Attention over packed rows and over a KV cache, plugged into any Hugging Face decoder.

A decoder of `transformers` hands its projected queries, keys and values to a function by name; ours finds a
*layout* among the keyword arguments of the forward call and lets it attend. So one decoder serves packed training,
prefill and decoding, and no mask of a whole row is ever built.

Axes: B row · H query head · K key/value head · T packed token · G branch of a fan · Q longest branch · P prompt
· S cached position · D head dimension · R row that is filled, or queries per key head
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from engine.backends.torch import varlen
from engine.backends.torch.packing import Fan
from engine.errors import BadSpec

IMPLEMENTATION = "ostinato_layout"


class Layout(Protocol):
    longest: int

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """(1|B, H, T, D), (1|B, K, T, D) twice -> (1|B, T, H, D)."""
        ...


def register_attention() -> None:
    """Makes `attn_implementation=IMPLEMENTATION` known to transformers. Idempotent."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, _attend)
    AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    """Layouts know who sees whom; a mask over the row would only cost memory."""


def _attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    layout: Layout = kwargs["layout"]
    window = kwargs.get("sliding_window")
    if window is not None and layout.longest > window:
        raise BadSpec(
            f"a sequence of {layout.longest} tokens is longer than the model's sliding window of {window}, which "
            "packed attention does not support; lower the sequence length, or use a model with full attention"
        )
    if kwargs.get("softcap") is not None:
        raise BadSpec("the model soft-caps its attention scores, which packed attention does not support")
    scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
    # under autocast the rotation leaves queries and keys in float32 while values are already lower
    query, key = query.to(value.dtype), key.to(value.dtype)
    return layout.attend(int(module.layer_idx), query, key, value, scale), None  # type: ignore[arg-type]


class _Within(Protocol):
    def attend(self, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scale: float) -> Tensor: ...


class PackedLayout:
    """Attention within the fans of one packed row (B = 1): by a variable-length flash kernel where the device and the
    dtype of the first queries have one, else by SDPA. Both mean the same."""

    def __init__(self, fans: Sequence[Fan], *, device: torch.device, kernel: varlen.Varlen | None = None) -> None:
        """`kernel`: what to attend with; None finds one."""
        self.longest = max(f.prefix + max((n for _, n in f.branches), default=0) for f in fans)
        self._fans, self._device, self._kernel = fans, device, kernel
        self._within: _Within | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        if self._within is None:  # the dtype is known here first
            kernel = self._kernel or varlen.find_varlen(query)
            self._within = (
                _ByLength(self._fans, self._device)
                if kernel is None
                else varlen.VarlenAttention(self._fans, device=self._device, kernel=kernel)
            )
        query_THD, key_TKD, value_TKD = (x[0].transpose(0, 1) for x in (query, key, value))
        return self._within.attend(query_THD, key_TKD, value_TKD, scale).unsqueeze(0)


class _ByLength:
    """One SDPA call per distinct length of the causal segments, and one per fan."""

    def __init__(self, fans: Sequence[Fan], device: torch.device) -> None:
        by_length: dict[int, list[int]] = defaultdict(list)
        for fan in fans:
            if fan.prefix:
                by_length[fan.prefix].append(fan.start)
        self._causal_BL = [
            torch.tensor([range(s, s + length) for s in starts], device=device)
            for length, starts in by_length.items()
        ]
        self._branching = [_Branches(fan, device) for fan in fans if fan.branches]

    def attend(self, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scale: float) -> Tensor:
        key_TKD, value_TKD, gqa = _heads_for_sdpa(query_THD, key_TKD, value_TKD)
        pieces, places = [], []
        for index_BL in self._causal_BL:
            out = sdpa(
                query_THD[index_BL].transpose(1, 2),
                key_TKD[index_BL].transpose(1, 2),
                value_TKD[index_BL].transpose(1, 2),
                is_causal=True,
                scale=scale,
                enable_gqa=gqa,
            )
            pieces.append(out.transpose(1, 2).flatten(0, 1))
            places.append(index_BL.flatten())
        for branches in self._branching:
            pieces.append(branches.attend(query_THD, key_TKD, value_TKD, scale))
            places.append(branches.places_N)
        packed_THD = pieces[0].new_empty(query_THD.shape)  # every position is in one fan: nothing stays unset
        return packed_THD.index_copy(0, torch.cat(places), torch.cat(pieces))


def _heads_for_sdpa(query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Keys, values, and whether sdpa is to share a key head among query heads. On a GPU each query head gets its own:
    the only fused kernel for float32 or for a mask does not share, and without it every score would be held."""
    groups = query_THD.shape[1] // key_TKD.shape[1]
    if groups == 1 or not query_THD.is_cuda:
        return key_TKD, value_TKD, groups != 1

    def repeated(x_TKD: Tensor) -> Tensor:  # its gradient is one sum; that of repeat_interleave scatters
        return x_TKD.unsqueeze(2).expand(-1, -1, groups, -1).flatten(1, 2)

    return repeated(key_TKD), repeated(value_TKD), False


class _Branches:
    """The branches of one fan: queries padded to the longest branch inside attention only."""

    def __init__(self, fan: Fan, device: torch.device) -> None:
        longest = max(length for _, length in fan.branches)
        offsets_Q = torch.arange(longest, device=device)
        starts_G1 = torch.tensor([start for start, _ in fan.branches], device=device).unsqueeze(1)
        lengths_G1 = torch.tensor([length for _, length in fan.branches], device=device).unsqueeze(1)
        # a padded query repeats its branch's last token: it attends to something, and its output is dropped
        self._index_GQ = starts_G1 + torch.minimum(offsets_Q, lengths_G1 - 1)
        self._real_N = (offsets_Q < lengths_G1).flatten().nonzero().squeeze(1)
        self.places_N = self._index_GQ.flatten()[self._real_N]
        self._prefix = slice(fan.start, fan.start + fan.prefix)
        causal_QQ = torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
        prompt_QP = torch.ones(longest, fan.prefix, dtype=torch.bool, device=device)
        self._mask_QS = torch.cat([prompt_QP, causal_QQ], dim=1)

    def attend(self, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scale: float) -> Tensor:
        branches = self._index_GQ.shape[0]

        def with_prompt(x_TKD: Tensor) -> Tensor:
            prompt = x_TKD[self._prefix].unsqueeze(0).expand(branches, -1, -1, -1)
            return torch.cat([prompt, x_TKD[self._index_GQ]], dim=1).transpose(1, 2)

        out_GHQD = sdpa(
            query_THD[self._index_GQ].transpose(1, 2),
            with_prompt(key_TKD),
            with_prompt(value_TKD),
            attn_mask=self._mask_QS,
            scale=scale,
            enable_gqa=query_THD.shape[1] != key_TKD.shape[1],  # False where heads were repeated
        )
        return out_GHQD.transpose(1, 2).flatten(0, 1)[self._real_N]


class PrefillLayout(PackedLayout):
    """A packed row whose keys and values are kept, layer by layer, for decoding."""

    def __init__(self, fans: Sequence[Fan], *, device: torch.device) -> None:
        super().__init__(fans, device=device)
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self.kept[layer] = (key[0], value[0])
        return super().attend(layer, query, key, value, scale)


class DecodeLayout:
    """One new token per row over a preallocated cache; rows have lengths of their own."""

    def __init__(self, *, rows: int, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.lengths_B = torch.zeros(rows, dtype=torch.long, device=device)
        self._lengths = [0] * rows  # the same on the host: asking a GPU for the longest would wait for it, every token
        self.longest = 0
        self._cache: dict[int, tuple[Tensor, Tensor]] = {}
        self._mask_B11S: Tensor | None = None
        self._rows_B = torch.arange(rows, device=device)

    def fill(self, prefill: PrefillLayout, spans: dict[int, tuple[int, int]]) -> None:
        """Row b starts with the keys and values at spans[b] = (start, length) of the prefilled row."""
        rows = list(spans)
        for row, (_, length) in spans.items():
            self._lengths[row] = length
        device = self.lengths_B.device
        rows_R = torch.tensor(rows, device=device)
        starts_R = torch.tensor([spans[row][0] for row in rows], device=device)
        lengths_R = torch.tensor([spans[row][1] for row in rows], device=device)
        self.lengths_B[rows_R] = lengths_R
        longest = max(spans[row][1] for row in rows)
        # past its end a shorter row repeats its last token: no query sees it, and new tokens take its place
        offsets_S = torch.arange(longest, device=device)
        index_RS = starts_R.unsqueeze(1) + torch.minimum(offsets_S, lengths_R.unsqueeze(1) - 1)
        for layer, (key_KTD, value_KTD) in prefill.kept.items():
            if layer not in self._cache:
                shape = (len(self._rows_B), key_KTD.shape[0], self.capacity, key_KTD.shape[2])
                self._cache[layer] = (key_KTD.new_zeros(shape), value_KTD.new_zeros(shape))
            keys, values = self._cache[layer]
            keys[rows_R, :, :longest] = key_KTD[:, index_RS].transpose(0, 1)
            values[rows_R, :, :longest] = value_KTD[:, index_RS].transpose(0, 1)

    def advance(self) -> Tensor:
        """Makes room for one token per row; returns its position (B,)."""
        positions_B = self.lengths_B.clone()
        self.lengths_B += 1
        self._lengths = [length + 1 for length in self._lengths]
        self.longest = max(self._lengths)
        seen = torch.arange(self.longest, device=positions_B.device)
        self._mask_B11S = (seen < self.lengths_B.unsqueeze(1))[:, None, None, :]
        return positions_B

    def keep(self, rows_B: Tensor) -> None:
        """Drops all rows but these: finished completions cost nothing."""
        self.lengths_B = self.lengths_B[rows_B]
        self._lengths = [self._lengths[row] for row in rows_B.tolist()]
        self._rows_B = torch.arange(len(rows_B), device=rows_B.device)
        self._cache = {layer: (k[rows_B], v[rows_B]) for layer, (k, v) in self._cache.items()}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        keys_BKSD, values_BKSD = self._cache[layer]
        at_B = self.lengths_B - 1
        keys_BKSD[self._rows_B, :, at_B] = key[:, :, 0]
        values_BKSD[self._rows_B, :, at_B] = value[:, :, 0]
        heads, groups = query.shape[1], key.shape[1]
        # the queries of one key head ride along its query axis: no key is copied per query head
        query_BKRD = query[:, :, 0].unflatten(1, (groups, heads // groups))
        out_BKRD = sdpa(
            query_BKRD,
            keys_BKSD[:, :, : self.longest],
            values_BKSD[:, :, : self.longest],
            attn_mask=self._mask_B11S,
            scale=scale,
        )
        return out_BKRD.flatten(1, 2).unsqueeze(1)
