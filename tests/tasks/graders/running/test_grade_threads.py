"""Tests of grade_threads: order, masks, timeouts and retries. An exception is never a reward."""

import asyncio
import math
import threading
import time
from typing import Any

import pytest

from engine.text.threads import StringThread
from tasks.graders.base import BaseGrader, Grade, GraderError, IgnoreGradeException
from tasks.graders.running.grade_threads import GradeOutcome, grade_threads


def numbered(n: int) -> list[StringThread]:
    return [StringThread(turns=[("user", "q"), ("assistant", str(i))], metadata={}) for i in range(n)]


async def run(function: Any, n: int = 3, **options: Any) -> list[GradeOutcome]:
    settings: dict[str, Any] = {"concurrency": 4, "timeout_seconds": 0.2, "retries": 0, "retry_delay_seconds": 0.0}
    return await grade_threads(BaseGrader.from_function("g", function), numbered(n), **(settings | options))


async def test_outcomes_are_in_input_order_whatever_finishes_first() -> None:
    async def slow_first(thread: StringThread) -> float:
        number = int(thread.last_content())
        await asyncio.sleep(0.02 * (10 - number))
        return number

    outcomes = await run(slow_first, 10, concurrency=10, timeout_seconds=5)
    assert [outcome.reward for outcome in outcomes] == [float(i) for i in range(10)]
    assert {outcome.status for outcome in outcomes} == {"ok"}


@pytest.mark.parametrize("value", [1e308, -1e308, 1e30, 10**400])
async def test_a_reward_that_float32_cannot_square_is_masked_for_that_reason(value: float) -> None:
    """1e30 itself fits float32; its square, of which a standard deviation is made, does not."""

    async def f(thread: StringThread) -> float:
        return value

    outcomes = await run(f)
    assert [(outcome.reward, outcome.status) for outcome in outcomes] == [(None, "masked")] * 3
    assert "finite" not in outcomes[0].reason
    problem = "too large" if isinstance(value, int) else f"returned {value:g}; expected a number from -1e+15 to 1e+15"
    assert problem in outcomes[0].reason


async def test_the_largest_reward_is_one() -> None:
    async def f(thread: StringThread) -> float:
        return 1e15

    assert [outcome.reward for outcome in await run(f)] == [1e15] * 3


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "1.0", [1]])
async def test_a_value_that_is_no_finite_number_is_masked(value: Any) -> None:
    async def f(thread: StringThread) -> Any:
        return value

    outcomes = await run(f)
    assert [(outcome.reward, outcome.status) for outcome in outcomes] == [(None, "masked")] * 3
    assert all("expected a" in outcome.reason for outcome in outcomes)


async def test_one_failure_is_masked_and_its_neighbours_are_not() -> None:
    def f(thread: StringThread) -> float:
        return 1 / int(thread.last_content())

    outcomes = await run(f)
    assert [(o.status, o.reward) for o in outcomes] == [("masked", None), ("ok", 1.0), ("ok", 0.5)]
    assert "ZeroDivisionError" in outcomes[0].reason and outcomes[0].reason.startswith("g:")


async def test_ignored_is_not_masked_and_not_retried() -> None:
    calls = []

    async def f(thread: StringThread) -> float:
        calls.append(1)
        raise IgnoreGradeException("not a sum")

    (outcome,) = await run(f, 1, retries=3)
    assert outcome == GradeOutcome(reward=None, status="ignored", reason="not a sum") and len(calls) == 1


async def test_a_failure_is_retried_and_may_recover() -> None:
    calls = []

    async def f(thread: StringThread) -> float:
        calls.append(1)
        if len(calls) < 3:
            raise ConnectionError("flaky")
        return 0.25

    (outcome,) = await run(f, 1, retries=2)
    assert outcome == GradeOutcome(reward=0.25, status="ok") and len(calls) == 3
    calls.clear()
    (outcome,) = await run(f, 1, retries=1)
    assert outcome.status == "masked" and "2 attempts" in outcome.reason and len(calls) == 2


async def test_an_error_that_trying_again_cannot_cure_is_not_retried() -> None:
    calls = []

    async def f(thread: StringThread) -> float:
        calls.append(1)
        raise GraderError("no answer in the metadata")

    (outcome,) = await run(f, 1, retries=5)
    assert outcome.status == "masked" and len(calls) == 1


async def test_hanging_async_and_plain_functions_time_out() -> None:
    async def hang(thread: StringThread) -> float:
        await asyncio.sleep(3600)
        return 1.0

    release = threading.Event()

    def hang_plain(thread: StringThread) -> float:
        release.wait(30)
        return 1.0

    for function in (hang, hang_plain):
        started = time.monotonic()
        outcomes = await run(function, 8, concurrency=8)
        assert [outcome.status for outcome in outcomes] == ["masked"] * 8
        assert "no grade after 0.2 s" in outcomes[0].reason and time.monotonic() - started < 5
    release.set()


async def test_a_grader_that_swallows_its_cancellation_cannot_hold_the_run() -> None:
    stubborn: list[asyncio.Task[Any]] = []

    async def f(thread: StringThread) -> float:
        stubborn.append(asyncio.current_task())  # type: ignore[arg-type]
        for _ in range(20):
            try:
                await asyncio.sleep(0.5)
                return 1.0
            except asyncio.CancelledError:
                continue
        return 1.0

    started = time.monotonic()
    (outcome,) = await run(f, 1)
    assert outcome.status == "masked" and time.monotonic() - started < 0.45
    await asyncio.wait(stubborn, timeout=5)


async def test_a_grader_that_cancels_itself_is_masked() -> None:
    async def f(thread: StringThread) -> float:
        raise asyncio.CancelledError

    assert [outcome.status for outcome in await run(f)] == ["masked"] * 3


async def test_a_grader_that_ends_the_process_is_masked() -> None:
    async def f(thread: StringThread) -> float:
        raise SystemExit(3)

    outcomes = await run(f)
    assert [outcome.status for outcome in outcomes] == ["masked"] * 3 and "end the process" in outcomes[0].reason


async def test_cancelling_the_call_cancels_the_grades() -> None:
    cancelled = []

    async def f(thread: StringThread) -> float:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(1)
            raise
        return 1.0

    call = asyncio.ensure_future(run(f, 3, timeout_seconds=3600))
    await asyncio.sleep(0.05)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.sleep(0)
    assert len(cancelled) == 3


async def test_concurrency_is_bounded() -> None:
    running, most = 0, 0

    async def f(thread: StringThread) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.005)
        running -= 1
        return 1.0

    assert len(await run(f, 30, concurrency=3, timeout_seconds=60)) == 30
    assert most == 3


async def test_a_grader_that_returns_no_grade() -> None:
    class Wrong(BaseGrader):
        async def grade(self, thread: StringThread) -> Grade:
            return 1.0  # type: ignore[return-value]

    (outcome,) = await grade_threads(Wrong("w"), numbered(1), retries=0)
    assert outcome.status == "masked" and "expected a Grade" in outcome.reason


async def test_nothing_to_grade_and_nonsense() -> None:
    assert await run(lambda thread: 1.0, 0) == []
    with pytest.raises(ValueError, match="expected concurrency >= 1"):
        await run(lambda thread: 1.0, 1, concurrency=0)
    with pytest.raises(ValueError, match="timeout_seconds > 0"):
        await run(lambda thread: 1.0, 1, timeout_seconds=math.nan)
