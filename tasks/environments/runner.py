"""Runs the environment of one episode with time limits and one retry. Its exceptions never end the run.

After a failure a new environment is created. It is shown the conversation so far, which brings it into the state of the
failed one, and then the failed call is repeated. An environment that reacts differently the second time has failed.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from random import Random
from time import monotonic
from typing import Any, TypeVar

from engine.text.threads import StringThread
from tasks.environments.base import Environment, EnvironmentFactory, EnvironmentFailed, Limit, turn_grade
from tasks.graders.base import IgnoreGradeException
from tasks.graders.running.grade_threads import retrieve_exception

logger = logging.getLogger("ostinato.environments")

T = TypeVar("T")
GradedReaction = tuple[StringThread | None, float | None]
"""(next conversation, or None at the end of the episode; grade of the last turn as one number, or None)."""


class EpisodeFailed(Exception):
    """An episode cannot continue, and is masked. Its environment failed twice in a row (the message has both errors),
    or its next answer cannot be sampled."""


class EnvironmentRunner:
    """The environment of one episode. Its methods raise only EpisodeFailed and IgnoreGradeException."""

    def __init__(self, factory: EnvironmentFactory, *, seed: int, seconds: float) -> None:
        """`seconds` is the time limit of one call of the environment."""
        self.spent = 0.0
        """Seconds that the environment took so far."""
        self._factory, self._seed, self._seconds = factory, seed, seconds
        self._has_native_tools = False
        self._environment: Environment | None = None
        self._prompt: StringThread | None = None
        self._opening: StringThread | None = None
        self._history: list[tuple[StringThread, GradedReaction]] = []

    async def begin(self, prompt: StringThread, *, has_native_tools: bool = False) -> StringThread:
        """Create the environment and return the conversation that the assistant answers first."""
        self._prompt, self._has_native_tools = prompt, has_native_tools
        self._opening = await self._with_retry(self._create)
        return self._opening

    async def react(self, thread: StringThread) -> GradedReaction:
        """Return the environment's reaction to the last turn of `thread`."""
        reaction = await self._with_retry(lambda: self._reaction(thread))
        self._history.append((thread, reaction))
        return reaction

    async def grade_at_limit(self, thread: StringThread, limit: Limit) -> float | None:
        """Return what the environment adds to the grade of the last turn, because a limit ended the episode there."""

        async def grade() -> float | None:
            return turn_grade(await self._current().on_limit(thread, limit))

        return await self._with_retry(grade)

    async def close(self) -> None:
        """Close the environment, if there is one."""
        if self._environment is None:
            return
        try:
            await with_time_limit(self._environment.close(), self._seconds)
        except Exception as error:  # noqa: BLE001  the boundary to a user's code: the episode is over, nothing depends on it
            logger.warning("an environment could not be closed: %r", error)
        self._environment = None

    async def _with_retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """Run `call`. If it fails, run it once more with a new environment in the same state."""
        started_at = monotonic()
        try:
            return await self._attempt(call)
        except IgnoreGradeException:
            raise
        except Exception as first:  # noqa: BLE001  the boundary to a user's code: tried again, then masked and counted
            try:
                await self._recreate()
                return await self._attempt(call)
            except IgnoreGradeException:
                raise
            except Exception as second:  # as above
                message = f"{_described(second)} (2 attempts, the first: {_described(first)})"
                raise EpisodeFailed(message) from second
        finally:
            self.spent += monotonic() - started_at

    async def _attempt(self, call: Callable[[], Awaitable[T]]) -> T:
        return await with_time_limit(call(), self._seconds)

    async def _recreate(self) -> None:
        """Create a new environment and bring it into the state of the failed one. Raises EnvironmentFailed if it reacts
        differently."""
        await self.close()
        # An environment that failed before its first conversation has no state to restore.
        if self._opening is None:
            return

        # Repeat all earlier calls, and compare their results with those of the failed environment.
        same = await self._attempt(self._create) == self._opening
        for thread, reaction in self._history:
            if not same:
                break
            same = await self._attempt(lambda thread=thread: self._reaction(thread)) == reaction  # type: ignore[misc]
        if not same:
            raise EnvironmentFailed(
                "a new environment reacts differently to the same conversation; use self.random for all randomness"
            )

    async def _create(self) -> StringThread:
        """Create the environment and return its first conversation."""
        assert self._prompt is not None
        created: Any = self._factory.create_environment(dict(self._prompt.metadata))
        environment = await created if inspect.isawaitable(created) else created
        if not isinstance(environment, Environment):
            raise TypeError(f"create_environment returned {type(environment).__name__}; expected an Environment")
        # The same seed for every attempt: a new environment must react like the failed one.
        environment.random = Random(self._seed)
        environment.has_native_tools = self._has_native_tools
        # Keep it before its first call, so that `close` is called even if that call fails.
        self._environment = environment
        return _checked_thread(await environment.initialize_state(self._prompt), "initialize_state")

    async def _reaction(self, thread: StringThread) -> GradedReaction:
        reaction: Any = await self._current().react_to(thread)
        if not isinstance(reaction, tuple) or len(reaction) != 2:
            raise TypeError(f"react_to returned {reaction!r:.80}; expected (next thread or None, grades or None)")
        following, grades = reaction
        if following is not None:
            following = _checked_thread(following, "react_to")
        return following, turn_grade(grades)

    def _current(self) -> Environment:
        if self._environment is None:
            raise EnvironmentFailed("the environment was closed after a failure")
        return self._environment


async def with_time_limit(call: Awaitable[T], seconds: float) -> T:
    """Await `call` in its own task. Raises TimeoutError after `seconds`.

    Unlike asyncio.wait_for, this does not wait for a cancelled task to end, so code that ignores its cancellation
    cannot block the run. Code that cancels itself, or that would end the process, has failed: EnvironmentFailed.
    """
    attempt = asyncio.ensure_future(_guarded(call))
    try:
        await asyncio.wait({attempt}, timeout=seconds)
    except asyncio.CancelledError:
        attempt.cancel()
        raise

    # Take the result. An attempt that is too late is abandoned.
    if not attempt.done():
        attempt.cancel()
        attempt.add_done_callback(retrieve_exception)
        raise TimeoutError(f"no answer after {seconds:g} s")
    if attempt.cancelled():
        raise EnvironmentFailed("the environment cancelled itself")
    return attempt.result()


async def _guarded(call: Awaitable[T]) -> T:
    """Await `call`. SystemExit would end the event loop, so it becomes EnvironmentFailed."""
    try:
        return await call
    except SystemExit as error:
        raise EnvironmentFailed(f"the environment raised {error!r}, which would end the process") from error


def _checked_thread(value: Any, method: str) -> StringThread:
    if not isinstance(value, StringThread):
        raise TypeError(f"{method} gave {type(value).__name__} as the next conversation; expected a StringThread")
    return value


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
