"""Tests of logprobs and entropies from logits: values and gradients are those of log_softmax and autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.backends.torch import causal_lm as module
from engine.backends.torch.causal_lm import token_logprobs, token_logprobs_and_entropy

VOCABULARY = 11


def plain(logits_NV: Tensor, target_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies by their definitions, in float64."""
    logp_NV = (logits_NV.double() / temperature).log_softmax(1)
    return logp_NV.gather(1, target_N.unsqueeze(1)).squeeze(1), -(logp_NV.exp() * logp_NV).sum(1)


def example(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(logits that require a gradient, targets, and the loss's gradient of each output (2, N))."""
    generator = torch.Generator().manual_seed(count)
    logits_NV = (4 * torch.randn(count, VOCABULARY, generator=generator)).to(dtype).requires_grad_()
    target_N = torch.randint(VOCABULARY, (count,), generator=generator)
    return logits_NV, target_N, torch.randn(2, count, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 4e-3)]
)
def test_they_are_those_of_log_softmax(
    count: int, temperature: float, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in blocks of three rows, of which the last one is not full."""
    monkeypatch.setitem(module.BLOCK_ELEMENTS, "cpu", 3 * VOCABULARY)
    logits_NV, target_N, weights_2N = example(count, dtype)
    expected = plain(logits_NV, target_N, temperature)
    actual = token_logprobs_and_entropy(logits_NV, target_N, temperature)
    for actual_N, expected_N in zip(actual, expected, strict=True):
        assert actual_N.dtype == torch.promote_types(dtype, torch.float32)
        # the logits are the same numbers in both, so the values differ by the rounding of float32 only
        torch.testing.assert_close(actual_N.double(), expected_N, rtol=min(tolerance, 1e-5), atol=min(tolerance, 1e-5))
    assert torch.equal(token_logprobs(logits_NV, target_N, temperature), actual[0])

    both = torch.stack(list(actual)).double()
    (grad_NV,) = torch.autograd.grad((both * weights_2N).sum(), logits_NV)
    (expected_grad_NV,) = torch.autograd.grad((torch.stack(list(expected)) * weights_2N).sum(), logits_NV)
    assert grad_NV.dtype == dtype
    torch.testing.assert_close(grad_NV, expected_grad_NV, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("output", [0, 1])
def test_the_gradient_of_one_output_alone(output: int) -> None:
    logits_NV, target_N, weights_2N = example(5, torch.float64)

    def gradient(outputs: tuple[Tensor, Tensor]) -> Tensor:
        return torch.autograd.grad((outputs[output] * weights_2N[output]).sum(), logits_NV)[0]

    actual = gradient(token_logprobs_and_entropy(logits_NV, target_N, 1.3))
    torch.testing.assert_close(actual, gradient(plain(logits_NV, target_N, 1.3)), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    """Values and gradients of a row are equal to the bit whatever the number of rows."""
    logits_NV, target_N, _ = example(7, dtype)
    together_N = token_logprobs(logits_NV, target_N, 0.7)
    (together_NV,) = torch.autograd.grad(together_N.sum(), logits_NV)
    for row in range(7):
        alone_1V = logits_NV[row : row + 1].detach().requires_grad_()
        alone_1 = token_logprobs(alone_1V, target_N[row : row + 1], 0.7)
        assert torch.equal(alone_1, together_N[row : row + 1])
        assert torch.equal(torch.autograd.grad(alone_1.sum(), alone_1V)[0], together_NV[row : row + 1])
