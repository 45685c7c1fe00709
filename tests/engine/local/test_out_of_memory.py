"""Tests of out-of-memory errors: the micro-batches of that update are halved once. Token ids outside the vocabulary are
refused before any forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from engine.backends.protocol import Objective
from engine.backends.torch.loading import load_model
from engine.backends.torch.packing import Packed
from engine.backends.torch.trainer import TorchTrainer
from engine.errors import BadSpec, OutOfMemory
from engine.losses.distillation import ForwardKLSpec
from engine.losses.likelihood import CrossEntropySpec
from engine.models.samples import Sample
from engine.protocol import TokenSequence
from storage.chain.records import OptimizerSpec

CE = Objective(CrossEntropySpec())
SAMPLES = [Sample([10 * n, 2, 3, 4, 5, 6], [0.0] + [1.0] * 5) for n in range(8)]
CPU_SAYS = "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 B"
ERRORS: dict[str, Callable[[], Exception]] = {
    "cuda": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    "cublas": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cpu": lambda: RuntimeError(CPU_SAYS),
    "other": lambda: RuntimeError("shapes do not match"),
    "cpu-windows": lambda: RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
}


class SmallMemory(TorchTrainer):
    """Holds at most `room` packed tokens, and `good` micro-batches before the first failure."""

    def __init__(self, folder: Path, *, room: int, error: str = "cuda", good: int = 0) -> None:
        dtype = torch.float64
        super().__init__(load_model(folder, dtype=dtype, compute_dtype=dtype, device=torch.device("cpu")))
        self.room, self.error, self.good = room, ERRORS[error], good
        self.seen: list[int] = []

    def _accumulate_micro_batch(self, samples: Sequence[Sample], *rest: Any) -> None:
        tokens = sum(len(sample.token_ids) for sample in samples)
        self.seen.append(tokens)
        super()._accumulate_micro_batch(samples, *rest)
        if tokens > self.room:
            self.good -= 1
            if self.good < 0:
                raise self.error()  # after the gradient was added to: the worst moment


def update(trainer: TorchTrainer, max_tokens: int) -> Any:
    return trainer.update(SAMPLES, CE, OptimizerSpec(lr=1e-2), max_tokens=max_tokens)


@pytest.mark.parametrize("error", ["cuda", "cublas", "cpu", "cpu-windows"])
@pytest.mark.parametrize("good", [0, 1])
def test_the_micro_batches_are_halved_once_and_nothing_else_changes(tiny_folder: Path, error: str, good: int) -> None:
    small = SmallMemory(tiny_folder, room=12, error=error, good=good)
    result = update(small, 24)
    assert small.seen == [24] * (good + 1) + [12] * 4
    halved = SmallMemory(tiny_folder, room=12)
    expected = update(halved, 12)
    assert (result.micro_batches, result.max_tokens) == (expected.micro_batches, expected.max_tokens) == (4, 12)
    assert result.metrics == expected.metrics
    assert small.weights_digest() == halved.weights_digest()


def test_memory_that_does_is_not_halved(tiny_folder: Path) -> None:
    report = update(SmallMemory(tiny_folder, room=24), 24)
    assert (report.micro_batches, report.max_tokens) == (2, 24)


def test_a_second_failure_is_permanent_and_says_what_to_lower(tiny_folder: Path) -> None:
    trainer = SmallMemory(tiny_folder, room=6)
    digest = trainer.weights_digest()
    with pytest.raises(OutOfMemory) as refused:
        update(trainer, 24)
    message = str(refused.value)
    assert trainer.seen == [24, 12]
    for part in ("12 packed tokens", "longest sequence 6", "CUDA out of memory", "max_tokens_per_forward", "now 24"):
        assert part in message
    assert trainer.weights_digest() == digest
    assert all(parameter.grad is None for _, parameter in trainer.trained_parameters())


def test_half_is_never_less_than_the_longest_sequence(tiny_folder: Path) -> None:
    trainer = SmallMemory(tiny_folder, room=7)
    mixed = [SAMPLES[0], *(Sample([n, 2, 3, 4], [0.0, 1.0, 1.0, 1.0]) for n in (7, 8))]
    assert trainer.update(mixed, CE, OptimizerSpec(lr=0), max_tokens=8).max_tokens == 6  # not 4
    assert trainer.seen == [6, 8, 6, 4, 4]
    trainer = SmallMemory(tiny_folder, room=5)
    with pytest.raises(OutOfMemory, match="6 packed tokens"):
        update(trainer, 6)  # one sequence alone does not fit: there is nothing to split
    assert trainer.seen == [6]


def test_other_errors_are_not_taken_for_memory(tiny_folder: Path) -> None:
    trainer = SmallMemory(tiny_folder, room=6, error="other")
    with pytest.raises(RuntimeError, match="shapes do not match"):
        update(trainer, 24)
    assert trainer.seen == [24]


@pytest.mark.parametrize("error", ["cuda", "cublas", "cpu", "cpu-windows"])
def test_logprobs_are_split_once_too(tiny_folder: Path, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = SmallMemory(tiny_folder, room=12)
    whole, seen = trainer.model.logprobs, []

    def small(packed: Packed, **rest: Any) -> torch.Tensor:
        seen.append(len(packed.token_ids_T))
        if seen[-1] > 12:
            raise ERRORS[error]()
        return whole(packed, **rest)

    sequences = [TokenSequence(s.token_ids, s.loss_mask, "") for s in SAMPLES]
    expected = trainer.logprobs(sequences, temperature=1.0, max_tokens=12)
    monkeypatch.setattr(trainer.model, "logprobs", small)
    again = trainer.logprobs(sequences, temperature=1.0, max_tokens=24)
    assert [row.tolist() for row in again] == [row.tolist() for row in expected]
    assert seen == [24, 12, 12, 12, 12]
    with pytest.raises(OutOfMemory, match="18 packed tokens"):
        trainer.logprobs(sequences, temperature=1.0, max_tokens=36)


def test_moments_that_do_not_fit_are_permanent(tiny_folder: Path) -> None:
    trainer = SmallMemory(tiny_folder, room=99)

    def fail(*_: Any) -> None:
        raise ERRORS["cuda"]()

    hook = register_optimizer_step_pre_hook(fail)
    try:
        with pytest.raises(OutOfMemory, match=r"moments of adamw, up to 0\.0\d GiB.*CUDA out of memory.*LoRA"):
            update(trainer, 24)
    finally:
        hook.remove()
    assert trainer.seen == [24, 24]


# -- token ids -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [-1, 259, (1 << 31) - 1])
def test_an_id_outside_the_vocabulary_is_named(tiny_folder: Path, wrong: int) -> None:
    trainer = SmallMemory(tiny_folder, room=99)
    ids, weights = [1, 2, wrong, 3], [0.0, 1.0, 1.0, 1.0]
    named = rf"sample 1 \(group 'g'\) has the token id {wrong} at position 2; the model's are 0\.\.258"
    with pytest.raises(BadSpec, match=named):
        trainer.update([SAMPLES[0], Sample(ids, weights, "g")], CE, OptimizerSpec(lr=0), max_tokens=64)
    with pytest.raises(BadSpec, match=named):
        trainer.logprobs(
            [TokenSequence([1, 258], [0, 1], ""), TokenSequence(ids, weights, "g")], temperature=1.0, max_tokens=64
        )
    assert trainer.seen == []


@pytest.mark.parametrize("wrong", [259, 1 << 20])
def test_a_teachers_id_outside_the_vocabulary_is_named(tiny_folder: Path, wrong: int) -> None:
    """A teacher with the student's tokenizer may have more rows in its head."""
    trainer = SmallMemory(tiny_folder, room=99)

    def sample(last: int) -> Sample:
        top = {"teacher_top_ids": [7, 8, 258, last], "teacher_top_logprobs": [-1.0, -2.0] * 2}
        return Sample([1, 2, 3], [0.0, 1.0, 1.0], "g", **top)

    with pytest.raises(BadSpec, match=rf"sample 1 \(group 'g'\) has {wrong} among its teacher_top_ids.* 0\.\.258"):
        trainer.update([sample(9), sample(wrong)], Objective(ForwardKLSpec()), OptimizerSpec(lr=0), max_tokens=64)
    assert trainer.seen == []
