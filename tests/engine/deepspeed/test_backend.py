"""Decisions of the engine's process that need no rank: sizes, names, refusals, and the distribution of
micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from engine.backends.deepspeed.backend import DeepSpeedBackend, DeepSpeedTrainer, layout_name
from engine.backends.deepspeed.memory import StateBytes, state_bytes
from engine.backends.deepspeed.passes import distribute
from engine.backends.protocol import Objective
from engine.errors import BadSpec, OutOfMemory, WorkerDied
from engine.losses.likelihood import CrossEntropySpec
from engine.models.samples import Sample
from engine.specs.engine import DeepSpeedSpec, LocalEngineSpec
from storage.chain.records import OptimizerSpec
from tests.engine.deepspeed.conftest import planned_rows, some_samples


def backend(compute_dtype: str = "float32", **trainer: object) -> DeepSpeedBackend:
    spec = DeepSpeedSpec(**trainer)  # type: ignore[arg-type]
    return DeepSpeedBackend(LocalEngineSpec(trainer=spec, device="cpu", compute_dtype=compute_dtype, threads=1))  # type: ignore[arg-type]


def test_numerics_name_the_layout() -> None:
    numerics = backend(ranks=2, zero_stage=3).numerics()
    assert (numerics.backend, numerics.layout, numerics.threads) == ("deepspeed", "zero3x2", 1)
    assert {"torch", "transformers", "deepspeed"} <= numerics.versions.keys()
    assert layout_name(DeepSpeedSpec(zero_stage=1, sequence_parallel=2), 4) == "zero1x4-sp2"


def test_what_it_does_not_do_is_refused_before_any_rank_starts() -> None:
    trainers = backend(ranks=2)
    with pytest.raises(BadSpec, match="float64"):
        backend("float64", zero_stage=2)
    with pytest.raises(BadSpec, match="does not divide 1 ranks"):
        backend(sequence_parallel=2)  # one rank, where there is no GPU
    assert trainers.group.pids == {}


@pytest.mark.parametrize(
    ("stage", "dtype_bytes", "expected"),
    [
        # 1000 weights on 4 ranks. Stage 0: everything on each, 4 bytes a number and two moments
        (0, 4, (16_000, 16_000, 32_000)),
        # 2-byte weights everywhere and 4-byte masters once; gradients of 2 and 4 bytes everywhere; moments once
        (1, 2, (8_000 + 4_000, 24_000, 8_000)),
        (1, 4, (16_000 + 4_000, 16_000, 8_000)),
        (2, 2, (8_000 + 4_000, 4_000, 8_000)),
        (3, 2, (2_000 + 4_000, 4_000, 8_000)),
    ],
)
def test_bytes_by_stage(stage: int, dtype_bytes: int, expected: tuple[int, int, int]) -> None:
    spec = DeepSpeedSpec(zero_stage=stage)  # type: ignore[arg-type]
    places = state_bytes(spec, parameters=1000, buffer_bytes=0, ranks=4, compute_bytes=dtype_bytes, master_bytes=4)
    held = places.device
    assert (held.weights + held.masters, held.gradients, held.moments) == expected
    assert held.nbytes(training=True) == sum(expected)
    assert places.host == StateBytes()


@pytest.mark.parametrize(
    ("stage", "dtype_bytes", "standing"),
    # stage 1 in bfloat16 adds up in a float32 buffer on every rank; stage 3 in one of each rank's share
    [(0, 4, 0), (1, 4, 0), (1, 2, 16_000), (2, 2, 0), (3, 2, 4_000)],
)
def test_buffers_that_a_policy_holds_without_training(stage: int, dtype_bytes: int, standing: int) -> None:
    spec = DeepSpeedSpec(zero_stage=stage)  # type: ignore[arg-type]
    held = state_bytes(spec, parameters=1000, buffer_bytes=7, ranks=4, compute_bytes=dtype_bytes, master_bytes=4).device
    assert held.nbytes(training=False) == held.weights + held.masters + standing


def test_what_is_offloaded_is_not_on_the_devices() -> None:
    spec = DeepSpeedSpec(zero_stage=3, offload_optimizer="cpu", offload_parameters="cpu")
    places = state_bytes(spec, parameters=1000, buffer_bytes=0, ranks=4, compute_bytes=2, master_bytes=4)
    assert places.device == StateBytes()
    assert (places.host.weights, places.host.masters, places.host.moments) == (2_000, 4_000, 8_000)
    assert places.host.gradients == 8_000  # of the micro-batches, and of the masters


@pytest.mark.parametrize(
    ("stage", "dtype_bytes", "device", "host"),
    [
        # the masters' gradient is in the machine; micro-batches add up in float32 on the device
        (1, 2, 24_000 + 4_000, 4_000),
        (2, 2, 4_000, 4_000),
        # they do so in the machine where weights are float32 themselves, and in stage 3
        (1, 4, 16_000, 8_000),
        (2, 4, 0, 8_000),
        (3, 2, 0, 8_000),
        (3, 4, 0, 8_000),
    ],
)
def test_gradients_of_an_offloaded_optimizer(stage: int, dtype_bytes: int, device: int, host: int) -> None:
    spec = DeepSpeedSpec(zero_stage=stage, offload_optimizer="cpu")  # type: ignore[arg-type]
    places = state_bytes(spec, parameters=1000, buffer_bytes=0, ranks=4, compute_bytes=dtype_bytes, master_bytes=4)
    assert (places.device.gradients, places.host.gradients) == (device, host)


def test_a_pass_that_killed_a_rank_is_halved_once() -> None:
    trainers = backend(ranks=2)
    assert trainers.max_tokens_that_fit(8192) == 8192
    trainers.reduce_max_tokens(8192, WorkerDied("gone"))
    assert (trainers.max_tokens_that_fit(8192), trainers.max_tokens_that_fit(4000)) == (4096, 4000)
    with pytest.raises(OutOfMemory, match="4096 packed tokens"):
        trainers.reduce_max_tokens(8192, WorkerDied("gone"))


class RanksWithRoom:
    """Stands for a group of ranks that have memory for passes of `room` tokens."""

    alive, start_number = True, 1

    def __init__(self, room: int) -> None:
        self.room = room
        self.calls: list[list[Any]] = []
        """For each call: [group of ranks][pass] -> `completion` of each sample; None for an empty pass."""

    def progress_callback(self, listener: Callable[[], None]) -> AbstractContextManager[None]:
        return nullcontext()

    def scatter(self, start_number: int, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        rows_by_group: list[Any] = []
        results: list[Any] = []
        longest = 0
        for _, passes, *_ in arguments:
            rows_by_group.append([])
            results.append([])
            for batch in passes:
                rows_by_group[-1].append(None if batch is None else [sample.completion for sample in batch])
                results[-1] += [sample.token_ids[sample.loss_mask] for sample in batch or ()]
                longest = max(longest, sum(len(sample.token_ids) for sample in batch or ()))
        self.calls.append(rows_by_group)
        if longest > self.room:
            raise OutOfMemory("rank 1: CUDA out of memory")
        return [({"loss": 0.5}, 1.0, True)] if method == "update" else results


def trainer_on(group: RanksWithRoom, **spec: object) -> DeepSpeedTrainer:
    trainers = backend(**spec)  # type: ignore[arg-type]
    trainers.group = group  # type: ignore[assignment]
    return DeepSpeedTrainer(
        trainers, 1, 1, {"repeats": True, "scalar": False, "vocab_size": 259, "context_length": 64}
    )


@pytest.mark.parametrize("sharing", [1, 2])
def test_each_group_of_ranks_is_sent_the_rows_of_its_passes(sharing: int) -> None:
    group, samples = RanksWithRoom(room=40), some_samples(prompt=1)
    trainer = trainer_on(group, ranks=4, sequence_parallel=sharing)
    report = trainer.update(samples, Objective(CrossEntropySpec()), OptimizerSpec(lr=1.0), max_tokens=40)
    planned = planned_rows(samples, 40, 4 // sharing)
    assert group.calls == [planned]
    assert report.micro_batches == sum(batch is not None for passes in planned for batch in passes)
    # The results for the sequences come back in their order.
    tokens = trainer.logprobs(samples, temperature=1.0, max_tokens=40)
    for found, sample in zip(tokens, samples, strict=True):
        assert np.array_equal(found, sample.token_ids[sample.loss_mask])


def test_ranks_short_of_memory_are_sent_passes_of_half_the_tokens() -> None:
    group, samples = RanksWithRoom(room=25), some_samples([10] * 8, prompt=1)
    trainer, objective = trainer_on(group, ranks=2), Objective(CrossEntropySpec())
    report = trainer.update(samples, objective, OptimizerSpec(lr=1.0), max_tokens=40)
    assert (report.max_tokens, report.micro_batches) == (20, 4)
    assert group.calls == [planned_rows(samples, max_tokens, 2) for max_tokens in (40, 20)]
    group.room = 9
    with pytest.raises(OutOfMemory, match=r"at most 20 packed tokens.* does not fit cpu memory: rank 1: CUDA"):
        trainer.update(samples, objective, OptimizerSpec(lr=1.0), max_tokens=40)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 23])
def test_every_sample_is_dealt_once_and_every_rank_runs_every_pass(ranks: int, count: int) -> None:
    random = Random(ranks * 100 + count)
    samples = [Sample([1] * n, [0.0] + [1.0] * (n - 1)) for n in (random.randrange(2, 40) for _ in range(count))]
    passes = distribute(samples, max_tokens=64, ranks=ranks)
    assert passes and all(len(row) == ranks for row in passes)
    dealt = sorted(index for row in passes for batch in row if batch for index in batch)
    assert dealt == list(range(count))
    for row in passes:
        assert all(sum(len(samples[i].token_ids) for i in batch) <= 64 for batch in row if batch)
    if count >= ranks:  # every rank has work in the first pass
        assert all(passes[0]) or sum(len(s.token_ids) for s in samples) < ranks * 40


def test_a_batch_that_fits_one_pass_is_shared_by_all_ranks() -> None:
    samples = [Sample([1] * 10, [0.0] + [1.0] * 9) for _ in range(8)]
    assert [len(batch or []) for batch in distribute(samples, max_tokens=4096, ranks=4)[0]] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "expected"),
    [
        ((7, 5, 5), 4096, [[10, 7]]),  # 9 tokens each would make three batches, and one rank wait in a second pass
        ((10,) * 7, 30, [[20, 20], [20, 10]]),  # not 30, 30, 10: the fourth place is taken too
        ((10,) * 5, 10, [[10, 10], [10, 10], [10, 0]]),
    ],
)
def test_an_uneven_batch_needs_no_further_pass(
    lengths: tuple[int, ...], max_tokens: int, expected: list[list[int]]
) -> None:
    samples = [Sample([1] * n, [0.0] + [1.0] * (n - 1)) for n in lengths]
    passes = distribute(samples, max_tokens=max_tokens, ranks=2)
    lengths_by_pass = [sorted((sum(lengths[i] for i in batch or []) for batch in row), reverse=True) for row in passes]
    assert lengths_by_pass == expected


def test_staged_dtypes_are_torch_s() -> None:
    trainers = backend("bfloat16", ranks=1, zero_stage=3)
    assert (trainers.compute_dtype, trainers.master_dtype) == (torch.bfloat16, torch.float32)
