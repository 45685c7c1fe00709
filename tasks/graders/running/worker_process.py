"""The part of a worker process that talks to its `tasks.graders.running.worker_pool`: JSON lines in, JSON lines out.

Whatever the worker's code prints goes to standard error, and its standard input is empty, so that only `serve` uses the
pipes to the parent. A worker ends when its input ends. On Linux it also ends, even in the middle of a computation, when
the thread that started it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

from tasks.graders.running.worker_pool import CRASH_REPORT_FD

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class WorkerConnection:
    """The two pipes between a worker and its parent."""

    requests: TextIO
    """Lines that the parent writes."""
    answers: TextIO
    """Lines that the parent reads."""

    def write_line(self, line: str) -> None:
        print(line, file=self.answers, flush=True)

    def serve(self, answer: Callable[[Any], Any]) -> None:
        """Write "ready", then answer every request until the input ends."""
        self.write_line("ready")
        for line in self.requests:
            self.write_line(json.dumps(answer(json.loads(line))))


def connect() -> WorkerConnection:
    """Take the pipes to the parent away from the worker's code. Call it first in a worker.

    After a crash of the interpreter, the parent learns where in the Python code it happened.
    """
    # The kernel kills this process when the parent's thread ends, also when the parent was killed itself.
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # a system without prctl
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if CRASH_REPORT_FD in os.environ:
        faulthandler.enable(file=int(os.environ[CRASH_REPORT_FD]), all_threads=False)
    # Keep copies of the pipes. Then make file descriptor 0 empty, and 1 the standard error.
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return WorkerConnection(requests, answers)
