"""Tests that the variable-length kernel of this GPU computes what the SDPA path computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.gpu.setting import attention_by, grpo_samples
from engine.backends.torch import attention
from engine.backends.torch.attention import PackedLayout
from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.loading import load_model
from engine.backends.torch.packing import PrefixGroup, pack

pytestmark = pytest.mark.gpu
FANS = [
    PrefixGroup(0, 130),
    PrefixGroup(130, 64, ((194, 1), (195, 200), (395, 33))),
    PrefixGroup(428, 1),
    PrefixGroup(429, 0, ((429, 5), (434, 70))),
    PrefixGroup(504, 300, ((804, 17),)),
]
TOKENS = 821


def query_of(cuda: torch.device, dtype: torch.dtype, head_dim: int = 64) -> Tensor:
    return torch.zeros(1, 2, 3, head_dim, dtype=dtype, device=cuda)


@pytest.fixture
def kernel(cuda: torch.device) -> attention.VarlenKernel:
    actual = attention.find_varlen(query_of(cuda, torch.bfloat16))
    if actual is None:
        pytest.skip("this GPU or this torch has no variable-length kernel")
    return actual


def test_a_recent_gpu_and_torch_have_a_kernel(cuda: torch.device) -> None:
    if torch.cuda.get_device_capability(cuda) < (8, 0):
        pytest.skip("flash kernels want capability 8.0")
    assert attention.find_varlen(query_of(cuda, torch.bfloat16)) is not None


def test_float32_and_odd_heads_go_by_sdpa(cuda: torch.device) -> None:
    assert attention.find_varlen(query_of(cuda, torch.float32)) is None
    assert attention.find_varlen(query_of(cuda, torch.bfloat16, 36)) is None
    assert attention.find_varlen(query_of(cuda, torch.bfloat16, 512)) is None


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("key_heads", [14, 2, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_values_and_gradients_are_those_of_sdpa(
    cuda: torch.device, kernel: attention.VarlenKernel, dtype: torch.dtype, key_heads: int, head_dim: int
) -> None:
    """Against SDPA in float32 of the same rounded inputs: off by at most twice what SDPA in this dtype is."""
    generator = torch.Generator(device=cuda).manual_seed(0)
    inputs = [
        torch.randn(1, heads, TOKENS, head_dim, device=cuda, generator=generator).to(dtype)
        for heads in (14, key_heads, key_heads)
    ]

    def run(dtype: torch.dtype, chosen: attention.VarlenKernel | None) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        with attention_by(None):
            out = PackedLayout(FANS, device=cuda, kernel=chosen).attend(0, *leaves, head_dim**-0.5)
        return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]

    exact, plain, actual = run(torch.float32, None), run(dtype, None), run(dtype, kernel)
    for e, p, f in zip(exact, plain, actual, strict=True):
        off, allowed = (((x.float() - e).norm() / e.norm()).item() for x in (f, p))
        assert off <= 2 * allowed + 1e-6


def test_a_whole_model_goes_through_the_kernel(
    cuda: torch.device, kernel: attention.VarlenKernel, tiny_folder: Path
) -> None:
    model: CausalLM = load_model(tiny_folder, dtype=torch.float32, compute_dtype=torch.bfloat16, device=cuda)
    packed = pack(grpo_samples("1M", (2, 3, 12, 5, 20)), device=cuda)
    calls = []

    def counted(*args: Tensor) -> Tensor:
        calls.append(args[0].dtype)
        return kernel(*args)  # type: ignore[arg-type]

    with torch.no_grad(), attention_by(counted):
        actual = model.logprobs(packed)
    with torch.no_grad(), attention_by(None):
        expected = model.logprobs(packed)
    assert calls == [torch.bfloat16] * model.module.config.num_hidden_layers
    torch.testing.assert_close(actual, expected, rtol=0, atol=0.05)
