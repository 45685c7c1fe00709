"""A log of the work that processes did, which tests count. It is off unless OSTINATO_WORKLOG names a file."""

from __future__ import annotations

import json
import os
import time
from typing import Any


def work_is_logged() -> bool:
    return bool(os.environ.get("OSTINATO_WORKLOG"))


def log_work(event: str, **fields: Any) -> None:
    """Appends one JSON line (event, time, pid, fields) in one write, so that lines of processes do not mix."""
    path = os.environ.get("OSTINATO_WORKLOG")
    if not path:
        return
    line = json.dumps({"event": event, "time": time.time(), "pid": os.getpid(), **fields}, default=str) + "\n"
    # O_APPEND makes the position and the write one operation
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)
