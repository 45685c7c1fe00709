"""Extracts the answer from a completion: the last number, the whole text, or the content of <answer> tags."""

import re
from typing import Literal, assert_never

AnswerFrom = Literal["last_number", "whole", "answer_tag"]

# A sign belongs to the number only if no operand stands before it: "5-3" ends with 3, "= -3" with -3.
NUMBER = re.compile(
    r"""(?:(?<![\w)\].])[-+])?                          # sign
        (?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])            # 1,234,567
          |[0-9]+)
        (?:\.[0-9]+)?                                   # without the full stop of a sentence
      |(?:(?<![\w)\].])[-+])?(?<![\w.])\.[0-9]+         # .5""",
    re.VERBOSE,
)
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"


def extract_answer(text: str, answer_from: AnswerFrom) -> str | None:
    """Return the answer in `text`, or None if it has none.

    last_number: the last decimal number, thousands commas removed ("is 1,234." -> "1234"); no exponents, no fractions.
    whole:       the text without surrounding white space; None if nothing is left.
    answer_tag:  the content of the last <answer>…</answer>, without surrounding white space.
    """
    if answer_from == "last_number":
        return last_number(text)
    if answer_from == "whole":
        return text.strip() or None
    if answer_from == "answer_tag":
        return _last_tag(text)
    assert_never(answer_from)


def last_number(text: str) -> str | None:
    """The last decimal number in `text`, in a form that Decimal parses, or None."""
    number = None
    for match in NUMBER.finditer(text.replace("\N{MINUS SIGN}", "-")):
        number = match.group()
    return number.replace(",", "") if number is not None else None


def _last_tag(text: str) -> str | None:
    end = text.rfind(ANSWER_CLOSE)
    start = text.rfind(ANSWER_OPEN, 0, end) if end >= 0 else -1
    if start < 0:
        return None
    return text[start + len(ANSWER_OPEN) : end].strip() or None
