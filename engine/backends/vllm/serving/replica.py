"""One replica as the pool sees it, and the loop that keeps it running: starts its process, loads the last weights into
it, and replaces it when it ends. Everything here runs in the pool's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from engine.cluster.actors import ActorHandle
from engine.errors import WorkerDied
from engine.protocol import ActorCount

log = logging.getLogger(__name__)

ReplicaPhase = Literal["starting", "up", "draining", "down", "closed"]

FIRST_DELAY, LONGEST_DELAY = 0.5, 60.0
"""Seconds before a replica that ended is started again; they double with every start that failed."""


@dataclass(eq=False)
class Replica:
    """`keep` is its one task. An `ActorHandle` is one start of its process: whoever makes several calls that belong
    together makes them to one actor, so that none of them reaches a later start."""

    name: str
    make: Callable[[], ActorHandle]
    """Starts a process of ReplicaActor, without vLLM yet."""
    config: Mapping[str, str]
    """The model's JSON files, by name."""
    on_up: Callable[[Replica], Awaitable[None]]
    """Called each time vLLM runs, before the replica counts as up. What it raises is a failed start."""
    start_seconds: float
    phase: ReplicaPhase = "starting"
    actor: ActorHandle | None = None
    """The process that runs now; None where none does."""
    starts: int = 0
    failures: int = 0
    """Starts in a row that did not come up."""
    error: str = ""
    """Why it is not up."""
    held: str | None = None
    """State of the weights that it was proven to hold."""
    workers: list[str] = field(default_factory=list)
    """Which starts of its workers proved it: an identifier that each worker makes when it starts."""
    adapters: set[str] = field(default_factory=set)
    outstanding: int = 0
    """Tokens, at most, of what it was given and has not finished."""
    needed: int = 0
    """Number of running calls in which this replica has a share. If it ended, its share would be done again."""

    def running(self) -> ActorHandle:
        """Raises WorkerDied where no process runs."""
        if self.actor is None:
            raise WorkerDied(f"vLLM {self.name} is {self.phase}: {self.error}")
        return self.actor

    async def keep(self) -> None:
        while self.phase != "closed":
            self.enter("starting")
            self.starts += 1
            actor: ActorHandle | None = None
            try:
                actor = self.actor = self.make()
                await self._come_up(actor)
                self.error = f"{actor.name} ended: {await actor.ended}{actor.log_tail()}"
            except Exception as error:  # noqa: BLE001 - the boundary of a start: the next one is tried, whatever it was
                self.failures += 1
                self.error = f"{type(error).__name__}: {error}{actor.log_tail() if actor is not None else ''}"
            await self.down()
            if actor is not None:
                await actor.kill()  # where a call has taken it down already, this waits until it is gone
            if self.phase in ("closed", "draining"):
                self.enter("closed")
                return
            delay = min(LONGEST_DELAY, FIRST_DELAY * 2 ** min(self.failures, 10))
            log.warning("%s; it is started again in %.1f s", self.error.splitlines()[0], delay)
            self.enter("down")
            await asyncio.sleep(delay)

    async def _come_up(self, actor: ActorHandle) -> None:
        try:
            await actor.wait_until_running(self.start_seconds)
            await actor.call("start", self.config, timeout=self.start_seconds)
        except WorkerDied as error:
            raise WorkerDied(f"{error} while it started (sampler.start_seconds is {self.start_seconds:.0f})") from error
        await self.on_up(self)
        self.failures = 0
        self.enter("up")

    async def down(self) -> None:
        """It holds nothing any more, and its processes are gone."""
        actor, self.actor = self.actor, None
        self.held = None
        self.workers.clear()
        self.adapters.clear()
        if actor is not None:
            await actor.kill()

    async def fail(self, actor: ActorHandle | None) -> None:
        """A call to `actor` failed: whatever is left of that start ends, and the next begins."""
        if actor is self.actor and self.phase in ("up", "draining"):
            self.enter("down" if self.phase == "up" else "closed")
            await self.down()

    async def close(self) -> None:
        self.enter("closed")
        await self.down()

    def enter(self, phase: ReplicaPhase) -> None:
        if self.phase != "closed":
            self.phase = phase


def count_replicas(replicas: Sequence[Replica]) -> ActorCount:
    """How many there are, are up, and were started again."""
    up = sum(replica.phase == "up" for replica in replicas)
    restarts = sum(max(0, replica.starts - 1) for replica in replicas)
    return ActorCount(wanted=len(replicas), alive=up, restarts=restarts)
