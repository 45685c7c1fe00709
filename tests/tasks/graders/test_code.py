"""Tests of the grader that runs programs from completions: which programs pass, and that they cannot harm the
grader."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from engine.text.threads import StringThread
from tasks.graders.base import GraderError
from tasks.graders.code import CodeGrader, last_python_block

pytestmark = pytest.mark.skipif(os.name != "posix", reason="limits are POSIX's")

DOUBLE = [{"stdin": "2\n", "stdout": "4\n"}, {"stdin": "5", "stdout": "10"}, {"stdin": "0", "stdout": "0"}]


def program(source: str, tests: Any) -> StringThread:
    text = f"Here it is:\n```python\n{source}\n```\nDone."
    return StringThread(turns=[("user", "Write it."), ("assistant", text)], metadata={"tests": tests})


async def grade(source: str, tests: Any, **options: Any) -> tuple[float, str]:
    patient = {"seconds": 60.0} | options.pop("limits", {})
    grade = await CodeGrader(limits=patient, **options).grade(program(source, tests))
    return grade.value, grade.reasoning or ""


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("print(2 * int(input()))", 1.0),
        ("n = int(input())\nprint(n * n)", pytest.approx(2 / 3)),  # right for 2 and 0
        ("print(4)", pytest.approx(1 / 3)),
        ("print(2 * int(input())", 0.0),  # does not compile
        ("raise SystemExit", 0.0),
        ("import sys\nprint(2 * int(input()))\nsys.exit(0)", 1.0),
        ("import sys\nprint(2 * int(input()))\nsys.exit(1)", 0.0),
        ("if __name__ == '__main__':\n    print(2 * int(input()), '  ')", 1.0),
    ],
)
async def test_the_share_of_tests_by_input_and_output(source: str, value: Any) -> None:
    assert (await grade(source, DOUBLE))[0] == value


async def test_all_or_nothing() -> None:
    assert (await grade("print(4)", DOUBLE, all_or_nothing=True))[0] == 0.0
    assert (await grade("print(2 * int(input()))", DOUBLE, all_or_nothing=True))[0] == 1.0


async def test_tests_in_python() -> None:
    tests = ["assert f(2) == 4", "assert f(3) == 9", "assert f(-1) == 1"]
    source = "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: 'int'\ndef f(n):\n    return P(n).x ** 2"
    assert await grade(source, [{"code": test} for test in tests]) == (1.0, "")
    value, why = await grade("def f(n):\n    return 2 * n", "\n".join(tests))
    assert value == 0.0 and "test 0: ended before the test did" in why


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "raise SystemExit",
        "print(open('token').read())",
        "print(open('test.py').read())\ndef f(n): return 4",
        "import sys\nprint(sys.argv[1:])\nimport os\nos._exit(0)",
    ],
)
async def test_leaving_before_the_test_is_not_passing_it(source: str) -> None:
    assert (await grade(source, "assert f(2) == 4"))[0] == 0.0


@pytest.mark.slow
async def test_a_program_that_does_not_end_is_killed_with_what_it_started(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = asyncio.create_task(asyncio.to_thread(pipe.read_bytes))  # ends when all writers have
    source = f"""
import os, threading
writing = open({str(pipe)!r}, "wb", buffering=0)
os.fork()
writing.write(b"x")
threading.Event().wait()
"""
    value, why = await grade(source, DOUBLE[:1], limits={"seconds": 10})
    assert value == 0.0 and "still ran after 10 s" in why
    assert await asyncio.wait_for(reading, 60) == b"xx"


async def test_memory_and_output_are_limited() -> None:
    value, _ = await grade("x = bytearray(1 << 30)\nprint(2 * int(input()))", DOUBLE[:1], limits={"memory_mib": 256})
    assert value == 0.0
    assert (await grade("for _ in range(100): print('x' * 10**6)\n", DOUBLE[:1]))[0] == 0.0


async def test_no_program_and_no_tests() -> None:
    silent = StringThread(turns=[("user", "q"), ("assistant", "print(4)")], metadata={"tests": DOUBLE})
    assert (await CodeGrader().grade(silent)).value == 0.0
    for tests in (None, [], [{"stdin": "1"}], [{"stdout": "1", "code": "x"}], 3):
        with pytest.raises(GraderError):
            await grade("print(1)", tests)


def test_the_last_python_block_counts() -> None:
    text = "```python\na\n```\n```bash\nb\n```\n```py\nc\n```\nand ```inline```"
    assert last_python_block(text) == "c\n"
    assert last_python_block("```\nd\n```") == "d\n"
    assert last_python_block("a = 1") is None
