"""Log-probabilities of tokens from logits, with a gradient that is computed in blocks of rows.

Autograd would keep the logits in float32, and three more tensors of that size in the backward pass. Here only the
logits are kept, in their own dtype. Each block of rows is scaled, exponentiated and summed while it is in the
processor's cache.

Axes: N token · V vocabulary · B token of a block
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

BLOCK_ELEMENTS = {"cpu": 1 << 18}
"""Logits of a block by device type: 1 MiB in float32, the size of a core's cache."""
DEFAULT_BLOCK_ELEMENTS = 1 << 26
"""Logits of a block on other devices, where each block costs kernel launches."""


def token_logprobs(logits_NV: Tensor, target_N: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature)[target], (N,) in nats, in float32 at least."""
    logprobs_N: Tensor = _TokenLogprobs.apply(logits_NV, target_N, temperature, False)[0]
    return logprobs_N


def token_logprobs_and_entropy(logits_NV: Tensor, target_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The logprobs of `token_logprobs`, and the entropy of each distribution, both (N,) in nats."""
    logprobs_N, entropy_N = _TokenLogprobs.apply(logits_NV, target_N, temperature, True)
    return logprobs_N, entropy_N


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor, in float32 if its dtype is a 16-bit one."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


class _TokenLogprobs(torch.autograd.Function):
    """With x = logits / temperature, z = logsumexp(x), p = exp(x - z) and H = z - Σ p·x, the outputs are x[target] - z
    and H. Their derivatives with respect to x are onehot(target) - p and -p·(x - z + H)."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, target_N: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        norms, logprobs, entropies = [], [], []
        for rows in _blocks(logits_NV):
            x_BV = _scaled(logits_NV[rows], temperature)
            norm_B = x_BV.logsumexp(1)
            norms.append(norm_B)
            logprobs.append(x_BV.gather(1, target_N[rows].unsqueeze(1)).squeeze(1) - norm_B)
            if with_entropy:
                entropies.append(norm_B - ((x_BV - norm_B.unsqueeze(1)).exp() * x_BV).sum(1))
        entropy_N = torch.cat(entropies) if with_entropy else None
        ctx.temperature = temperature
        ctx.save_for_backward(logits_NV, target_N, torch.cat(norms), entropy_N)
        return torch.cat(logprobs), entropy_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None, None, None]:
        logits_NV, target_N, norm_N, entropy_N = ctx.saved_tensors
        logprob_grad_N, entropy_grad_N = gradients
        assert logprob_grad_N is not None
        grad_NV = torch.empty_like(logits_NV)
        for rows in _blocks(logits_NV):
            logp_BV = _scaled(logits_NV[rows], ctx.temperature).sub_(norm_N[rows].unsqueeze(1))
            grad_B1 = logprob_grad_N[rows].unsqueeze(1)
            if entropy_grad_N is None:
                grad_BV = logp_BV.exp_().mul_(-grad_B1)
            else:
                # -p·g for the logprob, and -p·(x - z + H)·h for the entropy.
                factor_BV = (logp_BV + entropy_N[rows].unsqueeze(1)).mul_(entropy_grad_N[rows].unsqueeze(1))
                grad_BV = factor_BV.add_(grad_B1).mul_(logp_BV.exp_()).neg_()
            grad_BV.scatter_add_(1, target_N[rows].unsqueeze(1), grad_B1)
            if ctx.temperature != 1:
                grad_BV.div_(ctx.temperature)
            grad_NV[rows] = grad_BV
        return grad_NV, None, None, None


def _scaled(logits_BV: Tensor, temperature: float) -> Tensor:
    """A copy of the logits in float32 at least, divided by the temperature."""
    wide = torch.promote_types(logits_BV.dtype, torch.float32)
    x_BV = logits_BV.to(wide, copy=True)
    return x_BV if temperature == 1 else x_BV.div_(temperature)


def _blocks(logits_NV: Tensor) -> Iterator[slice]:
    """Slices of the rows, each of about as many logits as a block has. One slice at least."""
    count, vocabulary = logits_NV.shape
    rows = max(1, BLOCK_ELEMENTS.get(logits_NV.device.type, DEFAULT_BLOCK_ELEMENTS) // vocabulary)
    for start in range(0, max(1, count), rows):
        yield slice(start, start + rows)
