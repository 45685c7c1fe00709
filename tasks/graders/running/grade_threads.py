"""Grading many threads: bounded concurrency, a time limit for each, and every thread accounted for.

An exception, a timeout, or a value that is NaN or too large for float32 is never a reward. It is tried again and then
masked: the completion leaves its group's statistics and the loss, and is counted.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Literal

from engine.errors import PermanentEngineError, TransientEngineError
from engine.text.threads import StringThread
from engine.waiting import report_waits_to
from storage.errors import TransientStorageError
from storage.serialization import Frozen
from tasks.credit.advantages import LARGEST_REWARD, REWARD_RANGE
from tasks.graders.base import BaseGrader, Grade, GraderError, IgnoreGradeException, as_number

logger = logging.getLogger("ostinato.graders")

GradeStatus = Literal["ok", "masked", "ignored"]


class GradeOutcome(Frozen):
    """What became of one thread. `reward` is a number exactly when `status` is ok.

    ok: graded. masked: could not be graded, `reason` says why. ignored: the grader declined (IgnoreGradeException).
    """

    reward: float | None
    status: GradeStatus
    reason: str = ""


async def grade_threads(
    grader: BaseGrader,
    threads: Sequence[StringThread],
    *,
    concurrency: int = 32,
    timeout_seconds: float = 60.0,
    retries: int = 2,
    retry_delay_seconds: float = 0.1,
) -> list[GradeOutcome]:
    """One outcome per thread, in the order of `threads`.

    timeout_seconds bounds each attempt, without the time in which a judge waits for its engine; there are `retries`
    further attempts, the k-th after retry_delay_seconds * 2**k. Neither setup nor teardown is called here. A cancelled
    call cancels its grades.

    Raises TransientEngineError or TransientStorageError when a judge's engine or store is away: that says nothing about
    any completion, so the whole call is to be made again.
    """
    if concurrency < 1 or retries < 0 or not timeout_seconds > 0:
        raise ValueError(
            f"given concurrency={concurrency}, retries={retries}, timeout_seconds={timeout_seconds}; "
            f"expected concurrency >= 1, retries >= 0, timeout_seconds > 0"
        )
    outcomes: list[GradeOutcome | None] = [None] * len(threads)
    remaining = iter(range(len(threads)))

    async def worker() -> None:
        for index in remaining:
            outcomes[index] = await _grade_one(
                grader, threads[index], timeout_seconds=timeout_seconds, retries=retries, delay=retry_delay_seconds
            )

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(threads))):
                group.create_task(worker())
    except ExceptionGroup as away:  # all that _grade_one lets through
        raise away.exceptions[0] from None
    masked = [outcome for outcome in outcomes if outcome is not None and outcome.status == "masked"]
    if masked:
        logger.warning("%d of %d grades masked, the first: %s", len(masked), len(threads), masked[0].reason)
    return [outcome for outcome in outcomes if outcome is not None]


async def _grade_one(
    grader: BaseGrader, thread: StringThread, *, timeout_seconds: float, retries: int, delay: float
) -> GradeOutcome:
    reason = ""
    for attempt in range(retries + 1):
        if attempt:
            await asyncio.sleep(delay * 2 ** (attempt - 1))
        try:
            grade = await _within(grader, thread, timeout_seconds)
            value = as_number(grade.value)
        except IgnoreGradeException as declined:
            return GradeOutcome(reward=None, status="ignored", reason=str(declined))
        except (TransientEngineError, TransientStorageError):
            raise
        except (GraderError, PermanentEngineError) as error:
            return GradeOutcome(reward=None, status="masked", reason=f"{grader.grader_key}: {error}")
        except Exception as error:  # noqa: BLE001  the boundary to a user's code: recorded as a mask, never a reward
            reason = f"{type(error).__name__}: {error}"
            continue
        if abs(value) <= LARGEST_REWARD:
            return GradeOutcome(reward=value, status="ok", reason=grade.reasoning or "")
        reason = f"the grader returned {value:g}; expected {REWARD_RANGE}"
    tried = f" ({retries + 1} attempts)" if retries else ""
    return GradeOutcome(reward=None, status="masked", reason=f"{grader.grader_key}: {reason}{tried}")


class GraderTimeout(Exception):
    """An attempt at a grade took longer than timeout_seconds, without its waits for an engine."""

    transient = True


class _OwnTime:
    """A limit on the seconds that a grader takes itself. Its clock stands still while the grader waits for an engine,
    which has limits of its own and serves others too.

    A grader function runs in a thread, where it may wait in an event loop of its own. The clock belongs to the loop
    that grades, so it is stopped and started there.
    """

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.spent: asyncio.Future[None] = self._loop.create_future()
        self._left, self._waits = seconds, 0
        self._run()

    def begin(self) -> None:
        """A wait for an engine begins. Called in any thread."""
        self._loop.call_soon_threadsafe(self._stop)

    def end(self) -> None:
        """A wait for an engine ends. Called in any thread."""
        self._loop.call_soon_threadsafe(self._go_on)

    def _stop(self) -> None:
        self._waits += 1
        if self._waits == 1:
            self._timer.cancel()
            self._left -= self._loop.time() - self._since

    def _go_on(self) -> None:
        self._waits -= 1
        if self._waits == 0:
            self._run()

    def close(self) -> None:
        self._timer.cancel()
        self._waits += 1  # the clock does not run again, however late an abandoned attempt ends its waits
        self.spent.cancel()

    def _run(self) -> None:
        self._since, self._timer = self._loop.time(), self._loop.call_later(self._left, self._spend)

    def _spend(self) -> None:
        if not self.spent.done():
            self.spent.set_result(None)


async def _within(grader: BaseGrader, thread: StringThread, timeout_seconds: float) -> Grade:
    """One attempt in a task of its own.

    Unlike asyncio.wait_for this does not wait for the cancelled task to end, so a grader that swallows its
    cancellation cannot hold the run; and a grader that is cancelled from inside is a failure, not an end of ours.
    """
    own_time = _OwnTime(timeout_seconds)
    with report_waits_to(own_time):
        attempt = asyncio.ensure_future(_guarded(grader, thread))
    try:
        waited: set[asyncio.Future[Any]] = {attempt, own_time.spent}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        attempt.cancel()
        raise
    finally:
        own_time.close()
    if not attempt.done():
        attempt.cancel()
        attempt.add_done_callback(_retrieve)
        raise GraderTimeout(f"no grade after {timeout_seconds:g} s")
    if attempt.cancelled():
        raise RuntimeError("the grader cancelled itself")
    grade = attempt.result()
    if not isinstance(grade, Grade):
        raise TypeError(f"grade() returned {type(grade).__name__}; expected a Grade")
    return grade


async def _guarded(grader: BaseGrader, thread: StringThread) -> Grade:
    try:
        return await grader.grade(thread)
    except SystemExit as error:
        raise GraderError(f"the grader raised {error!r}, which would end the process") from error


def _retrieve(attempt: "asyncio.Future[Grade]") -> None:
    """Look at a late failure, so that asyncio does not print it as never retrieved."""
    if not attempt.cancelled():
        attempt.exception()
