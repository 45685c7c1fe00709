"""One vLLM server of a pool: its process, and the loop that keeps it running.

A server is a leash (engine.backends.vllm.leash), `engine.backends.vllm.serve` under it, and what vLLM starts under
that: one process group, which is killed as a whole. Everything here runs in the pool's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from engine.backends.vllm.remote import Remote
from engine.errors import EngineError, WorkerDied

log = logging.getLogger(__name__)

Phase = Literal["starting", "up", "draining", "down", "closed"]

FIRST_DELAY, LONGEST_DELAY = 0.5, 60.0
"""Seconds before a server that ended is started again; they double with every start that failed."""
TAIL_BYTES = 3000
POLL_SECONDS = 0.1
WATCH_SECONDS = 2.0
"""Between two looks at a server that another machine runs."""
GROUP_SECONDS = 10.0
"""How long the killed processes of a group may take to be gone: the next start wants their memory."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How one server process is started."""

    name: str
    command: Sequence[str]
    """Runs under the leash; listens on `port`."""
    port: int
    environment: Mapping[str, str]
    folder: Path
    """Its log, and its working directory."""
    host: str = "127.0.0.1"

    @property
    def log_file(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def url(self) -> str:
        """As this machine reaches it."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


class ServerProcess:
    """The process group of one start of a server."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        with launch.log_file.open("ab") as log_file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "engine.backends.vllm.leash", *launch.command],
                stdin=subprocess.PIPE,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                cwd=launch.folder,
                env={**launch.environment},
                start_new_session=True,
            )
        self.ended = asyncio.Event()
        """The leash has ended. It is reaped in `kill`: until then the number of its group is nobody else's."""
        self._pidfd = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._note_end)

    def _note_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.ended.set()

    @property
    def group(self) -> int:
        """Process group of the leash, the server and everything under it."""
        return self._process.pid

    async def ends_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ended.wait(), seconds)
        return self.ended.is_set()

    async def kill(self, *, grace_seconds: float = 0.0) -> None:
        """Kills every process of the group, after the server was asked to end when there is grace; returns when they
        are gone."""
        if self._process.returncode is not None:
            return
        if grace_seconds and not self.ended.is_set():
            self._process.terminate()
            await self.ends_within(grace_seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGKILL)
        await self.ended.wait()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            for _ in range(int(GROUP_SECONDS / POLL_SECONDS)):
                os.killpg(self.group, 0)
                await asyncio.sleep(POLL_SECONDS)

    def tail(self) -> str:
        """The end of its log, for an error message."""
        with contextlib.suppress(OSError), self.launch.log_file.open("rb") as log_file:
            log_file.seek(max(0, self.launch.log_file.stat().st_size - TAIL_BYTES))
            return log_file.read().decode(errors="replace")
        return "(no log)"


@dataclass(eq=False)
class Server:
    """One server as the pool sees it. `keep` is its one task: started here, or only watched where another machine
    runs it (`launch` is None)."""

    remote: Remote
    launch: Launch | None
    on_up: Callable[[Server], Awaitable[None]]
    """Called each time it is healthy, before it counts as up. What it raises is a failed start."""
    start_seconds: float
    phase: Phase = "starting"
    process: ServerProcess | None = None
    starts: int = 0
    failures: int = 0
    """Starts in a row that did not come up."""
    error: str = ""
    """Why it is not up."""
    held: str | None = None
    """State of the weights that it was proven to hold."""
    boot: str = ""
    """Which start of it that proof was of."""
    workers: list[str] = field(default_factory=list)
    """And which starts of its workers."""
    adapters: set[str] = field(default_factory=set)
    outstanding: int = 0
    """Tokens, at most, of what it was given and has not finished."""
    needed: int = 0
    """Calls that run and that it has a share in, finished or not: were it to end, its share would be done again."""

    @property
    def name(self) -> str:
        return self.remote.name

    async def keep(self) -> None:
        while self.phase != "closed":
            try:
                await self._come_up()
                await (self.process.ended.wait() if self.process else self._watch())
                self.error = f"vLLM server {self.name} ended{self._tail()}"
            except (EngineError, OSError) as error:
                self.failures += 1
                self.error = str(error)
            await self.down()
            if self.phase == "closed":
                return
            delay = min(LONGEST_DELAY, FIRST_DELAY * 2**self.failures)
            log.warning("%s; it is started again in %.1f s", self.error.splitlines()[0], delay)
            self.enter("down")
            await asyncio.sleep(delay)

    async def _come_up(self) -> None:
        self.enter("starting")
        self.starts += 1
        if self.launch is not None:
            self.process = ServerProcess(self.launch)
        await self._until_healthy()
        await self.on_up(self)
        self.failures = 0
        self.enter("up")

    async def _until_healthy(self) -> None:
        deadline = time.monotonic() + self.start_seconds
        while time.monotonic() < deadline:
            if await self.remote.healthy():
                return
            if self.process is None:
                await asyncio.sleep(POLL_SECONDS)
            elif await self.process.ends_within(POLL_SECONDS):
                raise WorkerDied(f"vLLM server {self.name} ended while it started{self._tail()}")
        raise WorkerDied(
            f"vLLM server {self.name} was not healthy {self.start_seconds:.0f} s after its start "
            f"(sampler.start_seconds){self._tail()}"
        )

    async def _watch(self) -> None:
        boot = (await self.remote.hello())["boot"]
        while self.phase in ("up", "draining") and await self.remote.healthy():
            await asyncio.sleep(WATCH_SECONDS)
            if (await self.remote.hello())["boot"] != boot:
                return

    def _tail(self) -> str:
        if self.process is None or self.launch is None:
            return f" ({self.remote.url})"
        return f"; the end of {self.launch.log_file}:\n{self.process.tail()}"

    async def down(self, *, grace_seconds: float = 0.0) -> None:
        """It holds nothing any more, and its processes are gone."""
        self.held, self.boot = None, ""
        self.workers.clear()
        self.adapters.clear()
        if self.process is not None:
            await self.process.kill(grace_seconds=grace_seconds)

    async def fail(self, process: ServerProcess | None) -> None:
        """A call to it failed while `process` ran: whatever is left of that start ends, and the next begins."""
        if process is self.process and self.phase == "up":
            self.enter("down")
            await self.down()

    async def close(self, *, grace_seconds: float = 0.0) -> None:
        self.enter("closed")
        await self.down(grace_seconds=grace_seconds)

    def enter(self, phase: Phase) -> None:
        if self.phase != "closed":
            self.phase = phase
