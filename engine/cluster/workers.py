"""Worker processes of graders on every machine of the cluster. They take a JSON request and return a JSON answer.

One actor runs on each machine. It holds a pool of worker processes there
(`tasks.graders.running.worker_pool.WorkerPool`, which graders also use without a cluster). A request that crashes or
hangs therefore ends a worker process, and not the actor.
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
from engine.specs.engine import ClusterSpec

logger = logging.getLogger("ostinato.engine")

MAX_PROCESSES = 64
"""Worker processes on one machine, at most."""
MAX_CALLS = 10_000
"""Calls that one actor holds at a time. Each process runs one of them; the others wait."""
DISCOVERY_INTERVAL = 30.0
"""Seconds between two searches for machines that joined the cluster or came back."""
CANCEL_TIMEOUT = 5.0
"""Seconds that an actor may take to cancel a call or to end its worker processes, before it is killed."""


class MachinePool(Protocol):
    """The worker processes on one machine."""

    async def start(self) -> None: ...

    async def call(self, request: Any, *, timeout_seconds: float | None) -> Any: ...

    async def close(self) -> None: ...


@dataclass(eq=False)
class _WorkerMachine:
    """One machine and its actor, which holds the worker processes there."""

    node_id: str
    actor: Any
    processes: int
    """Worker processes of the machine."""
    running: int = 0
    """Calls that the machine has now, including those that wait for a process."""

    @property
    def load(self) -> float:
        """Calls per process."""
        return self.running / self.processes


class ClusterWorkers:
    """A pool of worker processes over all machines of the Ray cluster, one process per CPU that Ray knows of.

    No resources are reserved: graders share the CPUs of a machine with the engine's actors, which are busy at other
    times. A call goes to the machine with the fewest calls per process. Use it in one event loop only.
    """

    def __init__(
        self, make_pool: Callable[..., MachinePool], arguments: Mapping[str, Any], *, spec: Callable[[], ClusterSpec]
    ) -> None:
        """Nothing starts yet.

        Args:
            make_pool: class that every machine can import, called there as `make_pool(processes=…, **arguments)`.
            spec: returns the cluster to connect to, and is called by `start`. A process that is already connected to a
                cluster keeps that connection.
        """
        self._make_pool, self._arguments, self._spec = make_pool, dict(arguments), spec
        self._cluster: Cluster | None = None
        self._machines: dict[str, _WorkerMachine] = {}
        self._discovery: asyncio.Task[None] | None = None
        self._last_discovery = 0.0

    async def start(self) -> None:
        """Starts a worker process on each machine. Machines where this fails are not used.

        Raises:
            EngineBusy: no machine of the cluster has CPUs.
            Exception: `MachinePool.start` failed on all machines; this is the first exception.
        """
        try:
            await self._discover_machines()
        except BaseException:
            await self.close()
            raise

    async def call(self, request: Any, *, timeout_seconds: float | None) -> Any:
        """Returns the answer to `request`. Cancelling the call ends its worker process.

        Raises:
            WorkerDied: the machine or its actor was lost during the call. The next call goes to another machine.
            Exception: as `MachinePool.call` and `start`.
        """
        machine = await self._least_loaded_machine()
        machine.running += 1
        try:
            return await self._result(machine, machine.actor.call.remote(request, timeout_seconds=timeout_seconds))
        finally:
            machine.running -= 1

    async def close(self) -> None:
        """Ends the worker processes, which may run their teardown, and then the actors."""
        if self._discovery is not None:
            self._discovery.cancel()
            await asyncio.wait([self._discovery])
        closings = [asyncio.ensure_future(self._close_pool(machine)) for machine in list(self._machines.values())]
        if closings:
            await asyncio.wait(closings, timeout=2 * CANCEL_TIMEOUT)
        for machine in list(self._machines.values()):
            self._drop(machine)
        if self._cluster is not None:
            self._cluster.release()
            self._cluster = None

    async def _least_loaded_machine(self) -> _WorkerMachine:
        loop = asyncio.get_running_loop()
        is_due = not self._machines or loop.time() > self._last_discovery + DISCOVERY_INTERVAL
        if self._discovery is None and is_due:
            self._discovery = loop.create_task(self._discover_machines())
            self._discovery.add_done_callback(self._finish_discovery)
        # If there are machines, the call does not wait for the discovery.
        if not self._machines and self._discovery is not None:
            await asyncio.shield(self._discovery)
        if not self._machines:
            raise EngineBusy("every machine of the Ray cluster that graded was lost; try again")
        return min(self._machines.values(), key=lambda machine: machine.load)

    def _finish_discovery(self, discovery: asyncio.Task[None]) -> None:
        self._discovery = None
        if not discovery.cancelled() and (error := discovery.exception()) is not None:
            logger.warning("graders found no machine of the Ray cluster that works: %s", error)

    async def _discover_machines(self) -> None:
        """Starts an actor on each machine that has none yet."""
        import ray

        if self._cluster is None:
            self._cluster = await asyncio.to_thread(connect, self._spec(), any_cluster=True)
        self._last_discovery = asyncio.get_running_loop().time()

        # Start on all new machines at once. One that fails must not keep the others from being used.
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
        new_nodes = [node for node in nodes if node["NodeID"] not in self._machines]
        outcomes = await asyncio.gather(*(self._start_machine(node) for node in new_nodes), return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]

        # Raise if no machine works, and warn if some do not.
        if not self._machines and errors:
            raise errors[0]
        if not self._machines:
            raise EngineBusy(
                "workers='cluster' was given for a grader, and no machine of the Ray cluster has CPUs for it; add a "
                "machine with CPUs (ray start --num-cpus), or grade with workers='local'"
            )
        for error in errors:
            logger.warning("graders do not use a machine of the Ray cluster: %s", error)

    async def _start_machine(self, node: Mapping[str, Any]) -> None:
        """Starts the actor of one machine and its first worker process."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        assert self._cluster is not None
        cpus = int(node["Resources"]["CPU"])
        if self._cluster.is_private:  # a private Ray is told a larger number than there are
            cpus = os.cpu_count() or 1
        processes = min(cpus, MAX_PROCESSES)
        # soft=False: Ray must not start the actor on another machine if this one is lost.
        actor_class = ray.remote(self._make_pool).options(
            num_cpus=0,
            max_concurrency=MAX_CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )
        actor = actor_class.remote(**self._arguments, processes=processes)
        machine = _WorkerMachine(node["NodeID"], actor, processes)
        try:
            await self._result(machine, machine.actor.start.remote())
        except BaseException:
            self._drop(machine)
            raise
        self._machines[machine.node_id] = machine

    async def _result(self, machine: _WorkerMachine, reference: Any) -> Any:
        """Returns the result of a remote call, or raises its exception."""
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

    async def _cancel(self, machine: _WorkerMachine, reference: Any) -> None:
        """Cancels the call in the actor, which ends its worker process. Kills an actor that does not react."""
        import ray

        ray.cancel(reference)
        cancelled = asyncio.wrap_future(reference.future())
        # Reading the exception prevents asyncio's warning about an exception that was never retrieved.
        cancelled.add_done_callback(lambda future: future.cancelled() or future.exception())
        done, _ = await asyncio.wait([cancelled], timeout=CANCEL_TIMEOUT)
        if not done:
            self._drop(machine)

    async def _close_pool(self, machine: _WorkerMachine) -> None:
        import ray

        with contextlib.suppress(ray.exceptions.RayError):  # the actor is killed next
            await machine.actor.close.remote()

    def _drop(self, machine: _WorkerMachine) -> None:
        """Removes the machine, and kills its actor."""
        import ray

        if self._machines.get(machine.node_id) is machine:
            del self._machines[machine.node_id]
        ray.kill(machine.actor)
