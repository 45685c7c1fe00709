"""Turns: what they are, how given ones are checked, and the messages chat templates take for them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, get_args

from pydantic import JsonValue, TypeAdapter, ValidationError

from engine.text.errors import ThreadError
from engine.text.fragments import (
    ALLOWED_ROLES,
    Fragment,
    ImageFragment,
    ReasoningFragment,
    Role,
    TextFragment,
    ToolCallFragment,
    ToolResponseFragment,
)

ROLES: tuple[str, ...] = get_args(Role)
Content = str | tuple[Fragment, ...]

_FRAGMENTS = TypeAdapter(tuple[Fragment, ...])
_METADATA = TypeAdapter(dict[str, JsonValue])


class Turn(NamedTuple):
    """One turn; it is also the pair (role, content)."""

    role: Role
    content: Content

    @property
    def text(self) -> str:
        """The turn's text: its text and tool-response fragments joined; reasoning and tool calls left out."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content if isinstance(part, TextFragment | ToolResponseFragment))


def turn_messages(turn: Turn) -> list[dict[str, Any]]:
    """The messages one turn becomes: one, except for a tool turn that holds several responses."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    responses = [part for part in turn.content if isinstance(part, ToolResponseFragment)]
    if responses and len(responses) == len(turn.content):
        return [_response_message(part) for part in responses]
    message: dict[str, Any] = {"role": turn.role, "content": _message_content(turn)}
    if reasoning := "".join(part.text for part in turn.content if isinstance(part, ReasoningFragment)):
        message["reasoning_content"] = reasoning
    if calls := [part for part in turn.content if isinstance(part, ToolCallFragment)]:
        message["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return [message]


def _response_message(part: ToolResponseFragment) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "tool", "content": part.text, "tool_call_id": part.id}
    return message if part.name is None else message | {"name": part.name}


def _message_content(turn: Turn) -> str | list[dict[str, str]]:
    assert not isinstance(turn.content, str)
    if not any(isinstance(part, ImageFragment) for part in turn.content):
        return turn.text
    parts = []
    for part in turn.content:
        if isinstance(part, ImageFragment):
            parts.append({"type": "image", "url": part.url})
        elif isinstance(part, TextFragment | ToolResponseFragment):
            parts.append({"type": "text", "text": part.text})
    return parts


def default_weight(turn: Turn) -> float:
    """1 for an assistant turn, 0 for any other."""
    return 1.0 if turn.role == "assistant" else 0.0


def plain_content(content: Content) -> Any:
    """The content as JSON says it."""
    return content if isinstance(content, str) else [part.model_dump(mode="json") for part in content]


def check_turns(turns: Any) -> tuple[Turn, ...]:
    """The given turns, checked. Raises ThreadError, which names the turn."""
    if isinstance(turns, str | bytes | Mapping) or not isinstance(turns, Iterable):
        raise ThreadError(f"turns is {shown(turns)}; expected a list of (role, content), as in [('user', 'Hello')]")
    return tuple(turn if isinstance(turn, Turn) else check_turn(turn, index) for index, turn in enumerate(turns))


def check_turn(given: Any, index: int) -> Turn:
    """A checked turn out of a (role, content) pair or a {'role', 'content'} mapping."""
    if isinstance(given, Mapping) and given.keys() == {"role", "content"}:
        given = (given["role"], given["content"])
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise ThreadError(f"turn {index} is {shown(given)}; expected (role, content), as in ('user', 'Hello')")
    role, content = given
    if role not in ROLES:
        raise ThreadError(f"the role of turn {index} is {shown(role)}; expected one of {', '.join(ROLES)}")
    return Turn(role, _text(content, index) if isinstance(content, str) else _fragments(content, role, index))


def _text(text: str, index: int) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ThreadError(
            f"the content of turn {index} holds half a surrogate pair at character {error.start}; "
            "expected text that UTF-8 can say: decode it with errors='replace' first"
        ) from error
    return text


def _fragments(content: Any, role: str, index: int) -> tuple[Fragment, ...]:
    where = f"the content of turn {index} ({role})"
    if not isinstance(content, list | tuple) or not content:
        raise ThreadError(f"{where} is {shown(content)}; expected a str, or a list of at least one fragment")
    try:
        parts = _FRAGMENTS.validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(step) for step in first["loc"])
        raise ThreadError(
            f"{where}, fragment {at}: {first['msg']}, given {shown(first['input'])}; "
            "expected the fragments of engine.text.fragments, as in [TextFragment(text='Hello')]"
        ) from error
    for part in parts:
        allowed = ALLOWED_ROLES[part.kind]
        if role not in allowed:
            raise ThreadError(f"{where} holds a {part.kind} fragment; expected it in a turn of {' or '.join(allowed)}")
        _text(json.dumps(part.model_dump(mode="json"), ensure_ascii=False), index)
    return parts


def check_metadata(metadata: Any) -> dict[str, JsonValue]:
    """A deep copy that JSON can say."""
    try:
        checked = _METADATA.validate_python(metadata)
        json.dumps(checked, allow_nan=False, ensure_ascii=False).encode("utf-8")
    except ValueError as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise ThreadError(
            f"metadata is {shown(metadata)} ({why}); expected a dict that JSON can say: str keys, finite numbers, "
            "lists, no tuples, no numpy values"
        ) from error
    return checked


def check_weights(weights: Any, turns: tuple[Turn, ...]) -> tuple[float, ...] | None:
    """One finite weight per turn, or None. Raises ThreadError."""
    if weights is None:
        return None
    if not isinstance(weights, list | tuple) or len(weights) != len(turns):
        raise ThreadError(f"weights is {shown(weights)} for {len(turns)} turns; give a list of one number per turn")
    for index, (weight, turn) in enumerate(zip(weights, turns, strict=True)):
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not number or not math.isfinite(weight) or weight < 0:
            raise ThreadError(f"the weight of turn {index} is {shown(weight)}; expected a finite number of at least 0")
        if weight > 0 and turn.role != "assistant":
            raise ThreadError(f"turn {index} ({turn.role}) has weight {weight}; only assistant turns can be trained")
    checked = tuple(float(weight) for weight in weights)
    # one spelling of the default, so that threads that mean the same are equal, and so are their bytes
    return None if checked == tuple(default_weight(turn) for turn in turns) else checked


def shown(value: Any) -> str:
    """The start of a value, for an error."""
    try:
        text = repr(value)
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply to be shown"
    return text if len(text) <= 80 else text[:77] + "…"
