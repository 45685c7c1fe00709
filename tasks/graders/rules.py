"""Graders by rule, without a model or a network. Most compare the completion with the row's metadata."""

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Literal, assert_never

from engine.text.threads import StringThread
from tasks.graders.base import BaseGrader, Grade, GraderError

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


class ExactMatch(BaseGrader):
    """1.0 if the extracted answer equals metadata[answer_key], else 0.0."""

    def __init__(
        self,
        grader_key: str = "exact_match",
        *,
        answer_key: str = "answer",
        answer_from: AnswerFrom = "whole",
        ignore_case: bool = False,
    ) -> None:
        super().__init__(grader_key)
        self.answer_key, self.answer_from, self.ignore_case = answer_key, answer_from, ignore_case

    async def grade(self, thread: StringThread) -> Grade:
        # A completion without an answer is compared as an empty text.
        expected = str(from_metadata(thread, self.answer_key)).strip()
        answer = extract_answer(thread.last_content(), self.answer_from) or ""
        if self.ignore_case:
            answer, expected = answer.casefold(), expected.casefold()
        same = answer == expected
        return Grade(value=float(same), grader_key=self.grader_key, answer=answer or None)


class RegexMatch(BaseGrader):
    """1.0 if `pattern` is found in the completion (with `full`: if it matches the whole completion), else 0.0.

    The pattern comes from the config and never from a dataset: no timeout can stop a pattern such as (a+)+$, since
    Python's `re` does not release the interpreter lock.
    """

    def __init__(self, grader_key: str = "regex_match", *, pattern: str, full: bool = False) -> None:
        super().__init__(grader_key)
        self.pattern, self.full = re.compile(pattern), full

    async def grade(self, thread: StringThread) -> Grade:
        text = thread.last_content()
        match = self.pattern.fullmatch(text) if self.full else self.pattern.search(text)
        return Grade(value=float(match is not None), grader_key=self.grader_key)


class LastNumber(BaseGrader):
    """1.0 if the last number of the completion equals the number in metadata[answer_key], within `tolerance`.

    A completion without a number gets 0.0. The comparison is exact, in decimal arithmetic: "4.0" equals 4.
    """

    def __init__(self, grader_key: str = "last_number", *, answer_key: str = "answer", tolerance: float = 0.0) -> None:
        super().__init__(grader_key)
        if not tolerance >= 0.0:
            raise ValueError(f"given tolerance={tolerance}; expected 0 or more")
        self.answer_key, self.tolerance = answer_key, Decimal(str(tolerance))

    async def grade(self, thread: StringThread) -> Grade:
        expected = self._expected(thread)
        answer = last_number(thread.last_content())
        right = answer is not None and abs(Decimal(answer) - expected) <= self.tolerance
        # 1.50 and 1.5 are one answer
        number = None if answer is None else f"{Decimal(answer).normalize():f}"
        return Grade(value=float(right), grader_key=self.grader_key, answer=number)

    def _expected(self, thread: StringThread) -> Decimal:
        # Decimal also parses "NaN" and "Infinity", which are refused like any other text.
        stored = from_metadata(thread, self.answer_key)
        try:
            number = Decimal(str(stored).replace(",", "").strip())
        except InvalidOperation:
            number = Decimal("NaN")
        if not number.is_finite():
            raise GraderError(f"metadata[{self.answer_key!r}] is {stored!r}; LastNumber expects a number there")
        return number


class LabelMatch(BaseGrader):
    """Grades a classification: 1.0 for the label in metadata[answer_key], 0.0 for another of `labels`, else -1.0."""

    def __init__(
        self,
        grader_key: str = "label_match",
        *,
        labels: Sequence[str],
        answer_key: str = "label",
        answer_from: AnswerFrom = "whole",
        ignore_case: bool = False,
    ) -> None:
        super().__init__(grader_key)
        self.answer_key, self.answer_from, self.ignore_case = answer_key, answer_from, ignore_case
        # Two labels that are equal without their case, or a text instead of a list, leave fewer keys than labels.
        self.labels = {self._folded(label): label for label in labels}
        if isinstance(labels, str) or len(self.labels) < max(2, len(labels)):
            raise ValueError(f"given labels={labels!r}; expected a list of two or more different labels")

    async def grade(self, thread: StringThread) -> Grade:
        # A row with an unknown label is an error of the dataset, not a wrong answer.
        stored = from_metadata(thread, self.answer_key)
        expected = self.labels.get(self._folded(str(stored)))
        if expected is None:
            known = list(self.labels.values())
            raise GraderError(f"metadata[{self.answer_key!r}] is {stored!r}; expected one of {known}")
        answer = extract_answer(thread.last_content(), self.answer_from) or ""
        label = self.labels.get(self._folded(answer))
        value = -1.0 if label is None else float(label == expected)
        reasoning = None if label else "no label in the completion"
        return Grade(value=value, grader_key=self.grader_key, reasoning=reasoning, answer=label)

    def _folded(self, label: str) -> str:
        return label.strip().casefold() if self.ignore_case else label.strip()


def no_reward(thread: StringThread) -> float:
    """The reward 0 of every completion, for training that needs none (distillation)."""
    return 0.0


def from_metadata(thread: StringThread, key: str) -> Any:
    """Return thread.metadata[key]. Raises GraderError if the row has no such value, or null."""
    value = thread.metadata.get(key)
    if value is None:
        known = ", ".join(sorted(thread.metadata)) or "nothing"
        raise GraderError(
            f"the thread's metadata has no {key!r} (it has {known}), which this grader needs. "
            f"Load it with the dataset's metadata_columns, or set another key."
        )
    return value
