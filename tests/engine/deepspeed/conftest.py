"""Groups of ranks that the tests of a file share, and trainers in them to compare with the torch trainer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backends.deepspeed.backend import DeepSpeedBackend, DeepSpeedTrainer
from engine.backends.deepspeed.passes import distribute
from engine.backends.protocol import Objective, UpdateReport
from engine.backends.torch.loading import load_model
from engine.backends.torch.trainer import TorchTrainer
from engine.backends.weight_files.pieces import StoredTensors, open_checkpoint
from engine.cluster.rank_group import RankGroup
from engine.models.samples import Sample
from engine.specs.engine import DeepSpeedSpec, LocalEngineSpec
from storage.chain.records import OptimizerSpec
from tests.engine.deepspeed.lab import TARGET, lab_options
from tests.fixtures.rounding import rounding

NUMBERS = itertools.count(1)
ADAMW = OptimizerSpec(lr=1e-3, weight_decay=0.1, eps=1e-3)
"""AdamW for comparing layouts. AdamW divides a gradient g by |g| + eps. With the default eps of 1e-8, the rounding
error of a tiny gradient can reverse its update. With eps = lr, an error moves a weight by twice that error at most."""
VALUE_TOLERANCE = rounding(terms=2_000, size=6.0)
"""Tolerance of a logprob, a mean loss or a value of the tiny model. Logprobs are near -ln(259) = -5.6 and follow
from sums of at most 512 terms in each of 4 layers."""
GRADIENT_TOLERANCE = rounding(terms=2_000, size=ADAMW.max_grad_norm)
"""Tolerance of one entry of the clipped gradient, which is a sum over about 90 tokens of what follows from the same
sums."""


@dataclass
class OnRanks:
    """A trainer in the group."""

    group: RankGroup
    number: int
    folder: Path
    """Folder for the files that this trainer writes."""
    trainer: DeepSpeedTrainer = field(init=False)
    """The trainer in the engine's process, after `load`."""

    def load(self, method: str, *args: Any, **spec: Any) -> None:
        """Loads the trainer by a method of `Lab`. `spec` are fields of DeepSpeedSpec."""
        trainer_spec = DeepSpeedSpec(ranks=self.group.size, **spec)
        backend = DeepSpeedBackend(LocalEngineSpec(trainer=trainer_spec, device="cpu", threads=1))
        backend.group = self.group
        info = self.call(method, *args)
        self.trainer = DeepSpeedTrainer(backend, self.number, self.group.start_number, info)

    def call(self, method: str, *args: Any) -> Any:
        return self.group.call(method, self.number, *args)

    def update(
        self, samples: Sequence[Sample], objective: Objective, optimizer: OptimizerSpec, max_tokens: int
    ) -> UpdateReport:
        return self.trainer.update(samples, objective, optimizer, max_tokens=max_tokens)

    def checkpoint(self) -> dict[str, Path]:
        folder = self.folder / f"checkpoint-{next(NUMBERS)}"
        return {name: folder / name for name in self.call("write_checkpoint", folder)}

    def digest(self) -> str:
        return str(self.call("weights_digest")[0])


def make_group(ranks: int) -> RankGroup:
    return RankGroup(TARGET, lab_options(), ranks=ranks, start_seconds=240, hang_seconds=120)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankGroup]:
    group = make_group(2)
    yield group
    group.close()


@pytest.fixture(scope="module")
def one_rank() -> Iterator[RankGroup]:
    group = make_group(1)
    yield group
    group.close()


@pytest.fixture
def on_ranks(tmp_path: Path) -> Iterator[Callable[..., OnRanks]]:
    loaded: list[OnRanks] = []

    def load(
        group: RankGroup, folder: Path, *, dtype: str = "float32", head: str = "lm", init_seed: int = 0, **spec: Any
    ) -> OnRanks:
        trainer = OnRanks(group, next(NUMBERS), tmp_path)
        trainer.load("load_with", lab_options(dtype, **spec), folder, head, init_seed, **spec)
        loaded.append(trainer)
        return trainer

    yield load
    for trainer in loaded:
        if trainer.group.alive:
            trainer.call("free")


def torch_trainer(folder: Path, compute_dtype: torch.dtype = torch.float32) -> TorchTrainer:
    cpu = torch.device("cpu")
    return TorchTrainer(load_model(folder, dtype=torch.float32, compute_dtype=compute_dtype, device=cpu))


def some_samples(lengths: Sequence[int] = (12, 30, 7, 22, 15), *, prompt: int = 3) -> list[Sample]:
    """Random tokens with old and reference logprobs near those of a fresh model over 259 ids; some groups of two."""
    random = Random(1)
    samples = []
    for index, length in enumerate(lengths):
        trained = length - prompt
        shared = [7, 8, 9][:prompt]
        samples.append(
            Sample(
                [*shared, *(random.randrange(3, 259) for _ in range(trained))],
                [0.0] * prompt + [1.0] * trained,
                group="g" if index < 2 else "",
                completion=index,
                advantages=[random.gauss(0, 1)] * trained,
                old_logprobs=[-5.5 + random.uniform(-0.3, 0.3) for _ in range(trained)],
                reference_logprobs=[-5.5 + random.uniform(-0.3, 0.3) for _ in range(trained)],
            )
        )
    return samples


def planned_rows(samples: Sequence[Sample], max_tokens: int, ranks: int) -> list[Any]:
    """[rank][pass] -> `completion` of each sample of the rank's micro-batch; None for an empty pass."""
    rows_by_rank: list[Any] = [[] for _ in range(ranks)]
    for batches in distribute(samples, max_tokens=max_tokens, ranks=ranks):
        for rows, indices in zip(rows_by_rank, batches, strict=True):
            rows.append(None if indices is None else [samples[index].completion for index in indices])
    return rows_by_rank


def whole(tensors: StoredTensors) -> dict[str, Tensor]:
    return {name: tensors.read(name) for name in tensors.shapes()}


def state_of(files: dict[str, Path]) -> dict[str, Tensor]:
    """All weights and moments of a checkpoint, whole."""
    checkpoint = open_checkpoint(files)
    return whole(checkpoint.weights) | (whole(checkpoint.moments) if checkpoint.moments else {})


def same_bytes(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].numpy().tobytes() == right[name].numpy().tobytes() for name in left
    )


def assert_weights_close(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, updates: int = 3) -> None:
    """Compares weights after at most `updates` updates by ADAMW, whose gradients were summed in different orders."""
    assert weights.keys() == expected.keys()
    worst = max((weights[name] - expected[name]).abs().max().item() for name in expected)
    assert worst <= updates * 2 * GRADIENT_TOLERANCE
