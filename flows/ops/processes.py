"""Processes by pid and start time, so that a pid that was given away again is never taken for ours.

Every process that `ostinato up` starts carries an environment variable, which all that it starts inherit: what is ours
can be told from what is not, whatever became of its parents.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from storage.serialization import Frozen

UP_ID_ENV = "OSTINATO_UP"
"""The environment variable with the id of the `up` that a process belongs to."""
FLOW_RUN_ENV = "PREFECT__FLOW_RUN_ID"
"""The environment variable by which Prefect's worker tells a process which flow run it is."""
SAME_START_SECONDS = 0.05
"""Start times are read from the kernel's clock ticks, which are 0.01 s."""


class ProcessIdentity(Frozen):
    """A process that cannot be mistaken for another one."""

    pid: int
    created: float
    """When it started: seconds since 1970."""

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """The process that has this pid now, or None."""
        try:
            return cls(pid=pid, created=psutil.Process(pid).create_time())
        except psutil.NoSuchProcess:
            return None

    def process(self) -> psutil.Process | None:
        """The living process, or None: gone, dead and not asked for yet, or the pid is another's by now."""
        try:
            found = psutil.Process(self.pid)
            ours = abs(found.create_time() - self.created) < SAME_START_SECONDS
            return found if ours and found.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None

    @property
    def alive(self) -> bool:
        return self.process() is not None


def spawn(command: Sequence[str], *, environment: Mapping[str, str], log: Path, folder: Path) -> ProcessIdentity:
    """Starts a process in a session of its own (Ctrl-C is for the supervisor), appending what it says to `log`."""
    with log.open("ab") as output:
        child = subprocess.Popen(
            list(command),
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    mark = ProcessIdentity.of(child.pid)
    assert mark is not None  # nobody has waited for it, so the kernel keeps it
    child.returncode = 0  # watched by its mark, and waited for by `reap`: Popen must not warn that it lives on
    return mark


def reap(mark: ProcessIdentity) -> None:
    """Lets the kernel forget a dead child. Not our child (adopted), or alive: nothing."""
    try:
        os.waitpid(mark.pid, os.WNOHANG)
    except ChildProcessError:
        return


def terminate_all(processes: Iterable[psutil.Process], *, grace_seconds: float) -> None:
    """SIGTERM to all, SIGKILL to those that are there after `grace_seconds`; returns when all are gone."""
    asked = list(processes)
    for process in asked:
        _signal(process, hard=False)
    _, lingering = psutil.wait_procs(asked, timeout=grace_seconds)
    for process in lingering:
        _signal(process, hard=True)
    psutil.wait_procs(lingering, timeout=grace_seconds)


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL to all; returns when all are gone."""
    asked = list(processes)
    for process in asked:
        _signal(process, hard=True)
    psutil.wait_procs(asked, timeout=10.0)


def processes_of_up(mark: str) -> list[psutil.Process]:
    """Every living process of this `up` but this one. Only those whose environment we may read can be ours."""
    found = []
    for process in psutil.process_iter():
        if process.pid != os.getpid() and process_environment(process).get(UP_ID_ENV) == mark:
            found.append(process)
    return found


def process_environment(process: psutil.Process) -> dict[str, str]:
    """Empty for a process that is gone, dead, or another user's."""
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def _signal(process: psutil.Process, *, hard: bool) -> None:
    try:
        process.kill() if hard else process.terminate()  # psutil looks at the start time first
    except psutil.NoSuchProcess:
        return
