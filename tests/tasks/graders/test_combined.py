"""Tests of CombinedGrader: weights, missing answers, setups and logs. Expected numbers are computed by hand."""

import asyncio
import math
from typing import Any

import pytest

from engine.text.threads import StringThread
from tasks.graders.base import BaseGrader, Grade, GraderError, IgnoreGradeException
from tasks.graders.combined import CombinedGrader
from tasks.graders.running.grade_threads import grade_threads
from tasks.graders.spec import build, grader_spec

THREAD = StringThread(turns=[("user", "q"), ("assistant", "a")])


def says(key: str, value: float | Exception) -> BaseGrader:
    async def grade(thread: StringThread) -> float:
        if isinstance(value, Exception):
            raise value
        return value

    return BaseGrader.from_function(key, grade)


SILENT = IgnoreGradeException("nothing to say")


@pytest.mark.parametrize(
    ("values", "weights", "mean", "total"),
    [
        ([1.0, 0.0], None, 0.5, 1.0),
        ([1.0, 0.0, 0.5], [2.0, 1.0, 1.0], 0.625, 2.5),  # (2 + 0 + 0.5) / 4; 2.5
        ([1.0, SILENT, 0.5], [2.0, 1.0, 1.0], 2.5 / 3, 2.5 * 4 / 3),  # over weight 3 of 4
        ([SILENT, 0.25], [3.0, 1.0], 0.25, 1.0),  # 0.25 over weight 1, scaled by 4
        ([-1.0, 1.0], [1.0, 3.0], 0.5, 2.0),
        ([0.7, 5.0], [1.0, 0.0], 0.7, 0.7),  # weight 0 is heard, logged, and does not count
    ],
)
async def test_values(values: list[Any], weights: list[float] | None, mean: float, total: float) -> None:
    graders = [says(f"g{index}", value) for index, value in enumerate(values)]
    assert await CombinedGrader("c", graders, weights).score_float_value(THREAD) == pytest.approx(mean)
    summed = CombinedGrader("c", graders, weights, aggregation_method="sum")
    assert await summed.score_float_value(THREAD) == pytest.approx(total)


@pytest.mark.parametrize("values", [[SILENT, SILENT], [SILENT, 1.0]])
async def test_no_grader_that_counts_answered(values: list[Any]) -> None:
    graders = [says(f"g{index}", value) for index, value in enumerate(values)]
    with pytest.raises(IgnoreGradeException):
        await CombinedGrader("c", graders, [1.0, 0.0]).grade(THREAD)


async def test_the_reason_of_each_grader_is_kept() -> None:
    graders = [says("tone", SILENT), says("facts", IgnoreGradeException("no documents"))]
    with pytest.raises(IgnoreGradeException) as ignored:
        await CombinedGrader("c", graders).grade(THREAD)
    assert str(ignored.value) == (
        "no grader of 'c' with a weight above 0 gave a grade: tone: no grade (nothing to say); "
        "facts: no grade (no documents)"
    )
    grade = await CombinedGrader("c", [says("tone", SILENT), says("facts", 0.5)]).grade(THREAD)
    assert grade.reasoning == "tone: no grade (nothing to say); facts: 0.5"


async def test_the_grades_are_the_parts_of_the_value() -> None:
    graders = [says("a", 1.0), says("b", SILENT), says("n", math.nan), says("d", 0.5)]
    grader = CombinedGrader("c", graders, [2, 1, 0, 0.5])
    parts = [(part.name, part.value, part.weight) for part in (await grader.grade(THREAD)).parts]
    assert parts == [("a", 1.0, 2.0), ("d", 0.5, 0.5)]
    assert "parts" not in Grade(value=1.0, grader_key="a").model_dump()


async def test_a_grader_that_fails_masks_the_whole_grade() -> None:
    combined = CombinedGrader("c", [says("a", 1.0), says("b", ZeroDivisionError("oh"))])
    (outcome,) = await grade_threads(combined, [THREAD], retries=0)
    assert (outcome.status, outcome.reward) == ("masked", None) and "ZeroDivisionError" in outcome.reason


async def test_what_is_no_number_is_masked() -> None:
    (outcome,) = await grade_threads(CombinedGrader("c", [says("a", 1.0), says("b", math.nan)]), [THREAD], retries=0)
    assert outcome.status == "masked"


async def test_graders_are_asked_at_once() -> None:
    together = asyncio.Barrier(2)

    async def meet(thread: StringThread) -> float:
        await asyncio.wait_for(together.wait(), 5)
        return 1.0

    graders = [BaseGrader.from_function(key, meet) for key in ("a", "b")]
    assert await CombinedGrader("c", graders).score_float_value(THREAD) == 1.0


class Tracked(BaseGrader):
    def __init__(self, grader_key: str, *, fails: bool = False) -> None:
        super().__init__(grader_key)
        self.fails, self.calls = fails, []

    async def setup(self) -> None:
        self.calls.append("setup")
        if self.fails:
            raise GraderError("no model")

    async def teardown(self) -> None:
        self.calls.append("teardown")
        if self.fails:
            raise GraderError("still no model")

    async def grade(self, thread: StringThread) -> Grade:
        return Grade(value=0.5, grader_key=self.grader_key)


async def test_children_are_set_up_and_torn_down_once_however_deep() -> None:
    leaf, other = Tracked("leaf"), Tracked("other")
    combined = CombinedGrader("outer", [CombinedGrader("inner", [leaf]), other])
    await combined.setup()
    await combined.setup()
    assert leaf.calls == other.calls == ["setup"]
    await combined.teardown()
    await combined.teardown()
    assert leaf.calls == other.calls == ["setup", "teardown"]


async def test_a_setup_that_fails_undoes_the_others() -> None:
    good, bad = Tracked("good"), Tracked("bad", fails=True)
    combined = CombinedGrader("c", [good, bad])
    with pytest.raises(GraderError, match="no model"):
        await combined.setup()
    assert good.calls == ["setup", "teardown"] and bad.calls == ["setup"]


async def test_a_teardown_that_raises_does_not_keep_the_next_from_its_own() -> None:
    good, bad = Tracked("good"), Tracked("bad")
    combined = CombinedGrader("c", [bad, good])
    await combined.setup()
    bad.fails = True
    with pytest.raises(GraderError, match="still"):
        await combined.teardown()
    assert good.calls == ["setup", "teardown"]


async def test_logs_of_each_grader() -> None:
    child = Tracked("child")
    combined = CombinedGrader("c", [child, says("quiet", SILENT)])
    for _ in range(3):
        await combined.grade(THREAD)
    child.add_log({"tokens": 7.0})
    logs = combined.get_logs()
    assert logs["child/mean"] == 0.5 and logs["child/count"] == 3.0 and logs["child/tokens/max"] == 7.0
    assert not any(name.startswith("quiet") for name in logs)
    combined.clear_logs()
    assert combined.get_logs() == {} and child.get_logs() == {}


def test_a_config_can_name_a_whole_combination() -> None:
    parts = [
        {"path": "tasks.graders.rules:LastNumber", "arguments": {"answer_key": "n"}},
        {"path": "tests.fixtures.grading:constant", "arguments": {"value": 0.25}},
    ]
    arguments: dict[str, Any] = {"grader_key": "both", "graders": parts, "weights": [3, 1]}
    grader = build(grader_spec("tasks.graders.combined:CombinedGrader", arguments))
    right = StringThread(turns=[("user", "q"), ("assistant", "4")], metadata={"n": 4})
    assert asyncio.run(grader.score_float_value(right)) == pytest.approx((3 * 1 + 0.25) / 4)


@pytest.mark.parametrize(
    ("changes", "says_so"),
    [
        ({"weights": [1.0]}, "weight each"),
        ({"weights": [1.0, -0.5]}, "penalty"),
        ({"weights": [0.0, 0.0]}, "not all 0"),
        ({"weights": [1.0, math.inf]}, "finite"),
        ({"aggregation_method": "max"}, "'mean' or 'sum'"),
        ({"graders": []}, "1 or more"),
        ({"graders": [says("a", 1.0), says("a", 0.0)]}, "different keys"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], says_so: str) -> None:
    arguments: dict[str, Any] = {"graders": [says("a", 1.0), says("b", 0.0)]} | changes
    with pytest.raises(ValueError, match=says_so):
        CombinedGrader("c", **arguments)
