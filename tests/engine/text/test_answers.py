"""Tests of answers in prose: one number, or one of the words that a field may have."""

from __future__ import annotations

from typing import Literal

import pytest
from pydantic import BaseModel, Field

from engine.text.answers import MalformedAnswer, answer_in_prose


class Verdict(BaseModel):
    why: str = ""
    result: Literal["PASS", "FAIL", "NA"]


class Score(BaseModel):
    why: str = ""
    score: float | None = Field(le=10)


class Both(BaseModel):
    result: Literal["PASS", "FAIL"]
    score: float


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("PASS", "PASS"),
        ("My verdict: **FAIL**.", "FAIL"),
        ("PASS. I repeat: PASS", "PASS"),
        ("The reply would pass.", "PASS"),
        ("It should not pass, so FAIL", "FAIL"),  # what is written as the word counts
    ],
)
def test_a_word(text: str, result: str) -> None:
    assert answer_in_prose(text, Verdict).result == result


@pytest.mark.parametrize(
    ("text", "score"),
    [("I give it 4.", 4.0), ("Score: 0.5", 0.5), ("4 out of 5: 3 parts are right", 4.0), ("7/10", 7.0), ("-1", -1.0)],
)
def test_a_number(text: str, score: float) -> None:
    assert answer_in_prose(text, Score).score == score


@pytest.mark.parametrize(
    ("text", "schema", "problem"),
    [
        ("PASS or FAIL", Verdict, "the prose has 2 values"),
        ("The surpassing failure", Verdict, "the prose has 0 values"),
        ("between 3 and 4", Score, "the prose has 2 values"),
        ("version v2 of gpt4", Score, "the prose has 0 values"),
        ("11", Score, "less than or equal to 10"),
        ("PASS 4", Both, r"the required fields \['result', 'score'\]"),
    ],
)
def test_prose_without_one_value_is_refused(text: str, schema: type[BaseModel], problem: str) -> None:
    with pytest.raises(MalformedAnswer, match=problem):
        answer_in_prose(text, schema)
