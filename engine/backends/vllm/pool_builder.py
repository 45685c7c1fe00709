"""Builds a running pool of vLLM replicas from a spec: reserves CPUs and GPUs on the cluster and starts the replicas."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from engine.backends.replicas.delivery import FILE_DELIVERY, BroadcastDelivery, WeightDelivery
from engine.backends.replicas.pool import OnUp, ReplicaPool
from engine.backends.replicas.replica import Replica
from engine.backends.vllm.architecture import EngineOptions
from engine.backends.vllm.replica_actor import ReplicaActor
from engine.cluster.actors import ActorHandle, node_address, start_actor
from engine.cluster.connection import Cluster, connect
from engine.cluster.inventory import take_inventory
from engine.cluster.placement import SHARED_GPU, Bundle, Placement
from engine.errors import BadSpec, WorkerDied
from engine.specs.engine import ClusterSpec, VllmSpec


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
        if trainer_placement is not None:
            places.extend(ReplicaPlace(trainer_placement, index, SHARED_GPU) for index in range(spec.replicas))
        else:
            _reserve(places, connection, spec, options.tensor_parallel, on_gpus=device.type == "cuda")
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
    places: list[ReplicaPlace], cluster: Cluster, spec: VllmSpec, tensor_parallel: int, *, on_gpus: bool
) -> None:
    """Appends a place for each replica to `places`, and waits until the cluster has reserved all of them.

    On a shared cluster each replica has its own placement, so that Ray can move it to another machine when its machine
    is lost. A private Ray has one machine, and all replicas share one placement: the reservation fails at once if there
    is no room for all of them.
    """
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
