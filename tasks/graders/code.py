"""Code that a completion holds, run against tests in a process with limits.

The process is no sandbox: it has this user's files. Its time, memory, output and, where the kernel lets an ordinary
user cut it off, its network are limited. Train on code from strangers only inside a container, or behind
RewardServerGrader.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import sys
import tempfile
from asyncio.subprocess import DEVNULL, Process
from pathlib import Path
from typing import Any

from pydantic import Field, TypeAdapter, ValidationError

from engine.text.threads import StringThread
from storage.serialization import Frozen
from tasks.graders.base import BaseGrader, Grade, GraderError
from tasks.graders.rules import from_metadata

_FENCED = re.compile(r"^[ \t]*```[ \t]*(\w*)[ \t]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
_PYTHON = frozenset({"", "python", "python3", "py"})
_LAUNCHER = Path(__file__).with_name("running") / "code_launcher.py"
MOST_OUTPUT_BYTES = 1 << 20


class CodeTest(Frozen):
    """One test of a program: either what it prints for an input, or Python that runs after it and must not raise."""

    stdin: str = ""
    stdout: str | None = None
    """Compared line by line, trailing white space aside."""
    code: str | None = None


_TESTS: TypeAdapter[list[CodeTest]] = TypeAdapter(list[CodeTest])


class CodeLimits(Frozen):
    seconds: float = Field(10.0, gt=0)
    """Of wall time, per test."""
    memory_mib: int = Field(512, ge=64)
    """Of address space."""
    processes: int = Field(2, ge=1)
    """Programs that run at once, from this grader in this process."""


class CodeGrader(BaseGrader):
    """Share of the tests in metadata[tests_key] that the completion's last Python block passes; `all_or_nothing`: 1.0
    for all of them, else 0.0. No block, or no test passed: 0.0.

    Tests are a list of {"stdin", "stdout"} or {"code"}; a text alone is one {"code"}. A program that exits before its
    test code ran to the end has not passed it, whatever its exit status. (The two share a process: a program written to
    deceive its test can. Tests by input and output are stricter.)
    """

    def __init__(
        self,
        grader_key: str = "code",
        *,
        tests_key: str = "tests",
        all_or_nothing: bool = False,
        limits: CodeLimits | dict[str, Any] | None = None,
    ) -> None:
        super().__init__(grader_key)
        self.tests_key, self.all_or_nothing = tests_key, all_or_nothing
        self.limits = CodeLimits.model_validate(limits or {})
        self._turn = asyncio.Semaphore(self.limits.processes)

    async def grade(self, thread: StringThread) -> Grade:
        tests, program = self._tests(thread), last_python_block(thread.last_content())
        if program is None:
            return Grade(value=0.0, grader_key=self.grader_key, reasoning="no Python block in the completion")
        problems = await asyncio.gather(*(self._run(program, test) for test in tests))
        failed = [f"test {number}: {problem}" for number, problem in enumerate(problems) if problem is not None]
        share = 1 - len(failed) / len(tests)
        value = float(not failed) if self.all_or_nothing else share
        return Grade(value=value, grader_key=self.grader_key, reasoning="; ".join(failed)[:500] or None)

    def _tests(self, thread: StringThread) -> list[CodeTest]:
        stored = from_metadata(thread, self.tests_key)
        try:
            tests = _TESTS.validate_python([{"code": stored}] if isinstance(stored, str) else stored)
        except ValidationError as error:
            raise GraderError(f"metadata[{self.tests_key!r}] holds no tests: {error.errors()[0]}"[:300]) from error
        if not tests or any((test.stdout is None) == (test.code is None) for test in tests):
            raise GraderError(f"metadata[{self.tests_key!r}]: expected tests, each with either 'stdout' or 'code'")
        return tests

    async def _run(self, program: str, test: CodeTest) -> str | None:
        """What was wrong; None for a test passed."""
        async with self._turn:
            with tempfile.TemporaryDirectory(prefix="ostinato-code-", ignore_cleanup_errors=True) as folder:
                return await self._run_in(Path(folder), program, test)

    async def _run_in(self, folder: Path, program: str, test: CodeTest) -> str | None:
        (folder / "program.py").write_text(program, encoding="utf-8", errors="replace")
        (folder / "test.py").write_text(test.code or "", encoding="utf-8")
        (folder / "stdin").write_text(test.stdin, encoding="utf-8")
        token = secrets.token_hex(16)
        (folder / "token").write_text(token)
        with open(folder / "stdin", "rb") as stdin, open(folder / "stdout", "wb") as stdout:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", str(_LAUNCHER),
                str(self.limits.memory_mib << 20), str(int(self.limits.seconds) + 1), str(MOST_OUTPUT_BYTES),
                cwd=folder, stdin=stdin, stdout=stdout, stderr=DEVNULL, start_new_session=True,
                env={"PATH": os.defpath, "HOME": str(folder), "TMPDIR": str(folder), "LC_ALL": "C.UTF-8"},
            )  # fmt: skip
            try:
                await asyncio.wait_for(process.wait(), self.limits.seconds)
            except TimeoutError:
                return f"still ran after {self.limits.seconds:g} s"
            finally:
                await _end(process)
        return _problem((folder / "stdout").read_bytes(), token, process.returncode, test)


def last_python_block(text: str) -> str | None:
    """The last fenced block of Python (or of no named language) in `text`."""
    blocks = [block for language, block in _FENCED.findall(text) if language.lower() in _PYTHON]
    return blocks[-1] if blocks else None


def _problem(output: bytes, token: str, status: int | None, test: CodeTest) -> str | None:
    text = output.decode("utf-8", errors="replace")
    printed, ran_to_the_end, _ = text.partition(f"\n{token}\n")
    if not ran_to_the_end:
        return f"ended before the test did, status {status}"
    if test.stdout is not None and _lines(printed) != _lines(test.stdout):
        return f"printed {printed[:100]!r}, expected {test.stdout[:100]!r}"
    return None


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


async def _end(process: Process) -> None:
    """Kill the program and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
