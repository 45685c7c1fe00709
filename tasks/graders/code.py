"""Grades code in a completion: runs it against tests in a process with limits.

The process is not a sandbox: it can read and write the files of this user. Its time, memory and output are limited. It
has no network if the kernel lets an ordinary user cut it off. Train on untrusted code only inside a container, or
behind RewardServerGrader.
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
MAX_OUTPUT_BYTES = 1 << 20
"""Limit on what a program prints, and on the size of each file that it writes."""


class CodeTest(Frozen):
    """One test of a program: either its output for an input, or Python code that runs after it and must not raise."""

    stdin: str = ""
    """Standard input of the program."""
    stdout: str | None = None
    """Expected output, compared line by line without trailing white space."""
    code: str | None = None
    """Python code that runs after the program in the same namespace, such as assert statements."""


_TESTS: TypeAdapter[list[CodeTest]] = TypeAdapter(list[CodeTest])


class CodeLimits(Frozen):
    """Limits on the programs that CodeGrader runs."""

    seconds: float = Field(10.0, gt=0)
    """Wall-clock time of one test, in seconds."""
    memory_mib: int = Field(512, ge=64)
    """Address space of a program, in MiB."""
    processes: int = Field(2, ge=1)
    """Number of programs that run at the same time for one grader in one process."""


class CodeGrader(BaseGrader):
    """The share of the tests in metadata[tests_key] that the last Python block of the completion passes.

    With `all_or_nothing`, 1.0 if all tests pass, else 0.0. A completion without a block gets 0.0.

    The tests are a list of {"stdin", "stdout"} or {"code"}; a text stands for one {"code"}. A program fails a test if
    it exits before the test code ran to the end, whatever its exit status. The program and the test code share a
    process, so a program can be written to deceive the test. Tests by input and output are stricter.
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
        self._free_processes = asyncio.Semaphore(self.limits.processes)

    async def grade(self, thread: StringThread) -> Grade:
        tests, program = self._tests(thread), last_python_block(thread.last_content())
        if program is None:
            return Grade(value=0.0, grader_key=self.grader_key, reasoning="no Python block in the completion")
        # The semaphore in `_run` limits how many of the tests run at the same time.
        problems = await asyncio.gather(*(self._run(program, test) for test in tests))
        failed = [f"test {number}: {problem}" for number, problem in enumerate(problems) if problem is not None]
        share = 1 - len(failed) / len(tests)
        value = float(not failed) if self.all_or_nothing else share
        return Grade(value=value, grader_key=self.grader_key, reasoning="; ".join(failed)[:500] or None)

    def _tests(self, thread: StringThread) -> list[CodeTest]:
        """The tests of the thread's row. Raises GraderError if its metadata holds none."""
        stored = from_metadata(thread, self.tests_key)
        try:
            tests = _TESTS.validate_python([{"code": stored}] if isinstance(stored, str) else stored)
        except ValidationError as error:
            raise GraderError(
                f"metadata[{self.tests_key!r}] is not a list of tests: {error.errors()[0]}"[:300]
            ) from error
        if not tests or any((test.stdout is None) == (test.code is None) for test in tests):
            raise GraderError(f"metadata[{self.tests_key!r}]: expected tests, each with either 'stdout' or 'code'")
        return tests

    async def _run(self, program: str, test: CodeTest) -> str | None:
        """Run one test in a new folder. Returns what went wrong, or None if the test passed."""
        async with self._free_processes:
            with tempfile.TemporaryDirectory(prefix="ostinato-code-", ignore_cleanup_errors=True) as folder:
                return await self._run_in(Path(folder), program, test)

    async def _run_in(self, folder: Path, program: str, test: CodeTest) -> str | None:
        # Write the files that the launcher reads. It prints the token if the test ran to its end.
        (folder / "program.py").write_text(program, encoding="utf-8", errors="replace")
        (folder / "test.py").write_text(test.code or "", encoding="utf-8")
        (folder / "stdin").write_text(test.stdin, encoding="utf-8")
        token = secrets.token_hex(16)
        (folder / "token").write_text(token)

        # Run the launcher with a clean environment, in its own session, and kill the whole session at the end.
        with open(folder / "stdin", "rb") as stdin, open(folder / "stdout", "wb") as stdout:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", str(_LAUNCHER),
                str(self.limits.memory_mib << 20), str(int(self.limits.seconds) + 1), str(MAX_OUTPUT_BYTES),
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
    """What is wrong with the output of a program, or None if the test passed."""
    text = output.decode("utf-8", errors="replace")
    # The launcher prints the token after the test, so an output without it means that the program ended early.
    printed, end_marker, _ = text.partition(f"\n{token}\n")
    if not end_marker:
        return f"ended before the test did, status {status}"
    if test.stdout is not None and _lines(printed) != _lines(test.stdout):
        return f"printed {printed[:100]!r}, expected {test.stdout[:100]!r}"
    return None


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


async def _end(process: Process) -> None:
    """Kill the program and all processes that it started."""
    # The process is the leader of its own session, so its id is that of the process group.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
