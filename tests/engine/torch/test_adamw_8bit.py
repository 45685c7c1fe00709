"""AdamW with moments of 8 bits: updates by the definition, moments in checkpoints, and where it is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from engine.backends.protocol import Objective
from engine.backends.torch.optimizers import TrainerOptimizer
from engine.backends.torch.trainer import TorchTrainer
from engine.backends.weight_files.pieces import open_checkpoint
from engine.errors import BadSpec
from engine.losses.likelihood import CrossEntropySpec
from engine.models.samples import Sample
from engine.specs.engine import DeepSpeedSpec, LocalEngineSpec
from flows.configs.common import SFTConfig
from storage.chain.records import OptimizerSpec
from tests.engine.losses.conftest import load

pytest.importorskip("bitsandbytes")

CE = Objective(CrossEntropySpec())
SAMPLES = [Sample([1, 2, 3, 4, 5], [0, 1, 1, 1, 1]), Sample([7, 6, 5], [0, 1, 1])]
SPEC = OptimizerSpec(kind="adamw_8bit", lr=1e-3, weight_decay=0.1)


def in_blocks(moment: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The definition: of each block of 256 numbers, the largest absolute one, times the entry of the table that is
    nearest to the number divided by it."""
    blocks = moment.reshape(-1, 256)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    nearest = np.abs(blocks[:, :, None] / largest[:, :, None] - table).argmin(axis=2)
    return (table[nearest] * largest).reshape(moment.shape)


def adamw(
    weight: np.ndarray, gradient: np.ndarray, moments: tuple[np.ndarray, np.ndarray], step: int
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """(the weight after the update, the moments) of AdamW with the settings of SPEC (arXiv:1711.05101)."""
    first, second = 0.9 * moments[0] + 0.1 * gradient, 0.999 * moments[1] + 0.001 * gradient**2
    root = np.sqrt(second / (1 - 0.999**step)) + 1e-8
    return weight * (1 - 1e-3 * 0.1) - 1e-3 * first / (1 - 0.9**step) / root, (first, second)


def test_three_updates_by_the_definition() -> None:
    """A tensor of 4096 numbers: the moments are exact within a step, and rounded to the table after it."""
    from bitsandbytes.functional import create_dynamic_map

    signed, unsigned = (create_dynamic_map(signed=signed).double().numpy() for signed in (True, False))
    assert len(signed) == 256 and signed.max() == 1.0
    layer = nn.Linear(64, 64, bias=False)
    weight = layer.weight.detach().double().numpy().copy()
    optimizer = TrainerOptimizer("adamw_8bit", list(layer.named_parameters()), layer)
    rounded = unrounded = (np.zeros_like(weight), np.zeros_like(weight))
    for step, gradient in enumerate(np.random.default_rng(0).normal(size=(3, 64, 64)), 1):
        layer.weight.grad = torch.tensor(gradient, dtype=torch.float32)
        optimizer.apply(SPEC)
        optimizer.step()
        of_unrounded, _ = adamw(weight, gradient, unrounded, step)
        expected, unrounded = adamw(weight, gradient, rounded, step)
        weight = layer.weight.detach().double().numpy().copy()
        # a number near the middle of two entries may be rounded to either
        assert (np.abs(weight - expected) > 2e-6).mean() < 0.02, step
        assert np.abs(weight - expected).max() < 1e-3
        if step > 1:  # with moments that were not rounded, most updates are others
            assert (np.abs(weight - of_unrounded) > 2e-6).mean() > 0.5, step
        rounded = in_blocks(unrounded[0], signed), in_blocks(unrounded[1], unsigned)


def test_a_small_tensor_has_the_updates_of_adamw() -> None:
    layers = [nn.Linear(8, 8) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    kinds = ("adamw_8bit", "adamw")
    optimizers = [TrainerOptimizer(k, list(m.named_parameters()), m) for k, m in zip(kinds, layers, strict=True)]  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for name, parameter in layers[0].named_parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            for layer in layers:
                layer.get_parameter(name).grad = gradient.clone()
        for kind, optimizer in zip(kinds, optimizers, strict=True):
            optimizer.apply(SPEC.model_copy(update={"kind": kind}))
            optimizer.step()
    for left, right in zip(*(layer.parameters() for layer in layers), strict=True):
        assert left.detach().numpy() == pytest.approx(right.detach().numpy(), abs=1e-6)


def test_a_trainer_that_reads_its_moments_goes_on_with_the_same_bytes(tiny_folder: Path, tmp_path: Path) -> None:
    def step(trainer: TorchTrainer) -> str:
        trainer.update(SAMPLES, CE, SPEC, max_tokens=64)
        return trainer.weights_digest()[0]

    def new() -> TorchTrainer:
        return TorchTrainer(load(tiny_folder, torch.float32))

    whole = new()
    digests = [step(whole) for _ in range(2)]
    files = whole.write_checkpoint(tmp_path / "checkpoint")
    digests.append(step(whole))
    resumed = new()
    resumed.read_checkpoint(files, optimizer=True)
    assert step(resumed) == digests[2] and len(set(digests)) == 3
    fresh = new()
    fresh.read_checkpoint(files, optimizer=False)
    assert step(fresh) != digests[2]
    # 2 bytes per weight and 8 per block of 256, in float32 only for small tensors
    moments = open_checkpoint(files).moments
    assert moments is not None
    for name, parameter in whole.trained_parameters():
        numbers = parameter.numel()
        expected = 2 * numbers + 8 * math.ceil(numbers / 256) if numbers >= 4096 else 8 * numbers
        parts = [part for part in ("state1", "state2", "absmax1", "absmax2") if f"{part}.{name}" in moments.shapes()]
        assert sum(moments.read(f"{part}.{name}").nbytes for part in parts) == expected, name
        assert moments.read(f"step.{name}") == 2


def test_the_moments_of_another_kind_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    trainer = TorchTrainer(load(tiny_folder, torch.float32))
    trainer.update(SAMPLES, CE, SPEC, max_tokens=64)
    files = trainer.write_checkpoint(tmp_path / "checkpoint")
    other = TorchTrainer(load(tiny_folder, torch.float32))
    other.read_checkpoint(files, optimizer=True)
    with pytest.raises(BadSpec, match="is one of adamw, and the moments of its policy are those of adamw_8bit"):
        other.update(SAMPLES, CE, OptimizerSpec(lr=1e-3), max_tokens=64)


def test_other_trainers_are_refused_with_the_config() -> None:
    body: dict[str, Any] = {
        "model": {"key": "m"}, "data": {"train": {"kind": "file", "path": "rows.jsonl"}},
        "optimizer": {"kind": "adamw_8bit"},
    }  # fmt: skip
    assert SFTConfig.model_validate(body).optimizer.kind == "adamw_8bit"
    engine = {"kind": "local", "trainer": {"kind": "deepspeed"}}
    with pytest.raises(ValidationError, match="which only the torch trainer has, and engine.trainer.kind='deepspeed'"):
        SFTConfig.model_validate(body | {"engine": engine})
    with pytest.raises(BadSpec, match="set engine.trainer.kind='torch', or optimizer.kind='adamw'"):
        LocalEngineSpec(trainer=DeepSpeedSpec()).check_optimizer("adamw_8bit")
