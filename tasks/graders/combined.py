"""Several graders as one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any, Literal

from engine.text.threads import StringThread
from tasks.graders.base import BaseGrader, Grade, IgnoreGradeException
from tasks.graders.spec import GraderSpec, build

Aggregation = Literal["mean", "sum"]


class CombinedGrader(BaseGrader):
    """The weighted mean or sum of what other graders say, asked concurrently.

    With weights w (1 each unless given), grades g, and A the graders that answered (the others raised
    IgnoreGradeException):

        mean   sum_A w g / sum_A w
        sum    sum_A w g * sum w / sum_A w      the same scale whoever answered

    Nobody of weight > 0 answered: ignored. A grader that fails fails the whole grade, which is then retried and masked
    like any other: a reward out of what happened to work would be another reward.

    `graders` may be specs, {"path": …, "arguments": {…}}, so that a config can name a whole combination.
    """

    def __init__(
        self,
        grader_key: str,
        graders: Sequence[BaseGrader | GraderSpec | Mapping[str, Any]],
        weights: Sequence[float] | None = None,
        aggregation_method: Aggregation = "mean",
    ) -> None:
        super().__init__(grader_key)
        if aggregation_method not in ("mean", "sum"):
            raise ValueError(f"given aggregation_method={aggregation_method!r}; expected 'mean' or 'sum'")
        self.graders = [_grader(grader) for grader in graders]
        self.weights = _checked_weights(weights, len(self.graders))
        self.aggregation_method: Aggregation = aggregation_method
        keys = [grader.grader_key for grader in self.graders]
        if len(set(keys)) < len(keys):
            raise ValueError(f"given graders of the keys {keys}; expected different keys, since logs go by them")
        self._is_set_up = False

    async def setup(self) -> None:
        """Sets up the graders. If one cannot be, those that were are torn down. A second call does nothing."""
        if self._is_set_up:
            return
        self._is_set_up = True
        outcomes = await asyncio.gather(*(grader.setup() for grader in self.graders), return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures:
            self._is_set_up = False
            done = [grader for grader, outcome in zip(self.graders, outcomes, strict=True) if outcome is None]
            await asyncio.gather(*(grader.teardown() for grader in done), return_exceptions=True)
            raise failures[0]

    async def teardown(self) -> None:
        """Tears down the graders, all of them even if one raises."""
        if self._is_set_up:
            self._is_set_up = False
            await _all(grader.teardown() for grader in self.graders)

    async def grade(self, thread: StringThread) -> Grade:
        given = await asyncio.gather(*(grader.grade(thread) for grader in self.graders), return_exceptions=True)
        for outcome in given:
            if isinstance(outcome, BaseException) and not isinstance(outcome, IgnoreGradeException):
                raise outcome
        answered = [
            (grader.grader_key, weight, grade)
            for grader, weight, grade in zip(self.graders, self.weights, given, strict=True)
            if isinstance(grade, Grade)
        ]
        value = self._aggregate([(weight, grade.value) for _, weight, grade in answered])
        self.add_log({key: grade.value for key, _, grade in answered if math.isfinite(grade.value)})
        said = "; ".join(_said(key, grade) for key, _, grade in answered)
        return Grade(value=value, grader_key=self.grader_key, reasoning=said)

    def get_logs(self) -> dict[str, float]:
        """The statistics of each grader's value as `{key}/mean` and so on, and `{key}/{name}/mean` of its own logs."""
        own = super().get_logs()
        children = [(grader.grader_key, grader.get_logs()) for grader in self.graders]
        return own | {f"{key}/{name}": value for key, logs in children for name, value in logs.items()}

    def clear_logs(self) -> None:
        super().clear_logs()
        for grader in self.graders:
            grader.clear_logs()

    def _aggregate(self, answered: Sequence[tuple[float, float]]) -> float:
        weight = sum(weight for weight, _ in answered)
        if weight == 0:
            raise IgnoreGradeException(f"none of the graders of {self.grader_key!r} that count answered")
        mean = sum(weight * value for weight, value in answered if weight) / weight
        return mean if self.aggregation_method == "mean" else mean * sum(self.weights)


def _grader(given: BaseGrader | GraderSpec | Mapping[str, Any]) -> BaseGrader:
    if isinstance(given, BaseGrader):
        return given
    return build(given if isinstance(given, GraderSpec) else GraderSpec.model_validate(dict(given)))


def _said(key: str, grade: Grade) -> str:
    return f"{key}: {grade.value:g}" + (f" ({grade.reasoning})" if grade.reasoning else "")


def _checked_weights(weights: Sequence[float] | None, graders: int) -> list[float]:
    found = [1.0] * graders if weights is None else [float(weight) for weight in weights]
    if len(found) != graders or graders == 0:
        raise ValueError(f"given {graders} graders and {len(found)} weights; expected 1 or more, with a weight each")
    if not all(math.isfinite(weight) and weight >= 0 for weight in found) or sum(found) == 0:
        raise ValueError(
            f"given weights={found}; expected finite numbers of 0 or more, not all 0. For a penalty give the grader "
            "negative grades: with negative weights a mean over those that answered has no meaning"
        )
    return found


async def _all(calls: Iterable[Awaitable[None]]) -> None:
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
