"""One life of a group: from the spawning of its ranks to the end of the first of them."""

from __future__ import annotations

import base64
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from engine.backends.group import messages
from engine.backends.group.head import JOINED, LOST, Head
from engine.backends.group.local_ranks import CULPRIT_SECONDS, Died, Event, LocalRanks, NotSpawned, Said, Tick
from engine.backends.group.messages import (
    Call,
    Launch,
    MasterAt,
    Outcome,
    Progressed,
    RankDeath,
    Ready,
    StartFailed,
)
from engine.backends.group.progress import Activity, Phase
from engine.backends.group.watch import ProgressWatch
from engine.errors import EngineError, PermanentEngineError, WorkerDied

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
    """The group did not come up."""

    def __init__(self, reason: str, error: Exception | None = None, *, nodes_missing: bool = False) -> None:
        super().__init__(reason)
        self.error = error
        """What a rank raised on purpose, which it would raise again."""
        self.nodes_missing = nodes_missing
        """Nothing was started."""


@dataclass(frozen=True, slots=True)
class _Over:
    """The generation has ended; all its local processes are gone."""


@dataclass(frozen=True, slots=True)
class _Joined:
    """One more node is there."""


class Generation:
    """The ranks of one start. Every method but `fail` is for the thread that calls the group."""

    def __init__(self, number: int, plan: Plan, head: Head | None, clock: Callable[[], float]) -> None:
        """`head` when there are other nodes."""
        self.number = number
        self.failure: str | None = None
        """Why it ended."""
        self.ready = False
        self._plan = plan
        self._head = head
        self._launched = False
        self._over = threading.Event()
        self._gone = threading.Event()
        self._events: queue.SimpleQueue[Said | _Over | _Joined] = queue.SimpleQueue()
        self._watch = ProgressWatch(plan.world_size, plan.hang_seconds, clock)
        self._lock = threading.Lock()
        self._local = LocalRanks(
            plan.launches(number, 0),
            plan.env,
            self._on_event,
            tick_seconds=plan.tick_seconds,
            address=plan.master_host,
        )
        if head is not None:
            head.listener = self._on_node

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the local ranks, by rank."""
        return self._local.pids

    def start(self) -> None:
        """Until every rank has built its object. Raises StartFailure, and nothing of it is left then."""
        deadline = time.monotonic() + self._plan.start_seconds
        if self._head is not None:
            self._launch_nodes(self._head, deadline)
        self._local.start()
        ready: set[int] = set()
        failures: dict[int, StartFailed] = {}
        while len(ready) < self._plan.world_size:
            event = self._next(deadline)
            if event is None:
                missing = sorted(set(range(self._plan.world_size)) - ready)
                self.fail(f"not ready after start_seconds={self._plan.start_seconds:g}: ranks {missing}", missing)
            elif isinstance(event, _Over):
                raise self._start_failure(failures)
            elif isinstance(event, Said):
                match event.message:
                    case MasterAt() as master:
                        self._announce(master)
                    case Ready():
                        ready.add(event.rank)
                    case StartFailed() as failed:  # its process ends now, and with it the generation
                        failures[event.rank] = failed
        self.ready = True

    def ask(self, call: Call, listener: Callable[[], None] | None) -> Outcome:
        """Raises WorkerDied when the generation ends before the answer, and is over then."""
        data = pickle.dumps(call, protocol=5)
        with self._lock:
            self._watch.begin()
        try:
            with suppress(OSError):  # rank 0 is gone: the keeper says so, with more to say about it
                self._local.send_bytes(0, data)
            while True:
                event = self._events.get()
                if isinstance(event, _Over):
                    raise WorkerDied(f"{self.failure}\nduring {call.method}; the next call starts the ranks again")
                if not isinstance(event, Said):
                    continue
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
        if self.failure is None and self.ready:
            self._local.expect_end()
            if self._head is not None:
                self._head.send_all({"do": "close", "generation": self.number})
            try:
                self._local.send_bytes(0, b"")
            except OSError:  # rank 0 is gone: nobody hears of it
                self._local.expect_end(False)
        self.fail("it was closed")
        self.wait_gone()

    def wait_gone(self) -> None:
        """After `failure` is set: until no local process of it is left."""
        self._gone.wait()

    def fail(self, reason: str, stuck: list[int] | None = None) -> None:
        """Ends it, from any thread; the first reason counts. `stuck` ranks write their stacks down first."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = reason
        self._over.set()
        try:
            if self._head is not None:
                self._head.send_all({"do": "end", "generation": self.number, "stacks": bool(stuck)})
            if stuck:
                self._local.dump_stacks()
            self._local.kill()
            logs = self._local.logs()
            self.failure += "".join(messages.log_tail(rank, logs[rank]) for rank in (stuck or ())[:2] if rank in logs)
        finally:
            self._gone.set()
            self._events.put(_Over())

    def _next(self, deadline: float) -> Said | _Over | _Joined | None:
        """None: the deadline has passed."""
        try:
            return self._events.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None

    def _launch_nodes(self, head: Head, deadline: float) -> None:
        """Waits for all of them."""
        everyone = set(range(1, self._plan.nodes))
        while missing := everyone - head.joined():
            event = self._next(deadline)
            if event is None:
                host, port = head.address
                self.fail(
                    f"nodes {sorted(missing)} have not joined; run on each of them: "
                    f"ostinato engine join --head {host}:{port} --node-rank N"
                )
            elif isinstance(event, _Over):
                raise StartFailure(self.failure or "", nodes_missing=True)
        self._launched = True
        for node in everyone:
            launches = pickle.dumps(self._plan.launches(self.number, node), protocol=5)
            message = {
                "do": "launch",
                "generation": self.number,
                "launches": base64.b64encode(launches).decode(),
                "env": dict(self._plan.env),
                "tick_seconds": self._plan.tick_seconds,
            }
            head.send(node, message)
        if everyone - head.joined():
            self.fail("a node left while the group was started")

    def _announce(self, master: MasterAt) -> None:
        self._local.announce(master)
        if self._head is not None:
            self._head.send_all(
                {"do": "master", "generation": self.number, "host": master.host, "port": master.port}
            )  # fmt: skip

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Said):
            self._events.put(event)
        elif isinstance(event, NotSpawned):
            self.fail(f"a rank could not be spawned: {event.reason}")
        elif isinstance(event, Died):
            if self._head is not None and not any(death.to_blame for death in event.deaths):
                self._over.wait(CULPRIT_SECONDS)  # another node is about to say who was
            self.fail(messages.blame(list(event.deaths)))
        else:
            with self._lock:
                self._watch.saw(event.activities)
                stuck = self._watch.stuck()
            if stuck:
                self.fail("; ".join(one.describe() for one in stuck), [one.rank for one in stuck])

    def _on_node(self, node: int, message: dict[str, Any]) -> None:
        if message["say"] == JOINED:
            self._events.put(_Joined())
        elif message["say"] == LOST and self._launched:
            self.fail(f"node {node} is gone: {message['reason']}")
        elif message.get("generation") == self.number:
            self._on_event(from_message(message))

    def _start_failure(self, failures: dict[int, StartFailed]) -> StartFailure:
        for rank, failed in sorted(failures.items()):
            if failed.on_purpose:
                return StartFailure(f"rank {rank}: {failed.error}", failed.error)
        return StartFailure(self.failure or "")


def from_message(message: dict[str, Any]) -> Event:
    """What a node reports; nothing of it is unpickled. Raises KeyError or ValueError."""
    match message["say"]:
        case "ready":
            return Said(message["rank"], Ready())
        case "failed":
            kind = {cls.__name__: cls for cls in engine_errors()}.get(message["kind"], PermanentEngineError)
            return Said(message["rank"], StartFailed(kind(message["error"]), on_purpose=bool(message["kind"])))
        case "died":
            return Died(tuple(RankDeath(**{**death, "log": tuple(death["log"])}) for death in message["deaths"]))
        case "tick":
            return Tick(tuple(Activity(**{**one, "phase": Phase(one["phase"])}) for one in message["activities"]))
        case "not_spawned":
            return NotSpawned(message["reason"])
    raise ValueError(f"a node reports {message['say']!r}, which nobody knows")


def engine_errors(root: type[EngineError] = EngineError) -> Iterator[type[EngineError]]:
    """`root` and all its kinds."""
    yield root
    for kind in root.__subclasses__():
        yield from engine_errors(kind)
