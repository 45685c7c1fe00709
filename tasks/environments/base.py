"""The base classes of environments. An environment gets a conversation and returns the next one and grades, until it
ends the episode."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from random import Random
from typing import Literal

from pydantic import JsonValue

from engine.text.threads import StringThread
from tasks.batches.advantages import LARGEST_REWARD, REWARD_RANGE
from tasks.graders.base import Grade, as_number

Grades = float | Grade | Sequence[float | Grade]
"""The grade of one turn: a number, a Grade, or a sequence of them, which are added up."""
Reaction = tuple[StringThread | None, Grades | None]
"""(next conversation for the assistant, or None at the end of the episode; grade of its last turn, or None)."""
Limit = Literal["turns", "tokens", "time"]
"""The limit that ended an episode."""


class Environment(ABC):
    """One episode. A subclass must define `react_to`; everything else has a default.

    Many environments run on one event loop, so their methods must not block: run blocking work with
    `tasks.graders.base.in_thread`. All randomness must come from `self.random`, which is seeded for the episode, so
    that a resumed run plays the same episode. All state must be kept in the object: after an error a new object is
    created, which is shown the conversation so far again.
    """

    random: Random
    """Random generator of the episode. Its seed is derived from the run's seed, the step, the prompt and the episode's
    number. It is set before any method is called."""
    has_native_tools: bool = False
    """Whether the model's chat template knows tools, and its tool calls can be read: the environment may then set the
    tools of the conversation (`thread.with_tools`), and the calls in an answer are fragments of its turn. It is set
    before any method is called."""

    async def initialize_state(self, thread: StringThread) -> StringThread:
        """Called once with the prompt of the dataset. Return the conversation that the assistant answers first."""
        return thread

    @abstractmethod
    async def react_to(self, thread: StringThread) -> Reaction:
        """React to the assistant's answer, the last turn of `thread`.

        The next conversation is usually `thread` with more turns, as in `thread.user("Colder.")`. It may also be a
        different one, for instance without old turns: the episode then continues in a new segment, whose first tokens
        are context. Raise IgnoreGradeException to leave the whole episode out; any other exception is a failure.
        """

    async def on_limit(self, thread: StringThread, limit: Limit) -> Grades | None:
        """Grade the last turn of an episode that a limit on turns, tokens or time ended.

        `thread` ends with the assistant's last answer. The grade is added to the one that `react_to` gave it.
        """
        return None

    async def close(self) -> None:  # noqa: B027  optional for a subclass
        """Called once at the end of the episode, also after a failure. Its exceptions are only logged."""


class EnvironmentFactory(ABC):
    """Creates an environment for each episode."""

    @abstractmethod
    def create_environment(self, metadata: Mapping[str, JsonValue]) -> Environment:
        """Create the environment of one episode. `metadata` is that of the prompt's thread."""


class EnvironmentFailed(Exception):
    """The code of an environment cancelled itself, tried to end the process, or reacted differently when the
    conversation was repeated. Like other exceptions of an environment, it is followed by one retry."""

    transient = False


def turn_grade(grades: Grades | None) -> float | None:
    """The grade of a turn, or the reward of an agent, as one number. Raises TypeError for other types, ValueError for
    NaN and for values that are too large for float32, OverflowError for an int that is too large for a float."""
    if grades is None:
        return None
    if isinstance(grades, Sequence) and not isinstance(grades, str):
        parts = grades
    else:
        parts = [grades]
    if not parts:
        return None
    values = []
    for part in parts:
        value = as_number(part.value if isinstance(part, Grade) else part)
        # The comparison is written so that it refuses NaN, too.
        if not abs(value) <= LARGEST_REWARD:
            raise ValueError(f"a reward is {value:g}; expected {REWARD_RANGE}")
        values.append(value)
    return math.fsum(values)
