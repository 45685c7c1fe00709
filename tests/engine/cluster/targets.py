"""The class that the ranks of the group tests build."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from engine.cluster.rank_progress import report_progress
from engine.errors import BadSpec, OutOfMemory


class CountingTarget:
    """Counts calls, sums over ranks and fails on request. With the option "bad_start" the last rank fails to start."""

    def __init__(self, options: dict[str, Any], *, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.options = options
        self.calls = 0
        bad_start = options.get("bad_start")
        if bad_start and rank == world_size - 1:
            print("about to fail the start", flush=True)
            if bad_start == "exit":
                os._exit(7)
            if bad_start == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if bad_start == "sleep":
                time.sleep(600)
            if bad_start == "spec":
                raise BadSpec("no such model")
            raise RuntimeError("no luck")

    def who(self) -> tuple[int, int, int]:
        return self.rank, self.world_size, os.getpid()

    def niceness(self) -> int:
        return os.nice(0)

    def count(self, tag: str) -> tuple[str, int]:
        """The number of `count` calls so far, summed over the ranks."""
        self.calls += 1
        total = torch.tensor([self.calls])
        dist.all_reduce(total)
        return tag, int(total)

    def echo(self, value: Any) -> Any:
        return value

    def pids(self) -> list[int]:
        pids: list[Any] = [None] * self.world_size
        dist.all_gather_object(pids, os.getpid())
        return pids

    def ray_nodes(self) -> list[str]:
        nodes: list[Any] = [None] * self.world_size
        dist.all_gather_object(nodes, ray.get_runtime_context().get_node_id())
        return nodes

    def fail(self, on: list[int], error: str) -> str:
        errors = {"memory": OutOfMemory("half a micro-batch"), "value": ValueError("seven is no prime")}
        if self.rank in on:
            raise errors[error]
        return "fine"

    def unsendable(self) -> Any:
        return threading.Lock()

    def mark_and_wait(self, folder: str, seconds: float = 600.0) -> None:
        """Writes a file that shows that the call runs, and then blocks for long outside of Python."""
        (Path(folder) / f"rank-{self.rank}").write_text(str(os.getpid()))
        time.sleep(seconds)

    def mark_and_wait_for_file(self, folder: str) -> None:
        """Writes a file that shows that the call runs, and computes until another file is there."""
        (Path(folder) / f"rank-{self.rank}").write_text(str(os.getpid()))
        while not (Path(folder) / f"go-on-{self.rank}").exists():
            time.sleep(0.01)

    def exit_alone(self, on: int) -> None:
        if self.rank == on:
            os._exit(7)

    def stop_self(self, on: int) -> None:
        """Hangs the group: one rank is stopped, and the others wait for it in a collective."""
        if self.rank == on:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(1))

    def slow(self, steps: int, seconds: float) -> int:
        """Takes longer than `hang_seconds` in all, but never in one step."""
        for _ in range(steps):
            time.sleep(seconds)
            report_progress()
        return steps

    def exit(self, on: int, status: int) -> None:
        if self.rank == on:
            os._exit(status)
        dist.all_reduce(torch.ones(1))

    def option_size(self, name: str) -> int:
        return len(self.options[name])

    def spawn_child(self) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def close(self) -> None:
        folder = self.options.get("closed")
        if folder:
            Path(folder, f"closed-{self.rank}").touch()
