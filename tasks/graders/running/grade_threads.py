"""Grades many threads with bounded concurrency and a time limit for each. Every thread gets an outcome.

An exception, a timeout, and a value that is NaN or too large for float32 never become a reward. The grade is tried
again and then masked: the completion is left out of its group's statistics and of the loss, and is counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Literal

from engine.errors import PermanentEngineError, TransientEngineError
from engine.models.call_batching import report_waits_to
from engine.text.threads import StringThread
from storage.errors import TransientStorageError
from storage.serialization import Frozen
from tasks.batches.advantages import LARGEST_REWARD, REWARD_RANGE
from tasks.graders.base import BaseGrader, Grade, GradePart, GraderError, IgnoreGradeException, as_number


def retrieve_exception(future: asyncio.Future[Any]) -> None:
    """Read the exception of a finished future, so that asyncio does not print that it was never retrieved."""
    if not future.cancelled():
        future.exception()


logger = logging.getLogger("ostinato.graders")

GradeStatus = Literal["ok", "masked", "ignored"]


class GradeOutcome(Frozen):
    """The result of grading one thread. `reward` is a number exactly when `status` is ok.

    ok: graded. masked: could not be graded; `reason` says why. ignored: the grader raised IgnoreGradeException.
    """

    reward: float | None
    status: GradeStatus
    reason: str = ""
    answer: str | None = None
    """The answer that the grader extracted from the completion."""
    parts: tuple[GradePart, ...] = ()
    """The parts that the reward was computed from."""


async def grade_threads(
    grader: BaseGrader,
    threads: Sequence[StringThread],
    *,
    concurrency: int = 32,
    timeout_seconds: float = 60.0,
    retries: int = 2,
    retry_delay_seconds: float = 0.1,
) -> list[GradeOutcome]:
    """Grade all threads and return one outcome per thread, in their order.

    timeout_seconds limits each attempt, not counting the time in which a judge waits for its engine. There are
    `retries` further attempts; retry k, counted from 0, follows after retry_delay_seconds * 2**k. This function calls
    neither setup nor teardown. Cancelling it cancels the grades.

    Raises TransientEngineError or TransientStorageError if a judge's engine or store is unreachable. This says nothing
    about a completion, so the caller should repeat the whole call.
    """
    if concurrency < 1 or retries < 0 or not timeout_seconds > 0:
        raise ValueError(
            f"given concurrency={concurrency}, retries={retries}, timeout_seconds={timeout_seconds}; "
            f"expected concurrency >= 1, retries >= 0, timeout_seconds > 0"
        )

    # Each worker grades the next thread that is left.
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
    except ExceptionGroup as errors:  # transient errors of an engine or a store
        raise errors.exceptions[0] from None

    # Report the masked grades.
    masked = [outcome for outcome in outcomes if outcome is not None and outcome.status == "masked"]
    if masked:
        logger.warning("%d of %d grades masked, the first: %s", len(masked), len(threads), masked[0].reason)
    return [outcome for outcome in outcomes if outcome is not None]


async def _grade_one(
    grader: BaseGrader, thread: StringThread, *, timeout_seconds: float, retries: int, delay: float
) -> GradeOutcome:
    """Grade one thread, with retries. Raises only transient errors of an engine or a store."""
    reason = ""
    for attempt in range(retries + 1):
        if attempt:
            await asyncio.sleep(delay * 2 ** (attempt - 1))
        # An error that a retry cannot remedy masks the grade at once. Only the engine's own errors leave this function.
        try:
            grade = await _attempt(grader, thread, timeout_seconds)
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
        # False for NaN, too, which is masked like a value that is too large.
        if abs(value) <= LARGEST_REWARD:
            reason = grade.reasoning or ""
            return GradeOutcome(reward=value, status="ok", reason=reason, answer=grade.answer, parts=grade.parts)
        reason = f"the grader returned {value:g}; expected {REWARD_RANGE}"
    attempts = f" ({retries + 1} attempts)" if retries else ""
    return GradeOutcome(reward=None, status="masked", reason=f"{grader.grader_key}: {reason}{attempts}")


class GraderTimeout(Exception):
    """An attempt took longer than timeout_seconds, not counting its waits for an engine."""

    transient = True


class _GraderTimer:
    """A timer for the seconds that a grader takes itself. It is paused while the grader waits for an engine, which has
    its own time limits and serves other callers, too.

    A grader function runs in a thread, where it may wait in another event loop. The timer belongs to the loop that
    grades, so it is paused and continued there.
    """

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.expired: asyncio.Future[None] = self._loop.create_future()
        self._remaining_seconds, self._waits = seconds, 0
        self._start()

    def begin(self) -> None:
        """Pause the timer: a wait for an engine begins. May be called in any thread."""
        self._loop.call_soon_threadsafe(self._pause)

    def end(self) -> None:
        """Continue the timer: a wait for an engine ends. May be called in any thread."""
        self._loop.call_soon_threadsafe(self._continue)

    def _pause(self) -> None:
        # A grader may wait for several answers at once. Only the first wait pauses the timer.
        self._waits += 1
        if self._waits == 1:
            self._timer.cancel()
            self._remaining_seconds -= self._loop.time() - self._started_at

    def _continue(self) -> None:
        self._waits -= 1
        if self._waits == 0:
            self._start()

    def close(self) -> None:
        """Stop the timer for good."""
        self._timer.cancel()
        # The count never becomes 0 again, so an abandoned attempt that ends its waits later cannot restart the timer.
        self._waits += 1
        self.expired.cancel()

    def _start(self) -> None:
        self._started_at = self._loop.time()
        self._timer = self._loop.call_later(self._remaining_seconds, self._expire)

    def _expire(self) -> None:
        if not self.expired.done():
            self.expired.set_result(None)


async def _attempt(grader: BaseGrader, thread: StringThread, timeout_seconds: float) -> Grade:
    """Grade a thread once, in its own task. Raises GraderTimeout, and what the grader raises.

    Unlike asyncio.wait_for, this does not wait for the cancelled task to end, so a grader that ignores its cancellation
    cannot block the run. A grader that cancels itself has failed; this call is not cancelled.
    """
    # Grade until the grade is there or the time is over.
    timer = _GraderTimer(timeout_seconds)
    with report_waits_to(timer):
        attempt = asyncio.ensure_future(_guarded(grader, thread))
    try:
        waited: set[asyncio.Future[Any]] = {attempt, timer.expired}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        attempt.cancel()
        raise
    finally:
        timer.close()

    # Take the result.
    if not attempt.done():
        attempt.cancel()
        attempt.add_done_callback(retrieve_exception)
        raise GraderTimeout(f"no grade after {timeout_seconds:g} s")
    if attempt.cancelled():
        raise RuntimeError("the grader cancelled itself")
    grade = attempt.result()
    if not isinstance(grade, Grade):
        raise TypeError(f"grade() returned {type(grade).__name__}; expected a Grade")
    return grade


async def _guarded(grader: BaseGrader, thread: StringThread) -> Grade:
    """Grade a thread. SystemExit would end the event loop, so it becomes a GraderError."""
    try:
        return await grader.grade(thread)
    except SystemExit as error:
        raise GraderError(f"the grader raised {error!r}, which would end the process") from error
