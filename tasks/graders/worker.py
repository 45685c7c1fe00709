"""Helper processes for graders whose work may hang or eat memory: a line of JSON in, a line of JSON out.

A worker says one line when it is ready for calls. One that does not answer in time is killed and replaced, which no
thread allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from typing import Any

MOST_BYTES = 16 << 20
"""Of one line."""
START_SECONDS = 120.0
"""What a worker may take for its imports, on a machine that is busy with training."""


class WorkerTimeout(Exception):
    """The worker did not answer in time, and was killed."""


class WorkerFailed(Exception):
    """The worker ended, or answered what is no JSON."""


class WorkerPool:
    """Up to `processes` copies of `python -m module`, started when first needed."""

    def __init__(self, module: str, *, processes: int) -> None:
        self.module = module
        self._idle: list[Process] = []
        self._turn = asyncio.Semaphore(processes)

    async def start(self) -> None:
        """Starts one worker if none is idle, so that the first call need not wait for its imports."""
        async with self._turn:
            if not self._idle:
                self._idle.append(await self._start())

    async def call(self, request: Any, *, timeout_seconds: float) -> Any:
        """The answer to `request`. Raises WorkerTimeout and WorkerFailed."""
        async with self._turn:
            process = self._idle.pop() if self._idle else await self._start()
            try:
                answer = await asyncio.wait_for(self._exchange(process, request), timeout_seconds)
            except TimeoutError:
                raise WorkerTimeout(f"{self.module}: no answer in {timeout_seconds:g} s") from None
            else:
                self._idle.append(process)
                return answer
            finally:
                if process not in self._idle:  # late, broken, or the caller was cancelled: its next line is not ours
                    await _end(process)

    async def close(self) -> None:
        """Ends the idle workers."""
        while self._idle:
            await _end(self._idle.pop())

    async def _start(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", self.module, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, limit=MOST_BYTES
        )
        assert process.stdout is not None
        ready = b""
        try:
            ready = await asyncio.wait_for(process.stdout.readline(), START_SECONDS)
        except TimeoutError:
            raise WorkerFailed(f"{self.module} was not ready after {START_SECONDS:g} s") from None
        finally:
            if not ready:
                await _end(process)
        if not ready:
            raise WorkerFailed(f"{self.module} ended before it was ready; run `python -m {self.module}` to see why")
        return process

    async def _exchange(self, process: Process, request: Any) -> Any:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
            if not line.endswith(b"\n"):
                raise WorkerFailed(f"{self.module} ended in the middle of a call")
            return json.loads(line)
        except (OSError, ValueError) as error:
            raise WorkerFailed(f"{self.module}: {error}") from error


async def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
