"""A pool of worker processes for graders whose work may hang, use up memory or crash.

A request is one line of JSON, and so is its answer. A worker writes the line "ready" when it is ready for calls; any
other line says why it cannot work. A worker that does not answer in time is killed and replaced, which is impossible
with a thread. `tasks.graders.running.worker_process` is the code at the other end of the pipes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from dataclasses import dataclass
from typing import IO, Any

CRASH_REPORT_FD = "OSTINATO_CRASH_REPORT_FD"
"""Environment variable of a worker: the file descriptor that faulthandler writes to."""

READY = b"ready\n"
MAX_LINE_BYTES = 16 << 20
START_SECONDS = 120.0
"""Time limit of a worker's imports, on a machine that is busy with training."""
END_SECONDS = 5.0
"""Time that a worker has to end by itself before it is killed."""
_STACK_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
MAX_FRAMES = 3
"""Innermost calls of a crashed worker that its error message lists."""


class WorkerTimeout(Exception):
    """The worker did not answer in time, and was killed."""


class WorkerFailed(Exception):
    """The worker cannot work, ended, or did not answer with JSON."""


class WorkerProcessDied(WorkerFailed):
    """The worker's process ended during a start or a call. The message says how and, after a crash, where."""


@dataclass(frozen=True, eq=False)
class _Worker:
    process: Process
    crash_report: IO[bytes]
    """Where faulthandler writes the Python stack of a crash."""

    async def describe_end(self) -> str:
        """Say how a process ended that closed its output or refuses input."""
        try:
            status = await asyncio.wait_for(self.process.wait(), END_SECONDS)
        except TimeoutError:
            return "closed its standard output"
        return _exit_description(status) + self._crash_location()

    def _crash_location(self) -> str:
        """The innermost Python calls of a crash, or an empty text if faulthandler wrote nothing."""
        self.crash_report.seek(0)
        report = self.crash_report.read().decode(errors="replace")
        frames = list(_STACK_FRAME.finditer(report))[:MAX_FRAMES]
        calls = [f"{frame['function']} ({frame['file']}:{frame['line']})" for frame in frames]
        return f" in {', called by '.join(calls)}" if calls else ""


class WorkerPool:
    """Up to `processes` processes of `python -m module`, each started when it is first needed.

    `configuration`, if given, is the first line that each of them reads. With `quiet`, what they print is thrown away;
    otherwise it goes to the standard error of this process.
    """

    def __init__(self, module: str, *, processes: int, configuration: Any = None, quiet: bool = True) -> None:
        self.module = module
        self._configuration, self._quiet = configuration, quiet
        self._idle: list[_Worker] = []
        self._free_processes = asyncio.Semaphore(processes)

    async def start(self) -> None:
        """Start a worker if none is idle, so that the first call does not wait for its imports."""
        async with self._free_processes:
            if not self._idle:
                self._idle.append(await self._start())

    async def call(self, request: Any, *, timeout_seconds: float | None) -> Any:
        """Return the answer to `request`. Raises WorkerTimeout, WorkerFailed and WorkerProcessDied."""
        async with self._free_processes:
            worker = self._idle.pop() if self._idle else await self._start()
            try:
                answer = await asyncio.wait_for(self._exchange(worker, request), timeout_seconds)
            except TimeoutError:
                raise WorkerTimeout(f"{self.module}: no answer in {timeout_seconds:g} s") from None
            else:
                self._idle.append(worker)
                return answer
            finally:
                # A worker without an answer is late or broken, or the caller was cancelled. The next line that it
                # writes would be taken for the answer to another request.
                if worker not in self._idle:
                    await _kill(worker)

    async def close(self) -> None:
        """End the idle workers. They have END_SECONDS to tear down what they set up."""
        workers, self._idle = self._idle, []
        await asyncio.gather(*(_end(worker) for worker in workers))

    async def _start(self) -> _Worker:
        # Whatever goes wrong before the worker is ready, the `finally` ends its process.
        worker, first_line = await self._spawn(), b""
        try:
            first_line = await asyncio.wait_for(self._first_line(worker), START_SECONDS)
            if not first_line:
                raise WorkerProcessDied(
                    f"{self.module} ended before it was ready ({await worker.describe_end()}); "
                    f"run 'python -m {self.module}' to see why"
                )
            if first_line != READY:
                raise WorkerFailed(first_line.decode(errors="replace").strip())
        except TimeoutError:
            raise WorkerFailed(f"{self.module} was not ready after {START_SECONDS:g} s") from None
        finally:
            if first_line != READY:
                await _kill(worker)
        return worker

    async def _spawn(self) -> _Worker:
        crash_report = tempfile.TemporaryFile()  # noqa: SIM115  closed with the worker
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", self.module,
            stdin=PIPE, stdout=PIPE, stderr=DEVNULL if self._quiet else None, limit=MAX_LINE_BYTES,
            pass_fds=(crash_report.fileno(),), env=os.environ | {CRASH_REPORT_FD: str(crash_report.fileno())},
        )  # fmt: skip
        return _Worker(process, crash_report)

    async def _first_line(self, worker: _Worker) -> bytes:
        """Send the configuration and read the worker's first line; empty if the worker ended."""
        process = worker.process
        assert process.stdin is not None and process.stdout is not None
        # A worker that already ended refuses the configuration. Its empty first line then says so.
        if self._configuration is not None:
            with contextlib.suppress(ConnectionError):
                process.stdin.write(json.dumps(self._configuration).encode() + b"\n")
                await process.stdin.drain()
        return await process.stdout.readline()

    async def _exchange(self, worker: _Worker, request: Any) -> Any:
        """Send one request and read its answer."""
        process = worker.process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
        except ConnectionError:
            line = b""
        except (OSError, ValueError) as error:
            raise WorkerFailed(f"{self.module}: {error}") from error
        # A line without its end means that the worker ended while it wrote, or before.
        if not line.endswith(b"\n"):
            raise WorkerProcessDied(await worker.describe_end())
        try:
            return json.loads(line)
        except ValueError as error:
            raise WorkerFailed(f"{self.module}: {error}") from error


def _exit_description(status: int) -> str:
    """Say how a process with this return code ended."""
    if status >= 0:
        return f"exited with status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else "unknown"
    hint = ", which the system sends when memory runs out," if -status == signal.SIGKILL else ""
    return f"ended by signal {-status} ({name}){hint}"


async def _end(worker: _Worker) -> None:
    """Close the worker's input, upon which it ends by itself, and kill it if it takes too long."""
    assert worker.process.stdin is not None
    worker.process.stdin.close()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(worker.process.wait(), END_SECONDS)
    await _kill(worker)


async def _kill(worker: _Worker) -> None:
    with contextlib.suppress(ProcessLookupError):
        worker.process.kill()
    await worker.process.wait()
    worker.crash_report.close()
