"""Answers in JSON: what a model said, as the pydantic class that was asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

Answer = TypeVar("Answer", bound=BaseModel)

CANDIDATES = 64
"""Opening braces of an answer that are tried: text of nothing but braces must not take forever."""


class MalformedAnswer(ValueError):
    """What a model said is not what was asked for. The model is at fault and not the call: asking another, or with more
    tokens, may do."""

    def __init__(self, text: str, problem: str) -> None:
        super().__init__(problem)
        self.text = text
        """What it said."""


def parse_answer(text: str, schema: type[Answer]) -> Answer:
    """The first JSON object in `text` that is a `schema`: what a model says around it is skipped. Raises
    MalformedAnswer."""
    problem = "no JSON object in it"
    for found in _json_objects(text):
        try:
            return schema.model_validate(found)
        except ValidationError as error:
            first = error.errors()[0]
            problem = f"{'.'.join(map(str, first['loc'])) or 'the object'}: {first['msg']}"
    raise MalformedAnswer(text, problem)


def _json_objects(text: str) -> Iterator[dict[str, Any]]:
    decoder = json.JSONDecoder()
    start = text.find("{")
    for _ in range(CANDIDATES):
        if start < 0:
            return
        end = start + 1
        try:
            found, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            yield found
        start = text.find("{", end)
