"""The reference: losses and gradients by plain transformers and plain formulas, with one unpacked forward pass per
sample and without code of the engine.

Axes: T token · N trained token of one sample · M key of a pair · H query head · K key/value head · D head dimension
· Q queries of a pair
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from engine.backends.torch.attention import VarlenPairs
from engine.models.samples import Sample

Grads = dict[str, Tensor]
CLIP, BETA = 0.2, 0.05


def trained_logprobs(module: nn.Module, sample: Sample) -> Tensor:
    """Returns the logprobs of the trained tokens, (N,), in nats."""
    ids_1T = torch.tensor([sample.token_ids], device=next(module.parameters()).device)
    logits_TV: Tensor = module(input_ids=ids_1T, use_cache=False).logits[0, :-1]
    all_T = logits_TV.log_softmax(-1).gather(1, ids_1T[0, 1:].unsqueeze(1)).squeeze(1)
    return all_T[torch.tensor(sample.loss_mask[1:], device=ids_1T.device) > 0]


def cross_entropy(logprobs_N: Tensor, _: Sample) -> Tensor:
    return -logprobs_N


def grpo(logprobs_N: Tensor, sample: Sample) -> Tensor:
    """Returns GRPO's loss of each token: arXiv:2402.03300, equations 3 and 4."""

    def column(values: Any) -> Tensor:
        return torch.tensor(values, dtype=logprobs_N.dtype, device=logprobs_N.device)

    ratio_N = (logprobs_N - column(sample.old_logprobs)).exp()
    advantages_N, gap_N = column(sample.advantages), column(sample.reference_logprobs) - logprobs_N
    surrogate_N = torch.minimum(ratio_N * advantages_N, ratio_N.clip(1 - CLIP, 1 + CLIP) * advantages_N)
    return -surrogate_N + BETA * (gap_N.exp() - gap_N - 1)


LOSSES = {"sft": cross_entropy, "grpo": grpo}


def gradient(module: nn.Module, samples: Sequence[Sample], loss: str) -> Grads:
    """Returns the gradient of the mean loss over all trained tokens, computed one sample at a time."""
    parameters = dict(module.named_parameters())
    tokens = sum(sample.trained for sample in samples)
    module.zero_grad(set_to_none=True)
    for sample in samples:
        (LOSSES[loss](trained_logprobs(module, sample), sample).sum() / tokens).backward()
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return gradients


def distance(actual: Grads, expected: Grads) -> float:
    """Returns the relative L2 distance of the whole gradients, computed in float64 on the CPU."""
    if actual.keys() != expected.keys():
        raise ValueError(f"the gradients are of other parameters: {sorted(actual.keys() ^ expected.keys())[:5]}")
    squared_gap = squared_norm = 0.0
    for name, gradient_of_parameter in expected.items():
        wide = gradient_of_parameter.detach().double().cpu()
        squared_gap += (actual[name].detach().double().cpu() - wide).square().sum().item()
        squared_norm += wide.square().sum().item()
    return math.sqrt(squared_gap / squared_norm)


def attention_by_pairs(
    query_THD: Tensor, key_MKD: Tensor, value_MKD: Tensor, pairs: VarlenPairs, scale: float
) -> Tensor:
    """Computes what engine.backends.torch.attention.VarlenKernel defines, one pair at a time, on any device."""
    out, groups = [], query_THD.shape[1] // key_MKD.shape[1]
    spans = zip(pairwise(pairs.starts_q.tolist()), pairwise(pairs.starts_k.tolist()), strict=True)
    for (q, q_end), (k, k_end) in spans:
        key, value = (x[k:k_end].repeat_interleave(groups, 1).transpose(0, 1) for x in (key_MKD, value_MKD))
        seen = torch.ones(q_end - q, k_end - k, dtype=torch.bool, device=key.device).tril((k_end - k) - (q_end - q))
        out.append(sdpa(query_THD[q:q_end].transpose(0, 1), key, value, attn_mask=seen, scale=scale).transpose(0, 1))
    return torch.cat(out)
