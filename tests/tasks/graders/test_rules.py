"""Tests of the rule graders."""

from typing import Any

import pytest

from engine.text.threads import StringThread
from tasks.graders.base import BaseGrader, GraderError
from tasks.graders.rules import ExactMatch, LabelMatch, LastNumber, RegexMatch


def answered(text: str, **metadata: Any) -> StringThread:
    return StringThread(turns=[("user", "q 99"), ("assistant", text)], metadata=metadata)


@pytest.mark.parametrize(
    ("grader", "text", "answer", "value"),
    [
        (LastNumber(), "it is 4", "4", 1.0),
        (LastNumber(), "it is 4.0", 4, 1.0),
        (LastNumber(), "4 or 5", "4", 0.0),
        (LastNumber(), "none at all", "4", 0.0),
        (LastNumber(), "12345678901234567890123456789012345678901", "12345678901234567890123456789012345678902", 0.0),
        (LastNumber(), "1,000", "1000", 1.0),
        (LastNumber(), "0.3", 0.3, 1.0),
        (LastNumber(tolerance=0.1), "3.14", "3.2", 1.0),
        (LastNumber(tolerance=0.1), "3.14", "3.3", 0.0),
        (ExactMatch(), " Paris\n", "Paris", 1.0),
        (ExactMatch(), "paris", "Paris", 0.0),
        (ExactMatch(ignore_case=True), "paris", "Paris", 1.0),
        (ExactMatch(), "In Paris", "Paris", 0.0),
        (ExactMatch(answer_from="answer_tag"), "so <answer>Paris</answer>", "Paris", 1.0),
        (ExactMatch(answer_from="answer_tag"), "Paris", "Paris", 0.0),
        (RegexMatch(pattern=r"\d+ apples"), "I have 3 apples.", None, 1.0),
        (RegexMatch(pattern=r"\d+ apples"), "I have apples.", None, 0.0),
        (RegexMatch(pattern=r"\d+ apples", full=True), "I have 3 apples.", None, 0.0),
    ],
)
async def test_values(grader: BaseGrader, text: str, answer: Any, value: float) -> None:
    grade = await grader.grade(answered(text, answer=answer))
    assert grade.value == value and grade.grader_key == grader.grader_key


async def test_another_key_of_the_metadata() -> None:
    assert await LastNumber(answer_key="gold").score_float_value(answered("7", gold=7)) == 1.0


@pytest.mark.parametrize("grader", [LastNumber(), ExactMatch()])
async def test_a_row_without_an_answer_is_an_error_and_no_reward(grader: BaseGrader) -> None:
    with pytest.raises(GraderError, match=r"no 'answer' \(it has topic\).*metadata_columns"):
        await grader.grade(answered("4", topic="sums"))


@pytest.mark.parametrize("stored", ["four", "nan", "inf", [4]])
async def test_an_answer_that_is_no_number_is_an_error(stored: Any) -> None:
    with pytest.raises(GraderError, match="expects a number"):
        await LastNumber().grade(answered("4", answer=stored))


def test_a_negative_tolerance_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 0 or more"):
        LastNumber(tolerance=-1.0)


@pytest.mark.parametrize(
    ("text", "value"),
    [("spam", 1.0), (" spam\n", 1.0), ("ham", 0.0), ("Spam", -1.0), ("spam, I think", -1.0), ("", -1.0)],
)
async def test_a_label_is_right_wrong_or_malformed(text: str, value: float) -> None:
    thread = StringThread(turns=[("user", "q"), ("assistant", text)], metadata={"label": "spam"})
    assert (await LabelMatch(labels=["spam", "ham"]).grade(thread)).value == value


async def test_labels_in_tags_and_in_any_case() -> None:
    grader = LabelMatch(labels=["Spam", "Ham"], answer_from="answer_tag", ignore_case=True)
    thread = StringThread(turns=[("user", "q"), ("assistant", "Hm. <answer>SPAM</answer>")], metadata={"label": "spam"})
    assert (await grader.grade(thread)).value == 1.0


async def test_a_row_of_another_label_is_an_error() -> None:
    thread = StringThread(turns=[("user", "q"), ("assistant", "ham")], metadata={"label": "eggs"})
    with pytest.raises(GraderError, match="expected one of"):
        await LabelMatch(labels=["spam", "ham"]).grade(thread)


@pytest.mark.parametrize("labels", [[], ["spam"], ["spam", " spam"], "spam"])
def test_labels_that_tell_nothing_apart_are_refused(labels: Any) -> None:
    with pytest.raises(ValueError, match="two or more different labels"):
        LabelMatch(labels=labels)
