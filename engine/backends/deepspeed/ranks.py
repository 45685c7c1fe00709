"""What every rank process builds: the trainers of this group, by number. Only rank processes import this module."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.backends.deepspeed.options import ZeroOptions
from engine.backends.deepspeed.ulysses import SequenceGroup
from engine.backends.protocol import Objective, UpdateReport
from engine.backends.torch.scalar_lm import is_scalar
from engine.errors import BadSpec
from engine.models.samples import Sample
from engine.protocol import TokenSequence
from engine.specs.adapters import Head
from storage.chain.records import OptimizerSpec


class RankTrainers:
    """Methods are called on all ranks at once (engine.cluster.rank_group). Paths are seen by every rank."""

    def __init__(self, options: Mapping[str, Any], rank: int, world_size: int) -> None:
        """`options` is a dumped ZeroOptions. torch.distributed is up already."""
        self._options = ZeroOptions.model_validate(options)
        # Ray shows each rank its own GPU only
        self._device = torch.device("cuda", 0) if self._options.device == "cuda" else torch.device("cpu")
        torch.set_num_threads(self._options.threads)
        _prepare_deepspeed(self._options.device)
        self._trainers: dict[int, Any] = {}
        self._sequences: dict[int, SequenceGroup] = {}

    def load(self, number: int, folder: Path, head: Head = "lm", init_seed: int = 0) -> dict[str, Any]:
        """Loads a model as trainer `number`; what the engine wants to know of it."""
        from engine.backends.deepspeed.trainer import ZeroTrainer

        size = self._options.trainer.sequence_parallel
        if size > 1 and size not in self._sequences:
            self._sequences[size] = SequenceGroup(size)
        drawn = init_seed if head == "scalar" and not is_scalar(folder) else None
        sequence = self._sequences.get(size)
        trainer = ZeroTrainer(folder, self._options, device=self._device, sequence=sequence, head_seed=drawn)
        self._trainers[number] = trainer
        shapes = trainer.state.shards.shapes
        return {
            "parameters": sum(torch.Size(shape).numel() for shape in shapes.values()),
            "scalar": trainer.model.scalar,
            "buffers_nbytes": sum(buffer.nbytes for buffer in trainer.state.buffers.values()),
        }

    def free(self, number: int) -> None:
        trainer = self._trainers.pop(number, None)
        if trainer is not None:
            trainer.close()
            del trainer
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _of(self, number: int) -> Any:
        try:
            return self._trainers[number]
        except KeyError:
            raise BadSpec(f"trainer {number} was freed; load the model again") from None

    def set_threads(self, threads: int) -> None:
        torch.set_num_threads(threads)

    def update(
        self,
        number: int,
        samples: Sequence[Sample],
        objective: Objective,
        optimizer: OptimizerSpec,
        max_tokens: int,
    ) -> UpdateReport:
        return self._of(number).update(samples, objective, optimizer, max_tokens=max_tokens)

    def logprobs(
        self, number: int, sequences: Sequence[TokenSequence], temperature: float, max_tokens: int
    ) -> list[list[float]]:
        return self._of(number).logprobs(sequences, temperature=temperature, max_tokens=max_tokens)

    def values(self, number: int, sequences: Sequence[TokenSequence], max_tokens: int) -> list[list[float]]:
        return self._of(number).values(sequences, max_tokens=max_tokens)

    def reset_optimizer(self, number: int) -> None:
        self._of(number).reset_optimizer()

    def weights_digest(self, number: int) -> tuple[str, dict[str, str]]:
        return self._of(number).weights_digest()

    def write_checkpoint(self, number: int, folder: Path) -> list[str]:
        return self._of(number).write_checkpoint(folder)

    def read_checkpoint(self, number: int, files: Mapping[str, Path], optimizer: bool) -> None:
        self._of(number).read_checkpoint(files, optimizer=optimizer)

    def export(self, number: int, folder: Path) -> list[str]:
        return self._of(number).export(folder)

    def stage_weights(self, number: int, folder: Path, dtype: torch.dtype) -> list[str]:
        return self._of(number).stage_weights(folder, dtype=dtype)

    def write_config(self, number: int, folder: Path) -> list[str]:
        return self._of(number).write_config(folder)

    def holds(self, number: int) -> dict[str, int]:
        return self._of(number).holds()

    def close(self) -> None:
        for number in list(self._trainers):
            self.free(number)


def _prepare_deepspeed(device: str) -> None:
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # else it looks for one, and finds whatever is installed
    # torch's own names of collectives, which DeepSpeed calls by the older ones: nothing that a person could act on
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    import deepspeed
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    # it would compile an extension when it starts; gloo and NCCL need none, and a rank may have no compiler
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel("WARNING")
    deepspeed.init_distributed()
