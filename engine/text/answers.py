"""Parses a model's answer in JSON into the pydantic class that the caller expects."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

Answer = TypeVar("Answer", bound=BaseModel)

MAX_CANDIDATES = 64
"""Number of opening braces at which parsing is tried. It bounds the time for a text that consists of braces."""


_NUMBER = r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w])"
"""A number that is no part of a word or of a longer number."""


class MalformedAnswer(ValueError):
    """A model's answer does not have the expected schema. The call was correct: asking again, or with more tokens, may
    succeed."""

    def __init__(self, text: str, problem: str) -> None:
        super().__init__(problem)
        self.text = text
        """The model's whole answer."""


def parse_answer(text: str, schema: type[Answer]) -> Answer:
    """Returns the first JSON object in `text` that is a valid `schema`. Text around it is skipped.

    Raises MalformedAnswer.
    """
    # A model may write other JSON first, such as an example. The last problem is the most useful one to report.
    problem = "no JSON object in it"
    for candidate in _json_objects(text):
        try:
            return schema.model_validate(candidate)
        except ValidationError as error:
            first_error = error.errors()[0]
            field = ".".join(map(str, first_error["loc"])) or "the object"
            problem = f"{field}: {first_error['msg']}"
    raise MalformedAnswer(text, problem)


def answer_in_prose(text: str, schema: type[Answer]) -> Answer:
    """Returns an answer of which `text` gives the only required field in prose: a number, or one of its words, such as
    PASS or FAIL. "4 out of 5" and "4/5" give 4.

    Raises MalformedAnswer if the schema has other required fields, and if the text has no such value or several.
    """
    described = schema.model_json_schema()
    required = described.get("required", [])
    if len(required) != 1:
        raise MalformedAnswer(text, f"{schema.__name__} has the required fields {required}; prose can give one")
    words = described["properties"][required[0]].get("enum")
    values = _words_in(text, words) if words else _numbers_in(text)
    if len(values) != 1:
        raise MalformedAnswer(text, f"{required[0]}: the prose has {len(values)} values that it may be")
    try:
        return schema.model_validate({required[0]: values.pop()})
    except ValidationError as error:
        raise MalformedAnswer(text, f"{required[0]}: {error.errors()[0]['msg']}") from error


def _words_in(text: str, words: list[str]) -> set[str]:
    """The words that occur in the text: as they are written, or else in any case."""
    exact = {word for word in words if re.search(rf"\b{re.escape(word)}\b", text)}
    return exact or {word for word in words if re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE)}


def _numbers_in(text: str) -> set[float]:
    """The different numbers of the text, or those of which it gives the largest possible one."""
    out_of = re.findall(rf"{_NUMBER}(?=\s*(?:/|out of)\s*\d)", text)
    return {float(number) for number in out_of or re.findall(_NUMBER, text)}


def _json_objects(text: str) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects in `text`. Objects inside of a yielded one are not yielded again."""
    # Try to parse from each opening brace, since any text may surround an object.
    decoder = json.JSONDecoder()
    start = text.find("{")
    for _ in range(MAX_CANDIDATES):
        if start < 0:
            return
        end = start + 1
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            yield value
        start = text.find("{", end)
