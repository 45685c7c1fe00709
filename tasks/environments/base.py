"""What an environment is: a conversation in, the next one and grades out, until it says that it is over."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from random import Random
from typing import Literal

from pydantic import JsonValue

from engine.text.threads import StringThread
from tasks.credit.advantages import LARGEST_REWARD, REWARD_RANGE
from tasks.graders.base import Grade, as_number

Grades = float | Grade | Sequence[float | Grade]
"""The grade of one turn: a number, or several that are parts of it and are added up."""
Reaction = tuple[StringThread | None, Grades | None]
"""(the conversation that the assistant is to continue, or None at the end; the grade of its last turn, or None)."""
Limit = Literal["turns", "tokens", "time"]


class Environment(ABC):
    """One episode. Subclass and write `react_to`; everything else has a default.

    Its methods run on an event loop next to many others, so they must not block: hand blocking work to
    `tasks.graders.base.in_thread`. What is random must come from `self.random`, which is seeded for the episode: a run
    that is resumed then plays the same episode. The same goes for state: all of it belongs to the object, since after
    an error a new one is made and sees the conversation so far again.
    """

    random: Random
    """Seeded from the run's seed, the step, the prompt and the episode's number; set before any method is called."""

    async def initialize_state(self, thread: StringThread) -> StringThread:
        """Called once, with the dataset's prompt. Returns the conversation that the assistant answers first."""
        return thread

    @abstractmethod
    async def react_to(self, thread: StringThread) -> Reaction:
        """What follows the assistant's answer, the last turn of `thread`.

        The next conversation usually is `thread` and more turns, as in `thread.user("Colder.")`. It may also be
        another one, as after forgetting old turns: the episode then goes on in a new segment, whose first tokens are
        context. Raise IgnoreGradeException to leave the whole episode out; any other exception is a failure.
        """

    async def on_limit(self, thread: StringThread, limit: Limit) -> Grades | None:
        """The grade of the last turn of an episode that a limit has ended: it had no more turns, tokens or time.
        `thread` ends with the assistant's last answer; its grade, if it had one already, is added to."""
        return None

    async def close(self) -> None:  # noqa: B027  optional for a subclass
        """Called once at the end, however it came. What it raises is logged."""


class EnvironmentFactory(ABC):
    """Makes an environment per episode."""

    @abstractmethod
    def create_environment(self, metadata: Mapping[str, JsonValue]) -> Environment:
        """The environment of one episode. `metadata` is that of the prompt's thread."""


class EnvironmentFailed(Exception):
    """An environment cannot be played, and trying again would not help."""

    transient = False


def turn_grade(grades: Grades | None) -> float | None:
    """The grade of a turn as one number. Raises TypeError for what is no grade, ValueError for NaN and for what float32
    has no room for."""
    if grades is None:
        return None
    parts = grades if isinstance(grades, Sequence) and not isinstance(grades, str) else [grades]
    if not parts:
        return None
    values = [as_number(part.value if isinstance(part, Grade) else part) for part in parts]
    for value in values:
        if not abs(value) <= LARGEST_REWARD:
            raise ValueError(f"the environment graded a turn {value:g}; expected {REWARD_RANGE}")
    return math.fsum(values)
