"""The object that every rank process creates: it holds this rank's part of the group's trainers, by number, and
transfers the files of their checkpoints.

Only rank processes import this module.
"""

from __future__ import annotations

import gc
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.backends.deepspeed.options import RankOptions
from engine.backends.deepspeed.passes import RankPasses
from engine.backends.deepspeed.rank_model import SequenceGroup, gather
from engine.backends.deepspeed.sending import RankSender
from engine.backends.deepspeed.transfers import RankStore
from engine.backends.protocol import Objective
from engine.backends.replicas.broadcast import BroadcastGroup, DeviceInfo, Parts
from engine.backends.replicas.runtime import Manifest
from engine.backends.torch.determinism import repeats_sums, use_deterministic_kernels
from engine.backends.torch.scalar_lm import is_scalar
from engine.backends.torch.updates import Totals
from engine.backends.weight_files.sketches import Sketch
from engine.errors import BadSpec
from engine.models.samples import FloatArray, Sample
from engine.protocol import TokenSequence
from engine.specs.adapters import Head, LoraSpec
from storage.chain.records import OptimizerSpec
from storage.serialization import FileDigest


class RankTrainers:
    """The trainers and the frozen bases of a group, on one rank. Each method is called on all ranks at once
    (engine.cluster.rank_group): `upload`, `download`, `discard` and the methods of broadcasts by
    `RankGroup.call_beside`, those that take rows by `RankGroup.scatter`, the others by `RankGroup.call`. All ranks must
    have access to the paths, except those of `upload` and `discard`."""

    def __init__(self, options: Mapping[str, Any], rank: int, world_size: int) -> None:
        """`options` is a RankOptions as JSON. torch.distributed must be initialised."""
        self._options = RankOptions.model_validate(options)
        # Ray shows each rank only its own GPU.
        self._device = torch.device("cuda", 0) if self._options.device == "cuda" else torch.device("cpu")
        torch.set_num_threads(self._options.threads)
        if self._device.type == "cuda" and self._options.deterministic_kernels:
            use_deterministic_kernels(strict=False)
        _prepare_deepspeed(self._options.device)
        self._trainers: dict[int, Any] = {}
        self._sequences: dict[int, SequenceGroup] = {}
        self._store = RankStore(rank, world_size)
        self._sender = RankSender(rank, self._device)

    def load(self, number: int, folder: Path, head: Head = "lm", init_seed: int = 0) -> dict[str, Any]:
        """Loads a model as trainer `number`; returns the facts that `DeepSpeedTrainer` keeps about it."""
        from engine.backends.deepspeed.trainer import ZeroTrainer  # after _prepare_deepspeed

        trainer = ZeroTrainer.load(
            folder,
            self._options,
            device=self._device,
            sequence=self._sequence_group(),
            head_seed=init_seed if head == "scalar" and not is_scalar(folder) else None,
        )
        self._trainers[number] = trainer
        return self._facts(trainer)

    def load_base(self, number: int, folder: Path, key: str) -> dict[str, Any]:
        """Loads the frozen base of adapters under a number; returns the facts that `DeepSpeedBase` keeps about it."""
        from engine.backends.deepspeed.frozen_base import RankBase  # after _prepare_deepspeed

        sequence = self._sequence_group()
        base = RankBase(folder, key, self._options, device=self._device, sequence=sequence)
        self._trainers[number] = base
        return {"digest": base.digest, "layers": list(base.layers), "nbytes": base.nbytes(), **self._facts(base)}

    def load_adapter(self, number: int, base_number: int, spec: LoraSpec, init_seed: int) -> dict[str, Any]:
        """Makes a new adapter on a base that `load_base` has loaded, as trainer `number`."""
        from engine.backends.deepspeed.adapters import ZeroAdapter

        self._trainers[number] = ZeroAdapter(self.trainer(base_number), spec, init_seed=init_seed)
        return self._facts(self._trainers[number])

    def load_adapter_off(self, number: int, base_number: int) -> dict[str, Any]:
        """Makes the base itself trainer `number`, which is only read."""
        from engine.backends.deepspeed.frozen_base import ZeroBaseTrainer

        self._trainers[number] = ZeroBaseTrainer(self.trainer(base_number))
        return self._facts(self._trainers[number])

    def _facts(self, loaded: Any) -> dict[str, Any]:
        """Facts about a trainer or a base, equal on all ranks. Shapes are those of the whole parameters."""
        return {
            "parameters": sum(torch.Size(shape).numel() for shape in loaded.state.shards.shapes.values()),
            "scalar": loaded.model.scalar,
            "vocab_size": loaded.model.vocab_size,
            "context_length": loaded.model.context_length,
            "buffers_nbytes": sum(buffer.nbytes for buffer in loaded.state.buffers.values()),
            "repeats": all(gather(repeats_sums(self._device, self._options.dtype))),
        }

    def _sequence_group(self) -> SequenceGroup | None:
        """The group of ranks that share each row. None without sequence parallelism."""
        # Process groups are created once per size, by all ranks at the same time.
        size = self._options.trainer.sequence_parallel
        if size > 1 and size not in self._sequences:
            self._sequences[size] = SequenceGroup(size)
        return self._sequences.get(size)

    def free(self, number: int) -> None:
        """Frees the memory of a trainer, or of weights that are held. A number that is not loaded is ignored."""
        self._sender.held.pop(number, None)
        trainer = self._trainers.pop(number, None)
        if trainer is not None:
            trainer.close()
            # Objects in reference cycles are freed by a collection only.
            del trainer
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def trainer(self, number: int) -> Any:
        """This rank's part of the trainer. Raises BadSpec if it was freed."""
        try:
            return self._trainers[number]
        except KeyError:
            raise BadSpec(f"trainer {number} was freed; load the model again") from None

    def set_threads(self, threads: int) -> None:
        torch.set_num_threads(threads)

    def update(
        self,
        number: int,
        passes: RankPasses[Sample],
        objective: Objective,
        optimizer: OptimizerSpec,
        totals: Totals,
    ) -> tuple[dict[str, float], float, bool]:
        return self.trainer(number).update(passes, objective, optimizer, totals)

    def logprobs(self, number: int, passes: RankPasses[TokenSequence], temperature: float) -> list[FloatArray]:
        return self.trainer(number).logprobs(passes, temperature)

    def entropies(self, number: int, passes: RankPasses[TokenSequence], temperature: float) -> list[FloatArray]:
        return self.trainer(number).entropies(passes, temperature)

    def top_logprobs(self, number: int, passes: RankPasses[TokenSequence], count: int) -> list[FloatArray]:
        return self.trainer(number).top_logprobs(passes, count)

    def values(self, number: int, passes: RankPasses[TokenSequence]) -> list[FloatArray]:
        return self.trainer(number).values(passes)

    def reset_optimizer(self, number: int) -> None:
        self.trainer(number).reset_optimizer()

    def weights_digest(self, number: int) -> tuple[str, dict[str, str]]:
        return self.trainer(number).weights_digest()

    def weights_sketch(self, number: int) -> Sketch:
        return self.trainer(number).weights_sketch()

    def add_rounding_noise(self, number: int, relative: float, seed: int) -> None:
        self.trainer(number).add_rounding_noise(relative, seed=seed)

    def write_checkpoint(self, number: int, folder: Path) -> list[str]:
        return self.trainer(number).write_checkpoint(folder)

    def read_checkpoint(self, number: int, files: Mapping[str, Path], optimizer: bool) -> None:
        self.trainer(number).read_checkpoint(files, optimizer=optimizer)

    def upload(self, url: str, files: Mapping[str, tuple[str, Path]]) -> dict[str, FileDigest]:
        return self._store.upload(url, files)

    def download(self, url: str, key: str, names: Sequence[str], folder: Path) -> list[str]:
        return self._store.download(url, key, names, folder)

    def discard(self, folder: Path) -> None:
        """Removes the files of a checkpoint from the disk of this rank's machine."""
        shutil.rmtree(folder, ignore_errors=True)

    def export(self, number: int, folder: Path) -> list[str]:
        return self.trainer(number).export(folder)

    def export_adapter(self, number: int, folder: Path) -> list[str]:
        return self.trainer(number).export_adapter(folder)

    def stage_weights(self, number: int, folder: Path, dtype: torch.dtype) -> list[str]:
        return self.trainer(number).stage_weights(folder, dtype=dtype)

    def hold_weights(self, number: int, held_number: int, dtype: torch.dtype) -> tuple[Manifest, Parts]:
        """Holds the trainer's weights under `held_number`, until `free` is called with it."""
        held = self.trainer(number).hold_parts(dtype=dtype)
        self._sender.held[held_number] = held
        return held.manifest, held.parts

    def sender_device(self) -> DeviceInfo:
        return self._sender.device_info()

    def join_broadcast(self, group: Mapping[str, Any]) -> str:
        return self._sender.join(BroadcastGroup(**group))

    def send_weights(self, held_number: int, group_name: str) -> str:
        return self._sender.send(held_number, group_name)

    def write_config(self, number: int, folder: Path) -> list[str]:
        return self.trainer(number).write_config(folder)

    def close(self) -> None:
        self._sender.close()
        for number in list(self._trainers):
            self.free(number)


def _prepare_deepspeed(device: str) -> None:
    """Imports and initialises DeepSpeed without its messages, and without compilation."""
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # otherwise DeepSpeed searches for an accelerator
    # DeepSpeed calls collectives by older names of torch's; users can do nothing about the warnings.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    import deepspeed
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    # DeepSpeed would compile this extension when it starts; gloo and NCCL do not need it, and a machine may have no
    # compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel("WARNING")
    deepspeed.init_distributed()
