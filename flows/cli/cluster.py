"""What `ostinato doctor` and `ostinato engine plan` say of the Ray cluster at `cluster.address`."""

from __future__ import annotations

from typing import Any

from engine.cluster.inventory import Inventory, inventory_of
from engine.errors import EngineError
from engine.specs.engine import LocalEngineSpec


def ask_cluster(spec: LocalEngineSpec) -> Inventory | EngineError | None:
    """What the spec's cluster has, or the error where it does not answer; None where the spec uses no cluster."""
    if not spec.uses_ray or spec.cluster.address is None:
        return None
    try:
        return inventory_of(spec.cluster)
    except EngineError as error:
        return error


def describe_inventory(inventory: Inventory) -> str:
    """Machines, GPUs, and who holds what, in one line."""
    machines = f"{len(inventory.nodes)} machine{'s' * (len(inventory.nodes) != 1)}"
    gpus = f"{inventory.gpus:g} GPUs ({inventory.free_gpus:g} free)"
    holders = [
        f"{reservation.name} holds {reservation.gpus:g} GPUs and {reservation.cpus:g} CPUs on {node.host}"
        for node in inventory.nodes
        for reservation in node.reservations
    ]
    waiting = [f"{name} waits for room" for name in inventory.waiting]
    return "; ".join([f"{machines}, {gpus}, {inventory.free_cpus:g} free CPUs", *holders, *waiting])


def shortage(spec: LocalEngineSpec, inventory: Inventory) -> str:
    """Why the cluster can never carry the engine; empty where it can, or where the engine computes on CPUs."""
    if spec.device == "cpu" or (spec.device == "auto" and not inventory.gpus):
        return ""
    needed = spec.actor_gpus(int(inventory.gpus))
    if needed <= inventory.gpus:
        return ""
    return f"ranks and replicas need {needed} GPUs, and the cluster has {inventory.gpus:g}"


def cluster_document(inventory: Inventory) -> dict[str, Any]:
    """The same for machines."""
    return {
        "gpus": inventory.gpus,
        "free_gpus": inventory.free_gpus,
        "free_cpus": inventory.free_cpus,
        "nodes": [
            {
                "host": node.host, "address": node.address, "cpus": node.cpus, "gpus": node.gpus,
                "reservations": [
                    {"name": reservation.name, "cpus": reservation.cpus, "gpus": reservation.gpus}
                    for reservation in node.reservations
                ],
            }
            for node in inventory.nodes
        ],
    }  # fmt: skip
