"""Asks a model for an answer as a pydantic class, with or without a second try."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pydantic import BaseModel

from engine.text.answers import MalformedAnswer, parse_answer
from engine.text.threads import StringThread

Answer = TypeVar("Answer", bound=BaseModel)
AskModel = Callable[[StringThread], Awaitable[StringThread]]
"""Returns the thread with the model's answer appended."""


async def answer_once(ask: AskModel, thread: StringThread, schema: type[Answer]) -> Answer:
    """The model's answer to `thread` as an instance of `schema`. Raises MalformedAnswer."""
    answered = await ask(thread)
    return parse_answer(answered.last_content(), schema)


async def answer_repaired(ask: AskModel, thread: StringThread, schema: type[Answer]) -> Answer:
    """Like `answer_once`, but the model gets a second try in which it sees the error of the first.

    Raises MalformedAnswer if the second answer does not fit either."""
    try:
        return await answer_once(ask, thread, schema)
    except MalformedAnswer as first:
        # An endpoint refuses an empty assistant turn.
        repair_thread = thread.assistant(first.text or "(no answer)").user(
            f"That answer cannot be used: {first}. Answer again, with one JSON object that fits this JSON schema, and "
            f"nothing else:\n{json.dumps(schema.model_json_schema())}"
        )
    try:
        return await answer_once(ask, repair_thread, schema)
    except MalformedAnswer as second:
        problem = f"the model gave no usable {schema.__name__}, even shown its error: {second}"
        raise MalformedAnswer(second.text, problem) from second
