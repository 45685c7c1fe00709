"""Combines several graders into one, as a weighted mean or sum."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any, Literal

from engine.text.threads import StringThread
from tasks.graders.base import BaseGrader, Grade, GradePart, IgnoreGradeException
from tasks.graders.spec import GraderSpec, build

Aggregation = Literal["mean", "sum"]


class CombinedGrader(BaseGrader):
    """The weighted mean or sum of the grades of other graders, which run concurrently.

    With weights w (1 each by default), grades g, and A the graders that gave a grade (the others raised
    IgnoreGradeException):

        mean   sum_A w g / sum_A w
        sum    sum_A w g * sum w / sum_A w      the scale does not depend on A

    If no grader of weight > 0 gave a grade, the thread is ignored, with the reason of each grader. If one fails, the
    whole grade fails and is retried and masked like any other: a reward of the remaining graders would be a different
    reward.

    `graders` may be specs, {"path": …, "arguments": {…}}, so that a config can declare a whole combination.
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
        self.graders = [_built(grader) for grader in graders]
        self.weights = _checked_weights(weights, len(self.graders))
        self.aggregation_method: Aggregation = aggregation_method
        keys = [grader.grader_key for grader in self.graders]
        if len(set(keys)) < len(keys):
            raise ValueError(f"given graders with the keys {keys}; expected different keys, which name their logs")
        self._is_set_up = False

    async def setup(self) -> None:
        """Set up the graders. If one fails, tear down the others and raise. A second call does nothing."""
        if self._is_set_up:
            return
        # Mark it before the first await, so that a concurrent call does not set the graders up a second time.
        self._is_set_up = True
        outcomes = await asyncio.gather(*(grader.setup() for grader in self.graders), return_exceptions=True)
        ready: list[BaseGrader] = []
        failures: list[BaseException] = []
        for grader, outcome in zip(self.graders, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                failures.append(outcome)
            else:
                ready.append(grader)
        if failures:
            # The caller gets the first failure, also if a teardown fails too.
            self._is_set_up = False
            await asyncio.gather(*(grader.teardown() for grader in ready), return_exceptions=True)
            raise failures[0]

    async def teardown(self) -> None:
        """Tear down all graders, even if one raises."""
        if self._is_set_up:
            self._is_set_up = False
            await _run_all(grader.teardown() for grader in self.graders)

    async def grade(self, thread: StringThread) -> Grade:
        # Run all graders, and raise the first failure.
        outcomes = await asyncio.gather(*(grader.grade(thread) for grader in self.graders), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, IgnoreGradeException):
                raise outcome

        # Collect the grades of the others, which have different weights.
        weighted_values: list[tuple[float, float]] = []
        logs: dict[str, float] = {}
        parts: list[GradePart] = []
        reasons: list[str] = []
        for grader, weight, grade in zip(self.graders, self.weights, outcomes, strict=True):
            if not isinstance(grade, Grade):
                reasons.append(f"{grader.grader_key}: no grade ({grade})")
                continue
            weighted_values.append((weight, grade.value))
            reasons.append(_reason(grader.grader_key, grade))
            # Logs accept finite numbers only.
            if math.isfinite(grade.value):
                logs[grader.grader_key] = grade.value
                parts.append(GradePart(name=grader.grader_key, value=grade.value, weight=weight))

        # Combine them.
        explanation = "; ".join(reasons)
        value = self._aggregate(weighted_values, explanation)
        self.add_log(logs)
        return Grade(value=value, grader_key=self.grader_key, reasoning=explanation, parts=tuple(parts))

    def get_logs(self) -> dict[str, float]:
        """The statistics of each grader's value as `{key}/mean` and so on, and its own logs as `{key}/{name}/mean`."""
        logs = super().get_logs()
        for grader in self.graders:
            for name, value in grader.get_logs().items():
                logs[f"{grader.grader_key}/{name}"] = value
        return logs

    def clear_logs(self) -> None:
        super().clear_logs()
        for grader in self.graders:
            grader.clear_logs()

    def _aggregate(self, weighted_values: Sequence[tuple[float, float]], explanation: str) -> float:
        """Combine (weight, value) pairs. `explanation` has the reason of each grader."""
        total_weight = sum(weight for weight, _ in weighted_values)
        if total_weight == 0:
            raise IgnoreGradeException(
                f"no grader of {self.grader_key!r} with a weight above 0 gave a grade: {explanation}"
            )
        # Leave out graders of weight 0: 0 times a NaN would be NaN.
        mean = sum(weight * value for weight, value in weighted_values if weight) / total_weight
        return mean if self.aggregation_method == "mean" else mean * sum(self.weights)


def _built(grader: BaseGrader | GraderSpec | Mapping[str, Any]) -> BaseGrader:
    if isinstance(grader, BaseGrader):
        return grader
    if isinstance(grader, GraderSpec):
        return build(grader)
    return build(GraderSpec.model_validate(dict(grader)))


def _reason(key: str, grade: Grade) -> str:
    reasoning = f" ({grade.reasoning})" if grade.reasoning else ""
    return f"{key}: {grade.value:g}{reasoning}"


def _checked_weights(weights: Sequence[float] | None, graders: int) -> list[float]:
    """The weights as floats, by default 1 each. Raises ValueError."""
    if weights is None:
        weights = [1.0] * graders
    checked = [float(weight) for weight in weights]
    if len(checked) != graders or graders == 0:
        raise ValueError(f"given {graders} graders and {len(checked)} weights; expected 1 or more, with a weight each")
    are_valid = all(math.isfinite(weight) and weight >= 0 for weight in checked)
    if not are_valid or sum(checked) == 0:
        raise ValueError(
            f"given weights={checked}; expected finite numbers of 0 or more, not all 0. For a penalty, let the grader "
            "give negative grades: a mean with negative weights over the graders that answered is not defined"
        )
    return checked


async def _run_all(calls: Iterable[Awaitable[None]]) -> None:
    """Await all calls, and then raise the first exception."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
