"""Asks a model for an answer in JSON, and parses it into the pydantic class that the caller expects."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from engine.text.threads import StringThread

Answer = TypeVar("Answer", bound=BaseModel)

MAX_CANDIDATES = 64
"""Number of opening braces at which parsing is tried. It bounds the time for a text that consists of braces."""


_NUMBER = r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w])"
"""A number that is no part of a word or of a longer number."""

AskModel = Callable[[StringThread], Awaitable[StringThread]]
"""Returns the thread with the model's answer appended."""


MOST_ITEMS = 32
"""Items of a list in a constrained answer, unless its class gives a limit."""


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
