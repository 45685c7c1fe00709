"""Tests of the extraction of answers from completions."""

import pytest

from tasks.graders.rules import extract_answer, last_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", "42"),
        ("The answer is 12.", "12"),
        ("It is 3.50.", "3.50"),
        ("= -4", "-4"),
        ("5-3", "3"),
        ("5 - 3 = 2", "2"),
        ("x=-7", "-7"),
        ("(2)-3", "3"),
        ("−9", "-9"),
        ("total 1,234,567!", "1234567"),
        ("1, 2, 3", "3"),
        ("\\boxed{17}", "17"),
        ("is .5", ".5"),
        ("7/8", "8"),
        ("+6", "+6"),
        ("1.2.3", "3"),
        ("no numbers", None),
        ("", None),
        ("٣", None),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> 5 </answer>", "5"),
        ("<answer>1</answer> no: <answer>a\nb</answer> end", "a\nb"),
        ("<answer>open", None),
        ("</answer><answer>", None),
        ("<answer></answer>", None),
        ("5", None),
    ],
)
def test_answer_tag(text: str, answer: str | None) -> None:
    assert extract_answer(text, "answer_tag") == answer


def test_whole() -> None:
    assert extract_answer("  a b\n", "whole") == "a b"
    assert extract_answer(" \n", "whole") is None
