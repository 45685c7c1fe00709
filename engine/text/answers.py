"""Parses a model's answer in JSON into the pydantic class that the caller expects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

Answer = TypeVar("Answer", bound=BaseModel)

MAX_CANDIDATES = 64
"""Number of opening braces at which parsing is tried. It bounds the time for a text that consists of braces."""


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
