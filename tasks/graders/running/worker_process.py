"""The side of a worker process of `tasks.graders.running.worker_pool`: it answers lines of JSON with lines of JSON.

Whatever the code prints goes to standard error, and it reads from nothing, so that only `serve` talks to the parent.
A worker ends when its input ends, and on Linux also when the thread that started it ends while it computes.
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
class Connection:
    """The lines that the parent writes, and those that it reads."""

    requests: TextIO
    answers: TextIO

    def say(self, line: str) -> None:
        print(line, file=self.answers, flush=True)

    def serve(self, answer: Callable[[Any], Any]) -> None:
        """Says "ready", then answers every request until the input ends."""
        self.say("ready")
        for line in self.requests:
            self.say(json.dumps(answer(json.loads(line))))


def connect() -> Connection:
    """What a worker does first. Its parent then hears of a crash where in the Python code it happened."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # a system without that call
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if CRASH_REPORT_FD in os.environ:
        faulthandler.enable(file=int(os.environ[CRASH_REPORT_FD]), all_threads=False)
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return Connection(requests, answers)
