"""Finds, starts and ends processes by pid and start time, so that a reused pid is never mistaken for our process.

Every process that `ostinato up` starts has the environment variable UP_ID_ENV, and all its children inherit it. So the
processes of one `up` can be found even if their parents have ended.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import psutil

from storage.serialization import Frozen

UP_ID_ENV = "OSTINATO_UP"
"""Environment variable with the id of the `up` that a process belongs to."""
FLOW_RUN_ENV = "PREFECT__FLOW_RUN_ID"
"""Environment variable in which Prefect's worker puts the id of the flow run that a process executes."""
MAX_LOG_BYTES = 50 * 2**20
"""Size at which the log of a process is rotated."""
START_TIME_TOLERANCE_SECONDS = 0.05
"""Start times are computed from the kernel's clock ticks of 0.01 s."""


class ProcessIdentity(Frozen):
    """A pid with the start time of its process, which together identify a process."""

    pid: int
    created: float
    """Start time of the process, seconds since 1970."""

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """Returns the identity of the process that has this pid now, or None if there is none."""
        try:
            return cls(pid=pid, created=psutil.Process(pid).create_time())
        except psutil.NoSuchProcess:
            return None

    def process(self) -> psutil.Process | None:
        """Returns the process if it is alive. Returns None if it is gone or a zombie, or if the pid was reused."""
        try:
            process = psutil.Process(self.pid)
            is_same = abs(process.create_time() - self.created) < START_TIME_TOLERANCE_SECONDS
            if is_same and process.status() != psutil.STATUS_ZOMBIE:
                return process
            return None
        except psutil.NoSuchProcess:
            return None

    @property
    def alive(self) -> bool:
        return self.process() is not None


def open_log(log: Path) -> BinaryIO:
    """Opens the log of a process to append to it. A log that has grown too long is rotated first."""
    rotate_log(log)
    return log.open("ab")


def rotate_log(log: Path) -> None:
    """Moves the content of a log over MAX_LOG_BYTES to the file with the ending .1, whose content it replaces.

    The log stays the same file, because running processes append to it. Lines that they write during the copy are
    lost."""
    if log.exists() and log.stat().st_size > MAX_LOG_BYTES:
        shutil.copyfile(log, log.with_name(f"{log.name}.1"))
        os.truncate(log, 0)


def spawn(command: Sequence[str], *, environment: Mapping[str, str], log: Path, folder: Path) -> ProcessIdentity:
    """Starts a process in a new session, so that Ctrl-C reaches only the supervisor. Appends its output to `log`."""
    with open_log(log) as output:
        child = subprocess.Popen(
            list(command),
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    identity = ProcessIdentity.of(child.pid)
    # the kernel keeps a child until its parent has waited for it
    assert identity is not None
    # keeps Popen from warning about a running child; `reap` waits for it
    child.returncode = 0
    return identity


def run_and_follow(
    command: Sequence[str], *, environment: Mapping[str, str], folder: Path | None, on_line: Callable[[str], None]
) -> tuple[int, str]:
    """Runs a command in a folder, or in the present one, and calls `on_line` with each line that it prints. Returns its
    exit status and all that it printed."""
    printed = []
    with subprocess.Popen(
        command, cwd=folder, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            printed.append(line)
            on_line(line)
    return process.returncode, "".join(printed).strip()


def reap(identity: ProcessIdentity) -> str:
    """Removes a dead child from the kernel's process table. Does nothing for a live process or another's child.

    Returns how it ended: "by SIGKILL", "with exit code 1", or "" if that is not known."""
    try:
        pid, status = os.waitpid(identity.pid, os.WNOHANG)
    except ChildProcessError:
        return ""
    if pid == 0:
        return ""
    code = os.waitstatus_to_exitcode(status)
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def terminate_all(processes: Iterable[psutil.Process], *, grace_seconds: float) -> None:
    """Sends SIGTERM to all, and SIGKILL to those that run after `grace_seconds`. Returns when all have ended."""
    # all get the signal before the first wait, so that they end at the same time
    targets = list(processes)
    for process in targets:
        _signal(process, hard=False)
    _, remaining = psutil.wait_procs(targets, timeout=grace_seconds)
    for process in remaining:
        _signal(process, hard=True)
    psutil.wait_procs(remaining, timeout=grace_seconds)


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """Sends SIGKILL to all. Returns when all have ended."""
    targets = list(processes)
    for process in targets:
        _signal(process, hard=True)
    psutil.wait_procs(targets, timeout=10.0)


def processes_of_up(up_id: str) -> list[psutil.Process]:
    """Returns the live processes of an `up` except this one. Processes whose environment is unreadable are not ours."""
    processes = []
    for process in psutil.process_iter():
        if process.pid != os.getpid() and process_environment(process).get(UP_ID_ENV) == up_id:
            processes.append(process)
    return processes


def process_environment(process: psutil.Process) -> dict[str, str]:
    """Returns the environment of a process. Empty if the process is gone, dead, or another user's."""
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def _signal(process: psutil.Process, *, hard: bool) -> None:
    try:
        # psutil compares the start time first
        process.kill() if hard else process.terminate()
    except psutil.NoSuchProcess:
        return
