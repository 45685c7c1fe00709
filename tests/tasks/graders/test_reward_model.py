"""A scoring model as a grader."""

import asyncio
import math
from contextvars import Context
from typing import Any

import pytest

from engine.text.threads import StringThread
from tasks.graders.base import GraderError
from tasks.graders.reward_model import RewardModelGrader
from tasks.graders.running.grade_threads import grade_threads

THREAD = StringThread(turns=[("user", "q"), ("assistant", "abcd")])


class Scores:
    """Scores the length of the reply."""

    async def score_last_token(self, thread: StringThread) -> float:
        return float(len(thread.last_content()))


@pytest.mark.parametrize(
    ("options", "value"),
    [({}, 4.0), ({"scale": -0.5}, -2.0), ({"scale": 2.0, "shift": -3.0}, 5.0), ({"clip": 3.0}, 3.0)],
)
async def test_the_score(options: dict[str, Any], value: float) -> None:
    assert (await RewardModelGrader("m", Scores(), **options).grade(THREAD)).value == value
    below = RewardModelGrader("m", Scores(), scale=-10.0, clip=3.0)
    assert (await below.grade(THREAD)).value == -3.0


class Broken:
    async def score_last_token(self, thread: StringThread) -> float:
        return math.nan


async def test_a_score_that_is_no_number_is_masked_also_behind_a_clip() -> None:
    (outcome,) = await grade_threads(RewardModelGrader("m", Broken(), clip=1.0), [THREAD], retries=0)
    assert outcome.status == "masked"


async def test_a_model_that_is_only_named_must_be_spawned_first() -> None:
    grader = RewardModelGrader("m", "reward@1")
    with pytest.raises(GraderError, match=r"await setup\(\)"):
        await grader.grade(THREAD)
    nothing_opened = Context()  # another test of this process may have opened a RecipeContext
    with pytest.raises(GraderError, match="with grading_in"):
        await asyncio.create_task(grader.setup(), context=nothing_opened)


@pytest.mark.parametrize("options", [{"scale": math.nan}, {"clip": 0.0}])
def test_what_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected finite"):
        RewardModelGrader("m", Scores(), **options)
