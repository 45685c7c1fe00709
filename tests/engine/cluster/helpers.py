"""Helpers of the tests of rank groups."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from engine.cluster.rank_group import RankGroup
from tests.fixtures.waiting import wait_until

TARGET = "tests.engine.cluster.targets:CountingTarget"
TIMEOUT = 60.0


@contextmanager
def rank_group(options: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A group of two ranks on this machine. At the end it is closed, and its processes must end."""
    settings = {"ranks": 2, "start_seconds": TIMEOUT, "hang_seconds": TIMEOUT, **changes}
    group = RankGroup(TARGET, options or {}, **settings)
    try:
        yield group
    finally:
        pids = list(group.pids.values())
        group.close()
        wait_until_gone(pids)


def wait_for(condition: Callable[[], Any], event: str) -> None:
    """Polls until the condition is true."""
    wait_until(condition, seconds=TIMEOUT, interval=0.01, describe=lambda: event)


def running(pid: int) -> bool:
    """Whether the process runs. False for a zombie too: after the death of its parent, init reaps it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids: Iterable[int]) -> None:
    """Waits until the processes have ended. Ray ends a stopped process after five seconds."""
    wait_for(lambda: not any(running(pid) for pid in pids), "the ranks to end")


def when_all_compute(folder: Path, ranks: int, action: Callable[[dict[int, int]], None]) -> threading.Thread:
    """Calls `action` with the pids by rank, in a thread, as soon as every rank is inside `mark_and_wait`."""

    def pids_of_marks() -> dict[int, int]:
        files = [folder / f"rank-{rank}" for rank in range(ranks)]
        if not all(file.exists() and file.read_text() for file in files):
            return {}
        return {rank: int(file.read_text()) for rank, file in enumerate(files)}

    def run() -> None:
        wait_for(pids_of_marks, "the call to run")
        action(pids_of_marks())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread
