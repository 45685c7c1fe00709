"""The vLLM backend: makes samplers, and one shared runtime per architecture.

This process has room for one vLLM engine at a time, since engines share torch's process group. Replicas
(engine.backends.replicas.pool) form one pool per architecture.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, cast

import torch

from engine.backends.protocol import Trainer, is_sampled_on_base
from engine.backends.replicas.delivery import FILE_DELIVERY, BroadcastDelivery, WeightDelivery
from engine.backends.replicas.pool import ReplicaPool
from engine.backends.replicas.replica import OnUp, Replica
from engine.backends.replicas.runtime import Runtime
from engine.backends.torch.lora import short_names
from engine.backends.vllm.architecture import EXTENSION, Architecture, EngineOptions, architecture_of
from engine.backends.vllm.replica_actor import ReplicaActor
from engine.backends.vllm.sampler import DTYPES, SharedRuntime, VllmSampler
from engine.backends.vllm.vllm_api import CPU_KV_CACHE_BYTES, InProcessRuntime
from engine.cluster.actors import ActorHandle, node_address, start_actor
from engine.cluster.connection import Cluster, connect, draining_nodes, take_inventory
from engine.cluster.placement import SHARED_GPU, Bundle, Placement, check_room
from engine.errors import BadSpec, WorkerDied
from engine.protocol import ActorCount, SamplerScale
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
        self._scaling = threading.Lock()

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
            leaving=sum(count.leaving for count in counts),
        )

    def scale(self, count: int) -> SamplerScale:
        if self._in_process:
            raise BadSpec(
                "vLLM samples in the engine's own process, which has no replicas to add or to remove; start the engine "
                "with sampler.replicas=1 or more"
            )
        with self._scaling:
            # The spec first: a pool that is opened meanwhile starts with one of both numbers, and is scaled then.
            before = self.spec
            self.spec = before.model_copy(update={"replicas": count})
            try:
                for shared in list(self._runtimes.values()):
                    shared.scale(count)
            except BaseException:
                self.spec = before
                raise
            return SamplerScale(before=before.replicas, replicas=self.actors)

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
    """The resources of one replica."""

    name: str
    """Name of the replica."""
    placement: Placement
    bundle: int
    """Index of the replica's first bundle in the placement."""


class ClusterReplicas:
    """Implements replica.ReplicaSource with actors on the Ray cluster.

    Each replica has a placement of its own, so that its resources are freed when it leaves, and Ray can move it to
    another machine when its machine is lost. Replicas that share GPUs with the trainer's ranks have one bundle each of
    the trainer's placement."""

    def __init__(
        self,
        spec: VllmSpec,
        config: Mapping[str, str],
        options: EngineOptions,
        cluster: Cluster,
        trainer_placement: Placement | None,
        actor_class: type[ReplicaActor],
        *,
        on_gpus: bool,
    ) -> None:
        """Reserves nothing yet. `config`: the model's JSON files, by name."""
        self._spec, self._config, self._options, self._cluster = spec, config, options, cluster
        self._trainer_placement, self._actor_class = trainer_placement, actor_class
        self._numbers = itertools.count()
        self._places: list[ReplicaPlace] = []
        """The places of all replicas."""
        self._unused: list[ReplicaPlace] = []
        """The places that `reserve` has made for replicas to come."""

        # The bundles of one replica: a single bundle with all its GPUs.
        ranks = options.tensor_parallel
        self._executor = "mp" if ranks > 1 and trainer_placement is None else None
        self._share = 1.0 if trainer_placement is None else SHARED_GPU
        self._bundles = [Bundle(gpus=ranks if on_gpus else 0)]
        # If no machine has that many GPUs: one bundle per GPU. vLLM's own Ray executor starts a worker in each of them,
        # and the actor itself computes nothing.
        if on_gpus and trainer_placement is None:
            most_gpus = max((node.gpus for node in take_inventory().nodes), default=0.0)
            if ranks > max(1, most_gpus):
                self._executor, self._share, self._bundles = "ray", 0.0, [Bundle(gpus=1)] * ranks

    def reserve(self, count: int) -> None:
        """Waits until the cluster has reserved the places of the first replicas. Raises BadSpec, EngineBusy and
        WorkerDied."""
        if self._trainer_placement is None:
            check_room(self._cluster, _replicas_text(count), self._bundles * count)
        self._unused = [self._take_place() for _ in range(count)]
        if self._trainer_placement is None:
            deadline = time.monotonic() + self._spec.start_seconds
            for place in self._unused:
                place.placement.wait(deadline - time.monotonic())

    def check_room(self, count: int) -> None:
        if self._trainer_placement is not None:
            if count > len(self._trainer_placement.bundles):
                raise BadSpec(
                    f"{_replicas_text(count)} were asked for, and with placement='colocated' each shares the GPU of "
                    f"one of the trainer's {len(self._trainer_placement.bundles)} ranks; ask for at most as many"
                )
            return
        if loss := self._cluster.loss():
            raise WorkerDied(loss)
        reserved = {place.placement.name for place in self._places}
        held = {"CPU": 0.0, "GPU": 0.0}
        for node in take_inventory().nodes:
            for reservation in node.reservations:
                if reservation.name not in reserved:
                    held["CPU"] += reservation.cpus
                    held["GPU"] += reservation.gpus
        check_room(self._cluster, _replicas_text(count), self._bundles * count, held)

    def make(self, on_up: OnUp) -> Replica:
        place = self._unused.pop(0) if self._unused else self._take_place()
        start, release = partial(self._start_process, place), partial(self._release, place)
        return Replica(place.name, start, self._config, on_up, self._spec.start_seconds, release)

    def _take_place(self) -> ReplicaPlace:
        """A place for another replica. Its resources may not be free yet."""
        if loss := self._cluster.loss():
            raise WorkerDied(loss)
        name = f"replica-{next(self._numbers)}"
        if self._trainer_placement is None:
            place = ReplicaPlace(name, Placement(self._cluster, f"vLLM {name}", self._bundles), 0)
        else:
            # A replica that leaves keeps its bundle until it has ended, and a new one in that bundle waits for that.
            taken = [other.bundle for other in self._places]
            bundle = min(range(len(self._trainer_placement.bundles)), key=taken.count)
            place = ReplicaPlace(name, self._trainer_placement, bundle)
        self._places.append(place)
        return place

    def _start_process(self, place: ReplicaPlace) -> ActorHandle:
        """Starts the process of one replica, without vLLM yet. Raises WorkerDied if a private Ray is gone."""
        if loss := self._cluster.loss():
            raise WorkerDied(loss)
        return start_actor(
            self._actor_class,
            place.name,
            self._options,
            self._executor,
            name=f"vLLM {place.name}",
            options=place.placement.options(place.bundle, share=self._share),
            timeout=self._spec.answer_seconds,
            python=self._spec.python,
        )

    def _release(self, place: ReplicaPlace) -> None:
        self._places.remove(place)
        if self._trainer_placement is None:  # the trainer releases its own placement
            place.placement.remove()

    def draining_nodes(self) -> set[str]:
        # A private Ray has one machine. Replicas that share GPUs with the trainer's ranks cannot go without them.
        is_fixed = self._cluster.is_private or self._trainer_placement is not None
        return set() if is_fixed else draining_nodes()

    def is_connected(self) -> bool:
        return not self._cluster.loss()

    def close(self) -> None:
        try:
            for place in list(self._places):
                self._release(place)
        finally:
            self._cluster.release()


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
        trainer_placement: the bundles of the trainer's ranks. If it is given, each replica shares the GPU of one of
            them.

    Raises:
        BadSpec: the cluster is too small, Ray is not installed, or `sampler.python` is no file.
        EngineBusy: other processes use the resources of the cluster that the replicas need.
        WorkerDied: one of the replicas did not start.
    """
    if spec.python and cluster.address is None and not Path(spec.python).is_file():
        raise BadSpec(f"sampler.python={spec.python!r} is no file on this machine; give the path of an interpreter")
    config = {file.name: file.read_text() for file in config_folder.glob("*.json")}
    connection = connect(cluster, exclude_first_gpu=exclude_first_gpu)
    # Reserve a place for each replica, and choose how weights reach them. After an error nothing stays reserved.
    source: ClusterReplicas | None = None
    try:
        source = ClusterReplicas(
            spec, config, options, connection, trainer_placement, actor_class, on_gpus=device.type == "cuda"
        )
        source.reserve(spec.replicas)
        delivery = _weight_delivery(spec, device)
    except BaseException:
        (source.close if source is not None else connection.release)()
        raise
    # With LoRA the base is sent only once, so the pool must keep it for replicas that restart.
    return ReplicaPool(source, spec.replicas, keep_weights=options.max_lora_rank is not None, delivery=delivery)


def _replicas_text(count: int) -> str:
    return f"{count} vLLM replica{'' if count == 1 else 's'}"


def _weight_delivery(spec: VllmSpec, device: torch.device) -> WeightDelivery:
    """How weights reach the replicas."""
    if spec.transport == "nccl":
        return BroadcastDelivery(node_address(), device, timeout=spec.sync_seconds)
    return FILE_DELIVERY
