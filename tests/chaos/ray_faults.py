"""A Ray cluster of two nodes on this machine for the engine of a world, and faults of the cluster.

Each node is a raylet with its workers, in processes of their own. What is lost comes back as on a managed cluster: a
node is replaced after a while, and a cluster whose head was lost is started again at the same address.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import httpx
import psutil

from tests.chaos.faults import Fault, Pause
from tests.chaos.processes import free_port
from tests.fixtures.ray_nodes import prepare_ray

if TYPE_CHECKING:
    from tests.chaos.world import World

RANK, REPLICA = "ray::Rank", "ray::Replica"
"""Beginnings of the titles of the processes that train and that sample."""
NODE_STARTS = 3
"""How often a node is started before the world is given up."""
REPLACEMENT_SECONDS = 2.0
"""How long a lost node stays away."""
LEAVE_SECONDS = 5.0
"""How long an engine may take to end by itself after the head was lost, before it is killed and started again."""


class RayNodes:
    """Head and one more node, each with `cpus` CPUs. The engine connects to the head, and actors run on both."""

    def __init__(self, cpus: int, environment: dict[str, str]) -> None:
        """`environment` are variables of the actors' processes."""
        prepare_ray()
        os.environ.update(environment)  # Ray's processes get them from this one
        self.port, self._cpus = free_port(), cpus
        self._cluster: Any = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> RayNodes:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": self._cpus, "include_dashboard": False, "gcs_server_port": self.port}

        def start_head() -> None:
            for process in self.processes("gcs_server") + self.processes("raylet"):  # of an attempt that failed
                process.kill()
            self._cluster = Cluster(initialize_head=True, head_node_args=head)

        _try_to_start(start_head)
        self.add_node()
        return self

    def add_node(self) -> None:
        _try_to_start(lambda: self._cluster.add_node(num_cpus=self._cpus))

    @property
    def has_node(self) -> bool:
        """Whether there is a node besides the head."""
        return bool(self._cluster.worker_nodes)

    def lose_node(self) -> None:
        """Kills the raylet of the node that is not the head, and with it its workers."""
        [node] = self._cluster.worker_nodes
        self._cluster.remove_node(node, allow_graceful=False)

    def lose_head(self) -> None:
        self._cluster.remove_node(self._cluster.head_node, allow_graceful=False)

    def end(self) -> None:
        for node in list(self._cluster.worker_nodes):
            self._cluster.remove_node(node, allow_graceful=False)
        if self._cluster.head_node is not None:
            self._cluster.remove_node(self._cluster.head_node, allow_graceful=False)

    def processes(self, title: str) -> list[psutil.Process]:
        """The processes of the cluster whose title begins so."""
        processes = []
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.name().startswith(title) and child.status() != psutil.STATUS_ZOMBIE:
                    processes.append(child)
        return sorted(processes, key=lambda child: child.pid)


def _try_to_start(start: Callable[[], object]) -> None:
    for attempt in range(NODE_STARTS):
        try:
            start()
        except Exception:  # Ray has no class of its own for a node that took longer than 30 s to start
            if attempt == NODE_STARTS - 1:
                raise
        else:
            return


def _one_of(world: World, title: str) -> psutil.Process:
    assert world.ray is not None
    return world.random.choice(world.ray.processes(title))


def _kill(title: str) -> Callable[[World, Fault], Iterator[Pause]]:
    def kill(world: World, fault: Fault) -> Iterator[Pause]:
        _one_of(world, title).send_signal(signal.SIGKILL)
        yield 0.0

    return kill


def _freeze(title: str) -> Callable[[World, Fault], Iterator[Pause]]:
    def freeze(world: World, fault: Fault) -> Iterator[Pause]:
        """For good: the engine finds that it hangs, and replaces it."""
        frozen = _one_of(world, title)
        frozen.send_signal(signal.SIGSTOP)
        yield lambda: world.over or not frozen.is_running() or frozen.status() == psutil.STATUS_ZOMBIE

    return freeze


def lose_node(world: World, fault: Fault) -> Iterator[Pause]:
    ray = world.ray
    assert ray is not None
    # the fault before may have taken the node
    yield lambda: world.over or ray.has_node
    if not ray.has_node:
        return
    ray.lose_node()
    yield REPLACEMENT_SECONDS
    ray.add_node()


def lose_head(world: World, fault: Fault) -> Iterator[Pause]:
    """The cluster is started again at its address, and so is the engine."""
    assert world.ray is not None
    engine = world.engine
    world.ray.lose_head()
    yield LEAVE_SECONDS
    world.ray.end()
    world.ray.start()
    engine.signal(signal.SIGKILL)
    yield 0.0


def leave_and_join(world: World, fault: Fault) -> Iterator[Pause]:
    """One of the two replicas leaves the pool, and another one joins after two more steps."""
    _scale(world, 1)
    yield world.moved_on(fault.run)
    _scale(world, 2)


def _scale(world: World, samplers: int) -> None:
    """Has no effect while the engine is away. It comes back with all replicas."""
    url = f"http://127.0.0.1:{world.engine_line.upstream_port}/v1/scale_samplers"
    with contextlib.suppress(httpx.TransportError):
        answer = httpx.post(
            url, params={"wait": 0}, json={"samplers": samplers}, headers={"X-Request-Id": uuid4().hex},
            timeout=5, trust_env=False,
        )  # fmt: skip
        assert answer.is_success or answer.status_code == httpx.codes.SERVICE_UNAVAILABLE, answer.text


RAY_KINDS: dict[str, Callable[[World, Fault], Iterator[Pause]]] = {
    "kill -9 rank": _kill(RANK),
    "freeze rank": _freeze(RANK),
    "kill -9 replica": _kill(REPLICA),
    "freeze replica": _freeze(REPLICA),
    "replica leaves and joins": leave_and_join,
    "lose node": lose_node,
    "lose head": lose_head,
}
OF_RANK = frozenset({"kill -9 rank", "freeze rank"})
OF_REPLICA = frozenset({"kill -9 replica", "freeze replica", "replica leaves and joins"})


def can_happen(world: World, fault: Fault) -> bool:
    """Whether the fault has a target now."""
    assert world.ray is not None
    if fault.kind in OF_RANK:
        return bool(world.ray.processes(RANK))
    if fault.kind in OF_REPLICA:
        return bool(world.ray.processes(REPLICA))
    return True
