"""Whether a device repeats its sums to the bit, and torch's deterministic kernels for those that do not."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOKENS, WIDTH, HEADS, VOCABULARY = 512, 128, 4, 64
REPETITIONS = 3


def use_deterministic_kernels(*, strict: bool) -> None:
    """Makes torch use deterministic kernels on CUDA. An operation that has none raises an error with `strict`, and
    otherwise runs as it is."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    warnings.filterwarnings("ignore", message=".* does not have a deterministic implementation")


def is_warn_only() -> bool:
    """Whether deterministic kernels are in use, and an operation that has none runs as it is."""
    # torch keeps the second setting also where the first one is off
    return torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()


def deterministic_backward(output: Tensor) -> Tensor:
    """Makes the backward pass of the fused attention kernel that returned `output` deterministic, if deterministic
    kernels are in use. Returns `output`.

    Attention has deterministic backward kernels, but torch uses them only without `warn_only`
    (aten/src/ATen/native/transformers/cuda/attention_backward.cu). Run the backward pass under `warn_only_restored`."""
    node = output.grad_fn
    if node is not None and is_warn_only():
        # torch pads odd sizes of heads, and returns a slice of what the kernel returned
        if "Slice" in node.name() and node.next_functions[0][0] is not None:
            node = node.next_functions[0][0]
        node.register_prehook(lambda _: torch.use_deterministic_algorithms(True))
        node.register_hook(lambda *_: torch.use_deterministic_algorithms(True, warn_only=True))
    return output


@contextmanager
def warn_only_restored() -> Iterator[None]:
    """Restores `warn_only` after a backward pass that failed within attention."""
    warn_only = is_warn_only()
    try:
        yield
    finally:
        if warn_only:
            torch.use_deterministic_algorithms(True, warn_only=True)


def repeats_sums(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this device repeats its sums to the bit in this precision, as far as one small update shows it.

    Without deterministic kernels a GPU is assumed not to repeat: on an H100 the small update did, and an update of 0.5B
    parameters did not (bench/gpu, part `determinism`)."""
    if device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        return False
    return small_update_repeats(device, dtype)


@cache
def small_update_repeats(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device gave the same bits each time for one small update.

    The update has the sums that a GPU may add in another order at each call: gradients of an embedding with repeated
    tokens, of attention, of gathered rows, and the norm of all gradients. A model may have further ones."""
    first = _small_update(device, dtype)
    return all(torch.equal(first, _small_update(device, dtype)) for _ in range(REPETITIONS - 1))


def _small_update(device: torch.device, dtype: torch.dtype) -> Tensor:
    """The gradients of a model of one layer, clipped."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> nn.Parameter:
        return nn.Parameter((0.1 * torch.randn(*shape, generator=generator)).to(device))

    embedding_VW, weight_WW = drawn(VOCABULARY, WIDTH), drawn(WIDTH, WIDTH)
    tokens_T = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator).to(device)
    parameters = [embedding_VW, weight_WW]
    with torch.autocast(device.type, dtype, enabled=dtype in (torch.bfloat16, torch.float16)):
        hidden_TW = F.embedding(tokens_T, embedding_VW)
        heads = F.silu(hidden_TW @ weight_WW).view(1, TOKENS, HEADS, -1).transpose(1, 2)
        attended = deterministic_backward(F.scaled_dot_product_attention(heads, heads, heads, is_causal=True))
        hidden_TW = hidden_TW + attended.transpose(1, 2).reshape(TOKENS, WIDTH)
        logits_TV = hidden_TW[tokens_T] @ embedding_VW.t()
        loss = F.cross_entropy(logits_TV.float(), tokens_T)
    with warn_only_restored():
        loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(parameters, 0.1)
    return torch.cat([parameter.grad.reshape(-1) for parameter in parameters if parameter.grad is not None])
