"""What the tests of the group share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from engine.cluster.rank_group import RankGroup

TARGET = "tests.engine.cluster.targets:Target"
PATIENCE = 60.0


@contextmanager
def a_group(options: dict[str, Any] | None = None, **changes: Any) -> Any:
    """Two ranks on this machine; closed at the end, and nothing of it may be left then."""
    settings = {"ranks": 2, "start_seconds": PATIENCE, "hang_seconds": PATIENCE, **changes}
    group = RankGroup(TARGET, options or {}, **settings)
    try:
        yield group
    finally:
        pids = list(group.pids.values())
        group.close()
        wait_until_gone(pids)


def wait_for(condition: Callable[[], Any], what: str) -> None:
    """Polls what another process does."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE:g} s for {what}"
        time.sleep(0.01)


def running(pid: int) -> bool:
    """False for a zombie too: whose parent is gone, it is for init to reap."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids: Iterable[int]) -> None:
    """Ray ends a process, a stopped one after five seconds."""
    wait_for(lambda: not any(running(pid) for pid in pids), "the ranks to end")


def once_all_compute(folder: Path, ranks: int, action: Callable[[dict[int, int]], None]) -> threading.Thread:
    """Calls `action` with the pids by rank when every rank is inside `mark_and_wait`."""

    def marked() -> dict[int, int]:
        files = [folder / f"rank-{rank}" for rank in range(ranks)]
        if not all(file.exists() and file.read_text() for file in files):
            return {}
        return {rank: int(file.read_text()) for rank, file in enumerate(files)}

    def run() -> None:
        wait_for(marked, "the call to run")
        action(marked())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread
