"""Single processes on the cluster: Ray actors that are called from the event loop of this process.

Ray starts the process in a bundle of a placement, optionally with another Python interpreter, and does not restart it:
the caller starts a new one. Ray notices within milliseconds that a process has ended. It does not notice that a process
is stopped or hangs, so every call here has a timeout.

`ActorBase` is the base of the classes whose instances run in the process. `ActorHandle` is what the caller holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import EngineError, WorkerDied

log = logging.getLogger(__name__)

CONCURRENT_CALLS = 10_000
"""Calls that one actor may run at once. All of them wait in one event loop."""
LOG_TAIL_BYTES = 3000
"""How much of a process's log an error message shows."""
ERROR_CHARACTERS = 2000
"""How much of an error of Ray an error message shows."""
KILL_TIMEOUT = 20.0
"""Seconds that a killed process may take to end. Ray gives a stopped process five seconds."""
POLL_INTERVAL = 0.05
"""Seconds between two checks whether a killed process has ended."""


@dataclass(frozen=True, slots=True)
class ProcessLocation:
    """The machine, process id and log files of an actor."""

    node: str
    """Ray's id of the machine, as in `connection.draining_nodes`."""
    host: str
    pid: int
    """Process id. Ray makes the process the leader of the process group of everything that it starts."""
    logs: tuple[str, ...]
    """Paths of the files that receive the process's output."""

    @property
    def is_local(self) -> bool:
        """Whether the process runs on this machine."""
        return self.host == socket.gethostname()

    def log_tail(self) -> str:
        """The end of the process's logs, for an error message; empty if they are on another machine."""
        if not self.is_local:
            return ""
        sections = []
        for path in self.logs:
            text = _tail(Path(path))
            if text:
                sections.append(f"\nthe end of {path}:\n{text}")
        return "".join(sections)


def this_process_location() -> ProcessLocation:
    """The location of the calling process, which is an actor."""
    import ray

    # Ray redirects standard output and standard error (descriptors 1 and 2) to files.
    outputs = []
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            outputs.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    node = ray.get_runtime_context().get_node_id()
    return ProcessLocation(node, socket.gethostname(), os.getpid(), tuple(outputs))


class ActorBase:
    """Base of classes whose instances run as actors. Their public methods are coroutines or asynchronous generators."""

    async def location(self) -> ProcessLocation:
        """Where this actor's process runs."""
        return this_process_location()

    async def wait_for_failure(self) -> str:
        """Returns the reason when the instance becomes unusable. The caller then replaces the process."""
        await asyncio.Event().wait()
        return ""  # never reached: the call ends with the process


class ActorHandle:
    """The caller's side of one actor process, made by `start_actor`.

    `ended` completes when the process has ended or its instance has failed. Its result is the reason.
    """

    def __init__(self, name: str, ray_handle: Any, timeout: float) -> None:
        """`timeout`: seconds that a call may take if it sets no timeout of its own."""
        self.name = name
        self._ray_handle, self._timeout = ray_handle, timeout
        self.process: ProcessLocation | None = None
        self.ended = asyncio.ensure_future(self._wait_for_end())

    async def _wait_for_end(self) -> str:
        import ray

        try:
            reason: str = await self._ray_handle.wait_for_failure.remote()
        except ray.exceptions.RayError as error:
            reason = _short_message(error)
        return reason

    async def wait_until_running(self, timeout: float) -> ProcessLocation:
        """Waits until the process runs. Raises WorkerDied if it does not run after `timeout` seconds."""
        self.process = await self.call("location", timeout=timeout)
        return self.process

    async def call(self, method: str, *args: Any, timeout: float | None = None, **named: Any) -> Any:
        """Calls a method of the instance and returns its result.

        Args:
            timeout: seconds that the call may take. None uses the actor's timeout.

        Raises:
            EngineError: the method raised an EngineError; it is raised again here.
            WorkerDied: the process ended, the method raised another exception, or the call timed out.
        """
        seconds = timeout or self._timeout
        with self._converted_errors(method, seconds):
            return await asyncio.wait_for(getattr(self._ray_handle, method).remote(*args, **named), seconds)

    async def stream(self, method: str, *args: Any, **named: Any) -> AsyncGenerator[Any, None]:
        """Yields the items of a method that is an asynchronous generator. Closing this generator ends the method.

        Raises:
            As `call`. The timeout applies to each item.
        """
        import ray

        with self._converted_errors(method, self._timeout):
            remote = getattr(self._ray_handle, method).options(num_returns="streaming")
            items = remote.remote(*args, **named)
            is_finished = False
            try:
                while not is_finished:
                    try:
                        item = await asyncio.wait_for(anext(items), self._timeout)
                    except StopAsyncIteration:
                        is_finished = True
                    else:
                        yield await asyncio.wait_for(item, self._timeout)
            finally:
                # The caller closed the generator early, or an item failed. The remote method must end, too.
                if not is_finished:
                    with contextlib.suppress(ray.exceptions.RayError):
                        ray.cancel(items)

    @contextlib.contextmanager
    def _converted_errors(self, method: str, timeout: float) -> Iterator[None]:
        """Converts errors of Ray into EngineErrors."""
        import ray

        try:
            yield
        except ray.exceptions.RayTaskError as error:
            # This clause comes first: a RayTaskError is also an instance of the class that the method raised.
            cause = error.cause
            if isinstance(cause, EngineError):
                raise cause from None
            text = _short_message(error)
            if isinstance(cause, Exception):
                text = f"{type(cause).__name__}: {cause}"
            raise WorkerDied(f"{self.name} failed in {method}: {text}") from error
        except TimeoutError as error:
            raise WorkerDied(f"{self.name} was silent for {timeout:.0f} s in {method}") from error
        except ray.exceptions.RayError as error:
            raise WorkerDied(f"{self.name} is gone in {method}: {_short_message(error)}") from error

    async def kill(self) -> None:
        """Kills the process, and returns when it has ended. Ray also kills the processes that it started."""
        import ray

        ray.kill(self._ray_handle, no_restart=True)
        await asyncio.wait([self.ended], timeout=KILL_TIMEOUT)
        # Ray reports the end of an actor before the last process of its group is gone. A new process could then meet
        # the memory and the ports of the old one.
        for _ in range(int(KILL_TIMEOUT / POLL_INTERVAL)):
            if self.process is None or not _group_exists(self.process):
                return
            await asyncio.sleep(POLL_INTERVAL)
        log.error("Ray has not ended the process of %s within %g s", self.name, KILL_TIMEOUT)

    def log_tail(self) -> str:
        """The end of the process's logs, for an error message; empty if they are on another machine."""
        if self.process is None:
            return ""
        return self.process.log_tail()


def start_actor(
    actor_class: type[ActorBase],
    *args: Any,
    name: str,
    options: Mapping[str, Any],
    timeout: float,
    python: str | None = None,
) -> ActorHandle:
    """Starts an instance of `actor_class(*args)` in a process of its own. Returns at once; call it from an event loop.

    Args:
        name: name of the actor in error messages.
        options: Ray's options of the actor; see `Placement.options`.
        timeout: seconds that a call may take if it sets no timeout of its own.
        python: interpreter of the process. Its environment must have the same Ray, and the module of `actor_class`.
    """
    import ray

    environment = {"runtime_env": {"py_executable": python}} if python else {}
    # max_restarts=0: Ray must not restart an actor by itself, since its state would be lost without an error.
    remote_class = ray.remote(actor_class).options(
        max_concurrency=CONCURRENT_CALLS, max_restarts=0, **environment, **options
    )
    return ActorHandle(name, remote_class.remote(*args), timeout)


def node_address() -> str:
    """The address by which other processes of the cluster reach this machine."""
    import ray

    return str(ray.util.get_node_ip_address())


def _group_exists(process: ProcessLocation) -> bool:
    """Whether a process of its process group still runs. False for processes on other machines, which this one cannot
    see."""
    if not process.is_local:
        return False
    # Signal 0 only checks whether the group exists. It has the id of its leader.
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # A process of another user has it now.
        return True
    return True


def _tail(path: Path) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
        return file.read().decode(errors="replace")
    return ""


def _short_message(error: Exception) -> str:
    """The last characters of an error of Ray. The cause is at the end, after a page of hints."""
    return str(error).strip()[-ERROR_CHARACTERS:]
