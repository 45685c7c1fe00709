"""An environment that asks questions of reasoning-gym and allows one or several attempts at an answer.

The prompts are rows of a ReasoningGymDataset, whose metadata holds what their verifier needs.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue

from engine.text.threads import StringThread
from tasks.environments.base import Environment, EnvironmentFactory, Grades, Limit, Reaction
from tasks.graders.gym import ReasoningGymGrader
from tasks.graders.rules import AnswerFrom


class ReasoningGymEnvironment(Environment):
    """The episode ends with an answer of full score, or with the last attempt.

    Only the last turn is graded, with score * discount ** (attempts before it). There is thus one grade per episode, as
    GSPO requires.
    """

    def __init__(self, grader: ReasoningGymGrader, *, attempts: int, discount: float, feedback: str) -> None:
        self.grader, self.attempts, self.discount, self.feedback = grader, attempts, discount, feedback
        self.answered = 0

    async def react_to(self, thread: StringThread) -> Reaction:
        score = await self._score(thread)
        self.answered += 1
        if score >= 1.0 or self.answered == self.attempts:
            return None, score * self.discount ** (self.answered - 1)
        return thread.user(self.feedback), None

    async def on_limit(self, thread: StringThread, limit: Limit) -> Grades | None:
        return await self._score(thread) * self.discount ** (self.answered - 1)

    async def _score(self, thread: StringThread) -> float:
        return (await self.grader.grade(thread)).value


class ReasoningGymFactory(EnvironmentFactory):
    """Creates a ReasoningGymEnvironment for each episode. `answer_from` and `exact` are those of ReasoningGymGrader."""

    def __init__(
        self,
        *,
        attempts: int = 1,
        discount: float = 1.0,
        feedback: str = "That is not right. Try again.",
        answer_from: AnswerFrom = "last_number",
        exact: bool = False,
    ) -> None:
        if attempts < 1 or not 0 <= discount <= 1:
            raise ValueError(
                f"given attempts={attempts}, discount={discount}; expected attempts >= 1, discount from 0 to 1"
            )
        self.attempts, self.discount, self.feedback = attempts, discount, feedback
        self.grader = ReasoningGymGrader(answer_from=answer_from, exact=exact)

    def create_environment(self, metadata: Mapping[str, JsonValue]) -> Environment:
        return ReasoningGymEnvironment(
            self.grader, attempts=self.attempts, discount=self.discount, feedback=self.feedback
        )
