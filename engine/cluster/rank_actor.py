"""One rank as a Ray actor: it joins torch.distributed, builds the target's object, and runs the calls of its group.

A thread of its own does the computation. Meanwhile the concurrency group "watch" replies to polls of the progress, and
the concurrency groups "transfers" and "weights" run calls that do not use the group's own exchanges: uploads, and
broadcasts of weights to samplers. The concurrency group "life" holds one call that ends when the actor does, which
tells the group that the actor is dead.
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

from engine.cluster.actors import ProcessLocation, this_process_location
from engine.cluster.rank_progress import REPORTER, RankFailed, RankPhase, end_with_parent, is_peer_loss
from engine.errors import EngineError, PermanentEngineError

TRACEBACK_CHARACTERS = 4000
"""How much of a traceback an error message shows."""


@dataclass(frozen=True, slots=True)
class RankLaunch:
    """What a rank needs to know when it starts."""

    target: str
    """"package.module:Class" of the object that every rank builds."""
    options: dict[str, Any]
    rank: int
    world_size: int
    start_timeout: float
    """Seconds that the ranks may take to find each other."""
    collective_timeout: float
    """Seconds that one exchange may take. Longer than the hang detector waits, so that a hang is reported first."""
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Address of the torch.distributed store, which runs in rank 0."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class RankFailure:
    """An exception of a rank, as plain data."""

    error_class: str
    """Name of the EngineError's class; "" for any other exception."""
    message: str
    ends_group: bool = False
    """Whether the rank cannot continue, so that the whole group must end."""
    is_cause: bool = True
    """False if the rank only noticed that another rank was gone."""


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """How a call ended on one rank: with a result or a failure."""

    result: Any = None
    """What the method returned. None if the call failed, and for `Rank.run` without `returns_result`."""
    failure: RankFailure | None = None


class Rank:
    """The class of the actor. Its methods run one at a time, except those in the other concurrency groups."""

    def __init__(self, launch: RankLaunch) -> None:
        end_with_parent()
        self._launch = launch
        self._store: Any = None
        self._target: Any = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rank")  # torch keeps settings per thread
        self._host = ray.util.get_node_ip_address()
        # torch reads these variables when it is imported, and nothing has imported it in this process yet.
        os.environ.update(_environment(launch, self._host))

    def location(self) -> ProcessLocation:
        """Where this rank's process runs."""
        return this_process_location()

    def open_store(self) -> StoreAddress:
        """Opens the store of torch.distributed, by which the ranks find each other. Called on rank 0 only."""
        return self._thread.submit(self._open_store).result()

    def start(self, store_address: StoreAddress) -> RankOutcome:
        """Joins the other ranks and builds the target's object."""
        return self._thread.submit(self._attempt, lambda: self._join_and_build(store_address)).result()

    def run(self, method: str, arguments: tuple[tuple[Any, ...], dict[str, Any]], returns_result: bool) -> RankOutcome:
        """Calls a method of the target's object."""

        def call() -> Any:
            REPORTER.set_phase(RankPhase.COMPUTING)
            try:
                result = getattr(self._target, method)(*arguments[0], **arguments[1])
            finally:
                REPORTER.set_phase(RankPhase.FINISHED)
            # Ranks that got the same arguments have the same result. It is sent once.
            return result if returns_result else None

        return self._thread.submit(self._attempt, call).result()

    def close(self) -> None:
        """Calls the `close` method of the target's object, if it has one."""
        if hasattr(self._target, "close"):
            self._thread.submit(self._target.close).result()

    def run_beside(self, method: str, arguments: tuple[Any, ...]) -> RankOutcome:
        """Calls a method of the target's object while `run` may compute. Every rank returns its own result. The caller
        names the concurrency group."""
        return self._attempt(lambda: getattr(self._target, method)(*arguments))

    @ray.method(concurrency_group="watch")
    def activity(self) -> tuple[int, RankPhase]:
        """(counter of progress, phase)."""
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
        """Never returns. A call of it ends when the actor does."""
        threading.Event().wait()

    # -- called in the thread that computes ---------------------------------------------------------------------

    def _open_store(self) -> StoreAddress:
        import torch.distributed as dist

        # The socket is bound here because torch would listen on every interface, and a port chosen in advance could be
        # taken by another process.
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.create_server((self._host, 0), family=family)
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            self._host, port, None, True, self._timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return StoreAddress(self._host, port)

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self._launch.start_timeout)

    def _join_and_build(self, store_address: StoreAddress) -> None:
        import torch
        import torch.distributed as dist

        launch = self._launch

        # Connect to the store of rank 0.
        if self._store is None:
            self._store = dist.TCPStore(
                store_address.host, store_address.port, None, False, self._timeout, wait_for_workers=False
            )  # fmt: skip
        os.environ.update(MASTER_ADDR=store_address.host, MASTER_PORT=str(store_address.port))

        # Join the process group.
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(0)  # Ray makes only the actor's own GPU visible
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=self._store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timedelta(seconds=launch.collective_timeout),
        )

        # Build the object whose methods the group calls.
        module, _, name = launch.target.partition(":")
        target_class = getattr(import_module(module), name)
        self._target = target_class(launch.options, rank=launch.rank, world_size=launch.world_size)

    def _attempt(self, function: Callable[[], Any]) -> RankOutcome:
        try:
            return RankOutcome(result=function())
        except Exception as error:  # noqa: BLE001 - the boundary of the rank: the group raises the error again
            traceback.print_exc()
            return RankOutcome(failure=failure_from_error(error, self._launch.rank))


RankActor = ray.remote(concurrency_groups={"watch": 2, "transfers": 2, "weights": 2, "life": 1})(Rank)  # type: ignore[call-overload]
"""The actor class. `ray.remote` is not used as a decorator: Ray copies a decorated class into the actor by value,
together with the module's global objects, and REPORTER would then not be the object that `report_progress` changes."""


def failure_from_error(error: Exception, rank: int) -> RankFailure:
    """Converts an exception to plain data. For anything but an EngineError the message names the rank and the place."""
    if isinstance(error, RankFailed):
        return RankFailure("", str(error), ends_group=True, is_cause=error.is_cause)
    if is_peer_loss(error):
        return RankFailure("", f"it lost the other ranks: {error}", ends_group=True, is_cause=False)
    if isinstance(error, EngineError):
        return RankFailure(type(error).__name__, str(error))
    trace = "".join(traceback.format_exception(error))[-TRACEBACK_CHARACTERS:]
    return RankFailure("", f"rank {rank}: {type(error).__name__}: {error}\n{trace}")


def error_from_failure(failure: RankFailure) -> EngineError:
    """The exception that `failure_from_error` converted, or a PermanentEngineError with its message."""
    error_classes = {error_class.__name__: error_class for error_class in _engine_errors(EngineError)}
    return error_classes.get(failure.error_class, PermanentEngineError)(failure.message)


def _engine_errors(root: type[EngineError]) -> list[type[EngineError]]:
    """`root` and all its subclasses."""
    error_classes = [root]
    for subclass in root.__subclasses__():
        error_classes += _engine_errors(subclass)
    return error_classes


def _environment(launch: RankLaunch, host: str) -> dict[str, str]:
    return {
        **_gloo_interface(host),
        **launch.environment,
        "RANK": str(launch.rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(launch.world_size),
    }


def _gloo_interface(host: str) -> dict[str, str]:
    """The variable that selects gloo's network interface. By default gloo uses the address that the host's name
    resolves to, which other machines often cannot reach."""
    for name, addresses in psutil.net_if_addrs().items():
        has_address = any(address.address == host for address in addresses)
        if has_address:
            return {"GLOO_SOCKET_IFNAME": name}
    return {}
