"""Under autocast, a step casts each weight once, whatever its number of micro-batches."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.backends.protocol import Objective
from engine.backends.torch.causal_lm import CausalLM
from engine.backends.torch.loading import load_model
from engine.backends.torch.trainer import TorchTrainer
from engine.losses.likelihood import CrossEntropySpec
from engine.models.samples import Sample
from storage.chain.records import OptimizerSpec

SAMPLES = [Sample([10, 11, 12, 13 + n], [0, 0, 1.0, 1.0]) for n in range(3)]


class CastCounter(TorchDispatchMode):
    """Counts the casts of each float32 weight to bfloat16, by its address."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self.casts = Counter({parameter.data_ptr(): 0 for parameter in model.module.parameters()})

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_cast = function is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") == torch.bfloat16
        if is_cast and args[0].data_ptr() in self.casts:
            self.casts[args[0].data_ptr()] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def trainer(tiny_folder: Path) -> TorchTrainer:
    cpu = torch.device("cpu")
    return TorchTrainer(load_model(tiny_folder, dtype=torch.float32, compute_dtype=torch.bfloat16, device=cpu))


def linear_weights(trainer: TorchTrainer) -> set[int]:
    linears = [module for module in trainer.model.module.modules() if isinstance(module, torch.nn.Linear)]
    return {linear.weight.data_ptr() for linear in linears}


def update(trainer: TorchTrainer) -> int:
    """One update of three micro-batches, one sample each. Returns the number of micro-batches."""
    report = trainer.update(SAMPLES, Objective(CrossEntropySpec()), OptimizerSpec(lr=1e-2), max_tokens=4)
    return report.micro_batches


def test_an_update_casts_each_matrix_once(trainer: TorchTrainer) -> None:
    with CastCounter(trainer.model) as counter:
        assert update(trainer) == len(SAMPLES)
    cast = {address: count for address, count in counter.casts.items() if count}
    assert cast == dict.fromkeys(linear_weights(trainer), 1)


def test_logprobs_cast_each_matrix_once(trainer: TorchTrainer) -> None:
    with CastCounter(trainer.model) as counter:
        trainer.logprobs(SAMPLES, temperature=1.0, max_tokens=4)
    assert max(counter.casts.values()) <= 1


def test_the_next_update_casts_the_new_weights(tiny_folder: Path, trainer: TorchTrainer) -> None:
    """Two updates have the bytes of updates that cast in every forward pass."""
    update(trainer)
    update(trainer)
    plain = TorchTrainer(
        load_model(tiny_folder, dtype=torch.float32, compute_dtype=torch.bfloat16, device=torch.device("cpu"))
    )
    plain.model.cached_casts = nullcontext  # type: ignore[method-assign, assignment]
    update(plain)
    update(plain)
    assert trainer.weights_digest() == plain.weights_digest()
