"""The process group that a trainer of several ranks runs in: started at the first call, watched, started again.

    group = Group("package.module:Trainer", {"folder": "…"}, ranks=2, start_seconds=300, hang_seconds=1800)
    group.call("update", samples)      # Trainer.update(samples) on every rank; rank 0's result

Every rank builds `Trainer(options, rank=…, world_size=…, local_rank=…)` once torch.distributed is initialised, gloo on
the CPU and NCCL on GPUs. What it does for longer than moments calls `progress.progress()` now and then.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from engine.backends.group.generation import Generation, Plan, StartFailure
from engine.backends.group.head import Head
from engine.backends.group.messages import TOKEN_ENV, Call
from engine.errors import BadSpec, EngineError, PermanentEngineError, WorkerDied

STARTS = 3
"""Starts in a row that may fail before the next failure is called permanent."""
MAX_BACKOFF = 30.0
SILENCE_SECONDS = 20.0
"""A node that says nothing for so long is lost."""
MIN_TOKEN = 16
"""Characters: a shorter token is guessed."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A call that some ranks ran to the end and others did not: what it was to change is undefined."""

    method: str
    finished: tuple[int, ...]
    failed: tuple[int, ...]


class Group:
    """N ranks, as one object. Calls come from one thread at a time; `alive` and `close` from any."""

    def __init__(  # noqa: PLR0913 - a constructor like a config
        self,
        target: str,
        options: dict[str, Any],
        *,
        ranks: int,
        nodes: int = 1,
        listen: str = "127.0.0.1:0",
        start_seconds: float,
        hang_seconds: float,
        env: Mapping[str, str] = {},
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ranks` per node. With several nodes it listens for the others from now on.

        Raises BadSpec for an address that is none, that is taken, or that others reach while no token is set.
        """
        self.generation = 0
        """Grows at each start, also of one that fails. What the ranks of an older one held is gone."""
        self.disagreement: Disagreement | None = None
        """Of this generation's calls, the last one that ended differently on different ranks."""
        host, port = parse_address(listen)
        self._head = open_head(host, port, nodes, hang_seconds) if nodes > 1 else None
        self._plan = Plan(
            target=target,
            options=options,
            ranks=ranks,
            nodes=nodes,
            master_host=host,
            start_seconds=start_seconds,
            hang_seconds=hang_seconds,
            env=dict(env),
        )
        self._clock = clock
        self._lock = threading.Lock()
        self._current: Generation | None = None
        self._closed = threading.Event()
        self._failed_starts = 0
        self._retry_at = 0.0
        self._listener: Callable[[], None] | None = None

    @property
    def alive(self) -> bool:
        """Its ranks are up: what they hold can be asked for."""
        return self._current is not None and self._current.ready and self._current.failure is None

    @property
    def address(self) -> str | None:
        """HOST:PORT that the other nodes join; None when there are none."""
        if self._head is None:
            return None
        host, port = self._head.address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of this machine's ranks, by rank; of the last generation."""
        return self._current.pids if self._current is not None else {}

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Runs a method on every rank; returns rank 0's result. Starts the ranks when they are not up.

        Raises:
            WorkerDied: a rank ended, or the group hung, or did not start; no rank is left, the next call starts anew.
            EngineError: as a rank raised it; any other exception of a rank comes as a PermanentEngineError. When the
                ranks did not all fail, a note of the error says so, and `disagreement`.
        """
        with self._lock:
            return self._run(self._up(), Call(method, args, kwargs))

    def call_in(self, generation: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """`call`, for what needs the state that the ranks of this generation hold: raises WorkerDied where they are
        gone, and starts nothing."""
        with self._lock:
            current = self._current
            if current is None or not self.alive or current.number != generation:
                why = None
                if current is not None and current.number == generation:
                    current.wait_gone()
                    why = current.failure
                raise WorkerDied(
                    f"the ranks of generation {generation} are gone, and what they held with them"
                    + (f": {why}" if why else "")
                )
            return self._run(current, Call(method, args, kwargs))

    def start(self) -> int:
        """Starts the ranks when they are not up; returns the generation. Raises as `call`."""
        with self._lock:
            return self._up().number

    @contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """In the block, `listener` runs in the calling thread at each `progress()` of rank 0. What it raises ends the
        group."""
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

    def close(self) -> None:
        """No process of it is left. A call that runs in another thread raises WorkerDied."""
        self._closed.set()
        if not self._lock.acquire(blocking=False):
            if self._current is not None:
                self._current.fail("the group was closed during a call")
            self._lock.acquire()
        try:
            if self._current is not None:
                self._current.stop()
            if self._head is not None:
                self._head.close()
        finally:
            self._lock.release()

    def _run(self, generation: Generation, call: Call) -> Any:
        outcome = generation.ask(call, self._listener)
        if not outcome.errors:
            return pickle.loads(outcome.result)
        failed = tuple(rank for rank, _ in outcome.errors)
        finished = tuple(rank for rank in range(self._plan.world_size) if rank not in failed)
        # an EngineError is the cause of what the others ran into, more often than not
        error = min(outcome.errors, key=lambda one: (type(one[1]) is PermanentEngineError, one[0]))[1]
        if finished:
            self.disagreement = Disagreement(call.method, finished, failed)
            error.add_note(
                f"ranks {list(failed)} failed and ranks {list(finished)} finished {call.method}: what it changed is "
                "undefined"
            )
        raise error

    def _up(self) -> Generation:
        if self._closed.is_set():
            raise WorkerDied("the group is closed")
        if self._current is not None and self.alive:
            return self._current
        if self._current is not None:
            self._current.wait_gone()
        self._closed.wait(max(0.0, self._retry_at - time.monotonic()))
        self.generation += 1
        self.disagreement = None
        self._current = Generation(self.generation, self._plan, self._head, self._clock)
        if self._closed.is_set():
            raise WorkerDied("the group is closed")
        try:
            self._current.start()
        except StartFailure as failure:
            raise self._start_error(failure) from None
        self._failed_starts = 0
        return self._current

    def _start_error(self, failure: StartFailure) -> Exception:
        if isinstance(failure.error, EngineError):
            return failure.error
        if failure.nodes_missing:
            return WorkerDied(str(failure))
        self._failed_starts += 1
        self._retry_at = time.monotonic() + min(MAX_BACKOFF, 2.0 ** (self._failed_starts - 1))
        if self._failed_starts < STARTS or self._closed.is_set():
            return WorkerDied(f"the ranks did not start: {failure}")
        return PermanentEngineError(f"the ranks did not start, {self._failed_starts} times in a row: {failure}")


def open_head(host: str, port: int, nodes: int, hang_seconds: float) -> Head:
    """Raises BadSpec."""
    token = os.environ.get(TOKEN_ENV, "").strip()
    if host not in LOOPBACK and len(token) < MIN_TOKEN:
        raise BadSpec(
            f"trainer.listen={host}:{port} is reached from other machines, so a token is needed: set ${TOKEN_ENV} to "
            f"{MIN_TOKEN} characters or more on the head and on every node, such as `openssl rand -hex 32` prints; "
            f"it has {len(token)}"
        )
    try:
        return Head(host, port, token, nodes=nodes, silence_seconds=min(SILENCE_SECONDS, max(2.0, hang_seconds)))
    except OSError as error:
        raise BadSpec(f"trainer.listen={host}:{port} cannot be listened on: {error}") from error


def parse_address(address: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT or [IPv6]:PORT. Raises BadSpec."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise BadSpec(f"{address!r} is no address; give HOST:PORT, such as 127.0.0.1:0 or [::1]:29400")
    return host.strip("[]"), int(port)
