"""Attention over packed rows, for any Hugging Face decoder.

A decoder of `transformers` passes its projected queries, keys and values to a function that it finds by name. The
function here takes a *layout* from the keyword arguments of the forward call and lets it attend. So one decoder serves
packed training, prefill and decoding (engine.backends.torch.decoding.kv_cache), and a mask over a whole row is never
built.

Where the device and the dtype have a variable-length flash kernel, one call of it attends for a whole row. Every
segment becomes one pair of (queries, keys). For a single sequence or a prompt, both are the segment itself. For a
branch, the queries are the branch's own, and the keys are the prompt's keys followed by the branch's own. Flash kernels
align a causal mask to the last key. So the queries of a branch attend to the whole prompt and, causally, to their own
branch, which is exactly the mask of the SDPA path.

Axes: B row · H query head · K key/value head · T packed token · L token of a segment · G branch of a prefix group
· Q token of the longest branch · P prompt token · N branch token · D head dimension
· M key of a pair of the flash kernel (a prompt's keys come once per branch) · C copy of a prompt
"""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from engine.backends.torch import flash_attention
from engine.backends.torch.determinism import deterministic_backward
from engine.backends.torch.packing import PrefixGroup
from engine.errors import BadSpec

IMPLEMENTATION = "ostinato_layout"

log = logging.getLogger(__name__)

MAX_HEAD_SIZE = 256
"""Largest head dimension of flash kernels, which must also be a multiple of 8."""

PROBE_TOLERANCE = 0.03
"""Largest |difference| of the probe's outputs, which are of size 1, that bfloat16 may cause. A mask that is aligned
otherwise gives a difference of 1."""


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
        self, groups: Sequence[PrefixGroup], *, device: torch.device, kernel: VarlenKernel | None = None
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
        kernel = self._kernel or find_varlen(query)
        if kernel is not None:
            return VarlenAttention(self._groups, device=self._device, kernel=kernel)
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
            outputs.append(deterministic_backward(output_BHLD).transpose(1, 2).flatten(0, 1))
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
        return deterministic_backward(output_GHQD).transpose(1, 2).flatten(0, 1)[self._real_N]


# -- decoding -----------------------------------------------------------------------------------------------------


class PrefillLayout(PackedLayout):
    """A packed row whose keys and values are kept, layer by layer, for decoding."""

    def __init__(self, groups: Sequence[PrefixGroup], *, device: torch.device) -> None:
        super().__init__(groups, device=device)
        self.keys_and_values: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self.keys_and_values[layer] = (key[0], value[0])
        return super().attend(layer, query, key, value, scale)


@dataclass(frozen=True, slots=True)
class VarlenPairs:
    """Lengths of the (queries, keys) pairs of one call, in packed order."""

    starts_q: Tensor
    """Cumulative numbers of queries, from 0: (pairs + 1,) in int32."""
    starts_k: Tensor
    """Cumulative numbers of keys, from 0: (pairs + 1,) in int32."""
    longest_q: int
    longest_k: int


class VarlenKernel(Protocol):
    """A variable-length attention kernel."""

    def __call__(
        self, query_THD: Tensor, key_MKD: Tensor, value_MKD: Tensor, pairs: VarlenPairs, scale: float
    ) -> Tensor:
        """Causal attention within each pair, with the mask aligned to the last key: (T, H, D). Differentiable."""
        ...


class VarlenAttention:
    """Attention of one packed row by a kernel: the indices of queries and keys."""

    def __init__(self, groups: Sequence[PrefixGroup], *, device: torch.device, kernel: VarlenKernel) -> None:
        self._kernel = kernel
        self._gatherer = _KeyGatherer(groups, device) if any(group.branches for group in groups) else None
        queries: list[int] = []
        keys: list[int] = []
        for group in groups:
            for query_length, key_length in _pair_lengths(group):
                queries.append(query_length)
                keys.append(key_length)
        self._pairs = VarlenPairs(_starts(queries, device), _starts(keys, device), max(queries), max(keys))

    def attend(self, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scale: float) -> Tensor:
        key_MKD, value_MKD = key_TKD, value_TKD
        if self._gatherer is not None:
            key_MKD, value_MKD = self._gatherer.gather(key_TKD), self._gatherer.gather(value_TKD)
        return self._kernel(query_THD.contiguous(), key_MKD.contiguous(), value_MKD.contiguous(), self._pairs, scale)


def _pair_lengths(group: PrefixGroup) -> list[tuple[int, int]]:
    """(queries, keys) of the prompt, if there is one, and of each branch."""
    prompt = [(group.prefix, group.prefix)] if group.prefix else []
    return prompt + [(length, group.prefix + length) for _, length in group.branches]


def _starts(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


class _KeyGatherer:
    """Gathers keys (or values) in the order of the pairs: a prompt's keys come once for itself, and again before each
    of its branches.

    The gradient of a prompt's key is the sum over its copies. They are gathered and summed in float32, because a
    scattered sum would round at every copy, and would depend on the order in which a GPU adds.
    """

    def __init__(self, groups: Sequence[PrefixGroup], device: torch.device) -> None:
        gather: list[int] = []
        first_place = [0] * sum(group.tokens for group in groups)
        copies: dict[int, list[int]] = {}
        for group in groups:
            prompt = range(group.start, group.start + group.prefix)
            for token in prompt:
                first_place[token] = len(gather)
                gather.append(token)
            for start, length in group.branches:
                for token in prompt:
                    copies.setdefault(token, []).append(len(gather))
                    gather.append(token)
                for token in range(start, start + length):
                    first_place[token] = len(gather)
                    gather.append(token)
        most = max((len(places) for places in copies.values()), default=0)
        padded = [places + [-1] * (most - len(places)) for places in copies.values()]
        copies_PC = torch.tensor(padded, dtype=torch.long, device=device).reshape(len(copies), most)
        self.gather_M = torch.tensor(gather, device=device)
        self.first_place_T = torch.tensor(first_place, device=device)
        self.shared_P = torch.tensor(list(copies), dtype=torch.long, device=device)
        self.copies_CP = copies_PC.T.contiguous()
        self.real_CP11 = (self.copies_CP >= 0)[..., None, None]

    def gather(self, x_TKD: Tensor) -> Tensor:
        """(M, K, D)."""
        gathered_MKD: Tensor = _Gather.apply(x_TKD, self)
        return gathered_MKD


class _Gather(torch.autograd.Function):
    """index_select whose gradient sums the copies in float32."""

    @staticmethod
    def forward(ctx: Any, x_TKD: Tensor, keys: _KeyGatherer) -> Tensor:
        ctx.keys = keys
        return x_TKD.index_select(0, keys.gather_M)

    @staticmethod
    def backward(ctx: Any, grad_MKD: Tensor) -> tuple[Tensor, None]:
        keys: _KeyGatherer = ctx.keys
        grad_TKD = grad_MKD.index_select(0, keys.first_place_T)
        if len(keys.shared_P):
            copied_CPKD = grad_MKD[keys.copies_CP].where(keys.real_CP11, 0)
            wide = torch.promote_types(grad_MKD.dtype, torch.float32)
            total_PKD = copied_CPKD.sum(0, dtype=wide) + grad_TKD[keys.shared_P]
            grad_TKD[keys.shared_P] = total_PKD.to(grad_TKD.dtype)
        return grad_TKD, None


# -- kernels ---------------------------------------------------------------------------------------------------


def find_varlen(query: Tensor) -> VarlenKernel | None:
    """The kernel for queries like this (…, D). None if they are not on a GPU, have another dtype or head size, or if no
    installed kernel computes what the SDPA path computes."""
    head_size = query.shape[-1]
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return None
    if head_size % 8 or head_size > MAX_HEAD_SIZE:
        return None
    return _checked_varlen(query.device)


@lru_cache(maxsize=16)
def _checked_varlen(device: torch.device) -> VarlenKernel | None:
    """The first kernel that passes the probe on this device. A build without the kernel, or with another mask, is not
    used."""
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return None
    for name, make in (("torch", torch_varlen), ("flash_attn", flash_attn_varlen)):
        try:
            kernel = make()
            if kernel is None:
                continue
            gap = _probe(kernel, device)
        except (RuntimeError, TypeError, ValueError) as error:
            log.warning("The variable-length attention of %s does not run on %s: %s", name, device, error)
            continue
        if gap <= PROBE_TOLERANCE:
            return kernel
        log.warning("The variable-length attention of %s is off by %.3g on %s; SDPA is used", name, gap, device)
    return None


def torch_varlen() -> VarlenKernel | None:
    """The kernel of `torch.nn.attention.varlen`, whose arguments changed between torch 2.10 and 2.13. None if this
    version of torch has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return adapt_torch_varlen(varlen_attn)


def adapt_torch_varlen(varlen_attn: Callable[..., Any]) -> VarlenKernel | None:
    """torch's function as a VarlenKernel. None for a version without a `scale` argument, which cannot apply the model's
    scale."""
    parameters = inspect.signature(varlen_attn).parameters
    if "scale" not in parameters:
        return None
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in parameters else {"is_causal": True}

    def attend(query_THD: Tensor, key_MKD: Tensor, value_MKD: Tensor, pairs: VarlenPairs, scale: float) -> Tensor:
        # A version without enable_gqa recognises fewer key heads by itself.
        gqa = {"enable_gqa": query_THD.shape[1] != key_MKD.shape[1]} if "enable_gqa" in parameters else {}
        output_THD: Tensor = varlen_attn(
            query_THD,
            key_MKD,
            value_MKD,
            pairs.starts_q,
            pairs.starts_k,
            pairs.longest_q,
            pairs.longest_k,
            scale=scale,
            **causal,
            **gqa,
        )
        return deterministic_backward(output_THD)

    return attend


def flash_attn_varlen() -> VarlenKernel | None:
    """The kernel of the package flash-attn. None if it is not installed."""
    try:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return None

    def attend(query_THD: Tensor, key_MKD: Tensor, value_MKD: Tensor, pairs: VarlenPairs, scale: float) -> Tensor:
        output_THD: Tensor = flash_attn_varlen_func(
            query_THD,
            key_MKD,
            value_MKD,
            pairs.starts_q,
            pairs.starts_k,
            pairs.longest_q,
            pairs.longest_k,
            softmax_scale=scale,
            causal=True,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return output_THD

    return attend


@torch.no_grad()
def _probe(kernel: VarlenKernel, device: torch.device) -> float:
    """Largest relative error of the kernel on a prompt of 3 tokens with branches of 1 and 2, with two query heads per
    key head.

    All scores are 0, so the output of a token is the mean of the values that it attends to. The value of packed token i
    is i + 1, so the means are known.
    """
    group = PrefixGroup(0, 3, ((3, 1), (4, 2)))
    attention = VarlenAttention([group], device=device, kernel=kernel)
    value_TKD = torch.arange(1.0, 7.0, device=device)[:, None, None].expand(6, 1, 64).to(torch.bfloat16)
    query_THD, key_TKD = value_TKD.new_zeros(6, 2, 64), value_TKD.new_zeros(6, 1, 64)
    output_THD = attention.attend(query_THD, key_TKD, value_TKD, 1.0).float()
    means_T = torch.tensor([1, 3 / 2, 6 / 3, 10 / 4, 11 / 4, 17 / 5], device=device)
    return float((output_THD - means_T[:, None, None]).abs().max() / 6)
