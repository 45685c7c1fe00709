"""One replica as the pool sees it, and the task that keeps it running: it starts the process, loads the last weights
into it, and replaces it when it ends. Everything here runs in the pool's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from engine.cluster.actors import ActorHandle
from engine.errors import WorkerDied
from engine.protocol import ActorCount

log = logging.getLogger(__name__)

ReplicaPhase = Literal["starting", "up", "draining", "down", "closed"]

POLL_INTERVAL = 0.05
"""Seconds between two checks of a condition."""
FIRST_DELAY, LONGEST_DELAY = 0.5, 60.0
"""Seconds before a replica that ended is started again. They double with every failed start."""


@dataclass(eq=False)
class Replica:
    """A copy of vLLM in a process of its own. The task `supervise` starts the process and replaces it when it ends.

    An `ActorHandle` stands for one start of the process. Calls that depend on each other must use the same handle, so
    that none of them reaches a later start.
    """

    name: str
    start_process: Callable[[], ActorHandle]
    """Starts a process of ReplicaActor, without vLLM yet."""
    config: Mapping[str, str]
    """The model's JSON files, by name."""
    on_up: OnUp
    """Called each time vLLM runs, before the phase becomes "up". An exception makes it a failed start."""
    start_seconds: float
    """Seconds that the process may take to run, and vLLM to start in it."""
    release: Callable[[], None] = lambda: None
    """Frees the resources of the process. Called once, after its end, if the replica leaves its pool."""
    leaving: bool = False
    """Whether it is to end: it is one too many, or its machine will be taken away. In the phase "draining" it gets no
    new work."""
    phase: ReplicaPhase = "starting"
    actor: ActorHandle | None = None
    """The process that runs now, if there is one."""
    starts: int = 0
    failures: int = 0
    """Failed starts in a row."""
    error: str = ""
    """Why the replica is not up."""
    loaded_state: str | None = None
    """State of the weights that the replica was proven to hold."""
    worker_ids: list[str] = field(default_factory=list)
    """Identifiers of the vLLM workers that proved it. A worker makes a new one whenever it starts."""
    adapters: set[str] = field(default_factory=set)
    """Names of the LoRA adapters that the replica holds."""
    outstanding_tokens: int = 0
    """Upper bound of the tokens of its unfinished work."""
    active_calls: int = 0
    """Number of running calls for which this replica does work. If it ended, that work would have to be repeated."""
    group_calls: int = 0
    """Number of running calls to all replicas, such as loads and checks, that this replica takes part in."""

    def running_actor(self) -> ActorHandle:
        """The process that runs now. Raises WorkerDied if there is none."""
        if self.actor is None:
            raise WorkerDied(f"vLLM {self.name} is {self.phase}: {self.error}")
        return self.actor

    async def supervise(self) -> None:
        """Starts the process, and starts it again whenever it ends, until the replica is closed."""
        while self.phase != "closed":
            # Run the process until it ends.
            self.set_phase("starting")
            self.starts += 1
            actor: ActorHandle | None = None
            try:
                actor = self.actor = self.start_process()
                await self._start_vllm(actor)
                self.error = f"{actor.name} ended: {await actor.ended}{actor.log_tail()}"
            except Exception as error:  # noqa: BLE001 - the boundary of a start: whatever it raised, the next is tried
                self.failures += 1
                self.error = f"{type(error).__name__}: {error}{actor.log_tail() if actor is not None else ''}"
            await self.stop_process()
            if actor is not None:
                await actor.kill()  # if a call has stopped it already, this waits until it is gone
            # Start it again after a delay, unless the replica is closed or drains.
            if self.phase in ("closed", "draining"):
                self.set_phase("closed")
                return
            delay = min(LONGEST_DELAY, FIRST_DELAY * 2 ** min(self.failures, 10))
            log.warning("%s; it is started again in %.1f s", self.error.splitlines()[0], delay)
            self.set_phase("down")
            await asyncio.sleep(delay)

    async def _start_vllm(self, actor: ActorHandle) -> None:
        try:
            await actor.wait_until_running(self.start_seconds)
            await actor.call("start", self.config, timeout=self.start_seconds)
        except WorkerDied as error:
            raise WorkerDied(f"{error} while it started (sampler.start_seconds is {self.start_seconds:.0f})") from error
        await self.on_up(self)
        self.failures, self.error = 0, ""
        self.set_phase("up")

    async def stop_process(self) -> None:
        """Kills the process, and forgets what it held."""
        actor, self.actor = self.actor, None
        self.loaded_state = None
        self.worker_ids.clear()
        self.adapters.clear()
        if actor is not None:
            await actor.kill()

    async def fail(self, actor: ActorHandle | None) -> None:
        """Kills the process after a call to `actor` failed. Does nothing if the replica has another process by now."""
        if actor is self.actor and self.phase in ("up", "draining"):
            self.set_phase("down" if self.phase == "up" else "closed")
            await self.stop_process()

    async def close(self) -> None:
        """Kills the process for good."""
        self.set_phase("closed")
        await self.stop_process()

    def set_phase(self, phase: ReplicaPhase) -> None:
        """Changes the phase. A closed replica stays closed."""
        if self.phase != "closed":
            self.phase = phase


OnUp = Callable[[Replica], Awaitable[None]]


class ReplicaSource(Protocol):
    """Makes the replicas of one pool. Its methods block for milliseconds at most."""

    def make(self, on_up: OnUp) -> Replica:
        """Returns another replica, which is not started. It waits for its resources when it starts. Raises WorkerDied
        if the cluster is lost."""
        ...

    def check_room(self, count: int) -> None:
        """Raises BadSpec if so many replicas can never run."""
        ...

    def draining_nodes(self) -> Collection[str]:
        """Ray's ids of the machines that will be taken away. Called in any thread."""
        ...

    def is_connected(self) -> bool:
        """Whether the cluster of the replicas is still there."""
        ...

    def close(self) -> None:
        """Frees all resources. Called after all replicas have ended."""
        ...


def count_replicas(replicas: Sequence[Replica]) -> ActorCount:
    """Numbers of replicas that stay, of those of them that are up, of all restarts, and of replicas that leave."""
    staying = staying_replicas(replicas)
    restarts = sum(max(0, replica.starts - 1) for replica in replicas)
    leaving = len(replicas) - len(staying)
    return ActorCount(wanted=len(staying), alive=len(replicas_up(staying)), restarts=restarts, leaving=leaving)


def staying_replicas(replicas: Sequence[Replica]) -> list[Replica]:
    return [replica for replica in replicas if not replica.leaving]


def replicas_up(replicas: Sequence[Replica]) -> list[Replica]:
    return [replica for replica in replicas if replica.phase == "up"]


def holders_of_state(replicas: Sequence[Replica], state: str) -> list[Replica]:
    """The replicas that were proven to hold the weights of this state, in any phase."""
    return [replica for replica in replicas if replica.loaded_state == state]


def holders_of_adapter(replicas: Sequence[Replica], name: str) -> list[Replica]:
    """The replicas that hold this LoRA adapter, in any phase."""
    return [replica for replica in replicas if name in replica.adapters]


ReplicaCall = Callable[[Replica], Awaitable[Any]]


@contextmanager
def in_use(replicas: Sequence[Replica]) -> Iterator[None]:
    """Within the block, none of these replicas ends because it leaves."""
    for replica in replicas:
        replica.group_calls += 1
    try:
        yield
    finally:
        for replica in replicas:
            replica.group_calls -= 1


async def call_all(replicas: Sequence[Replica], call: ReplicaCall) -> None:
    """Runs one call per replica, all at once. Raises the first error after all calls have ended."""
    with in_use(replicas):
        outcomes = await asyncio.gather(*map(call, replicas), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


async def call_surviving(replicas: Sequence[Replica], call: ReplicaCall) -> None:
    """As `call_all`, but the death of a replica is no error: the replica is restarted, and holds nothing then."""

    async def call_or_fail(replica: Replica) -> None:
        # The process before the call: `fail` must not end a later one.
        actor = replica.actor
        try:
            await call(replica)
        except WorkerDied as error:
            log.warning("%s", error)
            await replica.fail(actor)

    await call_all(replicas, call_or_fail)


async def wait_until(condition: Callable[[], bool], replicas: Sequence[Replica]) -> None:
    """Waits for a condition that a starting replica can fulfil. Raises WorkerDied after the start timeout."""
    timeout = max(replica.start_seconds for replica in replicas)
    for _ in range(int(timeout / POLL_INTERVAL)):
        if condition():
            return
        await asyncio.sleep(POLL_INTERVAL)
    description = describe_replicas(replicas)
    raise WorkerDied(f"no replica was ready within {timeout:.0f} s (sampler.start_seconds): {description}")


def describe_replicas(replicas: Sequence[Replica]) -> str:
    """The phase and error of each replica, for an error message."""
    return "; ".join(f"{replica.name} is {replica.phase} {replica.error}".strip() for replica in replicas)
