"""One call of a variable-length kernel gives what the SDPA path gives, gradients included.

The kernel here is the definition of one, pair by pair: the arithmetic of indices and cumulative lengths is what is
tested; that a GPU's kernel means the same is for tests/gpu. Axes: T packed token · M key of a pair · H query head
· K key/value head · D head dimension · Q, S queries and keys of one pair
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backends.torch import attention
from engine.backends.torch.attention import PackedLayout, PrefillLayout
from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.loading import load_model
from engine.backends.torch.packing import PrefixGroup, pack
from engine.errors import BadSpec
from engine.protocol import TokenSequence

CPU = torch.device("cpu")
LAYOUTS = {
    "one segment": [PrefixGroup(0, 5)],
    "segments of equal and other lengths": [
        PrefixGroup(0, 3),
        PrefixGroup(3, 4),
        PrefixGroup(7, 3),
        PrefixGroup(10, 1),
    ],
    "one group with branches": [PrefixGroup(0, 4, ((4, 1), (5, 3)))],
    "groups of two and three branches, between segments": [
        PrefixGroup(0, 2),
        PrefixGroup(2, 3, ((5, 2), (7, 1), (8, 4))),
        PrefixGroup(12, 1),
        PrefixGroup(13, 2, ((15, 3), (18, 3))),
        PrefixGroup(21, 4),
    ],
    "branches without a prompt": [PrefixGroup(0, 0, ((0, 2), (2, 3)))],
    "a group of one branch": [PrefixGroup(0, 2, ((2, 2),))],
}


def by_definition(
    query_THD: Tensor,
    key_MKD: Tensor,
    value_MKD: Tensor,
    pairs: attention.VarlenPairs,
    scale: float,
    *,
    last: bool = True,
) -> Tensor:
    """Pair s attends from queries starts_q[s]: to keys starts_k[s]:, query i to keys up to i + (keys - queries)."""
    assert pairs.starts_q.dtype == pairs.starts_k.dtype == torch.int32
    assert (pairs.starts_q[-1], pairs.starts_k[-1]) == (len(query_THD), len(key_MKD))
    heads = query_THD.shape[1] // key_MKD.shape[1]
    out = []
    q, k = pairs.starts_q.tolist(), pairs.starts_k.tolist()
    assert pairs.longest_q == max(b - a for a, b in pairwise(q))
    assert pairs.longest_k == max(b - a for a, b in pairwise(k))
    for pair in range(len(q) - 1):
        query_QHD = query_THD[q[pair] : q[pair + 1]]
        key_SHD, value_SHD = (x[k[pair] : k[pair + 1]].repeat_interleave(heads, 1) for x in (key_MKD, value_MKD))
        ahead = len(key_SHD) - len(query_QHD) if last else 0
        seen_QS = torch.ones(len(query_QHD), len(key_SHD), dtype=torch.bool).tril(ahead)
        scores_HQS = torch.einsum("qhd,shd->hqs", query_QHD, key_SHD) * scale
        weights_HQS = scores_HQS.masked_fill(~seen_QS, -torch.inf).softmax(-1)
        out.append(torch.einsum("hqs,shd->qhd", weights_HQS, value_SHD))
    return torch.cat(out)


def rows(groups: list[PrefixGroup], key_heads: int) -> list[Tensor]:
    """Query, key, value as a decoder hands them over: (1, heads, T, D), the queries not contiguous."""
    tokens = sum(group.tokens for group in groups)
    generator = torch.Generator().manual_seed(0)

    def random(heads: int) -> Tensor:
        return torch.randn(1, tokens, heads, 8, dtype=torch.float64, generator=generator).transpose(1, 2)

    return [random(heads).requires_grad_() for heads in (4, key_heads, key_heads)]


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS)
def test_values_and_gradients_are_those_of_the_sdpa_path(groups: list[PrefixGroup], key_heads: int) -> None:
    def run(kernel: attention.VarlenKernel | None) -> list[Tensor]:
        inputs = rows(groups, key_heads)
        out = PackedLayout(groups, device=CPU, kernel=kernel).attend(0, *inputs, 0.3)
        torch.manual_seed(1)
        return [out, *torch.autograd.grad((out * torch.randn_like(out)).sum(), inputs)]

    for actual, expected in zip(run(by_definition), run(None), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_the_gradient_of_a_shared_prompt_is_summed_in_float32() -> None:
    """The gradient of one key is a sum of 1 over 600 branches, and bfloat16 cannot count beyond 256."""
    branches = 600
    group = PrefixGroup(0, 1, tuple((1 + place, 1) for place in range(branches)))
    keys = torch.ones(1 + branches, 1, 1, dtype=torch.bfloat16, requires_grad=True)

    def sum_of_keys(q: Tensor, key_MKD: Tensor, v: Tensor, pairs: attention.VarlenPairs, scale: float) -> Tensor:
        return key_MKD.sum(dtype=torch.float32)

    output = attention.VarlenAttention([group], device=CPU, kernel=sum_of_keys).attend(keys.detach(), keys, keys, 1.0)
    (gradient,) = torch.autograd.grad(output, keys)
    assert gradient.flatten().tolist() == [600.0, *[1.0] * branches]  # 601 copies; bfloat16 rounds 601 to 600


SEQUENCES = [
    TokenSequence([10, 11, 12, 13, 20, 21], [0, 0, 0, 0, 1, 1], "a"),
    TokenSequence([10, 11, 12, 13, 30, 31, 32], [0, 0, 0, 0, 1, 1, 1], "a"),
    TokenSequence([40, 41, 42, 50], [0, 0, 0, 1], "b"),
    TokenSequence([10, 60, 61], [0, 1, 1], ""),
]


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> CausalLM:
    return load_model(tiny_folder, dtype=torch.float64, compute_dtype=torch.float64, device=CPU)


def test_a_whole_model_computes_the_same_with_the_kernel_that_was_found(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> tuple[Tensor, Tensor]:
        model.module.zero_grad()
        logprobs_N = model.logprobs(pack(SEQUENCES, device=CPU))
        logprobs_N.sum().backward()
        return logprobs_N.detach(), model.head.weight.grad.clone()

    expected = run()
    used: list[tuple[int, ...]] = []

    def kernel(*args: Any) -> Tensor:
        used.append(tuple(args[0].shape))
        return by_definition(*args)

    monkeypatch.setattr(attention, "find_varlen", lambda query: kernel)
    for actual, sdpa_values in zip(run(), expected, strict=True):
        torch.testing.assert_close(actual, sdpa_values, rtol=1e-11, atol=1e-12)
    layers = model.module.config.num_hidden_layers
    assert used == [(16, 4, 32)] * layers  # 4 + 2 + 3 tokens of group a, 4 of b, 3 alone: each once, in one call


def test_a_prefill_keeps_its_keys_in_packed_order() -> None:
    groups = LAYOUTS["one group with branches"]
    query, key, value = (x.detach() for x in rows(groups, 2))
    layout = PrefillLayout(groups, device=CPU)
    layout._kernel = by_definition
    layout.attend(3, query, key, value, 0.3)
    assert torch.equal(layout.keys_and_values[3][0], key[0])
    assert torch.equal(layout.keys_and_values[3][1], value[0])


@pytest.mark.parametrize("argument", [{"sliding_window": 3}, {"softcap": 5.0}, {"s_aux": torch.zeros(2)}])
def test_what_packing_does_not_support_is_refused_with_a_kernel_too(argument: dict[str, Any]) -> None:
    from engine.backends.torch.attention import _attend

    groups = LAYOUTS["one segment"]
    layout = PackedLayout(groups, device=CPU, kernel=by_definition)
    with pytest.raises(BadSpec, match="packed attention does not support"):
        _attend(torch.nn.Module(), *rows(groups, 2), None, layout=layout, **argument)


# -- which kernel ----------------------------------------------------------------------------------------------


def test_no_kernel_is_looked_for_where_there_is_none() -> None:
    assert attention.find_varlen(torch.zeros(1, 2, 3, 64, dtype=torch.bfloat16)) is None  # on the CPU


def top_left(*args: Any) -> Tensor:
    return by_definition(*args, last=False)


def test_the_probe_tells_a_mask_that_is_aligned_to_the_first_key() -> None:
    assert attention._probe(by_definition, CPU) < 0.004  # a value of bfloat16 rounds by at most 2^-8
    assert attention._probe(top_left, CPU) > attention.PROBE_TOLERANCE


def torch_2_13(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: Any, max_k: Any, *,
    return_aux: Any = None, scale: Any = None, window_size: Any = (-1, -1), enable_gqa: bool = False,
) -> Any:  # fmt: skip
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError("try setting enable_gqa=True")
    assert window_size == (-1, 0)
    return by_definition(query, key, value, attention.VarlenPairs(cu_seq_q, cu_seq_k, max_q, max_k), scale)


def torch_2_11(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: Any, max_k: Any, *,
    return_aux: Any = None, scale: Any = None, window_size: Any = (-1, -1),
) -> Any:  # fmt: skip
    assert window_size == (-1, 0)
    return by_definition(query, key, value, attention.VarlenPairs(cu_seq_q, cu_seq_k, max_q, max_k), scale)


def torch_2_10(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: Any, max_k: Any,
    is_causal: bool = False, return_aux: Any = None,
) -> Any:  # fmt: skip
    raise AssertionError("it has no scale")


@pytest.mark.parametrize("varlen_attn", [torch_2_13, torch_2_11])
def test_each_version_of_torchs_function_is_called_as_it_wants(varlen_attn: Callable[..., Any]) -> None:
    groups = LAYOUTS["groups of two and three branches, between segments"]
    kernel = attention.adapt_torch_varlen(varlen_attn)
    inputs = rows(groups, 2)
    actual = PackedLayout(groups, device=CPU, kernel=kernel).attend(0, *inputs, 0.3)
    expected = PackedLayout(groups, device=CPU).attend(0, *inputs, 0.3)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_a_version_without_a_scale_is_not_used() -> None:
    assert attention.adapt_torch_varlen(torch_2_10) is None


def test_the_installed_torch_has_the_arguments_that_are_used() -> None:
    from torch.nn.attention.varlen import varlen_attn

    known = list(inspect.signature(varlen_attn).parameters)
    assert known[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert {"scale", "window_size"} <= set(known)
