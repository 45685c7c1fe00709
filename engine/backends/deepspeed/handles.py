"""The models of a group of ranks, as the engine's process sees them: each call goes to the ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine.backends.deepspeed import OUT_OF_MEMORY_MARK
from engine.backends.deepspeed.memory import adapter_bytes, state_bytes
from engine.backends.protocol import Objective, ReadOnlyPolicy, UpdateReport
from engine.backends.torch.batch_checks import check_gives
from engine.errors import WorkerDied
from engine.models.samples import Sample
from engine.protocol import TokenSequence
from engine.specs.adapters import LoraSpec
from storage.chain.records import OptimizerSpec

if TYPE_CHECKING:
    from engine.backends.deepspeed.backend import DeepSpeedBackend


class DeepSpeedTrainer:
    """Implements engine.backends.protocol.Trainer by calls to the ranks, which know the trainer by its number. The
    trainer is lost when its group of ranks ends."""

    base: DeepSpeedBase | None = None
    adapter: LoraSpec | None = None

    def __init__(self, backend: DeepSpeedBackend, number: int, start_number: int, info: dict[str, Any]) -> None:
        self._backend, self._number, self._start_number, self._info = backend, number, start_number, info
        weakref.finalize(self, backend.drop, start_number, number)

    def _call(self, method: str, *args: Any) -> Any:
        self._backend.free_dropped()
        return self._backend.group.call_unless_restarted(self._start_number, method, self._number, *args)

    def _call_within_memory(self, method: str, *args: Any, max_tokens: int) -> Any:
        """Calls with the tokens per forward pass that fit. If a rank runs out of memory, the engine's next try uses
        fewer."""
        try:
            return self._call(method, *args, self._backend.max_tokens_that_fit(max_tokens))
        except WorkerDied as error:
            # The error ended the group. The backend remembers the smaller number for the next group.
            if OUT_OF_MEMORY_MARK in str(error):
                self._backend.reduce_max_tokens(max_tokens, error)
            raise

    @property
    def alive(self) -> bool:
        group = self._backend.group
        return group.alive and group.start_number == self._start_number

    @property
    def scalar(self) -> bool:
        return self._info["scalar"]

    def update(
        self,
        samples: Sequence[Sample],
        objective: Objective,
        optimizer: OptimizerSpec,
        *,
        max_tokens: int,
        on_micro_batch: Callable[[], None] = lambda: None,
    ) -> UpdateReport:
        with self._backend.group.progress_callback(on_micro_batch):
            return self._call_within_memory(
                "update", list(samples), objective, optimizer, max_tokens=max_tokens
            )  # fmt: skip

    def logprobs(self, sequences: Sequence[TokenSequence], *, temperature: float, max_tokens: int) -> list[list[float]]:
        check_gives("logprobs", scalar=self.scalar, name="the policy")
        return self._call_within_memory("logprobs", list(sequences), temperature, max_tokens=max_tokens)

    def entropies(
        self, sequences: Sequence[TokenSequence], *, temperature: float, max_tokens: int
    ) -> list[list[float]]:
        check_gives("logprobs", scalar=self.scalar, name="the policy")
        return self._call_within_memory("entropies", list(sequences), temperature, max_tokens=max_tokens)

    def values(self, sequences: Sequence[TokenSequence], *, max_tokens: int) -> list[list[float]]:
        check_gives("values", scalar=self.scalar, name="the policy")
        return self._call_within_memory("values", list(sequences), max_tokens=max_tokens)

    def reset_optimizer(self) -> None:
        self._call("reset_optimizer")

    def weights_digest(self) -> tuple[str, dict[str, str]]:
        return self._call("weights_digest")

    def write_checkpoint(self, folder: Path) -> dict[str, Path]:
        """All ranks write into `folder`, so all nodes must have access to it."""
        return {name: folder / name for name in self._call("write_checkpoint", folder)}

    def read_checkpoint(self, files: dict[str, Path], *, optimizer: bool) -> None:
        self._call("read_checkpoint", files, optimizer)

    def export(self, folder: Path) -> dict[str, Path]:
        return self.export_merged(folder)

    def export_merged(self, folder: Path) -> dict[str, Path]:
        return {name: folder / name for name in self._call("export", folder)}

    def write_config(self, folder: Path) -> None:
        self._call("write_config", folder)

    def stage_weights(self, folder: Path, *, dtype: torch.dtype) -> list[Path]:
        """At least one file per rank, so that the ranks write at the same time."""
        names = self._call("stage_weights", folder, dtype)
        return [folder / name for name in names if name.endswith(".safetensors")]

    def nbytes(self, *, training: bool = True) -> int:
        """Bytes on the devices of all ranks, as `TrainerBackend.memory_bytes` counts them."""
        backend, info = self._backend, self._info
        states = state_bytes(
            backend.trainer_spec,
            parameters=info["parameters"],
            buffer_bytes=info["buffers_nbytes"],
            ranks=backend.ranks,
            compute_bytes=backend.compute_dtype.itemsize,
            master_bytes=backend.master_dtype.itemsize,
        )
        return states.device.nbytes(training=training)

    @property
    def weights_nbytes(self) -> int:
        info = self._info
        return info["parameters"] * self._backend.master_dtype.itemsize + info["buffers_nbytes"]


class DeepSpeedBase:
    """Implements engine.backends.protocol.FrozenBase for a base on the ranks. It is lost when its group of ranks ends.
    """

    def __init__(self, backend: DeepSpeedBackend, number: int, start_number: int, info: dict[str, Any]) -> None:
        self.number, self.start_number, self._info = number, start_number, info
        self.digest: str = info["digest"]
        self.layers: Sequence[str] = info["layers"]
        self._group, self._master_bytes = backend.group, backend.master_dtype.itemsize
        weakref.finalize(self, backend.drop, start_number, number)

    @property
    def alive(self) -> bool:
        return self._group.alive and self._group.start_number == self.start_number

    def nbytes(self) -> int:
        """Bytes on the devices of all ranks."""
        return self._info["nbytes"]

    @property
    def weights_nbytes(self) -> int:
        """Bytes of all weights in master precision."""
        return self._info["parameters"] * self._master_bytes + self._info["buffers_nbytes"]


class DeepSpeedAdapter(DeepSpeedTrainer):
    """A LoRA adapter on a base on the ranks."""

    def __init__(
        self, backend: DeepSpeedBackend, number: int, info: dict[str, Any], base: DeepSpeedBase, spec: LoraSpec
    ) -> None:
        super().__init__(backend, number, base.start_number, info)
        self.base: DeepSpeedBase = base  # the ranks free a base that no adapter refers to
        self.adapter = spec

    def export(self, folder: Path) -> dict[str, Path]:
        return {name: folder / name for name in self._call("export_adapter", folder)}

    def nbytes(self, *, training: bool = True) -> int:
        backend = self._backend
        states = adapter_bytes(
            backend.trainer_spec,
            parameters=self._info["parameters"],
            ranks=backend.ranks,
            master_bytes=backend.master_dtype.itemsize,
        )
        return states.device.nbytes(training=training)

    @property
    def weights_nbytes(self) -> int:
        return self.base.weights_nbytes + super().weights_nbytes


class DeepSpeedBasePolicy(ReadOnlyPolicy, DeepSpeedTrainer):
    """The base of adapters itself, which can only be read: logprobs, digest and export."""

    def __init__(self, backend: DeepSpeedBackend, number: int, info: dict[str, Any], base: DeepSpeedBase) -> None:
        super().__init__(backend, number, base.start_number, info)
        self.base: DeepSpeedBase = base

    def nbytes(self, *, training: bool = True) -> int:
        """0: the weights are those of the base."""
        return 0
