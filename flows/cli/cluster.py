"""Descriptions of the Ray cluster at `cluster.address`, for `ostinato doctor` and `ostinato engine plan`."""

from __future__ import annotations

from typing import Any

from engine.cluster.connection import Inventory, inventory_of
from engine.errors import EngineError
from engine.specs.engine import LocalEngineSpec


def query_cluster(spec: LocalEngineSpec) -> Inventory | EngineError | None:
    """Returns the inventory of the spec's cluster, the error if it does not answer, or None without a cluster."""
    if not spec.uses_ray or spec.cluster.address is None:
        return None
    try:
        return inventory_of(spec.cluster)
    except EngineError as error:
        return error


def describe_inventory(inventory: Inventory) -> str:
    """Describes machines, GPUs and reservations in one line."""
    machines = f"{len(inventory.nodes)} machine{'s' * (len(inventory.nodes) != 1)}"
    gpus = f"{inventory.gpus:g} GPUs ({inventory.free_gpus:g} free)"
    parts = [f"{machines}, {gpus}, {inventory.free_cpus:g} free CPUs"]
    for node in inventory.nodes:
        for reservation in node.reservations:
            amount = f"{reservation.gpus:g} GPUs and {reservation.cpus:g} CPUs"
            parts.append(f"{reservation.name} holds {amount} on {node.host}")
    parts += [f"{name} waits for free resources" for name in inventory.waiting]
    return "; ".join(parts)


def shortage(spec: LocalEngineSpec, inventory: Inventory) -> str:
    """Returns why the cluster is too small for the engine. Empty if it is not, or if the engine computes on CPUs."""
    if spec.device == "cpu" or (spec.device == "auto" and not inventory.gpus):
        return ""
    needed = spec.actor_gpus(int(inventory.gpus))
    if needed <= inventory.gpus:
        return ""
    return f"ranks and replicas need {needed} GPUs, and the cluster has {inventory.gpus:g}"


def cluster_document(inventory: Inventory) -> dict[str, Any]:
    """Returns the inventory as a JSON document."""
    nodes = []
    for node in inventory.nodes:
        reservations = [
            {"name": reservation.name, "cpus": reservation.cpus, "gpus": reservation.gpus}
            for reservation in node.reservations
        ]
        nodes.append(
            {
                "host": node.host, "address": node.address, "cpus": node.cpus, "gpus": node.gpus,
                "reservations": reservations,
            }
        )  # fmt: skip
    return {
        "gpus": inventory.gpus,
        "free_gpus": inventory.free_gpus,
        "free_cpus": inventory.free_cpus,
        "nodes": nodes,
    }
