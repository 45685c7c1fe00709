"""Tests of the inventory of a Ray cluster: its machines, and the reservations of their GPUs."""

from __future__ import annotations

import pytest

from engine.cluster.connection import Reservation, connect, inventory_if_connected, inventory_of, take_inventory
from engine.cluster.placement import Bundle, Placement
from engine.specs.engine import ClusterSpec, LocalEngineSpec
from flows.cli.backend_checks import describe_inventory, shortage
from tests.fixtures.ray_nodes import ray_nodes

pytestmark = pytest.mark.slow


def test_machines_and_holders_of_a_cluster_of_two_machines() -> None:
    with ray_nodes(nodes=1) as nodes:
        nodes.add_node(num_cpus=8, num_gpus=4)
        spec = ClusterSpec(address=nodes.address)
        assert inventory_if_connected() is None
        cluster = connect(spec)
        try:
            # Reserve three of the four GPUs. Two more cannot be placed.
            placement = Placement(cluster, "trainer ranks", [Bundle(gpus=1.0)] * 3)
            placement.wait(30)
            too_large = Placement(cluster, "vLLM replicas", [Bundle(gpus=2.0)])
            # The inventory shows the reservation and the placement that waits.
            inventory = take_inventory()
            assert inventory_if_connected() == inventory
            reserved_nodes = [node for node in inventory.nodes if node.reservations]
            assert [(node.gpus, node.unreserved_gpus) for node in reserved_nodes] == [(4.0, 1.0)]
            assert reserved_nodes[0].reservations == (Reservation(placement.name, 3.0, 3.0),)
            assert (inventory.gpus, inventory.free_gpus) == (4.0, 1.0)
            assert inventory.waiting == (too_large.name,)
            line = describe_inventory(inventory)
            assert "4 GPUs (1 free)" in line and f"{placement.name} holds 3 GPUs and 3 CPUs on" in line
            placement.remove()
        finally:
            cluster.release()
        assert inventory_of(spec).gpus == 4.0  # connects only for this call
        assert inventory_if_connected() is None
        # A plan that needs five GPUs does not fit.
        engine_config = {"trainer": {"kind": "deepspeed", "ranks": 4}, "sampler": {"kind": "vllm", "replicas": 1}}
        engine = LocalEngineSpec.model_validate(engine_config | {"cluster": spec})
        assert shortage(engine, inventory) == "ranks and replicas need 5 GPUs, and the cluster has 4"
