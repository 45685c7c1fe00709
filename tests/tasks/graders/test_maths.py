"""Tests of the grader of mathematical answers, which compares by meaning in a process that can be killed."""

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

pytest.importorskip("math_verify")

from engine.text.threads import StringThread
from tasks.graders.base import GraderError
from tasks.graders.maths import MathsGrader
from tasks.graders.running.grade_threads import grade_threads
from tasks.graders.running.maths_worker import last_boxes
from tasks.graders.running.worker_pool import WorkerFailed, WorkerPool, WorkerTimeout


def answered(expected: object, text: str) -> StringThread:
    return StringThread(turns=[("user", "q"), ("assistant", text)], metadata={"answer": expected})


@pytest_asyncio.fixture
async def grader() -> AsyncIterator[MathsGrader]:
    grader = MathsGrader(timeout_seconds=60.0)
    await grader.setup()
    yield grader
    await grader.teardown()


async def test_answers_are_compared_as_mathematics(grader: MathsGrader) -> None:
    right = [
        ("1/2", r"So it is \boxed{0.5}."),
        (0.5, r"$x = \frac{1}{2}$"),
        ("x^2+2x+1", r"\boxed{(x+1)^2}"),
        (r"\sqrt{2}", r"not 3 but \boxed{2^{1/2}}"),
        ("{1,2}", r"\boxed{\{2,1\}}"),
        ("10", r"At first \boxed{3}. No, wait: it is \boxed{10}."),
        ("{3, 10}", r"\boxed{10} and \boxed{3}"),
        (r"$\frac{\pi}{4}$", r"\boxed{\arctan(1)}"),
    ]
    wrong = [
        ("1/2", r"\boxed{1/3}"),
        ("7", "no idea"),
        ("7", ""),
        ("x^2+2x+1", r"\boxed{(x-1)^2}"),
        ("10", r"\boxed{3}"),
    ]
    outcomes = await grade_threads(grader, [answered(*pair) for pair in right + wrong], timeout_seconds=120)
    assert [outcome.reward for outcome in outcomes] == [1.0] * len(right) + [0.0] * len(wrong)


async def test_a_dataset_without_an_answer_is_an_error(grader: MathsGrader) -> None:
    for expected in (None, "", "$ $"):
        with pytest.raises(GraderError):
            await grader.grade(answered(expected, "7"))


@pytest.mark.slow
async def test_what_takes_forever_is_wrong_and_the_next_is_graded() -> None:
    grader = MathsGrader(timeout_seconds=1.0)
    for endless in (r"\boxed{9^{9^{9^{9}}}}", r"\boxed{" + "(x+1)^{9999}" * 40 + "}"):
        assert (await grader.grade(answered("7", endless))).value == 0.0
        assert (await grader.grade(answered("7", r"\boxed{7}"))).value == 1.0
    await grader.teardown()


@pytest.mark.parametrize(
    ("text", "boxes"),
    [
        (r"\boxed{1}", r"$\boxed{1}$"),
        (r"$\boxed{\frac{1}{2}}$ then $\boxed{\text{a \} b}}$ ok", r"$\boxed{\text{a \} b}}$"),
        (r"\boxed{1} so $\boxed{2}$, $\boxed{3}$ and \boxed{4}.", r"$\boxed{2}$ and $\boxed{3}$ and $\boxed{4}$"),
        (r"\boxed{1} and \boxed{2", r"$\boxed{1}$"),
        ("no box { here", "no box { here"),
    ],
)
def test_the_last_boxes(text: str, boxes: str) -> None:
    assert last_boxes(text) == boxes


# -- the pool ----------------------------------------------------------------------------------------------------

ECHO = "tests.fixtures.servers.echo_worker"


async def test_a_worker_is_kept_while_it_answers_and_replaced_when_it_does_not() -> None:
    pool = WorkerPool(ECHO, processes=1)
    await pool.start()
    first, again = [await pool.call({"say": "pid"}, timeout_seconds=60) for _ in range(2)]
    assert first == again != os.getpid()
    with pytest.raises(WorkerTimeout):
        await pool.call({"say": "nothing"}, timeout_seconds=0.05)
    assert not _alive(first)
    second = await pool.call({"say": "pid"}, timeout_seconds=60)
    with pytest.raises(WorkerFailed):
        await pool.call({"say": "exit"}, timeout_seconds=60)
    third = await pool.call({"say": "pid"}, timeout_seconds=60)
    assert len({first, second, third}) == 3
    await pool.close()
    assert not _alive(third)


async def test_no_more_workers_than_allowed_and_one_answer_each() -> None:
    pool = WorkerPool(ECHO, processes=2)
    answers = await asyncio.gather(*(pool.call({"say": number}, timeout_seconds=60) for number in range(20)))
    assert answers == list(range(20))
    pids = await asyncio.gather(*(pool.call({"say": "pid"}, timeout_seconds=60) for _ in range(20)))
    assert len(set(pids)) <= 2
    await pool.close()


async def test_a_call_that_is_cancelled_takes_its_worker_along() -> None:
    """Its late answer would be taken for that of the next call."""
    pool = WorkerPool(ECHO, processes=1)
    pid = await pool.call({"say": "pid"}, timeout_seconds=60)
    call = asyncio.create_task(pool.call({"say": "nothing"}, timeout_seconds=60))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await pool.call({"say": 1}, timeout_seconds=60) == 1
    assert not _alive(pid)
    await pool.close()


async def test_a_module_that_is_no_worker_is_named() -> None:
    with pytest.raises(WorkerFailed, match="ended before it was ready"):
        await WorkerPool("tests.fixtures.no_such_worker", processes=1).call(1, timeout_seconds=60)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
