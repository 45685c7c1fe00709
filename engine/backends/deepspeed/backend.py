"""The trainer `deepspeed` in the engine's process: it starts a group of ranks, and loads models on them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

from engine.backends.deepspeed import OUT_OF_MEMORY_MARK
from engine.backends.deepspeed.memory import adapter_bytes, state_bytes
from engine.backends.deepspeed.meta_model import open_meta_model, streamed_weights
from engine.backends.deepspeed.options import RankOptions
from engine.backends.deepspeed.passes import Passes, distribute, in_order_of_rows, rows_by_group
from engine.backends.deepspeed.sending import RankSenders
from engine.backends.deepspeed.transfers import RankTransfers
from engine.backends.protocol import Objective, ReadOnlyPolicy, UpdateReport
from engine.backends.replicas.runtime import HeldWeights
from engine.backends.torch.backend import TorchBackend, available_cores, memory_bytes
from engine.backends.torch.loading import check_has_language_head
from engine.backends.torch.packing import Packable, longest_unit
from engine.backends.torch.probes import probe_model
from engine.backends.torch.updates import (
    check_gives,
    check_loss_fits_head,
    check_sequences,
    count_totals,
    has_gradient,
    retry_on_out_of_memory,
    update_metrics,
    validate_batch,
)
from engine.backends.weight_files.sketches import Sketch
from engine.cluster.connection import gpu_count
from engine.cluster.placement import SHARED_GPU, Placement
from engine.cluster.rank_group import RankGroup
from engine.errors import BadSpec, NonFiniteGradient, OutOfMemory, WorkerDied
from engine.models.samples import FloatArray, Sample
from engine.protocol import ActorCount, TokenSequence
from engine.specs.adapters import Head, LoraSpec
from engine.specs.engine import DeepSpeedSpec, LocalEngineSpec, VllmSpec, layout_name
from storage.chain.records import Numerics, OptimizerSpec

RANK_CLASS = "engine.backends.deepspeed.ranks:RankTrainers"
T = TypeVar("T")


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
        self.row_groups = self.ranks // spec.trainer.sequence_parallel
        """Number of groups of ranks that take different rows."""
        self.threads = _threads_per_rank(spec, self.ranks)
        self.group = self._new_group(spec.trainer)
        self.transfers = RankTransfers(self.group)
        self._senders: RankSenders | None = None
        self._numbers = itertools.count(1)
        # The garbage collector drops trainers in any thread. The thread that calls the ranks frees them there.
        self._dropped: list[tuple[int, int]] = []
        """(start number of the group, number) of trainers and held weights that the ranks may free."""
        self.ranks_repeat = True
        """Whether the devices of all ranks repeat their sums, as they said when they loaded a model."""
        self._reduced_max_tokens: dict[int, int] = {}
        """Requested packed tokens per forward pass -> the smaller number that is used after an out-of-memory error."""

    def _new_group(self, trainer: DeepSpeedSpec) -> RankGroup:
        """The group of ranks, not started."""
        options = RankOptions(
            trainer=trainer,
            compute_dtype=str(self.compute_dtype).removeprefix("torch."),  # type: ignore[arg-type]
            device=self.device.type,  # type: ignore[arg-type]
            threads=self.threads,
            deterministic_kernels=self.spec.deterministic_kernels,
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
                "repeats": self.ranks_repeat,
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
        return self.devices * memory_bytes(self.device)

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
        number = self.next_number()
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
        number = self.next_number()
        info = self.group.call_unless_restarted(start_number, "load_base", number, folder, key)
        return DeepSpeedBase(self, number, start_number, info)

    def adapter(self, base: DeepSpeedBase, spec: LoraSpec, *, init_seed: int) -> DeepSpeedAdapter:
        """A new adapter on `base`, which it does not change."""
        self.free_dropped()
        number = self.next_number()
        info = self.group.call_unless_restarted(base.start_number, "load_adapter", number, base.number, spec, init_seed)
        return DeepSpeedAdapter(self, number, info, base, spec)

    def adapter_off(self, base: DeepSpeedBase) -> DeepSpeedBasePolicy:
        """The base itself, as a policy that is only read."""
        self.free_dropped()
        number = self.next_number()
        info = self.group.call_unless_restarted(base.start_number, "load_adapter_off", number, base.number)
        return DeepSpeedBasePolicy(self, number, info, base)

    def next_number(self) -> int:
        """A new number, under which the ranks keep a trainer, or the weights of one that they hold for a sync."""
        return next(self._numbers)

    def senders(self, start_number: int) -> RankSenders:
        """The ranks of a start as senders of weights, which stay in one broadcast group over many syncs."""
        if self._senders is None or self._senders.start_number != start_number:
            self._senders = RankSenders(self.group, start_number)
        return self._senders

    def drop(self, start_number: int, number: int) -> None:
        """Marks what the ranks keep under a number for release: they free it before the next call. May be called in any
        thread."""
        self._dropped.append((start_number, number))

    def free_dropped(self) -> None:
        """Has the ranks free what was dropped."""
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


class DeepSpeedTrainer:
    """Implements engine.backends.protocol.Trainer by calls to the ranks, which know the trainer by its number. The
    trainer is lost when its group of ranks ends."""

    base: DeepSpeedBase | None = None
    adapter: LoraSpec | None = None

    def __init__(self, backend: DeepSpeedBackend, number: int, start_number: int, info: dict[str, Any]) -> None:
        self._backend, self._number, self._start_number, self._info = backend, number, start_number, info
        backend.ranks_repeat = info["repeats"]
        weakref.finalize(self, backend.drop, start_number, number)

    def _call(self, method: str, *args: Any) -> Any:
        self._backend.free_dropped()
        return self._backend.group.call_unless_restarted(self._start_number, method, self._number, *args)

    def _call_with_rows(self, method: str, rows: Sequence[Packable], passes: Passes, *args: Any) -> list[Any]:
        """Calls each rank with the rows of its passes. Returns the result of each group of ranks that share rows."""
        backend = self._backend
        backend.free_dropped()
        arguments = [(self._number, group_rows, *args) for group_rows in rows_by_group(rows, passes)]
        return backend.group.scatter(self._start_number, method, arguments)

    def _within_memory(
        self, run: Callable[[int], T], rows: Sequence[Packable], max_tokens: int, *, whole_groups: bool = False
    ) -> T:
        """Returns `run(tokens per forward pass)`, with as many tokens as fit the ranks' memory."""
        backend = self._backend
        fitting = backend.max_tokens_that_fit(max_tokens)
        if fitting < max_tokens:  # a pass has room for the longest row in any case
            fitting = min(max_tokens, max(fitting, longest_unit(rows, whole_groups=whole_groups)))
        try:
            return retry_on_out_of_memory(
                run,
                rows,
                fitting,
                device=backend.device,
                drop_gradients=lambda: None,  # the ranks have dropped theirs
                whole_groups=whole_groups,
            )
        except WorkerDied as error:
            # The error ended the group. The backend remembers the smaller number for the next group.
            if OUT_OF_MEMORY_MARK in str(error):
                backend.reduce_max_tokens(max_tokens, error)
            raise

    def _check_sequences(self, sequences: Sequence[Packable]) -> None:
        info = self._info
        check_sequences(sequences, vocab_size=info["vocab_size"], context_length=info["context_length"])

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
        # Check everything before anything changes.
        self._backend.spec.check_optimizer(optimizer.kind)
        check_loss_fits_head(objective.loss, scalar=self.scalar, name="the policy")
        self._check_sequences(samples)
        totals = count_totals(samples)
        with_gradient = [sample for sample in samples if has_gradient(sample, objective)]
        validate_batch(with_gradient, objective)

        # Plan the passes, and take the step on all ranks.
        whole_groups, groups = objective.loss.pairwise, self._backend.row_groups

        def step(max_tokens: int) -> UpdateReport:
            passes = distribute(with_gradient, max_tokens=max_tokens, ranks=groups, whole_groups=whole_groups)
            results = self._call_with_rows("update", with_gradient, passes, objective, optimizer, totals)
            sums, norm, moved = results[0]
            if not moved and not objective.skip_nan_gradients:
                raise NonFiniteGradient(f"the gradient norm of {len(samples)} samples is {norm}")
            return UpdateReport(
                metrics=update_metrics(sums, forward_samples=with_gradient, totals=totals) | {"grad_norm": norm},
                skipped=not moved,
                micro_batches=sum(groups - row.count(None) for row in passes),
                max_tokens=max_tokens,
            )

        with self._backend.group.progress_callback(on_micro_batch):
            return self._within_memory(step, with_gradient, max_tokens, whole_groups=whole_groups)

    def logprobs(self, sequences: Sequence[TokenSequence], *, temperature: float, max_tokens: int) -> list[FloatArray]:
        check_gives("logprobs", scalar=self.scalar, name="the policy")
        return self._read("logprobs", sequences, temperature, max_tokens=max_tokens)

    def entropies(self, sequences: Sequence[TokenSequence], *, temperature: float, max_tokens: int) -> list[FloatArray]:
        check_gives("logprobs", scalar=self.scalar, name="the policy")
        return self._read("entropies", sequences, temperature, max_tokens=max_tokens)

    def top_logprobs(self, sequences: Sequence[TokenSequence], *, count: int, max_tokens: int) -> list[FloatArray]:
        check_gives("logprobs", scalar=self.scalar, name="the policy")
        return self._read("top_logprobs", sequences, count, max_tokens=max_tokens)

    def values(self, sequences: Sequence[TokenSequence], *, max_tokens: int) -> list[FloatArray]:
        check_gives("values", scalar=self.scalar, name="the policy")
        return self._read("values", sequences, max_tokens=max_tokens)

    def _read(self, method: str, sequences: Sequence[TokenSequence], *args: Any, max_tokens: int) -> list[FloatArray]:
        """What a method of the ranks returns for each sequence, in the order of the sequences."""
        self._check_sequences(sequences)

        def read(max_tokens: int) -> list[FloatArray]:
            passes = distribute(sequences, max_tokens=max_tokens, ranks=self._backend.row_groups)
            return in_order_of_rows(self._call_with_rows(method, sequences, passes, *args), passes)

        return self._within_memory(read, sequences, max_tokens)

    def reset_optimizer(self) -> None:
        self._call("reset_optimizer")

    def weights_digest(self) -> tuple[str, dict[str, str]]:
        return self._call("weights_digest")

    def weights_sketch(self) -> Sketch:
        return self._call("weights_sketch")

    def add_rounding_noise(self, relative: float, *, seed: int) -> None:
        self._call("add_rounding_noise", relative, seed)

    def write_checkpoint(self, folder: Path) -> dict[str, Path]:
        """Each rank writes its files into the folder of this name on its machine."""
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

    def hold_weights(self, *, dtype: torch.dtype) -> HeldWeights:
        """Implements engine.backends.replicas.runtime.SendsWeights: each rank holds its part."""
        backend = self._backend
        number = backend.next_number()
        manifest, parts = self._call("hold_weights", number, dtype)
        drop = partial(backend.drop, self._start_number, number)
        return HeldWeights(backend.senders(self._start_number), number, manifest, parts, close=drop)

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
