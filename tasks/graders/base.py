"""The base classes of graders. A grader gives a thread a `Grade` and keeps running statistics of what it logs."""

import asyncio
import contextlib
import contextvars
import inspect
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from numbers import Real
from typing import Any

from pydantic import Field

from engine.text.threads import StringThread
from storage.serialization import Frozen


class GradePart(Frozen):
    """A part of a grade that is computed from several, such as one of its graders."""

    name: str
    value: float
    """Value of the part, before its weight."""
    weight: float = Field(1.0, ge=0)


class Grade(Frozen):
    """The grade of one thread.

    A bool, a string or None is refused as a value. NaN is accepted, and masked by the code that runs the grader.
    """

    value: float = Field(strict=True)
    grader_key: str
    """The key of the grader that gave the grade."""
    reasoning: str | None = None
    answer: str | None = None
    """The answer that the grader extracted from the completion, by which a majority vote compares completions. None: it
    found none, or it does not extract answers."""
    parts: tuple[GradePart, ...] = Field((), exclude_if=lambda parts: not parts)
    """The parts that the value was computed from. They are logged by name, and advantage_estimator='gdpo' normalises
    each of them by itself."""


class IgnoreGradeException(Exception):
    """Raised by a grader that declines to grade a thread. The thread is counted as ignored, not as failed."""


class GraderError(Exception):
    """A thread cannot be graded, and a retry would not help: the grader or the dataset must be corrected."""

    transient = False


class GraderCrashed(Exception):
    """The worker process of a grader ended during a grade. A retry runs in another process."""

    transient = True


class BaseGrader(ABC):
    """The base class of graders. A subclass must define `grade`; everything else has a default.

    Many calls of `grade` run on one event loop, so it must not block: run blocking work with `in_thread`.
    """

    def __init__(self, grader_key: str) -> None:
        self.grader_key = grader_key
        self._logs: dict[str, _Statistics] = {}

    @abstractmethod
    async def grade(self, thread: StringThread) -> Grade:
        """Grade the last turn of the thread.

        Raise IgnoreGradeException to leave it unscored. Any other exception counts as a failure and never becomes a
        reward.
        """

    async def score_float_value(self, thread: StringThread) -> float:
        """The value of the thread's grade."""
        return (await self.grade(thread)).value

    async def setup(self) -> None:  # noqa: B027  optional for a subclass
        """Called once, by the owner of the grader, before the first grade. It uses the engine and the store of the
        context of `tasks.graders.setting`."""

    async def teardown(self) -> None:  # noqa: B027  optional for a subclass
        """Called once, by the owner of the grader, after the last grade."""

    def add_log(self, values: Mapping[str, float]) -> None:
        """Add one observation of each named number. Only running statistics are kept, not the observations."""
        for name, value in values.items():
            if not math.isfinite(value):
                raise ValueError(f"grader {self.grader_key!r} logged {name}={value}; expected a finite number")
            self._logs.setdefault(name, _Statistics()).add(float(value))

    def get_logs(self) -> dict[str, float]:
        """`{name}/mean`, `/std` (of the population), `/min`, `/max` and `/count` of the values since clear_logs."""
        logs: dict[str, float] = {}
        for name, statistics in self._logs.items():
            for key, value in statistics.summary().items():
                logs[f"{name}/{key}"] = value
        return logs

    def clear_logs(self) -> None:
        self._logs.clear()

    @staticmethod
    def from_function(key: str, function: "GraderFunction", *, version: str | None = None) -> "FunctionGrader":
        """Make a grader of `async f(thread) -> float`, or of a plain `f(thread) -> float`, which runs in a thread.

        A training run requires `version`. It stands for the code of the function, which a later process cannot check.
        """
        return FunctionGrader(key, function, version=version)


GraderFunction = Callable[..., float | Grade | Awaitable[float | Grade]]
"""A function of a thread and keyword arguments that returns a number or a Grade."""


class FunctionGrader(BaseGrader):
    """A grader that calls a function. A function that is not a coroutine runs in its own thread."""

    def __init__(
        self,
        grader_key: str,
        function: GraderFunction,
        arguments: Mapping[str, Any] | None = None,
        *,
        version: str | None = None,
    ) -> None:
        super().__init__(grader_key)
        self.version = version
        self.function = function
        self.arguments = dict(arguments or {})

    async def grade(self, thread: StringThread) -> Grade:
        if inspect.iscoroutinefunction(self.function):
            result: Any = self.function(thread, **self.arguments)
        else:
            result = await in_thread(self.function, thread, **self.arguments)
        # Also await what a plain function returned, such as a lambda around a coroutine function.
        if inspect.isawaitable(result):
            result = await result
        if isinstance(result, Grade):
            return result
        return Grade(value=as_number(result), grader_key=self.grader_key)


def as_number(value: object) -> float:
    """Convert a Python or numpy number (or bool) to a float. Raises TypeError for other types, also for text."""
    # numpy's bool is not registered as a Real number. Its class is bool_ in numpy 1 and bool in numpy 2.
    if isinstance(value, Real) or type(value).__name__ in ("bool_", "bool"):
        return float(value)  # type: ignore[arg-type]
    shown = repr(value)[:60]
    raise TypeError(f"the grader returned {shown} ({type(value).__name__}); expected a number or a Grade")


async def in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a blocking function in a daemon thread and await its result.

    asyncio.to_thread is not used: its pool is small, so a few hung calls would stop all grading, and the interpreter
    waits for its threads at exit. A thread that hangs here is abandoned when the caller stops waiting. Python code that
    never releases the interpreter lock (a runaway regular expression) still blocks this process; such graders should
    run in worker processes (`workers` in tasks.graders.spec).
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    # The function sees the context variables of the caller, such as the timer that waits for an engine pause.
    context = contextvars.copy_context()

    # The thread hands its result to the event loop. The caller may have stopped waiting by then.
    def settle(result: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result((result, error))

    def work() -> None:
        result, error = None, None
        try:
            result = context.run(function, *args, **kwargs)
        except BaseException as raised:  # noqa: BLE001  the boundary of the thread: raised again by the caller below
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop was closed during this call
            loop.call_soon_threadsafe(settle, result, error)

    # Run the thread, and raise here what it raised.
    threading.Thread(target=work, name=f"grader-{getattr(function, '__name__', 'call')}", daemon=True).start()
    result, error = await future
    if isinstance(error, Exception):
        raise error
    # SystemExit and KeyboardInterrupt of the function must not end the event loop.
    if error is not None:
        raise GraderError(f"the grader function raised {error!r}, which would end the process") from error
    return result


class _Statistics:
    """Running mean and variance by Welford's algorithm, which stays exact when the mean is large."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, 0.0, 0.0
        self.min, self.max = math.inf, -math.inf

    def add(self, value: float) -> None:
        self.count += 1
        delta = value - self.mean
        self.mean += delta / self.count
        self.squares += delta * (value - self.mean)
        self.min, self.max = min(self.min, value), max(self.max, value)

    def summary(self) -> dict[str, float]:
        std = math.sqrt(self.squares / self.count)
        return {"mean": self.mean, "std": std, "min": self.min, "max": self.max, "count": float(self.count)}
