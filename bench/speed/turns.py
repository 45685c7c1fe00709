"""Runs the two sides of a comparison in turns. Each side ("arm") is a process that stays alive between its turns.

Only one arm works at a time. An arm is a function (setting, turns) that prepares itself and then loops:

    while turns.begin():
        ...one step...
        turns.end(tokens)

The time between `begin` and `end` is measured: CPU-seconds of all threads of the process, and wall seconds.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import time
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PROFILE_ROWS = 12
"""Operators of a profile."""
END_SECONDS = 60.0
"""Maximum time for an arm to end after it was told to."""


class ArmFailed(Exception):
    """An arm raised an error or died. The message has the end of its output."""


@dataclass(frozen=True)
class Setting:
    """What an arm is given."""

    model: str
    """A Hugging Face folder."""
    folder: str
    """A folder for the arm's own files."""
    rows: list[dict[str, Any]]
    """The data of all steps, in order."""
    rows_per_step: int
    completions: int = 1
    """Completions per prompt."""
    new_tokens: int = 0
    """Tokens of each completion."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of this arm only."""

    def step_rows(self, step: int) -> list[dict[str, Any]]:
        """The rows of 0-based `step`. The rows begin again when they are used up."""
        start = step * self.rows_per_step % len(self.rows)
        return self.rows[start : start + self.rows_per_step]


@dataclass
class Turn:
    """The measurement of one turn."""

    tokens: int
    cpu: float
    wall: float
    peak_gb: float
    """Peak resident memory of the process so far (VmHWM), in 10^9 bytes."""
    phases: dict[str, Any] = field(default_factory=dict)
    """Parts of the turn, by name, with their CPU-seconds, operations and bytes."""
    profile: str = ""


class Turns:
    """The arm's end of the connection to the bench."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._profiler: Any = None
        self._cpu = self._wall = 0.0
        self._stopped: tuple[float, float] | None = None

    def begin(self) -> bool:
        """Waits for the next turn, and starts the clocks. False if there is none."""
        command = self._connection.recv()
        if command == "end":
            return False
        if command == "profile":
            self._profiler = start_profiler()
        self._stopped = None
        self._cpu, self._wall = time.process_time(), time.perf_counter()
        return True

    def stop(self) -> None:
        """Stops the clocks before `end`, for work that is not part of the turn."""
        if self._stopped is None:
            self._stopped = time.process_time() - self._cpu, time.perf_counter() - self._wall
            if self._profiler is not None:
                self._profiler.__exit__(None, None, None)

    def end(self, tokens: int, *, phases: dict[str, Any] | None = None, earlier_cpu: float = 0.0) -> None:
        """Stops the clocks and reports the turn. `earlier_cpu`: CPU-seconds that were spent earlier for this turn."""
        self.stop()
        assert self._stopped is not None
        cpu, wall = (seconds + earlier_cpu for seconds in self._stopped)
        profile = ""
        if self._profiler is not None:
            averages = self._profiler.key_averages()
            profile = averages.table(sort_by="self_cpu_time_total", row_limit=PROFILE_ROWS, max_name_column_width=60)
            self._profiler = None
        self._connection.send(asdict(Turn(tokens, cpu, wall, peak_gb(), phases or {}, profile)))


def start_profiler() -> Any:
    """Starts torch's profiler for all threads of this process: the engine computes in a thread of its own."""
    import torch
    from torch._C._profiler import _ExperimentalConfig

    config = _ExperimentalConfig(profile_all_threads=True)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=config)
    profiler.__enter__()
    return profiler


def peak_gb() -> float:
    """Peak resident memory of this process, in 10^9 bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e9
    raise RuntimeError("/proc/self/status has no VmHWM")


def serve(arm: str, setting: Setting, connection: Connection, log: str) -> None:
    """The main function of an arm's process. `arm` is "module:function"."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    # when memory runs out, the kernel ends the bench and not other work
    Path("/proc/self/oom_score_adj").write_text("500")
    import torch

    torch.set_num_threads(1)
    module, _, name = arm.partition(":")
    getattr(importlib.import_module(module), name)(setting, Turns(connection))


class Arm:
    """The bench's end of the connection to an arm."""

    def __init__(self, function: str, setting: Setting) -> None:
        """`function` is "module:function"."""
        self.function = function
        folder = Path(setting.folder)
        folder.mkdir(parents=True)
        self.log = folder / "log.txt"
        context = multiprocessing.get_context("spawn")
        self._connection, remote = context.Pipe()
        self._process = context.Process(target=serve, args=(function, setting, remote, str(self.log)), daemon=True)
        self._process.start()
        remote.close()

    def turn(self, command: str = "step") -> Turn:
        """Lets the arm take one turn. `command` "profile" takes it under the profiler. Raises ArmFailed."""
        try:
            self._connection.send(command)
            return Turn(**self._connection.recv())
        except (EOFError, ConnectionError) as error:
            self._process.join(END_SECONDS)
            output = self.log.read_text(errors="replace")[-4000:]
            raise ArmFailed(f"{self.function} ended with status {self._process.exitcode}:\n{output}") from error

    def close(self) -> None:
        """Ends the process."""
        with contextlib.suppress(ConnectionError):
            self._connection.send("end")
        self._process.join(END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def take_turns(arms: dict[str, tuple[str, Setting]], pairs: int, *, profiled: str) -> tuple[dict[str, list[Turn]], str]:
    """Starts the arms one after the other, each with a warm-up turn, and lets them take `pairs` counted turns in turn.

    Returns the counted turns of each arm, and the profile of a further turn of the arm `profiled`."""
    started: dict[str, Arm] = {}
    turns: dict[str, list[Turn]] = {name: [] for name in arms}
    try:
        for name, (function, setting) in arms.items():
            started[name] = Arm(function, setting)
            print(f"  warm-up {name}: {started[name].turn().cpu:.1f} CPU-s", flush=True)
        for pair in range(pairs):
            for name, arm in started.items():
                turns[name].append(arm.turn())
            last = {name: turns[name][-1] for name in arms}
            speeds = [f"{name} {turn.tokens / turn.cpu:.1f}" for name, turn in last.items() if turn.tokens]
            print(f"  pair {pair + 1}: {', '.join(speeds)} a CPU-s", flush=True)
        return turns, started[profiled].turn("profile").profile
    finally:
        for arm in started.values():
            arm.close()
