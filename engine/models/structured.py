"""Asking a model for a pydantic class: one try, or one that is repaired."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pydantic import BaseModel

from engine.text.answers import MalformedAnswer, parse_answer
from engine.text.threads import StringThread

Answer = TypeVar("Answer", bound=BaseModel)
Say = Callable[[StringThread], Awaitable[StringThread]]
"""The thread with the model's answer appended."""


async def answer_once(say: Say, thread: StringThread, schema: type[Answer]) -> Answer:
    """The model's answer to `thread` as `schema`. Raises MalformedAnswer."""
    return parse_answer((await say(thread)).last_content(), schema)


async def answer_repaired(say: Say, thread: StringThread, schema: type[Answer]) -> Answer:
    """The same; an answer that does not fit is shown to the model once, with what was wrong. Raises MalformedAnswer."""
    try:
        return await answer_once(say, thread, schema)
    except MalformedAnswer as first:
        shown = thread.assistant(first.text or "(no answer)").user(
            f"That answer cannot be used: {first}. Answer again, with one JSON object that fits this JSON schema, and "
            f"nothing else:\n{json.dumps(schema.model_json_schema())}"
        )
    try:
        return await answer_once(say, shown, schema)
    except MalformedAnswer as second:
        problem = f"the model gave no usable {schema.__name__}, even shown its error: {second}"
        raise MalformedAnswer(second.text, problem) from second
