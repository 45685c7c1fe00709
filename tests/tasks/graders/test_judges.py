"""Tests of judges with a scripted model: their prompts, and the grades that they derive from the answers."""

import asyncio
import json
import math
from contextvars import Context
from typing import Any

import pytest
from pydantic import BaseModel

from engine.text.threads import StringThread
from tasks.graders.base import GraderError, IgnoreGradeException
from tasks.graders.judge_models import UnusableAnswer, ask, parse_answer
from tasks.graders.judges import BinaryJudgeGrader, BinaryVerdict
from tasks.graders.range_judge import RangeJudgeGrader
from tasks.graders.running.grade_threads import grade_threads
from tasks.graders.spec import build, grader_spec
from tests.fixtures.judges import ScoringJudge, ScriptedJudge, in_order

THREAD = StringThread(turns=[("system", "Be brief."), ("user", "What is 2+3?"), ("assistant", "It is 5.")])
PASS, FAIL, NA = ('{"reasoning": "r", "result": "%s"}' % result for result in ("PASS", "FAIL", "NA"))  # noqa: UP031


# -- answers in JSON ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        PASS,
        f"Sure!\n```json\n{PASS}\n```\nAnything else?",
        f'{{"no": "verdict"}} so {PASS} and {FAIL}',  # the first that fits
        '{"result": " pass "}',
        '{broken {"result": "PASS"}',
    ],
)
def test_the_first_object_that_fits_is_the_answer(text: str) -> None:
    assert parse_answer(text, BinaryVerdict).result == "PASS"


@pytest.mark.parametrize(
    ("text", "says_so"),
    [
        ("PASS", "no JSON object"),
        ("", "no JSON object"),
        ('{"result": "MAYBE"}', "result"),
        ('{"reasoning": "x"}', "result"),
        ('["PASS"]', "no JSON object"),
        ("{" * 200_000, "no JSON object"),
        ('{"result": ' + "[" * 200_000, "no JSON object"),
    ],
    ids=["word", "nothing", "another word", "missing", "list", "braces", "deep"],
)
def test_what_does_not_fit_is_refused(text: str, says_so: str) -> None:
    with pytest.raises(ValueError, match=says_so):
        parse_answer(text, BinaryVerdict)


async def test_a_bad_answer_is_shown_to_the_model_once() -> None:
    judge = ScriptedJudge(in_order("It passes.", PASS))
    answer, repaired = await ask(judge, StringThread().user("Well?"), BinaryVerdict)
    assert answer.result == "PASS" and repaired
    again = judge.asked[1].thread
    assert [turn.role for turn in again.turns] == ["user", "assistant", "user"]
    assert again.turns[1].text == "It passes." and "no JSON object" in again.turns[2].text


class Constrained(ScriptedJudge):
    """A model whose sampler can be held to a schema."""

    async def generate(self, thread: StringThread, schema: type[BaseModel] | None = None) -> Any:
        assert schema is not None
        return schema.model_validate_json((await super().generate(thread)).last_content())


async def test_a_model_that_can_be_constrained_is() -> None:
    assert (await ask(Constrained(in_order(FAIL)), THREAD.user("?"), BinaryVerdict))[0].result == "FAIL"
    answer, repaired = await ask(Constrained(in_order('{"result": "P', PASS)), THREAD.user("?"), BinaryVerdict)
    assert (answer.result, repaired) == ("PASS", True)


# -- pass or fail ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("answer", "value"), [(PASS, 1.0), (FAIL, 0.0)])
async def test_a_binary_verdict(answer: str, value: float) -> None:
    grade = await BinaryJudgeGrader("b", ScriptedJudge(in_order(answer)), "Is it right?").grade(THREAD)
    assert (grade.value, grade.grader_key, grade.reasoning) == (value, "b", "r")


async def test_not_applicable_and_unusable_are_ignored_and_counted() -> None:
    judge = ScriptedJudge(in_order(NA, "pass!", "still pass!", "hm", FAIL, PASS))
    grader = BinaryJudgeGrader("b", judge, "Is it right?")
    outcomes = await grade_threads(grader, [THREAD] * 4, concurrency=1, retries=2)
    assert [outcome.status for outcome in outcomes] == ["ignored", "ignored", "ok", "ok"]
    assert [outcome.reward for outcome in outcomes] == [None, None, 0.0, 1.0]
    logs = grader.get_logs()  # of four answers one stayed unusable, and one was repaired
    assert (logs["unusable/count"], logs["unusable/mean"], logs["repaired/mean"]) == (4.0, 0.25, 0.25)


async def test_a_lenient_judge_takes_a_verdict_in_prose() -> None:
    prose = "I think that the reply is right: PASS"
    strict = BinaryJudgeGrader("b", ScriptedJudge(in_order(prose, prose)), "Is it right?")
    with pytest.raises(UnusableAnswer):
        await strict.grade(THREAD)
    lenient = BinaryJudgeGrader("b", ScriptedJudge(in_order(prose)), "Is it right?", lenient=True)
    assert (await lenient.grade(THREAD)).value == 1.0
    assert lenient.get_logs()["repaired/mean"] == 0.0
    scored = RangeJudgeGrader("r", ScriptedJudge(in_order("3 out of 5")), "Clear?", (1, 5), ["Look."], lenient=True)
    assert (await scored.grade(THREAD)).value == 0.5
    # JSON has precedence, and prose with both verdicts is no answer
    both = BinaryJudgeGrader("b", ScriptedJudge(in_order("PASS or FAIL", f"PASS? {FAIL}")), "Right?", lenient=True)
    assert (await both.grade(THREAD)).value == 0.0


async def test_what_a_binary_judge_reads() -> None:
    judge = ScriptedJudge(in_order(PASS))
    shots = [
        {"thread": {"turns": [["user", "1+1?"], ["assistant", "2"]]}, "result": "PASS", "reasoning": "yes"},
        {"thread": {"turns": [["user", "1+2?"], ["assistant", "4"]]}, "result": "FAIL"},
    ]
    await BinaryJudgeGrader("b", judge, "Is {it} right?", shots).grade(THREAD)
    (prompt,) = judge.asked
    turns = prompt.thread.turns
    assert [turn.role for turn in turns] == ["user", "assistant", "user", "assistant", "user"]
    assert [json.loads(turn.text)["result"] for turn in turns if turn.role == "assistant"] == ["PASS", "FAIL"]
    assert "1+2?" in turns[2].text and "1+2?" not in prompt.text
    for wanted in ("Is {it} right?", "Be brief.", "What is 2+3?", "<reply>\nIt is 5.\n</reply>"):
        assert wanted in prompt.text
    assert prompt.temperature == 0.0


async def test_equal_questions_are_drawn_alike_and_others_not() -> None:
    judge = ScriptedJudge(lambda _text: PASS)
    grader = BinaryJudgeGrader("b", judge, "Is it right?", temperature=0.7)
    other = StringThread(turns=[("user", "What is 2+3?"), ("assistant", "It is 6.")])
    for thread in (THREAD, THREAD.with_metadata({"row": 3}), other):
        await grader.grade(thread)
    first, second, third = (prompt.seed for prompt in judge.asked)
    assert first is not None and first == second != third
    assert judge.asked[0].temperature == 0.7


async def test_a_model_that_is_only_named_must_be_spawned_first() -> None:
    grader = build(grader_spec("tasks.graders.judges:BinaryJudgeGrader", {
        "grader_key": "b", "model": "judge@1", "criteria": "c",
    }))  # fmt: skip
    with pytest.raises(GraderError, match=r"await setup\(\)"):
        await grader.grade(THREAD)
    nothing_opened = Context()  # another test of this process may have opened a RecipeContext
    with pytest.raises(GraderError, match="with grading_in"):
        await asyncio.create_task(grader.setup(), context=nothing_opened)


# -- a scale -----------------------------------------------------------------------------------------------------


def scoring(probabilities: dict[str, float], steps: str = "") -> ScoringJudge:
    """A judge that answers scores with these odds, whatever it reads."""
    return ScoringJudge(lambda _text: steps, lambda answer: math.log(probabilities[answer]) - 3.0)


@pytest.mark.parametrize(
    ("odds", "score_range", "expected", "normalised"),
    [
        ({"1": 0.1, "2": 0.0001, "3": 0.3, "4": 0.4999, "5": 0.1}, (1, 5), 3.4998, 0.62495),
        ({"0": 0.2, "1": 0.6}, (0, 1), 0.75, 0.75),  # 0.2 of the odds go elsewhere: 0.6 / 0.8
        ({"9": 0.25, "10": 0.75}, (9, 10), 9.75, 0.75),  # whole answers, not first digits
        ({"-1": 0.5, "0": 0.25, "1": 0.25}, (-1, 1), -0.25, 0.375),
    ],
)
async def test_the_expected_score(
    odds: dict[str, float], score_range: tuple[int, int], expected: float, normalised: float
) -> None:
    options: dict[str, Any] = {"score_range": score_range, "evaluation_steps": ["Look."]}
    raw = RangeJudgeGrader("r", scoring(odds), "Good?", normalize_score=False, **options)
    assert (await raw.grade(THREAD)).value == pytest.approx(expected)
    scaled = RangeJudgeGrader("r", scoring(odds), "Good?", **options)
    assert (await scaled.grade(THREAD)).value == pytest.approx(normalised)


async def test_every_score_is_asked_of_one_question() -> None:
    judge = scoring(dict.fromkeys("12345", 0.2))
    await RangeJudgeGrader("r", judge, "Good?", evaluation_steps=["Look.", "Think."]).grade(THREAD)
    assert [thread.last_content() for thread in judge.scored] == ["1", "2", "3", "4", "5"]
    (question,) = {thread.turns[0].text for thread in judge.scored}
    assert "1. Look.\n2. Think." in question and "It is 5." in question and judge.asked == []


async def test_evaluation_steps_are_written_once() -> None:
    judge = scoring(dict.fromkeys("12345", 0.2), steps='{"steps": ["Count the words."]}')
    grader = RangeJudgeGrader("r", judge, "Is it short?")
    await grader.setup()
    outcomes = await grade_threads(grader, [THREAD] * 3)
    assert [outcome.reward for outcome in outcomes] == [0.5] * 3
    assert len(judge.asked) == 1 and "Is it short?" in judge.asked[0].text
    assert all("1. Count the words." in thread.turns[0].text for thread in judge.scored)


async def test_grades_that_race_for_the_steps_share_them() -> None:
    judge = scoring(dict.fromkeys("12345", 0.2), steps='{"steps": ["Count the words."]}')
    await grade_threads(RangeJudgeGrader("r", judge, "Is it short?"), [THREAD] * 5)
    assert len(judge.asked) == 1


async def test_a_judge_that_cannot_write_steps_is_named() -> None:
    with pytest.raises(GraderError, match="give evaluation_steps"):
        await RangeJudgeGrader("r", scoring({}, steps="I would look at it."), "Good?").setup()


@pytest.mark.parametrize(("answer", "value"), [('{"reasoning": "ok", "score": 4}', 0.75), ('{"score": "5"}', 1.0)])
async def test_a_judge_without_logprobs_says_one_score(answer: str, value: float) -> None:
    grader = RangeJudgeGrader("r", ScriptedJudge(in_order(answer)), "Good?", evaluation_steps=["Look."])
    assert (await grader.grade(THREAD)).value == value


async def test_a_score_outside_the_range_and_odds_that_are_none_are_ignored() -> None:
    outside = RangeJudgeGrader("r", ScriptedJudge(in_order('{"score": 6}')), "Good?", evaluation_steps=["Look."])
    nan = RangeJudgeGrader("r", ScoringJudge(str, lambda _: math.nan), "Good?", evaluation_steps=["Look."])
    for grader in (outside, nan):
        with pytest.raises(UnusableAnswer):
            await grader.grade(THREAD)
    assert issubclass(UnusableAnswer, IgnoreGradeException)


@pytest.mark.parametrize("score_range", [(5, 1), (1, 1), (0, 1000), (1.0, 5.5)])
def test_ranges_that_are_refused(score_range: Any) -> None:
    with pytest.raises(ValueError, match="whole numbers low < high"):
        RangeJudgeGrader("r", scoring({}), "Good?", score_range=score_range)
