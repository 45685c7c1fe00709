"""Graders that end the process they run in, by import path."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path

from engine.text.threads import StringThread
from tasks.graders.base import BaseGrader, Grade, GraderError, IgnoreGradeException


def segfault(thread: StringThread) -> float:
    """1.0, but for the answer "crash"."""
    if thread.last_content() == "crash":
        ctypes.string_at(0)
    return 1.0


def leave(thread: StringThread) -> float:
    if thread.last_content() == "crash":
        os._exit(3)
    return 1.0


def be_killed(thread: StringThread) -> float:
    """As the kernel does when memory runs out."""
    if thread.last_content() == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def overflow(thread: StringThread) -> float:
    """Uses up the C stack."""
    if thread.last_content() == "crash":
        sys.setrecursionlimit(1 << 30)
        nested: list[object] = []
        for _ in range(1_000_000):
            nested = [nested]
        repr(nested)
    return 1.0


def crash_once(thread: StringThread, *, folder: str) -> float:
    """Crashes the first time, which a file in `folder` remembers."""
    mark = Path(folder) / "crashed"
    if not mark.exists():
        mark.touch()
        os._exit(3)
    return 1.0


def hang(thread: StringThread, *, folder: str) -> float:
    """Writes the id of its process into `folder`, then hangs, if the answer is "hang"."""
    (Path(folder) / "pid").write_text(str(os.getpid()))
    if thread.last_content() == "hang":
        threading.Event().wait()
    return 1.0


class Talkative(BaseGrader):
    """Does what the answer says."""

    async def setup(self) -> None:
        print("a line on standard output")
        self.ready = True

    async def grade(self, thread: StringThread) -> Grade:
        print("another line", flush=True)
        os.write(1, b"and one from native code\n")
        told = thread.last_content()
        if told == "decline":
            raise IgnoreGradeException("no opinion")
        if told == "bad data":
            raise GraderError("no answer in the dataset")
        if told == "bug":
            raise ValueError("a bug")
        if told == "exit":
            sys.exit(1)
        self.add_log({"length": len(told)})
        loaded = "torch" in sys.modules or sys.stdin.read() != ""
        return Grade(value=float(self.ready and not loaded), grader_key=self.grader_key, reasoning="because")


class Unready(BaseGrader):
    async def setup(self) -> None:
        raise RuntimeError("no license")

    async def grade(self, thread: StringThread) -> Grade:
        raise AssertionError


def segfault_at_zero(thread: StringThread) -> float:
    """Share of even code points; answers to the prompt "0" crash the interpreter."""
    if thread.turns[0].text == "0":
        ctypes.string_at(0)
    return sum(ord(character) % 2 == 0 for character in thread.last_content()[:6]) / 6
