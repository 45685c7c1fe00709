"""Tests of a pool on simulated machines, which come and go. A stand-in replaces vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.replicas.replica import Replica, count_replicas
from engine.backends.replicas.runtime import manifest_of_files
from engine.backends.vllm.backend import open_pool
from engine.backends.vllm.replica_actor import ReplicaActor
from engine.backends.weight_files.tensor_files import write_tensors
from engine.cluster.connection import take_inventory
from engine.protocol import ActorCount, TokenIds
from engine.specs.engine import ClusterSpec, VllmSpec
from tests.engine.vllm.pools import OPTIONS, ROOT, until
from tests.fixtures.ray_nodes import ray_nodes

pytestmark = pytest.mark.slow

SEQUENCES = [[number, 1, 2] for number in range(16)]
SCORES = [[-1.0, -1.0]] * len(SEQUENCES)


class FakeEngine:
    """vLLM with one worker, which takes all weights that it is given."""

    errored = False

    async def collective_rpc(self, method: str, args: Sequence[Any]) -> list[dict[str, Any]]:
        state = args[2] if method == "ostinato_load" else args[0]
        receipt = {"state": state, "tensors": 1, "values": 1, "unread": (), "seconds": {}}
        return [{"rank": 0, "worker_id": str(os.getpid()), "error": None} | receipt]

    async def reset_prefix_cache(self) -> bool:
        return True


class StandIn(ReplicaActor):
    async def start(self, config: Mapping[str, str]) -> None:
        self._client = FakeEngine()

    async def score(self, state: str, sequences: Sequence[TokenIds], adapter_name: str | None) -> list[list[float]]:
        await self._require_state(state)
        return [[-1.0] * (len(tokens) - 1) for tokens in sequences]


def test_the_pool_goes_on_without_a_machine_and_takes_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    file = tmp_path / "w.safetensors"
    write_tensors(file, [("w", torch.ones(3))])
    with ray_nodes(cpus=1) as nodes:
        spec = VllmSpec(replicas=2, transport="shm", start_seconds=120, answer_seconds=60)
        cluster = ClusterSpec(address=nodes.address)
        pool = open_pool(spec, tmp_path, OPTIONS, cluster=cluster, actor_class=StandIn)
        try:
            pool.load([file], manifest_of_files([file]), "state")
            assert pool.score(SEQUENCES) == SCORES
            pool.check("state")
            # Remove one of the two machines.
            first = [replica.running_actor() for replica in pool.replicas]
            nodes.remove_node(next(iter(nodes.worker_nodes)), allow_graceful=False)
            until(lambda: sum(replica.phase == "up" for replica in pool.replicas) == 1)
            assert pool.score(SEQUENCES) == SCORES  # all by the other one
            pool.check("state")
            # A new machine gets a replica with the same weights.
            nodes.add_node(num_cpus=1, include_dashboard=False)
            until(lambda: [replica.loaded_state for replica in pool.replicas] == ["state", "state"])
            stayed = [replica.running_actor() in first for replica in pool.replicas]
            assert sorted(stayed) == [False, True]
            assert pool.score(SEQUENCES) == SCORES
            pool.check("state")
        finally:
            pool.close()


def drain(address: str, node: str) -> None:
    """What the handler of a spot machine's notice runs."""
    command = ["drain-node", f"--address={address}", f"--node-id={node}", "--deadline-remaining-seconds=600"]
    reason = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=its notice came"]
    subprocess.run([sys.executable, "-m", "ray.scripts.scripts", *command, *reason], check=True, timeout=120)


def node_of(replica: Replica) -> str:
    process = replica.running_actor().process
    assert process is not None
    return process.node


def test_replicas_join_with_machines_and_leave_a_machine_that_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    file = tmp_path / "w.safetensors"
    write_tensors(file, [("w", torch.ones(3))])
    with ray_nodes(cpus=1) as nodes:
        spec = VllmSpec(replicas=1, transport="shm", start_seconds=120, answer_seconds=60)
        pool = open_pool(spec, tmp_path, OPTIONS, cluster=ClusterSpec(address=nodes.address), actor_class=StandIn)
        try:
            pool.load([file], manifest_of_files([file]), "state")
            # Two machines have room for two replicas. The third one waits, and the pool works.
            pool.scale(3)
            until(lambda: [replica.loaded_state for replica in pool.replicas] == ["state", "state", None])
            assert count_replicas(pool.replicas) == ActorCount(wanted=3, alive=2)
            assert pool.score(SEQUENCES) == SCORES
            nodes.add_node(num_cpus=1, include_dashboard=False)
            until(lambda: [replica.loaded_state for replica in pool.replicas] == ["state"] * 3)
            # A machine gets its notice. Its replica ends, and the next one waits for a machine.
            head = nodes.head_node.node_id
            notified = next(replica for replica in pool.replicas if node_of(replica) != head)
            actor, node = notified.running_actor(), node_of(notified)
            drain(nodes.address, node)
            until(lambda: notified not in pool.replicas)
            assert actor.ended.done() and count_replicas(pool.replicas) == ActorCount(wanted=3, alive=2)
            assert pool.score(SEQUENCES) == SCORES
            pool.check("state")
            nodes.add_node(num_cpus=1, include_dashboard=False)
            until(lambda: [replica.loaded_state for replica in pool.replicas] == ["state"] * 3)
            machines = {node_of(replica) for replica in pool.replicas}
            assert len(machines) == 3 and node not in machines
            # Those that leave free their machines.
            pool.scale(1)
            until(lambda: len(pool.replicas) == 1)
            assert sum(len(machine.reservations) for machine in take_inventory().nodes) == 1
            assert pool.score(SEQUENCES) == SCORES
            pool.check("state")
        finally:
            pool.close()
