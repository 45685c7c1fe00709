"""One process on the cluster: an actor of a class, called from the event loop of this process.

Ray starts the process in a bundle of a placement, if asked with another Python interpreter, and never starts it again:
the caller starts a new one. Ray notices within milliseconds that a process has ended. It does not notice that one is
stopped or hangs, so every call here has a deadline.

`Hosted` is the base of the classes, inside the process. `Actor` is what its caller holds.
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
"""Calls that one actor may run at once: all of them wait in one event loop."""
TAIL_BYTES = 3000
ERROR_CHARACTERS = 2000
KILL_SECONDS = 20.0
"""How long a killed process may take to be gone. Ray gives one that is stopped five seconds."""
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where an actor runs."""

    host: str
    pid: int
    """Of its process. Ray makes it the leader of the process group of all that it starts."""
    logs: tuple[str, ...]
    """The files that its output goes to."""

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    def log_tail(self) -> str:
        """The end of its logs, for an error message; empty where they are not on this machine."""
        if not self.is_here:
            return ""
        tails = [(path, _tail(Path(path))) for path in self.logs]
        return "".join(f"\nthe end of {path}:\n{text}" for path, text in tails if text)


def own_whereabouts() -> Whereabouts:
    """Of this process."""
    outputs = []
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            outputs.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return Whereabouts(socket.gethostname(), os.getpid(), tuple(outputs))


class Hosted:
    """Base of classes whose instances run as actors. Their public methods are coroutines or asynchronous generators."""

    async def whereabouts(self) -> Whereabouts:
        return own_whereabouts()

    async def wait_for_failure(self) -> str:
        """Returns when the instance is of no more use, and says why. The caller then replaces the process."""
        await asyncio.Event().wait()
        return ""  # never: this call ends with the process


class Actor:
    """The caller's end of one process. `start_actor` makes it.

    `ended` is done when the process has ended or its instance has failed; the result says why.
    """

    def __init__(self, name: str, handle: Any, seconds: float) -> None:
        self.name = name
        self._handle, self._seconds = handle, seconds
        self.process: Whereabouts | None = None
        self.ended = asyncio.ensure_future(self._wait_for_end())

    async def _wait_for_end(self) -> str:
        import ray

        try:
            why: str = await self._handle.wait_for_failure.remote()
        except ray.exceptions.RayError as error:
            why = _text(error)
        return why

    async def locate(self, seconds: float) -> Whereabouts:
        """Waits until the process runs. Raises WorkerDied when it does not run within `seconds`."""
        self.process = await self.call("whereabouts", seconds=seconds)
        return self.process

    async def call(self, method: str, *args: Any, seconds: float | None = None, **named: Any) -> Any:
        """The result of one method.

        Args:
            seconds: deadline of the call; unset, the actor's.

        Raises:
            EngineError: what the method raised, where it is one of ours.
            WorkerDied: the process has ended, the method failed otherwise, or it was silent for `seconds`.
        """
        deadline = seconds or self._seconds
        with self._errors(method, deadline):
            return await asyncio.wait_for(getattr(self._handle, method).remote(*args, **named), deadline)

    async def stream(self, method: str, *args: Any, **named: Any) -> AsyncGenerator[Any, None]:
        """The items of a method that is an asynchronous generator. Closed early, it ends the method.

        Raises:
            As `call`; the deadline holds for each item.
        """
        import ray

        with self._errors(method, self._seconds):
            remote = getattr(self._handle, method).options(num_returns="streaming")
            items = remote.remote(*args, **named)
            is_finished = False
            try:
                while not is_finished:
                    try:
                        item = await asyncio.wait_for(anext(items), self._seconds)
                    except StopAsyncIteration:
                        is_finished = True
                    else:
                        yield await asyncio.wait_for(item, self._seconds)
            finally:
                if not is_finished:
                    with contextlib.suppress(ray.exceptions.RayError):
                        ray.cancel(items)

    @contextlib.contextmanager
    def _errors(self, method: str, seconds: float) -> Iterator[None]:
        """Turns Ray's errors into ours."""
        import ray

        try:
            yield
        except ray.exceptions.RayTaskError as error:  # first: it is of the class of what the method raised, too
            cause = error.cause
            if isinstance(cause, EngineError):
                raise cause from None
            text = f"{type(cause).__name__}: {cause}" if isinstance(cause, Exception) else _text(error)
            raise WorkerDied(f"{self.name} failed in {method}: {text}") from error
        except TimeoutError as error:
            raise WorkerDied(f"{self.name} was silent for {seconds:.0f} s in {method}") from error
        except ray.exceptions.RayError as error:
            raise WorkerDied(f"{self.name} is gone in {method}: {_text(error)}") from error

    async def kill(self) -> None:
        """Kills the process, and returns when it is gone. Ray kills what it has started."""
        import ray

        ray.kill(self._handle, no_restart=True)
        await asyncio.wait([self.ended], timeout=KILL_SECONDS)
        for _ in range(int(KILL_SECONDS / POLL_SECONDS)):
            if self.process is None or not _group_exists(self.process):
                return
            await asyncio.sleep(POLL_SECONDS)
        log.error("Ray has not ended the process of %s within %g s", self.name, KILL_SECONDS)

    def log_tail(self) -> str:
        """The end of its logs, for an error message; empty where they are not on this machine."""
        return self.process.log_tail() if self.process is not None else ""


def start_actor(
    kind: type[Hosted],
    *args: Any,
    name: str,
    options: Mapping[str, Any],
    seconds: float,
    python: str | None = None,
) -> Actor:
    """Starts an instance of `kind(*args)` in a process of its own. Returns at once; call it from an event loop.

    Args:
        name: for error messages.
        options: Ray's options of the actor; see `Placement.options`.
        seconds: deadline of a call that names none.
        python: interpreter of the process. Its environment must have the same Ray, and the module of `kind`.
    """
    import ray

    environment = {"runtime_env": {"py_executable": python}} if python else {}
    remote = ray.remote(kind).options(max_concurrency=CONCURRENT_CALLS, max_restarts=0, **environment, **options)
    return Actor(name, remote.remote(*args), seconds)


def own_address() -> str:
    """The address by which processes of the cluster reach this one."""
    import ray

    return str(ray.util.get_node_ip_address())


def _group_exists(whereabouts: Whereabouts) -> bool:
    """Whether a process of its group is left, as far as it can be seen from this machine."""
    if not whereabouts.is_here:
        return False
    try:
        os.killpg(whereabouts.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _tail(path: Path) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace")
    return ""


def _text(error: Exception) -> str:
    """An error of Ray without its first page of hints: the end has the cause."""
    return str(error).strip()[-ERROR_CHARACTERS:]
