"""The process group of an agent ends with the process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tasks.child_process import GUARDED_COMMAND
from tests.fixtures.waiting import alive, wait_for_text, wait_until

WORKER = """
import os, subprocess, sys
pipe, write_end = os.pipe()
words = [sys.executable, "-c", sys.argv[1], str(pipe), "0", "sh", "-c", "sleep 600 & echo $! $$ >$0; wait", sys.argv[2]]
subprocess.run(words, pass_fds=(pipe,), start_new_session=True)
"""
"""Runs a shell with a child that sleeps, and notes their ids."""


def test_all_processes_of_an_agent_end_with_a_worker_that_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "ids"
    worker = subprocess.Popen([sys.executable, "-c", WORKER, GUARDED_COMMAND, str(note)])
    pids = [int(word) for word in wait_for_text(note).split()]
    assert len(pids) == 2 and all(map(alive, pids))
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    wait_until(lambda: not any(map(alive, pids)))


def run_guarded(*words: str, memory: int = 0) -> subprocess.CompletedProcess[str]:
    pipe, write_end = os.pipe()
    try:
        return subprocess.run(
            [sys.executable, "-c", GUARDED_COMMAND, str(pipe), str(memory), *words], pass_fds=(pipe,),
            start_new_session=True, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    finally:
        os.close(pipe)
        os.close(write_end)


def test_a_command_has_no_child_that_it_did_not_start() -> None:
    """Else a program that waits for all its children would never end."""
    program = "import os\ntry: os.wait()\nexcept ChildProcessError: print('no child')"
    assert run_guarded(sys.executable, "-c", program).stdout == "no child\n"


def test_the_memory_of_a_command_is_limited() -> None:
    done = run_guarded(sys.executable, "-c", "print(len(bytearray(1 << 30)))", memory=512 << 20)
    assert done.returncode == 1 and "MemoryError" in done.stderr


def test_a_program_that_is_not_there_is_named() -> None:
    done = run_guarded("no-such-program")
    assert done.returncode == 1 and "no-such-program cannot be run: " in done.stderr
