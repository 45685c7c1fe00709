"""Asks a model for an answer as a pydantic class, with or without a second try, and writes the JSON schema that a
sampler constrains the answer to."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from pydantic import BaseModel

from engine.text.answers import MalformedAnswer, parse_answer
from engine.text.threads import StringThread

Answer = TypeVar("Answer", bound=BaseModel)
AskModel = Callable[[StringThread], Awaitable[StringThread]]
"""Returns the thread with the model's answer appended."""


MOST_ITEMS = 32
"""Items of a list in a constrained answer, unless its class gives a limit."""


def constrained_schema(schema: type[BaseModel], max_new_tokens: int) -> str:
    """The JSON schema that a sampler constrains the answers of a class to, as text.

    It has no properties besides those of the class, and bounds strings and lists that the class does not bound, so that
    a weak model that repeats itself comes to the end of its answer: a string has at most half as many characters as
    the answer may have tokens."""
    described = schema.model_json_schema()
    _bound(described, max_length=max(1, max_new_tokens // 2))
    return json.dumps(described)


def _bound(node: Any, *, max_length: int) -> None:
    """Bounds all objects, strings and lists that a node of a JSON schema describes."""
    if isinstance(node, list):
        for item in node:
            _bound(item, max_length=max_length)
    if not isinstance(node, dict):
        return
    # a key of "properties" may have the name of a keyword, but its value is no text then
    kind = node.get("type")
    if kind == "object" and "properties" in node:
        node.setdefault("additionalProperties", False)
    if kind == "string" and not {"enum", "const", "pattern", "format"} & set(node):
        node.setdefault("maxLength", max(max_length, node.get("minLength", 0)))
    if kind == "array":
        node.setdefault("maxItems", max(MOST_ITEMS, node.get("minItems", 0)))
    for value in list(node.values()):
        _bound(value, max_length=max_length)


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
