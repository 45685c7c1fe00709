"""One rank as a Ray actor: it joins torch.distributed, builds the target's object, and runs the calls of its group.

The computation runs in one thread of its own. The concurrency group "watch" answers meanwhile how far it is, and "life"
holds one call that ends when the actor does, by which the group learns of its death.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import Any

import psutil
import ray

from engine.cluster.actors import Whereabouts, own_whereabouts
from engine.cluster.rank_progress import REPORTER, RankFailed, RankPhase, end_with_parent, is_peer_loss
from engine.errors import EngineError, PermanentEngineError

TRACEBACK_CHARS = 4000


@dataclass(frozen=True, slots=True)
class Launch:
    """What a rank is told at its start."""

    target: str
    """"package.module:Class" of the object that every rank builds."""
    options: dict[str, Any]
    rank: int
    world_size: int
    start_seconds: float
    collective_seconds: float
    """How long one exchange may take: longer than the watch waits, so that the watch speaks first."""
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where rank 0 keeps the store of torch.distributed."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of a rank, as plain data."""

    kind: str
    """Name of the EngineError's class; "" for any other exception."""
    message: str
    ends_group: bool = False
    is_cause: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended on one rank."""

    result: Any = None
    """On rank 0, if the call did not fail."""
    failure: Failure | None = None


class Rank:
    """Methods are called one at a time, except those in the concurrency groups "watch" and "life"."""

    def __init__(self, launch: Launch) -> None:
        end_with_parent()
        self._launch = launch
        self._store: Any = None
        self._target: Any = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rank")  # torch keeps settings per thread
        self._host = ray.util.get_node_ip_address()
        # torch reads these when it is imported, which nothing has done in this process yet
        os.environ.update(_environment(launch, self._host))

    def whereabouts(self) -> Whereabouts:
        return own_whereabouts()

    def open_store(self) -> Rendezvous:
        """On rank 0: where the ranks will meet."""
        return self._thread.submit(self._open_store).result()

    def start(self, meeting: Rendezvous) -> Outcome:
        """Joins the other ranks and builds the target's object."""
        return self._thread.submit(self._attempt, lambda: self._join_and_build(meeting)).result()

    def run(self, method: str, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Outcome:
        """Calls a method of the target's object."""

        def call() -> Any:
            REPORTER.enter(RankPhase.COMPUTING)
            try:
                result = getattr(self._target, method)(*arguments[0], **arguments[1])
            finally:
                REPORTER.enter(RankPhase.FINISHED)
            return result if self._launch.rank == 0 else None

        return self._thread.submit(self._attempt, call).result()

    def close(self) -> None:
        """Lets the target's object close what it holds."""
        if hasattr(self._target, "close"):
            self._thread.submit(self._target.close).result()

    @ray.method(concurrency_group="watch")
    def activity(self) -> tuple[int, RankPhase]:
        """The counter of progress, and the phase."""
        return REPORTER.counter, REPORTER.phase

    @ray.method(concurrency_group="watch")
    def stacks(self) -> str:
        """The stacks of all threads."""
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            return file.read()

    @ray.method(concurrency_group="life")
    def wait_until_killed(self) -> None:
        """Never returns: a call to it ends when the actor does."""
        threading.Event().wait()

    # -- the rank's own thread ----------------------------------------------------------------------------------

    def _open_store(self) -> Rendezvous:
        import torch.distributed as dist

        # bound here and handed over: torch itself would listen on every interface, and the port could be lost
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.create_server((self._host, 0), family=family)
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            self._host, port, None, True, self._timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return Rendezvous(self._host, port)

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self._launch.start_seconds)

    def _join_and_build(self, meeting: Rendezvous) -> None:
        import torch
        import torch.distributed as dist

        launch = self._launch
        if self._store is None:
            self._store = dist.TCPStore(
                meeting.host, meeting.port, None, False, self._timeout, wait_for_workers=False
            )  # fmt: skip
        os.environ.update(MASTER_ADDR=meeting.host, MASTER_PORT=str(meeting.port))
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(0)  # Ray shows each actor its own GPU only
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=self._store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timedelta(seconds=launch.collective_seconds),
        )
        module, _, name = launch.target.partition(":")
        target = getattr(import_module(module), name)
        self._target = target(launch.options, rank=launch.rank, world_size=launch.world_size)

    def _attempt(self, run: Callable[[], Any]) -> Outcome:
        try:
            return Outcome(result=run())
        except Exception as error:  # noqa: BLE001 - the boundary of the rank: the group raises it, with blame
            traceback.print_exc()
            return Outcome(failure=describe(error, self._launch.rank))


RankActor = ray.remote(concurrency_groups={"watch": 2, "life": 1})(Rank)  # type: ignore[call-overload]
"""Not a decorator: Ray copies a decorated class into the actor by value, together with the module's global objects, and
REPORTER would be another one than that of the code which calls `progress`."""


def describe(error: Exception, rank: int) -> Failure:
    """An exception as plain data. Anything but an EngineError becomes a text that names the rank and the place."""
    if isinstance(error, RankFailed):
        return Failure("", str(error), ends_group=True, is_cause=error.is_cause)
    if is_peer_loss(error):
        return Failure("", f"it lost the other ranks: {error}", ends_group=True, is_cause=False)
    if isinstance(error, EngineError):
        return Failure(type(error).__name__, str(error))
    trace = "".join(traceback.format_exception(error))[-TRACEBACK_CHARS:]
    return Failure("", f"rank {rank}: {type(error).__name__}: {error}\n{trace}")


def error_of(failure: Failure) -> EngineError:
    """The exception that `describe` was given, or a PermanentEngineError that names it."""
    kinds = {kind.__name__: kind for kind in _engine_errors(EngineError)}
    return kinds.get(failure.kind, PermanentEngineError)(failure.message)


def _engine_errors(root: type[EngineError]) -> list[type[EngineError]]:
    """`root` and all its subclasses."""
    found = [root]
    for kind in root.__subclasses__():
        found += _engine_errors(kind)
    return found


def _environment(launch: Launch, host: str) -> dict[str, str]:
    return {
        **_interface(host),
        **launch.environment,
        "RANK": str(launch.rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(launch.world_size),
    }


def _interface(host: str) -> dict[str, str]:
    """Gloo would take the address that the host's name resolves to, on many machines one that others cannot reach."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return {"GLOO_SOCKET_IFNAME": name}
    return {}
