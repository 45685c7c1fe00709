"""Grades, functions as graders, threads for blocking code, and running statistics."""

import asyncio
import math
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from engine.text.threads import StringThread
from tasks.graders.base import BaseGrader, Grade, GraderError, in_thread

THREAD = StringThread(turns=[("user", "q"), ("assistant", "abc")], metadata={})


@pytest.mark.parametrize("value", ["1.0", None, [1.0]])
def test_a_grade_is_a_number(value: Any) -> None:
    with pytest.raises(ValidationError):
        Grade(value=value, grader_key="k")


@pytest.mark.parametrize(
    ("returned", "value"), [(1, 1.0), (True, 1.0), (False, 0.0), (np.float32(0.5), 0.5), (np.bool_(True), 1.0)]
)
async def test_functions_may_return_any_number(returned: Any, value: float) -> None:
    assert (await BaseGrader.from_function("k", lambda thread: returned).grade(THREAD)).value == value


@pytest.mark.parametrize("returned", ["1", None, [1.0], {"value": 1.0}, 1j])
async def test_functions_may_not_return_anything_else(returned: Any) -> None:
    with pytest.raises(TypeError, match="expected a number or a Grade"):
        await BaseGrader.from_function("k", lambda thread: returned).grade(THREAD)


async def test_async_functions_and_whole_grades() -> None:
    async def length(thread: StringThread) -> float:
        return len(thread.last_content())

    async def explained(thread: StringThread) -> Grade:
        return Grade(value=0.5, grader_key="mine", reasoning="because")

    assert await BaseGrader.from_function("k", length).score_float_value(THREAD) == 3.0
    assert (await BaseGrader.from_function("k", explained).grade(THREAD)).reasoning == "because"


async def test_plain_functions_run_beside_the_loop() -> None:
    barrier = threading.Barrier(2, timeout=5)

    def meet(thread: StringThread) -> float:
        barrier.wait()
        return 1.0

    grader = BaseGrader.from_function("k", meet)
    grades = await asyncio.gather(grader.grade(THREAD), grader.grade(THREAD))
    assert [grade.value for grade in grades] == [1.0, 1.0]


async def test_what_a_thread_raises_is_raised_here() -> None:
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 / 0)
    with pytest.raises(GraderError, match="would end the process"):
        await in_thread(sys.exit, 3)
    with pytest.raises(RuntimeError):
        await in_thread(next, iter([]))


def test_a_hung_thread_does_not_hold_the_interpreter_at_exit() -> None:
    code = """
import asyncio, time
from tasks.graders.base import in_thread
async def main():
    await asyncio.wait({asyncio.ensure_future(in_thread(time.sleep, 3600))}, timeout=0.05)
asyncio.run(main())
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


class Quiet(BaseGrader):
    async def grade(self, thread: StringThread) -> Grade:
        return Grade(value=0.0, grader_key=self.grader_key)


def test_logs_are_statistics() -> None:
    grader = Quiet("q")
    for value in (2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0):  # the textbook example: mean 5, population std 2
        grader.add_log({"score": value})
    assert grader.get_logs() == {
        "score/mean": 5.0,
        "score/std": 2.0,
        "score/min": 2.0,
        "score/max": 9.0,
        "score/count": 8.0,
    }
    with pytest.raises(ValueError, match="finite"):
        grader.add_log({"score": math.nan})
    grader.clear_logs()
    assert grader.get_logs() == {}
