"""Packed attention by one call of a variable-length flash kernel, where there is one for the device and the dtype.

Every segment of a row becomes one pair of (queries, keys). For a single sequence or a prompt, both are the segment
itself. For a branch, the queries are the branch's own, and the keys are the prompt's keys followed by the branch's own.
Flash kernels align a causal mask to the last key. So the queries of a branch attend to the whole prompt and, causally,
to their own branch, which is exactly the mask of the SDPA path.

Axes: T packed token · M key of a pair (a prompt's keys come once per branch) · C copy of a prompt · P shared prompt
token · H query head · K key/value head · D head dimension
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.backends.torch.packing import PrefixGroup

log = logging.getLogger(__name__)

MAX_HEAD_SIZE = 256
"""Largest head dimension of flash kernels, which must also be a multiple of 8."""

PROBE_TOLERANCE = 0.03
"""Largest |difference| of the probe's outputs, which are of size 1, that bfloat16 may cause. A mask that is aligned
otherwise gives a difference of 1."""


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
        return output_THD

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
