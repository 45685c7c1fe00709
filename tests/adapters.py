"""Adapters and what they are trained on, for the tests of LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.adapters import LoraSpec
from engine.backends.protocol import Objective
from engine.backends.torch_backend import TorchBackend
from engine.backends.torch_samplers import TorchSamplers
from engine.backends.torch_trainer import TorchTrainer
from engine.losses.spec import CrossEntropySpec
from engine.protocol import TokenSequence
from engine.samples import Sample
from engine.spec import LocalEngineSpec
from storage.chain import OptimizerSpec

LORA = LoraSpec(rank=4, alpha=6.0)
SOME = LoraSpec(rank=3, alpha=5.0, target_modules=("q_proj", "mlp.down_proj"), use_rslora=True)
SPECS = [LORA, SOME, LoraSpec(rank=2, target_modules=("up_proj", "o_proj"))]
CE = Objective(CrossEntropySpec())
FAST = OptimizerSpec(lr=1e-2)
WHOLE, SPLIT = 4096, 12
TOKENS = [
    TokenSequence([10, 11, 12, 50, 51, 52, 53], [0, 0, 0, 1, 1, 1, 1], "a"),
    TokenSequence([10, 11, 12, 90, 91], [0, 0, 0, 1, 1], "a"),
    TokenSequence([20, 21, 22, 23, 24, 25], [0, 1, 1, 1, 1, 1], ""),
]


def backend(dtype: str = "float32") -> TorchBackend:
    return TorchBackend(LocalEngineSpec(device="cpu", compute_dtype=dtype, threads=1))


def sampler_of(trainer: TorchTrainer) -> Any:
    """A sampler that was just synced with the trainer, in the precision that the trainer computes in."""
    model = trainer.model
    samplers = TorchSamplers(LocalEngineSpec(), compute_dtype=model.compute_dtype, device=model.device)
    sampler = samplers.sampler(trainer)
    sampler.sync(trainer, "state")
    return sampler


def samples(first: int) -> list[Sample]:
    """Differ by `first`, so that adapters trained on them differ."""
    return [
        Sample([first, first + 1, 7, 8, 9], [0.0, 0.0, 1.0, 1.0, 1.0], "g"),
        Sample([first, first + 1, 30, 31], [0.0, 0.0, 1.0, 1.0], "g"),
        Sample([first + 5, 40, 41, 42], [0.0, 1.0, 1.0, 1.0]),
    ]


def train(trainer: TorchTrainer, first: int, *, updates: int = 1) -> None:
    for index in range(updates):
        trainer.update(samples(first + index), CE, FAST, max_tokens=WHOLE)


def logprobs(trainer: TorchTrainer) -> list[list[float]]:
    return trainer.logprobs(TOKENS, temperature=1.0, max_tokens=WHOLE)


def state_of(adapter: TorchTrainer, folder: Path) -> dict[str, bytes]:
    """Weights and moments, as bytes."""
    return {name: path.read_bytes() for name, path in adapter.write_checkpoint(folder).items()}
