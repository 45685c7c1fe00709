"""One environment under supervision: time limits, one retry, and never an exception into the run.

After a failure a new environment is made; it sees the conversation so far again, which puts it into the state that the
failed one was in, and is then asked once more. An environment that reacts otherwise the second time has failed.
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

logger = logging.getLogger("ostinato.environments")

T = TypeVar("T")
GradedReaction = tuple[StringThread | None, float | None]
"""A reaction whose grade is one number."""


class EpisodeFailed(Exception):
    """The environment failed twice in a row; the message says how."""


class EnvironmentRunner:
    """The environment of one episode. Its calls raise EpisodeFailed, IgnoreGradeException and nothing else."""

    def __init__(self, factory: EnvironmentFactory, *, seed: int, seconds: float) -> None:
        """`seconds`: how long one reaction may take."""
        self.spent = 0.0
        """Seconds that the environment took so far."""
        self._factory, self._seed, self._seconds = factory, seed, seconds
        self._environment: Environment | None = None
        self._prompt: StringThread | None = None
        self._opening: StringThread | None = None
        self._seen: list[tuple[StringThread, GradedReaction]] = []

    async def begin(self, prompt: StringThread) -> StringThread:
        """The conversation that the assistant answers first."""
        self._prompt = prompt
        self._opening = await self._twice(lambda: self._fresh())
        return self._opening

    async def react(self, thread: StringThread) -> GradedReaction:
        """What follows the last turn of `thread`."""
        outcome = await self._twice(lambda: self._reaction(thread))
        self._seen.append((thread, outcome))
        return outcome

    async def limited(self, thread: StringThread, limit: Limit) -> float | None:
        """What the environment says of an episode that a limit has ended."""

        async def ask() -> float | None:
            return turn_grade(await self._live().on_limit(thread, limit))

        return await self._twice(ask)

    async def close(self) -> None:
        """Lets the environment go, if there is one."""
        if self._environment is None:
            return
        try:
            await within(self._environment.close(), self._seconds)
        except Exception as error:  # noqa: BLE001  the boundary to a user's code: the episode is over, nothing depends on it
            logger.warning("an environment could not be closed: %r", error)
        self._environment = None

    async def _twice(self, call: Callable[[], Awaitable[T]]) -> T:
        began = monotonic()
        try:
            return await self._attempt(call)
        except IgnoreGradeException:
            raise
        except Exception as first:  # noqa: BLE001  the boundary to a user's code: tried again, then masked and counted
            try:
                await self._replay()
                return await self._attempt(call)
            except IgnoreGradeException:
                raise
            except Exception as second:  # as above
                raise EpisodeFailed(f"{_said(second)} (2 attempts, the first: {_said(first)})") from second
        finally:
            self.spent += monotonic() - began

    async def _attempt(self, call: Callable[[], Awaitable[T]]) -> T:
        return await within(call(), self._seconds)

    async def _replay(self) -> None:
        """A new environment in the state that the failed one was in."""
        await self.close()
        if self._opening is None:
            return
        same = await self._attempt(lambda: self._fresh()) == self._opening
        for thread, before in self._seen if same else ():
            same = same and await self._attempt(lambda thread=thread: self._reaction(thread)) == before  # type: ignore[misc]
        if not same:
            raise EnvironmentFailed(
                "a new environment reacts otherwise to the same conversation; draw what is random from self.random"
            )

    async def _fresh(self) -> StringThread:
        assert self._prompt is not None
        made: Any = self._factory.create_environment(dict(self._prompt.metadata))
        environment = await made if inspect.isawaitable(made) else made
        if not isinstance(environment, Environment):
            raise TypeError(f"create_environment returned {type(environment).__name__}; expected an Environment")
        environment.random = Random(self._seed)
        self._environment = environment
        return _thread(await environment.initialize_state(self._prompt), "initialize_state")

    async def _reaction(self, thread: StringThread) -> GradedReaction:
        given: Any = await self._live().react_to(thread)
        if not isinstance(given, tuple) or len(given) != 2:
            raise TypeError(f"react_to returned {given!r:.80}; expected (next thread or None, grades or None)")
        following, grades = given
        return None if following is None else _thread(following, "react_to"), turn_grade(grades)

    def _live(self) -> Environment:
        if self._environment is None:
            raise EnvironmentFailed("the environment is gone")
        return self._environment


async def within(call: Awaitable[T], seconds: float) -> T:
    """The result of `call`, in a task of its own. Raises TimeoutError.

    Unlike asyncio.wait_for this does not wait for a cancelled task to end: one that swallows its cancellation cannot
    hold the run; and a call that is cancelled from inside, or would end the process, is a failure.
    """
    attempt = asyncio.ensure_future(_guarded(call))
    try:
        await asyncio.wait({attempt}, timeout=seconds)
    except asyncio.CancelledError:
        attempt.cancel()
        raise
    if not attempt.done():
        attempt.cancel()
        attempt.add_done_callback(lambda late: None if late.cancelled() else late.exception())
        raise TimeoutError(f"no answer after {seconds:g} s")
    if attempt.cancelled():
        raise EnvironmentFailed("the environment cancelled itself")
    return attempt.result()


async def _guarded(call: Awaitable[T]) -> T:
    try:
        return await call
    except SystemExit as error:
        raise EnvironmentFailed(f"the environment raised {error!r}, which would end the process") from error


def _thread(given: Any, method: str) -> StringThread:
    if not isinstance(given, StringThread):
        raise TypeError(f"{method} gave {type(given).__name__} as the next conversation; expected a StringThread")
    return given


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
