"""The vLLM backend: makes samplers, and one shared runtime per architecture.

This process has room for one vLLM engine at a time, since engines share torch's process group. Replicas
(engine.backends.replicas.pool) form one pool per architecture.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, cast

import torch

from engine.backends.protocol import Trainer, is_sampled_on_base
from engine.backends.replicas.delivery import FILE_DELIVERY, BroadcastDelivery, WeightDelivery
from engine.backends.replicas.pool import OnUp, ReplicaPool
from engine.backends.replicas.replica import Replica
from engine.backends.replicas.runtime import Runtime
from engine.backends.torch.lora import short_names
from engine.backends.vllm.architecture import EXTENSION, Architecture, EngineOptions, architecture_of
from engine.backends.vllm.replica_actor import ReplicaActor
from engine.backends.vllm.sampler import DTYPES, SharedRuntime, VllmSampler
from engine.backends.vllm.vllm_api import CPU_KV_CACHE_BYTES, InProcessRuntime
from engine.cluster.actors import ActorHandle, node_address, start_actor
from engine.cluster.connection import Cluster, connect, take_inventory
from engine.cluster.placement import SHARED_GPU, Bundle, Placement
from engine.errors import BadSpec, WorkerDied
from engine.protocol import ActorCount
from engine.specs.engine import ClusterSpec, LocalEngineSpec, TorchTrainerSpec, VllmSpec
from engine.text.tokenizers import Tokenizer
from storage.temporary import process_folder

CONCURRENT_CALLS = 256
"""Calls that the replicas of an engine sample at the same time. Each takes a thread that waits. A run has at most as
many shards in progress."""

_RuntimeKey = tuple[str, int, bool, str | None]
"""(digest of the architecture, tensor_parallel, whether LoRA adapters are used, digest of the tokenizer)."""


class VllmSamplers:
    """Implements engine.backends.protocol.SamplerBackend with vLLM."""

    def __init__(
        self,
        spec: LocalEngineSpec,
        *,
        compute_dtype: torch.dtype,
        device: torch.device,
        reserve_trainer_placement: Callable[[], Placement] | None = None,
        extension: str = EXTENSION,
    ) -> None:
        """No vLLM is started yet.

        Args:
            compute_dtype: precision of the trainer and of vLLM.
            device: where the trainer's tensors are.
            reserve_trainer_placement: reserves the bundles of the trainer's ranks, for replicas that share their GPUs
                (sampler.placement="colocated").
            extension: import path of the class that runs inside vLLM's workers.

        Raises:
            BadSpec: the transport cannot reach the samplers, or vLLM does not support the precision.
        """
        # Resolve transport "auto", and refuse a transport that cannot work.
        assert isinstance(spec.sampler, VllmSpec)
        if problem := _transport_problem(spec.sampler):
            raise BadSpec(f"sampler.transport={spec.sampler.transport!r} was given, but {problem}")
        self.spec = spec.sampler.model_copy(update={"transport": spec.sampler.resolved_transport(spec.cluster)})
        self._max_rows, self._extension = spec.max_rows, extension
        self._cluster, self._reserve_trainer_placement = spec.cluster, reserve_trainer_placement
        self._trains_here = isinstance(spec.trainer, TorchTrainerSpec)
        self.device = device
        # vLLM must compute in the trainer's precision.
        dtype_names: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
        if compute_dtype not in dtype_names:
            raise BadSpec(f"vLLM computes in {' or '.join(DTYPES)}; compute_dtype {compute_dtype} was given")
        self._dtype = cast(Literal["float32", "bfloat16"], dtype_names[compute_dtype])
        self._in_process = not self.spec.replicas
        self._runtimes: dict[_RuntimeKey, SharedRuntime] = {}

    @property
    def devices(self) -> int:
        return self.spec.tensor_parallel * max(1, self.spec.replicas)

    @property
    def actors(self) -> ActorCount:
        # A copy of the values, because another thread may add a runtime meanwhile.
        counts = [shared.actors for shared in list(self._runtimes.values())]
        return ActorCount(
            wanted=sum(count.wanted for count in counts),
            alive=sum(count.alive for count in counts),
            restarts=sum(count.restarts for count in counts),
        )

    @property
    def concurrent_calls(self) -> int:
        # vLLM batches the completions of all calls continuously. In this process its engine takes one call at a time.
        return 1 if self._in_process else CONCURRENT_CALLS

    @property
    def tensor_parallel_from_config(self) -> bool:
        return not self._in_process

    def added_bytes(self, trainer: Trainer) -> int:
        # Replicas are other processes, whose memory is not in this engine's budget.
        if not self._in_process:
            return 0
        # A new engine in this process takes the place of the one that is open, whose bytes are counted already.
        for shared in self._runtimes.values():
            if shared.is_open and shared.users:
                return 0
        return self._nbytes(trainer)

    def new_sampler(
        self, trainer: Trainer, *, tensor_parallel: int | None = None, tokenizer: Tokenizer | None = None
    ) -> VllmSampler:
        ranks = tensor_parallel or self.spec.tensor_parallel
        if self.spec.replicas and ranks != self.spec.tensor_parallel:
            raise BadSpec(
                f"tp({ranks}) was given, but the sampler's replicas run with tensor_parallel="
                f"{self.spec.tensor_parallel}; set sampler.tensor_parallel, or leave tp out"
            )
        open_shared = partial(self._shared_runtime, ranks=ranks, tokenizer=tokenizer)
        return VllmSampler(trainer, self.spec, open_shared, tokenizer)

    def offload_for_training(self) -> None:
        for shared in self._runtimes.values():
            shared.sleep()

    def close(self) -> None:
        for shared in self._runtimes.values():
            shared.discard()
        self._runtimes.clear()

    def _shared_runtime(self, trainer: Trainer, *, ranks: int, tokenizer: Tokenizer | None) -> SharedRuntime:
        """The runtime of the trainer's architecture and tokenizer. It need not run yet."""
        # The model's config decides which trainers can share a runtime.
        folder = Path(tempfile.mkdtemp(prefix="config-", dir=process_folder()))
        trainer.write_config(folder)
        architecture = architecture_of(folder, tokenizer.eos_token_ids if tokenizer else None)
        model = (architecture.digest, ranks, is_sampled_on_base(trainer))
        key = (*model, tokenizer.digest if tokenizer else None)
        if tokenizer is None:
            # without a tokenizer no completion is constrained, so that any runtime of the architecture will do
            key = next((known for known in self._runtimes if known[:3] == model), key)
        # An existing runtime has its own config folder already.
        if key in self._runtimes:
            shutil.rmtree(folder)
            return self._runtimes[key]
        if tokenizer is not None and tokenizer.to_json() is not None:
            tokenizer.save(folder)
        nbytes = self._nbytes(trainer) if self._in_process else 0
        options = self._options(trainer, architecture, ranks)
        self._runtimes[key] = SharedRuntime(architecture, options, folder, self._open, nbytes)
        return self._runtimes[key]

    def _open(self, config_folder: Path, options: EngineOptions) -> Runtime:
        if self._in_process:
            # This process has room for one engine only.
            for shared in self._runtimes.values():
                shared.close()
            return InProcessRuntime(config_folder, options)

        trainer_placement = None
        if self._reserve_trainer_placement is not None and self.spec.placement == "colocated":
            trainer_placement = self._reserve_trainer_placement()
        return open_pool(
            self.spec,
            config_folder,
            options,
            self.device,
            cluster=self._cluster,
            exclude_first_gpu=self._trains_here and self.device.type == "cuda",
            trainer_placement=trainer_placement,
        )

    def _options(self, trainer: Trainer, architecture: Architecture, ranks: int) -> EngineOptions:
        targets: tuple[str, ...] = ()
        if trainer.base is not None and is_sampled_on_base(trainer):
            targets = tuple(short_names(trainer.base.layers))
        options = engine_options(
            self.spec,
            architecture,
            dtype=self._dtype,
            device=self.device,
            ranks=ranks,
            lora_targets=targets,
            max_rows=self._max_rows,
        )
        shares_gpu = (self._in_process or self.spec.placement == "colocated") and self.device.type == "cuda"
        sleep = shares_gpu if self.spec.sleep == "auto" else self.spec.sleep
        return replace(options, sleep=sleep, extension=self._extension)

    def _nbytes(self, trainer: Trainer) -> int:
        """Upper bound of the memory of an engine in this process: weights, a prepacked copy of a tied head, and the KV
        cache. The copy is at most half as large as the weights."""
        kv_cache_bytes = CPU_KV_CACHE_BYTES
        if self.spec.kv_cache_gib != "auto":
            kv_cache_bytes = int(self.spec.kv_cache_gib * (1 << 30))
        # `weights_nbytes` counts the weights in master precision, which is float32 for both precisions of vLLM.
        weights_bytes = trainer.weights_nbytes * DTYPES[self._dtype].itemsize // torch.float32.itemsize
        return weights_bytes * 3 // 2 + kv_cache_bytes


def _transport_problem(spec: VllmSpec) -> str:
    """Why the transport cannot reach the samplers, and which one can; empty if it can."""
    if spec.transport == "nccl" and not spec.replicas:
        return "vLLM in the engine's own process takes the tensors as they are: use 'auto', or set replicas"
    if spec.transport == "ipc" and spec.replicas:
        return (
            "replicas do not take CUDA handles: a handle is valid on one GPU only, and replicas compute on other GPUs, "
            "or on several; use 'nccl' between GPUs, 'shm' on one machine, or set replicas to 0 to share the GPU"
        )
    return ""


def engine_options(
    spec: VllmSpec,
    architecture: Architecture,
    *,
    dtype: Literal["float32", "bfloat16"],
    device: torch.device,
    ranks: int,
    lora_targets: tuple[str, ...] = (),
    max_rows: int,
) -> EngineOptions:
    """The options of a vLLM for models of this architecture, without sleep.

    Args:
        ranks: GPUs that share one copy of the model.
        max_rows: completions that decode together, at most.

    Raises:
        BadSpec: adapters in float32 on a GPU.
    """
    if lora_targets and device.type == "cuda" and dtype == "float32":
        raise BadSpec(
            "on a GPU, vLLM computes LoRA adapters in bfloat16 only, but the engine's compute_dtype is float32; "
            "set compute_dtype='bfloat16', or sample with sampler.kind='torch'"
        )
    return EngineOptions(
        dtype=dtype,
        # A context longer than the model's is cut to the model's.
        max_context=min(spec.max_context or architecture.context_length, architecture.context_length),
        vocab_size=architecture.vocab_size,
        # vLLM fails on stop tokens outside the vocabulary, which a config or a tokenizer may name.
        eos_token_ids=tuple(token for token in architecture.eos_token_ids if token < architecture.vocab_size),
        tensor_parallel=ranks,
        kv_cache_bytes=None if spec.kv_cache_gib == "auto" else int(spec.kv_cache_gib * (1 << 30)),
        gpu_share=spec.gpu_share,
        eager=device.type == "cpu" if spec.eager == "auto" else spec.eager,
        max_lora_rank=spec.max_lora_rank if lora_targets else None,
        max_loras=spec.max_loras,
        lora_targets=lora_targets,
        max_rows=max_rows,
    )


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """The reserved resources of one replica."""

    placement: Placement
    bundle: int
    """Index of the replica's first bundle in the placement."""
    share: float = 1.0
    """Fraction of the bundle's GPUs that Ray assigns to the actor itself. 0 if vLLM's own workers get them."""
    executor: str | None = None
    """vLLM's distributed executor; None for one worker."""


def open_pool(
    spec: VllmSpec,
    config_folder: Path,
    options: EngineOptions,
    device: torch.device = torch.device("cpu"),
    *,
    cluster: ClusterSpec = ClusterSpec(),
    exclude_first_gpu: bool = False,
    trainer_placement: Placement | None = None,
    actor_class: type[ReplicaActor] = ReplicaActor,
) -> ReplicaPool:
    """Starts the replicas of `spec` on the cluster, and waits until they are up.

    Args:
        spec: the config of the sampler. The caller has replaced a transport of "auto" by a concrete one.
        device: where the trainer's tensors are. Replicas compute on the same kind of device.
        exclude_first_gpu: leave the first GPU of this machine to the trainer, which computes in this process.
        trainer_placement: the bundles of the trainer's ranks. If it is given, replica i shares the GPU of bundle i.

    Raises:
        BadSpec: the cluster is too small, Ray is not installed, or `sampler.python` is no file.
        EngineBusy: other processes use the resources of the cluster that the replicas need.
        WorkerDied: one of the replicas did not start.
    """
    if spec.python and cluster.address is None and not Path(spec.python).is_file():
        raise BadSpec(f"sampler.python={spec.python!r} is no file on this machine; give the path of an interpreter")
    config = {file.name: file.read_text() for file in config_folder.glob("*.json")}
    connection = connect(cluster, exclude_first_gpu=exclude_first_gpu)
    places: list[ReplicaPlace] = []

    def make_replicas(on_up: OnUp) -> list[Replica]:
        replicas = []
        for index, place in enumerate(places):
            name = f"replica-{index}"
            start = partial(_start_process, actor_class, name, options, place, spec)
            replicas.append(Replica(name, start, config, on_up, spec.start_seconds))
        return replicas

    def release_resources() -> None:
        try:
            # The trainer releases its own placement.
            if trainer_placement is None:
                _remove_placements(places)
        finally:
            connection.release()

    # Reserve a place for each replica, and choose how weights reach them. After an error nothing stays reserved.
    try:
        _reserve(places, connection, spec, options.tensor_parallel, trainer_placement, on_gpus=device.type == "cuda")
        delivery = _weight_delivery(spec, device)
    except BaseException:
        release_resources()
        raise
    # With LoRA the base is sent only once, so the pool must keep it for replicas that restart.
    keep_weights = options.max_lora_rank is not None
    return ReplicaPool(
        make_replicas, release_resources, keep_weights=keep_weights, delivery=delivery,
        is_connected=lambda: not connection.loss(),
    )  # fmt: skip


def _remove_placements(places: Iterable[ReplicaPlace]) -> None:
    """Releases the bundles of replicas. Those of a private Ray have one placement together."""
    for placement in {id(place.placement): place.placement for place in places}.values():
        placement.remove()


def _weight_delivery(spec: VllmSpec, device: torch.device) -> WeightDelivery:
    """How weights reach the replicas."""
    if spec.transport == "nccl":
        return BroadcastDelivery(node_address(), device, timeout=spec.sync_seconds)
    return FILE_DELIVERY


def _start_process(
    actor_class: type[ReplicaActor], name: str, options: EngineOptions, place: ReplicaPlace, spec: VllmSpec
) -> ActorHandle:
    """Starts the process of one replica, without vLLM yet. Raises WorkerDied if a private Ray is gone."""
    if loss := place.placement.cluster.loss():
        raise WorkerDied(loss)
    return start_actor(
        actor_class,
        name,
        options,
        place.executor,
        name=f"vLLM {name}",
        options=place.placement.options(place.bundle, share=place.share),
        timeout=spec.answer_seconds,
        python=spec.python,
    )


def _reserve(
    places: list[ReplicaPlace],
    cluster: Cluster,
    spec: VllmSpec,
    tensor_parallel: int,
    trainer_placement: Placement | None,
    *,
    on_gpus: bool,
) -> None:
    """Appends a place for each replica to `places`, and waits until the cluster has reserved all of them. In the
    trainer's placement the places are reserved already.

    On a shared cluster each replica has its own placement, so that Ray can move it to another machine when its machine
    is lost. A private Ray has one machine, and all replicas share one placement: the reservation fails at once if there
    is no room for all of them.
    """
    if trainer_placement is not None:
        places.extend(ReplicaPlace(trainer_placement, index, SHARED_GPU) for index in range(spec.replicas))
        return

    # The bundles of one replica: a single bundle with all its GPUs.
    executor, share = None, 1.0
    bundles = [Bundle(gpus=tensor_parallel if on_gpus else 0)]
    if tensor_parallel > 1:
        executor = "mp"
    # If no machine has that many GPUs: one bundle per GPU. vLLM's own Ray executor starts a worker in each of them,
    # and the actor itself computes nothing.
    if on_gpus:
        most_gpus = max((node.gpus for node in take_inventory().nodes), default=0.0)
        if tensor_parallel > max(1, most_gpus):
            executor, share, bundles = "ray", 0.0, [Bundle(gpus=1)] * tensor_parallel

    # The placements of all replicas.
    if cluster.is_private:
        placement = Placement(cluster, f"{spec.replicas} vLLM replicas", bundles * spec.replicas)
        for index in range(spec.replicas):
            places.append(ReplicaPlace(placement, len(bundles) * index, share, executor))
    else:
        for index in range(spec.replicas):
            placement = Placement(cluster, f"vLLM replica-{index}", bundles)
            places.append(ReplicaPlace(placement, 0, share, executor))
    deadline = time.monotonic() + spec.start_seconds
    for place in places:
        place.placement.wait(deadline - time.monotonic())
