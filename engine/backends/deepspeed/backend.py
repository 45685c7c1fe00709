"""The trainer `deepspeed` in the engine's process: it starts a group of ranks, and loads models on them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import torch

from engine.backends.deepspeed.handles import DeepSpeedAdapter, DeepSpeedBase, DeepSpeedBasePolicy, DeepSpeedTrainer
from engine.backends.deepspeed.meta_model import open_meta_model, streamed_weights
from engine.backends.deepspeed.options import RankOptions
from engine.backends.torch import backend
from engine.backends.torch.backend import TorchBackend, available_cores
from engine.backends.torch.loading import check_has_language_head
from engine.backends.torch.probes import probe_model
from engine.cluster.inventory import gpu_count
from engine.cluster.placement import SHARED_GPU, Placement
from engine.cluster.rank_group import RankGroup
from engine.errors import BadSpec, OutOfMemory, WorkerDied
from engine.protocol import ActorCount
from engine.specs.adapters import Head, LoraSpec
from engine.specs.engine import DeepSpeedSpec, LocalEngineSpec, VllmSpec, layout_name
from storage.chain.records import Numerics

RANK_CLASS = "engine.backends.deepspeed.ranks:RankTrainers"


class DeepSpeedBackend:
    """Implements engine.backends.protocol.TrainerBackend. The ranks start when the first model is loaded."""

    def __init__(self, spec: LocalEngineSpec) -> None:
        """Raises BadSpec for settings that this trainer does not support."""
        if not isinstance(spec.trainer, DeepSpeedSpec):
            raise BadSpec(
                f"engine.trainer.kind is {spec.trainer.kind!r}, and the deepspeed backend was requested; set "
                "engine.trainer.kind='deepspeed'"
            )
        # The device and the precision are chosen as the torch backend chooses them.
        self.spec, self.trainer_spec = spec, spec.trainer
        self._torch_backend = TorchBackend(spec)
        self.device, self.compute_dtype = self._torch_backend.device, self._torch_backend.compute_dtype
        self.master_dtype = self._torch_backend.master_dtype
        if self.compute_dtype == torch.float64 and spec.trainer.zero_stage != 0:
            raise BadSpec(
                f"compute_dtype='float64' was given, and DeepSpeed keeps float32 masters in zero_stage="
                f"{spec.trainer.zero_stage}; set zero_stage=0, or compute_dtype='float32'"
            )
        # The group of ranks. Its processes start when the first model is loaded.
        self.ranks = spec.ranks(gpu_count(spec.cluster) if self.device.type == "cuda" else 0)
        if self.ranks % spec.trainer.sequence_parallel:
            raise BadSpec(
                f"trainer.sequence_parallel={spec.trainer.sequence_parallel} does not divide {self.ranks} ranks; give "
                "a divisor of the number of ranks"
            )
        self.threads = _threads_per_rank(spec, self.ranks)
        self.group = self._new_group(spec.trainer)
        self._numbers = itertools.count(1)
        # The garbage collector drops trainers in any thread. The thread that calls the ranks frees them there.
        self._dropped: list[tuple[int, int]] = []
        """(start number of the group, trainer number) of trainers that the ranks may free."""
        self._reduced_max_tokens: dict[int, int] = {}
        """Requested packed tokens per forward pass -> the smaller number that is used after an out-of-memory error."""

    def _new_group(self, trainer: DeepSpeedSpec) -> RankGroup:
        """The group of ranks, not started."""
        options = RankOptions(
            trainer=trainer,
            compute_dtype=str(self.compute_dtype).removeprefix("torch."),  # type: ignore[arg-type]
            device=self.device.type,  # type: ignore[arg-type]
            threads=self.threads,
        )
        shares_gpus = isinstance(self.spec.sampler, VllmSpec) and self.spec.sampler.placement == "colocated"
        return RankGroup(
            RANK_CLASS,
            options.model_dump(mode="json"),
            ranks=self.ranks,
            start_seconds=trainer.start_seconds,
            hang_seconds=trainer.hang_seconds,
            cluster=self.spec.cluster,
            gpus=1.0 if self.device.type == "cuda" else 0.0,
            gpu_share=SHARED_GPU if shares_gpus else 1.0,
            environment={"OMP_NUM_THREADS": str(self.threads)},
        )

    # -- properties of the backend ----------------------------------------------------------------------------

    @property
    def devices(self) -> int:
        return self.ranks if self.device.type == "cuda" else 1

    @property
    def actors(self) -> ActorCount:
        return self.group.actor_count()

    def reserve(self) -> Placement:
        """The placement of the ranks, for vLLM replicas that share their GPUs. Raises as `RankGroup.reserve`."""
        return self.group.reserve()

    def numerics(self) -> Numerics:
        local = self._torch_backend.numerics()
        return local.model_copy(
            update={
                "backend": "deepspeed",
                "layout": layout_name(self.trainer_spec, self.ranks),
                "threads": self.threads,
                "versions": {**local.versions, "deepspeed": version("deepspeed")},
            }
        )

    def prepare_thread(self) -> None:
        self._torch_backend.prepare_thread()

    @contextmanager
    def threads_of(self, numerics: Numerics) -> Iterator[None]:
        """Within this context, every rank computes with the thread count of a committed step."""
        # The common case costs no call to the ranks.
        if numerics.threads == self.threads:
            yield
            return
        self.group.call("set_threads", numerics.threads)
        try:
            yield
        finally:
            if self.group.alive:
                self.group.call("set_threads", self.threads)

    def memory_bytes(self) -> int:
        """Bytes that weights, moments and gradients may take on the devices of all ranks. On the CPU, on all
        machines."""
        if self.spec.memory_gib != "auto":
            return int(self.spec.memory_gib * (1 << 30))
        return self.devices * backend.memory_bytes(self.device)

    def operations_per_second(self) -> float:
        """Of all ranks together, if all their machines are like this one."""
        return self.devices * self._torch_backend.operations_per_second()

    # -- trainers ---------------------------------------------------------------------------------------------

    def load(self, folder: Path, *, head: Head = "lm", init_seed: int = 0) -> DeepSpeedTrainer:
        """Loads a model. Every rank reads its part of the folder, so all nodes must have access to it."""
        if head == "lm":
            check_has_language_head(folder)
        start_number = self.group.start()
        self.free_dropped()
        number = next(self._numbers)
        info = self.group.call_unless_restarted(start_number, "load", number, folder, head, init_seed)
        return DeepSpeedTrainer(self, number, start_number, info)

    def try_load(self, folder: Path) -> None:
        """Raises BadModelFolder for a folder that `load` would refuse.

        It runs in this process, on the CPU, with the weights of one module at a time. The ranks keep their models."""
        dtype = self.master_dtype
        meta_model = open_meta_model(folder, dtype=dtype, parameter_dtype=dtype, device=torch.device("cpu"))
        if not meta_model.probed:
            with streamed_weights(meta_model):
                probe_model(meta_model.model, folder)

    def load_base(self, folder: Path, *, key: str = "", load_in_4bit: bool = False) -> DeepSpeedBase:
        """Loads the frozen base of adapters. Every rank reads the folder, so all nodes must have access to it. Raises
        BadSpec for `load_in_4bit`."""
        self.spec.check_trainable(LoraSpec(load_in_4bit=load_in_4bit))
        start_number = self.group.start()
        self.free_dropped()
        number = next(self._numbers)
        info = self.group.call_unless_restarted(start_number, "load_base", number, folder, key)
        return DeepSpeedBase(self, number, start_number, info)

    def adapter(self, base: DeepSpeedBase, spec: LoraSpec, *, init_seed: int) -> DeepSpeedAdapter:
        """A new adapter on `base`, which it does not change."""
        self.free_dropped()
        number = next(self._numbers)
        info = self.group.call_unless_restarted(base.start_number, "load_adapter", number, base.number, spec, init_seed)
        return DeepSpeedAdapter(self, number, info, base, spec)

    def adapter_off(self, base: DeepSpeedBase) -> DeepSpeedBasePolicy:
        """The base itself, as a policy that is only read."""
        self.free_dropped()
        number = next(self._numbers)
        info = self.group.call_unless_restarted(base.start_number, "load_adapter_off", number, base.number)
        return DeepSpeedBasePolicy(self, number, info, base)

    def drop(self, start_number: int, number: int) -> None:
        """Marks a trainer for release: the ranks free its model before the next call. May be called in any thread."""
        self._dropped.append((start_number, number))

    def free_dropped(self) -> None:
        """Has the ranks free the models that were dropped."""
        while self._dropped:
            start_number, number = self._dropped.pop()
            if self.group.alive and start_number == self.group.start_number:
                self.group.call_unless_restarted(start_number, "free", number)

    def max_tokens_that_fit(self, max_tokens: int) -> int:
        """Packed tokens per forward pass to use for a request of `max_tokens`, given the errors so far."""
        return self._reduced_max_tokens.get(max_tokens, max_tokens)

    def reduce_max_tokens(self, max_tokens: int, error: WorkerDied) -> None:
        """Halves the tokens per forward pass after a group ended because a pass did not fit. Raises OutOfMemory if they
        were halved before."""
        if max_tokens in self._reduced_max_tokens:
            raise OutOfMemory(
                f"a pass of at most {self._reduced_max_tokens[max_tokens]} packed tokens does not fit a rank's "
                f"{self.device.type} memory; lower max_tokens_per_forward (max_batch_size, now {max_tokens}), set "
                "trainer.activation_checkpointing='recompute', or split more (zero_stage=3, offload, more ranks)"
            ) from error
        self._reduced_max_tokens[max_tokens] = max(1, max_tokens // 2)

    def close(self) -> None:
        self.group.close()


def _threads_per_rank(spec: LocalEngineSpec, ranks: int) -> int:
    if spec.threads != "auto":
        return spec.threads
    return max(1, available_cores() // ranks)
