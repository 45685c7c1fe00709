"""Which of torch's modes the backward pass of attention runs in, and which devices are taken to repeat their sums."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backends.torch.determinism import deterministic_backward, repeats_sums, warn_only_restored


def mode() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


OFF, WARN_ONLY, STRICT = (False, False), (True, True), (True, False)


@pytest.fixture(autouse=True)
def off_again() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


class Recorded(torch.autograd.Function):
    """Stands for a fused kernel. Its backward pass records the mode, and can fail."""

    seen: list[tuple[bool, bool]] = []
    fails = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        Recorded.seen.append(mode())
        if Recorded.fails:
            raise RuntimeError("out of memory")
        return 2 * gradient


def modes_of_a_backward_pass(monkeypatch: pytest.MonkeyPatch, *, fails: bool = False) -> list[tuple[bool, bool]]:
    """The modes within a kernel, and in the operations after it (its input) and before it (its output)."""
    monkeypatch.setattr(Recorded, "seen", [])
    monkeypatch.setattr(Recorded, "fails", fails)
    x = torch.ones(3, requires_grad=True)
    kernel_input = x * 1
    kernel_input.register_hook(lambda _: Recorded.seen.append(mode()))  # type: ignore[no-untyped-call]
    output = deterministic_backward(Recorded.apply(kernel_input))  # type: ignore[no-untyped-call]
    output.register_hook(lambda _: Recorded.seen.append(mode()))
    with warn_only_restored():
        output.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2, 2, 2]
    return Recorded.seen


def test_under_warn_only_the_kernel_alone_runs_strictly(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    _, within, after = modes_of_a_backward_pass(monkeypatch)
    assert (within, after) == (STRICT, WARN_ONLY)
    assert mode() == WARN_ONLY


def test_where_the_kernels_are_off_they_stay_off(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(False, warn_only=True)
    assert modes_of_a_backward_pass(monkeypatch) == 3 * [(False, True)]


@pytest.mark.parametrize("enabled", [False, True])
def test_other_modes_stay_as_they_are(monkeypatch: pytest.MonkeyPatch, enabled: bool) -> None:
    torch.use_deterministic_algorithms(enabled)
    assert modes_of_a_backward_pass(monkeypatch) == 3 * [STRICT if enabled else OFF]
    assert mode() == (STRICT if enabled else OFF)


def test_a_kernel_that_fails_leaves_the_mode_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.raises(RuntimeError, match="out of memory"):
        modes_of_a_backward_pass(monkeypatch, fails=True)
    assert mode() == WARN_ONLY


def test_without_a_gradient_nothing_is_registered() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    x = torch.ones(3)
    assert deterministic_backward(x) is x


def test_a_gpu_without_deterministic_kernels_is_not_trusted() -> None:
    """The small update would need a GPU here, and none is asked."""
    assert not repeats_sums(torch.device("cuda", 0), torch.bfloat16)
    assert repeats_sums(torch.device("cpu"), torch.float32)
