"""Packed attention by one call of a variable-length flash kernel, where the device and the dtype have one.

Every segment of a row becomes one (queries, keys) pair: of a plain segment or a prompt, the segment itself twice; of a
branch, its own queries over the prompt's keys followed by its own. Flash kernels align a causal mask to the last
key, so the queries of a branch see the whole prompt and, causally, their own branch: exactly the mask of the SDPA path.

Axes: T packed token · M key of a pair (prompts stand once per branch) · C copy of a prompt · P shared prompt token
· H query head · K key/value head · D head dimension · S pair
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

from engine.backends.torch.packing import Fan

log = logging.getLogger(__name__)

LARGEST_HEAD = 256
"""Head dimension, which flash kernels also want to be a multiple of 8."""

PROBE_TOLERANCE = 0.03
"""Largest |difference| of the probe's outputs, of size 1, that bfloat16 may cause; a mask aligned otherwise gives 1."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Queries and keys of one call, in packed order: S pairs with cumulative lengths from 0, (S + 1,) int32."""

    starts_q: Tensor
    starts_k: Tensor
    longest_q: int
    longest_k: int


class Varlen(Protocol):
    def __call__(self, query_THD: Tensor, key_MKD: Tensor, value_MKD: Tensor, pairs: Pairs, scale: float) -> Tensor:
        """Causal attention within each pair, the mask aligned to the last key; (T, H, D). Differentiable."""
        ...


class VarlenAttention:
    """The index arithmetic of one packed row around a kernel."""

    def __init__(self, fans: Sequence[Fan], *, device: torch.device, kernel: Varlen) -> None:
        self._kernel = kernel
        self._keys = _Keys(fans, device) if any(fan.branches for fan in fans) else None
        spans = [(q, k) for fan in fans for q, k in _pairs_of(fan)]
        queries, keys = [q for q, _ in spans], [k for _, k in spans]
        self._pairs = Pairs(_starts(queries, device), _starts(keys, device), max(queries), max(keys))

    def attend(self, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scale: float) -> Tensor:
        if self._keys is not None:
            key_TKD, value_TKD = self._keys.of(key_TKD), self._keys.of(value_TKD)
        return self._kernel(
            query_THD.contiguous(), key_TKD.contiguous(), value_TKD.contiguous(), self._pairs, scale
        )


def _pairs_of(fan: Fan) -> list[tuple[int, int]]:
    """(queries, keys) of the prompt, if there is one, and of each branch."""
    own = [(fan.prefix, fan.prefix)] if fan.prefix else []
    return own + [(length, fan.prefix + length) for _, length in fan.branches]


def _starts(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


class _Keys:
    """Keys (or values) in the order of the pairs: every prompt again before each of its branches.

    The gradient of a prompt is the sum over its copies: gathered and summed in float32, because a scattered sum
    would round at every copy and depend on the order in which a GPU adds.
    """

    def __init__(self, fans: Sequence[Fan], device: torch.device) -> None:
        gather: list[int] = []
        own = [0] * sum(fan.tokens for fan in fans)
        copies: dict[int, list[int]] = {}
        for fan in fans:
            prompt = range(fan.start, fan.start + fan.prefix)
            for token in prompt:
                own[token] = len(gather)
                gather.append(token)
            for start, length in fan.branches:
                for token in prompt:
                    copies.setdefault(token, []).append(len(gather))
                    gather.append(token)
                for token in range(start, start + length):
                    own[token] = len(gather)
                    gather.append(token)
        most = max((len(places) for places in copies.values()), default=0)
        padded = [places + [-1] * (most - len(places)) for places in copies.values()]
        self.gather_M = torch.tensor(gather, device=device)
        self.own_T = torch.tensor(own, device=device)
        self.shared_P = torch.tensor(list(copies), dtype=torch.long, device=device)
        self.copies_CP = torch.tensor(padded, dtype=torch.long, device=device).reshape(len(copies), most).T.contiguous()
        self.real_CP11 = (self.copies_CP >= 0)[..., None, None]

    def of(self, x_TKD: Tensor) -> Tensor:
        found: Tensor = _Copied.apply(x_TKD, self)
        return found


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TKD: Tensor, keys: _Keys) -> Tensor:
        ctx.keys = keys
        return x_TKD.index_select(0, keys.gather_M)

    @staticmethod
    def backward(ctx: Any, grad_MKD: Tensor) -> tuple[Tensor, None]:
        keys: _Keys = ctx.keys
        grad_TKD = grad_MKD.index_select(0, keys.own_T)
        if len(keys.shared_P):
            copied_CPKD = grad_MKD[keys.copies_CP].where(keys.real_CP11, 0)
            wide = torch.promote_types(grad_MKD.dtype, torch.float32)
            total_PKD = copied_CPKD.sum(0, dtype=wide) + grad_TKD[keys.shared_P]
            grad_TKD[keys.shared_P] = total_PKD.to(grad_TKD.dtype)
        return grad_TKD, None


# -- kernels ---------------------------------------------------------------------------------------------------


def find_varlen(query: Tensor) -> Varlen | None:
    """The kernel for such queries (…, D), or None: not a GPU, another dtype, an old GPU, or no kernel that does what
    the SDPA path does."""
    head = query.shape[-1]
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16) or head % 8 or head > LARGEST_HEAD:
        return None
    return _checked_varlen(query.device)


@lru_cache(maxsize=16)
def _checked_varlen(device: torch.device) -> Varlen | None:
    """Tried once per device on a small fan: a build without the kernel, or one that means another mask, is not used."""
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return None
    for name, make in (("torch", torch_varlen), ("flash_attn", flash_attn_varlen)):
        try:
            kernel = make()
            if kernel is None:
                continue
            gap = _probe(kernel, device)
        except (RuntimeError, TypeError, ValueError) as error:
            log.warning("varlen attention of %s does not run on %s: %s", name, device, error)
            continue
        if gap <= PROBE_TOLERANCE:
            return kernel
        log.warning("varlen attention of %s is off by %.3g on %s: attention goes by SDPA", name, gap, device)
    return None


def torch_varlen() -> Varlen | None:
    """`torch.nn.attention.varlen`, whose arguments changed from 2.10 to 2.13."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return adapt_torch_varlen(varlen_attn)


def adapt_torch_varlen(varlen_attn: Callable[..., Any]) -> Varlen | None:
    """None for a version without a scale of its own: it would attend at another temperature."""
    known = inspect.signature(varlen_attn).parameters
    if "scale" not in known:
        return None
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}

    def attend(query_THD: Tensor, key_MKD: Tensor, value_MKD: Tensor, pairs: Pairs, scale: float) -> Tensor:
        # where there is no enable_gqa, the kernel sees by itself that there are fewer key heads
        gqa = {"enable_gqa": query_THD.shape[1] != key_MKD.shape[1]} if "enable_gqa" in known else {}
        found: Tensor = varlen_attn(
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
        return found

    return attend


def flash_attn_varlen() -> Varlen | None:
    """The package flash-attn, where it is installed."""
    try:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return None

    def attend(query_THD: Tensor, key_MKD: Tensor, value_MKD: Tensor, pairs: Pairs, scale: float) -> Tensor:
        found: Tensor = flash_attn_varlen_func(
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
        return found

    return attend


@torch.no_grad()
def _probe(kernel: Varlen, device: torch.device) -> float:
    """A prompt of 3 tokens with branches of 1 and 2, two query heads per key head. Scores are all 0, so that a token
    gets the mean of the values it sees: value i is i + 1 for the i-th packed token, and the means are known."""
    fan = Fan(0, 3, ((3, 1), (4, 2)))
    attention = VarlenAttention([fan], device=device, kernel=kernel)
    value_TKD = torch.arange(1.0, 7.0, device=device)[:, None, None].expand(6, 1, 64).to(torch.bfloat16)
    query_THD, key_TKD = value_TKD.new_zeros(6, 2, 64), value_TKD.new_zeros(6, 1, 64)
    found = attention.attend(query_THD, key_TKD, value_TKD, 1.0).float()
    means = torch.tensor([1, 3 / 2, 6 / 3, 10 / 4, 11 / 4, 17 / 5], device=device)
    return float((found - means[:, None, None]).abs().max() / 6)
