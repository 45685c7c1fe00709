"""Worker processes on every machine of the cluster, for graders: a JSON request in, a JSON answer out.

One actor runs on each machine. It holds a pool of worker processes there
(`tasks.graders.running.worker_pool.WorkerPool`, which graders use on one machine, too), so a request that crashes or
hangs ends a worker process and not the actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from engine.cluster.connection import Cluster, connect
from engine.errors import EngineBusy, WorkerDied
from engine.specs.cluster import ClusterSpec

logger = logging.getLogger("ostinato.engine")

MOST_PROCESSES = 64
"""Worker processes on one machine, at most."""
MOST_CALLS = 10_000
"""Calls that one actor holds at a time; all but one per process wait."""
DISCOVERY_INTERVAL = 30.0
"""How often a call looks whether machines have joined the cluster, or a lost one is back."""
CANCEL_SECONDS = 5.0
"""What an actor may take to give up a call, and to end its worker processes, before it is killed."""


class Pool(Protocol):
    """Worker processes on one machine."""

    async def start(self) -> None: ...

    async def call(self, request: Any, *, timeout_seconds: float | None) -> Any: ...

    async def close(self) -> None: ...


@dataclass(eq=False)
class _Machine:
    node_id: str
    actor: Any
    processes: int
    running: int = 0
    """Calls that it has now, those that wait for a process included."""

    @property
    def load(self) -> float:
        return self.running / self.processes


class ClusterWorkers:
    """A `Pool` over all machines of the Ray cluster, with as many processes on each as Ray says that it has CPUs.

    No resources are reserved: graders share the CPUs of a machine with the engine's actors, whose turn it is at other
    times. A call goes to the machine with the fewest calls per process. Use it in one event loop.
    """

    def __init__(
        self, make_pool: Callable[..., Pool], arguments: Mapping[str, Any], *, spec: Callable[[], ClusterSpec]
    ) -> None:
        """Each machine calls `make_pool(processes=…, **arguments)`, a class that it can import. `spec` is asked at
        `start`; a process that is connected to a cluster already keeps that one."""
        self._make_pool, self._arguments, self._spec = make_pool, dict(arguments), spec
        self._cluster: Cluster | None = None
        self._machines: dict[str, _Machine] = {}
        self._looking: asyncio.Task[None] | None = None
        self._looked = 0.0

    async def start(self) -> None:
        """Starts a worker process on each machine. Machines where that fails are left out.

        Raises:
            EngineBusy: no machine of the cluster has CPUs.
            Exception: what `Pool.start` raised on a machine, if it raised on all of them.
        """
        try:
            await self._look_for_machines()
        except BaseException:
            await self.close()
            raise

    async def call(self, request: Any, *, timeout_seconds: float | None) -> Any:
        """The answer to `request`. A cancelled call ends its worker process.

        Raises:
            WorkerDied: the machine or its actor was lost during the call. Another call goes to another machine.
            Exception: what `Pool.call` and `start` raise.
        """
        machine = await self._least_loaded()
        machine.running += 1
        try:
            return await self._answer(machine, machine.actor.call.remote(request, timeout_seconds=timeout_seconds))
        finally:
            machine.running -= 1

    async def close(self) -> None:
        """Ends the worker processes, which may tear down what they set up, and the actors."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        endings = [asyncio.ensure_future(self._end(machine)) for machine in list(self._machines.values())]
        if endings:
            await asyncio.wait(endings, timeout=2 * CANCEL_SECONDS)
        for machine in list(self._machines.values()):
            self._drop(machine)
        if self._cluster is not None:
            self._cluster.release()
            self._cluster = None

    async def _least_loaded(self) -> _Machine:
        loop = asyncio.get_running_loop()
        if self._looking is None and (not self._machines or loop.time() > self._looked + DISCOVERY_INTERVAL):
            self._looking = loop.create_task(self._look_for_machines())
            self._looking.add_done_callback(self._end_of_look)
        if not self._machines and self._looking is not None:
            await asyncio.shield(self._looking)
        if not self._machines:
            raise EngineBusy("every machine of the Ray cluster that graded was lost; try again")
        return min(self._machines.values(), key=lambda machine: machine.load)

    def _end_of_look(self, looking: asyncio.Task[None]) -> None:
        self._looking = None
        if not looking.cancelled() and (error := looking.exception()) is not None:
            logger.warning("graders found no machine of the Ray cluster that works: %s", error)

    async def _look_for_machines(self) -> None:
        """Starts an actor on each machine that has none yet."""
        import ray

        if self._cluster is None:
            self._cluster = await asyncio.to_thread(connect, self._spec(), any_cluster=True)
        self._looked = asyncio.get_running_loop().time()
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
        new = [node for node in nodes if node["NodeID"] not in self._machines]
        outcomes = await asyncio.gather(*(self._begin(node) for node in new), return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if not self._machines and errors:
            raise errors[0]
        if not self._machines:
            raise EngineBusy(
                "workers='cluster' was given for a grader, and no machine of the Ray cluster has CPUs for it; add a "
                "machine with CPUs (ray start --num-cpus), or grade with workers='local'"
            )
        for error in errors:
            logger.warning("graders leave out a machine of the Ray cluster: %s", error)

    async def _begin(self, node: Mapping[str, Any]) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        assert self._cluster is not None
        cpus = int(node["Resources"]["CPU"])
        if self._cluster.private:  # which was told a larger number
            cpus = os.cpu_count() or 1
        processes = min(cpus, MOST_PROCESSES)
        placed = ray.remote(self._make_pool).options(
            num_cpus=0,
            max_concurrency=MOST_CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )
        machine = _Machine(node["NodeID"], placed.remote(**self._arguments, processes=processes), processes)
        try:
            await self._answer(machine, machine.actor.start.remote())
        except BaseException:
            self._drop(machine)
            raise
        self._machines[machine.node_id] = machine

    async def _answer(self, machine: _Machine, reference: Any) -> Any:
        """What the call returned or raised on the machine."""
        import ray

        try:
            return await reference
        except asyncio.CancelledError:
            await self._cancel(machine, reference)
            raise
        except ray.exceptions.RayTaskError as error:
            raise error.cause or error from None
        except ray.exceptions.RayError as error:
            self._drop(machine)
            first_line = str(error).partition("\n")[0]
            raise WorkerDied(f"was lost with its machine or its actor: {type(error).__name__}: {first_line}") from error

    async def _cancel(self, machine: _Machine, reference: Any) -> None:
        """Has the actor give up the call, which ends its worker process. An actor that does not answer is killed."""
        import ray

        ray.cancel(reference)
        given_up = asyncio.wrap_future(reference.future())
        given_up.add_done_callback(lambda future: future.cancelled() or future.exception())  # nobody reads it
        done, _ = await asyncio.wait([given_up], timeout=CANCEL_SECONDS)
        if not done:
            self._drop(machine)

    async def _end(self, machine: _Machine) -> None:
        import ray

        with contextlib.suppress(ray.exceptions.RayError):  # it is killed next
            await machine.actor.close.remote()

    def _drop(self, machine: _Machine) -> None:
        """Uses the machine no longer, and kills its actor."""
        import ray

        if self._machines.get(machine.node_id) is machine:
            del self._machines[machine.node_id]
        ray.kill(machine.actor)
