"""Helper processes for graders whose work may hang, eat memory or crash: a line of JSON in, a line of JSON out.

A worker writes the line "ready" when it is ready for calls; any other line says why it cannot work. One that does not
answer in time is killed and replaced, which no thread allows. `tasks.graders.running.worker_process` is the side of the
worker.
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
"""Environment variable of a worker: the descriptor that faulthandler writes to."""

READY = b"ready\n"
MOST_BYTES = 16 << 20
"""Of one line."""
START_SECONDS = 120.0
"""What a worker may take for its imports, on a machine that is busy with training."""
END_SECONDS = 5.0
"""What a worker may take to end by itself."""
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
FRAMES_SHOWN = 3


class WorkerTimeout(Exception):
    """The worker did not answer in time, and was killed."""


class WorkerFailed(Exception):
    """The worker cannot work, ended, or answered what is no JSON."""


class WorkerProcessDied(WorkerFailed):
    """The worker's process ended during a start or a call. The message says how and, after a crash, where."""


@dataclass(frozen=True, eq=False)
class _Worker:
    process: Process
    crash_report: IO[bytes]
    """Where faulthandler writes the Python stack of a crash."""

    async def how_it_ended(self) -> str:
        """For a process that closed its output or refuses input."""
        try:
            status = await asyncio.wait_for(self.process.wait(), END_SECONDS)
        except TimeoutError:
            return "closed its standard output"
        return _ending(status) + self._where()

    def _where(self) -> str:
        self.crash_report.seek(0)
        frames = _FRAME.finditer(self.crash_report.read().decode(errors="replace"))
        calls = [f"{frame['function']} ({frame['file']}:{frame['line']})" for frame in frames][:FRAMES_SHOWN]
        return f" in {', called by '.join(calls)}" if calls else ""


class WorkerPool:
    """Up to `processes` copies of `python -m module`, started when first needed.

    `configuration`, if given, is the first line that each of them reads. `quiet`: what they print is thrown away;
    otherwise it goes where this process prints its errors.
    """

    def __init__(self, module: str, *, processes: int, configuration: Any = None, quiet: bool = True) -> None:
        self.module = module
        self._configuration, self._quiet = configuration, quiet
        self._idle: list[_Worker] = []
        self._turn = asyncio.Semaphore(processes)

    async def start(self) -> None:
        """Starts one worker if none is idle, so that the first call need not wait for its imports."""
        async with self._turn:
            if not self._idle:
                self._idle.append(await self._start())

    async def call(self, request: Any, *, timeout_seconds: float | None) -> Any:
        """The answer to `request`. Raises WorkerTimeout, WorkerFailed and WorkerProcessDied."""
        async with self._turn:
            worker = self._idle.pop() if self._idle else await self._start()
            try:
                answer = await asyncio.wait_for(self._exchange(worker, request), timeout_seconds)
            except TimeoutError:
                raise WorkerTimeout(f"{self.module}: no answer in {timeout_seconds:g} s") from None
            else:
                self._idle.append(worker)
                return answer
            finally:
                if worker not in self._idle:  # late, broken, or the caller was cancelled: its next line is not ours
                    await _kill(worker)

    async def close(self) -> None:
        """Ends the idle workers. They may tear down what they set up first, for a few seconds."""
        leaving, self._idle = self._idle, []
        await asyncio.gather(*(_end(worker) for worker in leaving))

    async def _start(self) -> _Worker:
        worker, ready = await self._spawn(), b""
        try:
            ready = await asyncio.wait_for(self._first_line(worker), START_SECONDS)
            if not ready:
                raise WorkerProcessDied(
                    f"{self.module} ended before it was ready ({await worker.how_it_ended()}); "
                    f"run `python -m {self.module}` to see why"
                )
            if ready != READY:
                raise WorkerFailed(ready.decode(errors="replace").strip())
        except TimeoutError:
            raise WorkerFailed(f"{self.module} was not ready after {START_SECONDS:g} s") from None
        finally:
            if ready != READY:
                await _kill(worker)
        return worker

    async def _spawn(self) -> _Worker:
        crash_report = tempfile.TemporaryFile()  # noqa: SIM115  closed with the worker
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", self.module,
            stdin=PIPE, stdout=PIPE, stderr=DEVNULL if self._quiet else None, limit=MOST_BYTES,
            pass_fds=(crash_report.fileno(),), env=os.environ | {CRASH_REPORT_FD: str(crash_report.fileno())},
        )  # fmt: skip
        return _Worker(process, crash_report)

    async def _first_line(self, worker: _Worker) -> bytes:
        """What the worker says once it has read its configuration; nothing if it ended."""
        process = worker.process
        assert process.stdin is not None and process.stdout is not None
        if self._configuration is not None:
            with contextlib.suppress(ConnectionError):
                process.stdin.write(json.dumps(self._configuration).encode() + b"\n")
                await process.stdin.drain()
        return await process.stdout.readline()

    async def _exchange(self, worker: _Worker, request: Any) -> Any:
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
        if not line.endswith(b"\n"):
            raise WorkerProcessDied(await worker.how_it_ended())
        try:
            return json.loads(line)
        except ValueError as error:
            raise WorkerFailed(f"{self.module}: {error}") from error


def _ending(status: int) -> str:
    """How a process of this return code ended."""
    if status >= 0:
        return f"exited with status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else "unknown"
    hint = ", which the system sends when memory runs out," if -status == signal.SIGKILL else ""
    return f"ended by signal {-status} ({name}){hint}"


async def _end(worker: _Worker) -> None:
    """Lets the worker end by itself, which it does when its input ends, or kills it."""
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
