"""One life of a group: from the spawning of its ranks to the end of the first of them."""

from __future__ import annotations

import pickle
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.backends.group import messages
from engine.backends.group.local_ranks import Died, Event, LocalRanks, NotSpawned, Said
from engine.backends.group.messages import Call, Launch, MasterAt, Outcome, Progressed, Ready, StartFailed
from engine.backends.group.watch import ProgressWatch
from engine.errors import WorkerDied

CLOSE_SECONDS = 10.0
"""How long the ranks may take to close what they hold, before they are killed."""
COLLECTIVE_MARGIN = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What every generation of a group has in common."""

    target: str
    options: dict[str, Any]
    ranks: int
    """Per node."""
    nodes: int
    master_host: str
    start_seconds: float
    hang_seconds: float
    env: Mapping[str, str]

    @property
    def world_size(self) -> int:
        return self.ranks * self.nodes

    @property
    def tick_seconds(self) -> float:
        return min(0.2, self.hang_seconds / 10)

    def launches(self, generation: int, node: int) -> list[Launch]:
        """One per rank of a node."""
        return [
            Launch(
                target=self.target,
                options=self.options,
                generation=generation,
                rank=node * self.ranks + local,
                world_size=self.world_size,
                local_rank=local,
                local_world_size=self.ranks,
                master_host=self.master_host,
                start_seconds=self.start_seconds,
                collective_seconds=self.hang_seconds + COLLECTIVE_MARGIN,
            )
            for local in range(self.ranks)
        ]


class StartFailure(Exception):
    """The group did not come up. `error`: what a rank raised on purpose, which it would raise again."""

    def __init__(self, reason: str, error: Exception | None = None) -> None:
        super().__init__(reason)
        self.error = error


@dataclass(frozen=True, slots=True)
class _Over:
    """The generation has ended; all its local processes are gone."""


class Generation:
    """The ranks of one start. Every method but `fail` is for the thread that calls the group."""

    def __init__(self, number: int, plan: Plan, clock: Callable[[], float]) -> None:
        self.number = number
        self.failure: str | None = None
        """Why it ended."""
        self._plan = plan
        self._events: queue.SimpleQueue[Said | _Over] = queue.SimpleQueue()
        self._watch = ProgressWatch(plan.world_size, plan.hang_seconds, clock)
        self._lock = threading.Lock()
        self._local = LocalRanks(
            plan.launches(number, 0), plan.env, self._on_event, tick_seconds=plan.tick_seconds
        )  # fmt: skip

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the local ranks, by rank."""
        return self._local.pids

    def start(self) -> None:
        """Until every rank has built its object. Raises StartFailure, and nothing of it is left then."""
        deadline = time.monotonic() + self._plan.start_seconds
        self._local.start()
        ready: set[int] = set()
        failures: dict[int, StartFailed] = {}
        while len(ready) < self._plan.world_size:
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                missing = sorted(set(range(self._plan.world_size)) - ready)
                self.fail(f"not ready after start_seconds={self._plan.start_seconds:g}: ranks {missing}", missing)
                continue
            if isinstance(event, _Over):
                raise self._start_failure(failures)
            match event.message:
                case MasterAt() as master:
                    self._announce(master)
                case Ready():
                    ready.add(event.rank)
                case StartFailed() as failed:  # its process ends now, and with it the generation
                    failures[event.rank] = failed

    def ask(self, call: Call, listener: Callable[[], None] | None) -> Outcome:
        """Raises WorkerDied when the generation ends before the answer, and is over then."""
        data = pickle.dumps(call, protocol=5)
        with self._lock:
            self._watch.begin()
        try:
            try:
                self._local.send_bytes(0, data)
            except OSError:
                pass  # rank 0 is gone: the keeper says so, with more to say about it
            while True:
                event = self._events.get()
                if isinstance(event, _Over):
                    raise WorkerDied(f"{self.failure}\nduring {call.method}; the next call starts the ranks again")
                if isinstance(event.message, Progressed) and listener is not None:
                    listener()
                if isinstance(event.message, Outcome):
                    return event.message
        except BaseException as error:
            if not isinstance(error, WorkerDied):  # a listener's, or Ctrl-C: the ranks are in the middle of a call
                self.fail(f"{type(error).__name__} in the engine during {call.method}")
            raise
        finally:
            with self._lock:
                self._watch.end()

    def stop(self) -> None:
        """Lets the ranks close what they hold, between calls; then nothing of it is left."""
        if self.failure is None:
            try:
                self._local.send_bytes(0, b"")
                self._local.wait(CLOSE_SECONDS)
            except OSError:
                pass  # rank 0 is gone already
        self.fail("it was closed")

    def fail(self, reason: str, stuck: list[int] | None = None) -> None:
        """Ends it, from any thread; the first reason counts. `stuck` ranks write their stacks down first."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = reason
        if stuck:
            self._local.dump_stacks()
        self._local.kill()
        if stuck:
            logs = self._local.logs()
            self.failure += "".join(messages.log_tail(rank, logs[rank]) for rank in stuck[:2] if rank in logs)
        self._events.put(_Over())

    def _announce(self, master: MasterAt) -> None:
        for rank in range(1, self._plan.ranks):
            try:
                self._local.send(rank, master)
            except OSError:
                return  # it is gone: the keeper says so

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Said):
            self._events.put(event)
        elif isinstance(event, NotSpawned):
            self.fail(f"a rank could not be spawned: {event.reason}")
        elif isinstance(event, Died):
            self.fail(messages.blame(list(event.deaths)))
        else:
            with self._lock:
                self._watch.saw(event.activities)
                stuck = self._watch.stuck()
            if stuck:
                self.fail("; ".join(one.describe() for one in stuck), [one.rank for one in stuck])

    def _start_failure(self, failures: dict[int, StartFailed]) -> StartFailure:
        for rank, failed in sorted(failures.items()):
            if failed.on_purpose:
                return StartFailure(f"rank {rank}: {failed.error}", failed.error)
        return StartFailure(self.failure or "")
