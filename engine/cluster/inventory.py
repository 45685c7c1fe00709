"""Nodes and GPUs of a Ray cluster, and the placement groups that reserve them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from engine.cluster import connection
from engine.cluster.connection import connect
from engine.protocol import ActorCount, ClusterInfo
from engine.specs.engine import ClusterSpec

HOLDING_STATES = ("CREATED", "RESCHEDULING")
"""States in which a placement group holds resources."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """The resources that a placement group holds on one node."""

    name: str
    cpus: float
    gpus: float


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of the cluster."""

    host: str
    address: str
    cpus: float
    gpus: float
    reservations: tuple[Reservation, ...]

    @property
    def unreserved_gpus(self) -> float:
        """GPUs that no placement group holds. Actors and tasks outside of placement groups may use them."""
        return self.gpus - sum(reservation.gpus for reservation in self.reservations)


@dataclass(frozen=True, slots=True)
class Inventory:
    """Nodes and free resources of the cluster at one moment."""

    nodes: tuple[Node, ...]
    """The nodes that are alive."""
    free_cpus: float
    free_gpus: float
    waiting: tuple[str, ...]
    """Names of the placement groups that wait for resources."""

    @property
    def gpus(self) -> float:
        """GPUs of all nodes."""
        return sum(node.gpus for node in self.nodes)


def take_inventory() -> Inventory:
    """Reads the resources of the cluster that this process is connected to."""
    import ray

    # Add up what each placement group holds, by node id and by (group name, resource).
    groups = ray.util.placement_group_table().values()
    reserved: dict[str, Counter[tuple[str, str]]] = {}
    for group in groups:
        if group["state"] not in HOLDING_STATES:
            continue
        for index, bundle in group["bundles"].items():
            amounts = reserved.setdefault(group["bundles_to_node_id"].get(index, ""), Counter())
            for resource in ("CPU", "GPU"):
                amounts[group["name"] or "unnamed", resource] += bundle.get(resource, 0.0)

    # List the nodes that are alive, with their reservations. Ray also reports nodes that have left.
    nodes = []
    for node in ray.nodes():
        if node["Alive"]:
            nodes.append(_node(node, reserved.get(node["NodeID"], Counter())))
    free = ray.available_resources()
    waiting = sorted(group["name"] or "unnamed" for group in groups if group["state"] == "PENDING")
    nodes.sort(key=lambda node: (node.host, node.address, -node.gpus))
    return Inventory(tuple(nodes), free.get("CPU", 0.0), free.get("GPU", 0.0), tuple(waiting))


def inventory_of(spec: ClusterSpec) -> Inventory:
    """Connects to the cluster, reads its resources, and disconnects. Raises as `connect`."""
    cluster = connect(spec)
    try:
        return take_inventory()
    finally:
        cluster.release()


def gpu_count(spec: ClusterSpec) -> int:
    """The number of GPUs of the cluster, or of this machine if Ray is private. Raises as `connect`."""
    if spec.address is None:
        return int(import_module("torch").cuda.device_count())  # imported by name: `ostinato doctor` runs without torch
    return int(inventory_of(spec).gpus)


def inventory_if_connected() -> Inventory | None:
    """Reads the cluster that this process is connected to; None without one. Takes about two milliseconds."""
    with connection.hold_connection() as connected:
        return take_inventory() if connected else None


def cluster_info(ranks: ActorCount, replicas: ActorCount) -> ClusterInfo | None:
    """The cluster as an engine reports it in its info; None while this process is not connected to Ray."""
    inventory = inventory_if_connected()
    if inventory is None:
        return None
    return ClusterInfo(
        nodes=len(inventory.nodes), gpus=inventory.gpus, free_gpus=inventory.free_gpus, ranks=ranks, replicas=replicas
    )


def _node(node: Mapping[str, Any], reserved: Counter[tuple[str, str]]) -> Node:
    """One node as Ray describes it, with the amounts that placement groups hold there."""
    return Node(
        host=node["NodeManagerHostname"],
        address=node["NodeManagerAddress"],
        cpus=node["Resources"].get("CPU", 0.0),
        gpus=node["Resources"].get("GPU", 0.0),
        reservations=_reservations(reserved),
    )


def _reservations(amounts: Counter[tuple[str, str]]) -> tuple[Reservation, ...]:
    names = sorted({name for name, _ in amounts})
    return tuple(Reservation(name, amounts[name, "CPU"], amounts[name, "GPU"]) for name in names)
