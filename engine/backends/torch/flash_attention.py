"""Packed attention on the CPU: torch's flash kernel forward, and a gradient by matrix products over blocks of queries.

Each sequence, prompt and branch attends within its own part of the row, so no key is copied and nothing is padded. The
attention of a branch has two parts, the shared prompt and the branch itself, which are joined by their logsumexps
(arXiv:2205.14135, section 3.1).

The gradient has the formulas of arXiv:2205.14135, appendix B. It takes a third to two thirds of the time of torch's own
kernel in bfloat16 (lengths 64 to 512), and reads a prompt's keys once for all branches. Scores are computed in float32,
because a score rounded to bfloat16 would not fit the logsumexp of the forward pass.

Axes: T packed token · H query head · K key/value head · R query head per key head · D head dimension
· S sequence of a part · Q query of a block · M key that the block attends to · B sequence and key head
· N query of a block, of each query head
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.backends.torch.packing import PrefixGroup

QUERY_BLOCK = 64
"""Queries of a block of the gradient. Its scores then lie in a core's cache for most lengths."""


class _Part(NamedTuple):
    """A part has `sequences` neighbours of `queries` tokens each, from `start` on. Each of them attends to `keys`
    tokens: causally to itself, or fully to the prompt at `first_key`, which all share."""

    start: int
    sequences: int
    queries: int
    first_key: int
    keys: int
    causal: bool

    @property
    def query_slice(self) -> slice:
        return slice(self.start, self.start + self.sequences * self.queries)

    @property
    def key_slice(self) -> slice:
        return self.query_slice if self.causal else slice(self.first_key, self.first_key + self.keys)


class FlashAttention:
    """Attention within the prefix groups of one packed row."""

    def __init__(self, groups: Sequence[PrefixGroup]) -> None:
        self._parts = [*_causal_parts(groups), *_prompt_parts(groups)]

    def attend(self, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scale: float) -> Tensor:
        output_THD: Tensor = _Attention.apply(query_THD, key_TKD, value_TKD, self._parts, scale)
        return output_THD


def flash_kernel(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """torch's flash kernel on a CPU, for queries (S, H, Q, D), keys and values (S, K, M, D): the outputs (S, H, Q, D),
    and the logsumexps of the scores (S, H, Q)."""
    output, norm = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        query, key, value, 0.0, causal, attn_mask=mask, scale=scale
    )
    return output, norm


def is_supported(query: Tensor) -> bool:
    """Whether the flash kernel computes queries like this (…, D)."""
    return query.device.type == "cpu" and query.dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _causal_parts(groups: Sequence[PrefixGroup]) -> Iterator[_Part]:
    """The sequences, prompts and branches themselves. Neighbours of one length are one part."""
    segments: list[tuple[int, int]] = []
    for group in groups:
        if group.prefix:
            segments.append((group.start, group.prefix))
        segments += [branch for branch in group.branches if branch[1]]
    place = 0
    while place < len(segments):
        start, length = segments[place]
        count = 1
        while place + count < len(segments) and segments[place + count] == (start + count * length, length):
            count += 1
        yield _Part(start, count, length, start, length, causal=True)
        place += count


def _prompt_parts(groups: Sequence[PrefixGroup]) -> Iterator[_Part]:
    """The branches of each group, which attend to their prompt."""
    for group in groups:
        if group.branches and group.prefix:
            yield _Part(
                group.start + group.prefix, 1, group.tokens - group.prefix, group.start, group.prefix, causal=False
            )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, parts: Sequence[_Part], scale: float
    ) -> Tensor:
        wide = torch.promote_types(query_THD.dtype, torch.float32)
        output_THD = torch.empty_like(query_THD, memory_format=torch.contiguous_format)
        norm_TH = query_THD.new_empty(query_THD.shape[:2], dtype=wide)
        for part in parts:
            part_THD, part_TH = _flash(part, query_THD, key_TKD, value_TKD, scale)
            queries = part.query_slice
            if part.causal:
                output_THD[queries], norm_TH[queries] = part_THD, part_TH
                continue
            # The causal part came first. Both outputs are weighted by their shares of the sum of exponentials.
            joint_TH = torch.logaddexp(norm_TH[queries], part_TH)
            own_TH1 = (norm_TH[queries] - joint_TH).exp_().unsqueeze(2)
            prompt_TH1 = (part_TH - joint_TH).exp_().unsqueeze(2)
            output_THD[queries] = own_TH1 * output_THD[queries] + prompt_TH1 * part_THD
            norm_TH[queries] = joint_TH
        ctx.parts, ctx.scale = parts, scale
        ctx.save_for_backward(query_THD, key_TKD, value_TKD, output_THD, norm_TH)
        return output_THD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query_THD, key_TKD, value_TKD, output_THD, norm_TH = ctx.saved_tensors
        (grad_THD,) = gradients
        wide = norm_TH.dtype
        # Σ p·dp of each query, which is the product of its output and the output's gradient
        delta_TH = (output_THD.to(wide) * grad_THD).sum(2)
        query_grad_THD, key_grad_TKD, value_grad_TKD = (
            torch.zeros(x.shape, dtype=wide, device=x.device) for x in (query_THD, key_TKD, value_TKD)
        )
        for part in ctx.parts:
            backward = _PartBackward(part, ctx.scale, query_THD, key_TKD, value_TKD, grad_THD, norm_TH, delta_TH)
            for first in range(0, part.queries, QUERY_BLOCK):
                backward.add_block(first)
            backward.add_gradients(query_grad_THD, key_grad_TKD, value_grad_TKD)
        dtype = query_THD.dtype
        return query_grad_THD.to(dtype), key_grad_TKD.to(dtype), value_grad_TKD.to(dtype), None, None


def _flash(part: _Part, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(outputs (T, H, D), logsumexps of the scores (T, H)) of the part's queries."""
    query_SHQD = _by_sequence(query_THD[part.query_slice], part.sequences)
    key_SKMD, value_SKMD = (_by_sequence(x[part.key_slice], part.sequences) for x in (key_TKD, value_TKD))
    output_SHQD, norm_SHQ = flash_kernel(query_SHQD, key_SKMD, value_SKMD, scale, causal=part.causal)
    return output_SHQD.transpose(1, 2).flatten(0, 1), norm_SHQ.transpose(1, 2).flatten(0, 1)


def _by_sequence(x_THD: Tensor, count: int) -> Tensor:
    """(S, H, Q, D): a view of `count` sequences of one length."""
    return x_THD.unflatten(0, (count, -1)).transpose(1, 2)


class _PartBackward:
    """The gradient of one part, block by block of its queries. A block has the queries of all heads that share a key,
    which are neighbours in memory, so that none is copied for a block."""

    def __init__(
        self,
        part: _Part,
        scale: float,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        grad_THD: Tensor,
        norm_TH: Tensor,
        delta_TH: Tensor,
    ) -> None:
        self._part, self._scale = part, scale
        self._key_heads = key_TKD.shape[1]
        self._key_BMD, self._value_BMD = self._keys(key_TKD), self._keys(value_TKD)
        self._query_BQRD, self._grad_BQRD = self._queries(query_THD), self._queries(grad_THD)
        self._norm_BQR1 = self._queries(norm_TH.unsqueeze(2))
        self._delta_BQR1 = self._queries(delta_TH.unsqueeze(2))
        wide = norm_TH.dtype
        self._wide_query_BQRD = self._query_BQRD.to(wide)
        self._wide_key_BDM = self._key_BMD.to(wide).transpose(1, 2)
        self._query_grad_BQRD = torch.empty_like(self._query_BQRD)
        self._key_grad_BMD, self._value_grad_BMD = (
            torch.zeros(self._key_BMD.shape, dtype=wide, device=key_TKD.device) for _ in range(2)
        )

    def add_block(self, first: int) -> None:
        """Computes the gradients of the queries from `first` on, and adds what they give to keys and values."""
        last = min(first + QUERY_BLOCK, self._part.queries)
        keys = last if self._part.causal else self._part.keys
        rows = slice(first, last)
        query_BND, grad_BND, wide_BND, norm_BN1, delta_BN1 = (
            x[:, rows].flatten(1, 2)
            for x in (self._query_BQRD, self._grad_BQRD, self._wide_query_BQRD, self._norm_BQR1, self._delta_BQR1)
        )

        # p = exp(scores - logsumexp), and 0 where the mask is
        wide_key_BDM = self._wide_key_BDM[:, :, :keys]
        p_BNM = torch.baddbmm(norm_BN1, wide_BND, wide_key_BDM, beta=-1, alpha=self._scale).exp_()
        if self._part.causal:
            p_BQRM = p_BNM.unflatten(1, (last - first, -1))
            p_BQRM[..., first:].masked_fill_(_later_Q1Q(last - first, p_BNM.device), 0)

        # ds = p (dp - delta)
        dp_BNM = torch.bmm(grad_BND, self._value_BMD[:, :keys].transpose(1, 2))
        ds_BNM = dp_BNM.to(p_BNM.dtype).sub_(delta_BN1).mul_(p_BNM)

        # the gradients of queries, keys and values
        p_BNM, ds_BNM = p_BNM.to(query_BND.dtype), ds_BNM.to(query_BND.dtype)
        torch.bmm(ds_BNM, self._key_BMD[:, :keys], out=self._query_grad_BQRD[:, rows].flatten(1, 2))
        self._key_grad_BMD[:, :keys].add_(torch.bmm(ds_BNM.transpose(1, 2), query_BND))
        self._value_grad_BMD[:, :keys].add_(torch.bmm(p_BNM.transpose(1, 2), grad_BND))

    def add_gradients(self, query_grad_THD: Tensor, key_grad_TKD: Tensor, value_grad_TKD: Tensor) -> None:
        """Adds the gradients of the part to those of the whole row."""
        key_slice = self._part.key_slice
        key_grad_TKD[key_slice].add_(self._by_token(self._key_grad_BMD), alpha=self._scale)
        value_grad_TKD[key_slice].add_(self._by_token(self._value_grad_BMD))
        query_grad_TRD = self._by_token(self._query_grad_BQRD.flatten(2))
        query_grad = query_grad_THD[self._part.query_slice]
        query_grad.add_(query_grad_TRD.reshape(query_grad.shape), alpha=self._scale)

    def _keys(self, x_TKD: Tensor) -> Tensor:
        """(B, M, D): the part's keys or values."""
        return _by_sequence(x_TKD[self._part.key_slice], self._part.sequences).flatten(0, 1)

    def _queries(self, x_THD: Tensor) -> Tensor:
        """(B, Q, R, D): the part's queries, or what belongs to them."""
        x_SQKRD = (
            x_THD[self._part.query_slice].unflatten(1, (self._key_heads, -1)).unflatten(0, (self._part.sequences, -1))
        )
        return x_SQKRD.transpose(1, 2).flatten(0, 1).contiguous()

    def _by_token(self, x_BMD: Tensor) -> Tensor:
        """(T, K, D): the part's tokens in the order of the row."""
        return x_BMD.unflatten(0, (-1, self._key_heads)).transpose(1, 2).flatten(0, 1)


@lru_cache(maxsize=128)
def _later_Q1Q(queries: int, device: torch.device) -> Tensor:
    """(Q, 1, Q): whether the key of the last axis comes after the query of the first."""
    return torch.ones(queries, queries, dtype=torch.bool, device=device).triu(1).unsqueeze(1)
