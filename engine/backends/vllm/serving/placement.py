"""From a spec to a running pool: where on the cluster each replica runs, and how its process is started."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from engine.backends.vllm.serving.pool import OnUp, VllmPool
from engine.backends.vllm.serving.replica import Replica
from engine.backends.vllm.serving.replica_actor import ReplicaActor
from engine.backends.vllm.serving.runtime import EngineOptions
from engine.backends.vllm.weight_sync.delivery import BY_FILES, ByBroadcast
from engine.cluster.actors import ActorHandle, node_address, start_actor
from engine.cluster.connection import Cluster, connect
from engine.cluster.inventory import take_inventory
from engine.cluster.placement import SHARED_GPU, Bundle, Placement
from engine.errors import BadSpec
from engine.specs.cluster import ClusterSpec
from engine.specs.sampler import VllmSpec


@dataclass(frozen=True, slots=True)
class Place:
    """Where one replica runs."""

    placement: Placement
    bundle: int
    share: float = 1.0
    """Of the bundle's GPUs, for the actor itself."""
    executor: str | None = None
    """vLLM's distributed executor."""


def open_pool(
    spec: VllmSpec,
    config_folder: Path,
    options: EngineOptions,
    device: torch.device = torch.device("cpu"),
    *,
    cluster: ClusterSpec = ClusterSpec(),
    spare_first_gpu: bool = False,
    beside: Placement | None = None,
    actor_class: type[ReplicaActor] = ReplicaActor,
) -> VllmPool:
    """Starts the replicas of `spec` on the cluster, and waits until they are up.

    Args:
        spec: its transport is decided.
        device: where the trainer's tensors are; replicas compute on the same kind of device.
        spare_first_gpu: the trainer computes in this process, on its first GPU.
        beside: the bundles of the trainer's ranks; replica i shares the GPU of bundle i.

    Raises:
        BadSpec, EngineBusy: the cluster has no room for them.
        BadSpec: Ray is not installed, or there is no such interpreter.
        WorkerDied: one of them did not come up.
    """
    if spec.python and cluster.address is None and not Path(spec.python).is_file():
        raise BadSpec(f"sampler.python={spec.python!r} is no file on this machine; give the path of an interpreter")
    config = {file.name: file.read_text() for file in config_folder.glob("*.json")}
    connection = connect(cluster, spare_first_gpu=spare_first_gpu)
    places: list[Place] = []

    def make(on_up: OnUp) -> list[Replica]:
        replicas = []
        for index, place in enumerate(places):
            name = f"replica-{index}"
            start = partial(_start, actor_class, name, options, place, spec)
            replicas.append(Replica(name, start, config, on_up, spec.start_seconds))
        return replicas

    def give_back() -> None:
        try:
            if beside is None:
                for placement in {id(place.placement): place.placement for place in places}.values():
                    placement.remove()
        finally:
            connection.release()

    try:
        if beside is not None:
            places += [Place(beside, index, SHARED_GPU) for index in range(spec.replicas)]
        else:
            _reserve(places, connection, spec, options.tensor_parallel, on_gpus=device.type == "cuda")
        way = ByBroadcast(node_address(), device, seconds=spec.sync_seconds) if spec.transport == "nccl" else BY_FILES
    except BaseException:
        give_back()
        raise
    # adapters come again at every step, their base only once
    return VllmPool(make, give_back, keep=options.max_lora_rank is not None, delivery=way)


def _start(
    actor_class: type[ReplicaActor], name: str, options: EngineOptions, place: Place, spec: VllmSpec
) -> ActorHandle:
    """Starts the process of one replica, without vLLM yet."""
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


def _reserve(places: list[Place], cluster: Cluster, spec: VllmSpec, tensor_parallel: int, *, on_gpus: bool) -> None:
    """Adds a place for each replica, and waits until all are reserved.

    On a shared cluster each replica has a placement of its own, so that Ray moves it alone when its machine is lost. A
    private Ray has one machine: a single placement says at once whether it has room for all.
    """
    executor, share = ("mp" if tensor_parallel > 1 else None), 1.0
    bundles = [Bundle(gpus=tensor_parallel if on_gpus else 0)]
    most_gpus = max((node.gpus for node in take_inventory().nodes), default=0.0) if on_gpus else 0.0
    if on_gpus and tensor_parallel > max(1, most_gpus):
        # vLLM's own Ray executor starts a worker in each bundle; the actor itself computes nothing.
        executor, share, bundles = "ray", 0.0, [Bundle(gpus=1)] * tensor_parallel
    if cluster.is_private:
        placement = Placement(cluster, f"{spec.replicas} vLLM replicas", bundles * spec.replicas)
        places += [Place(placement, len(bundles) * index, share, executor) for index in range(spec.replicas)]
    else:
        for index in range(spec.replicas):
            places.append(Place(Placement(cluster, f"vLLM replica-{index}", bundles), 0, share, executor))
    deadline = time.monotonic() + spec.start_seconds
    for place in places:
        place.placement.wait(deadline - time.monotonic())
