"""Turns of a conversation: the value type, the validation of turns, weights and metadata, and the messages that chat
templates take."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar, get_args

from pydantic import JsonValue, TypeAdapter, ValidationError

from engine.errors import ThreadError
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
F = TypeVar("F")

_FRAGMENTS = TypeAdapter(tuple[Fragment, ...])
_METADATA = TypeAdapter(dict[str, JsonValue])
_TOOLS = TypeAdapter(tuple[dict[str, JsonValue], ...])


class Turn(NamedTuple):
    """One turn of a conversation. It equals the pair (role, content)."""

    role: Role
    content: Content

    @property
    def text(self) -> str:
        """The text and tool-response fragments, joined. Reasoning and tool calls are left out."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content if isinstance(part, TextFragment | ToolResponseFragment))

    @property
    def text_with_calls(self) -> str:
        """The text, and a line for each tool call, as in `add({"a": 1})`."""
        calls = _parts_of(fragments_of(self.content), ToolCallFragment)
        lines = [f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)})" for call in calls]
        return "\n".join(part for part in (self.text, *lines) if part)


def fragments_of(content: Content | None) -> tuple[Fragment, ...]:
    """Returns the fragments of a turn's content; none for plain text and for a turn without content."""
    return content if isinstance(content, tuple) else ()


def _parts_of(fragments: Iterable[Fragment], kind: type[F]) -> list[F]:
    """Returns the fragments of one class, in order."""
    return [part for part in fragments if isinstance(part, kind)]


# -- messages of chat templates --------------------------------------------------------------------------------


def turn_messages(turn: Turn) -> list[dict[str, Any]]:
    """Returns the messages of a turn: one per response if it holds only tool responses, else one message."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]

    # The format has one message per tool response, since each refers to one call.
    responses = _parts_of(turn.content, ToolResponseFragment)
    if responses and len(responses) == len(turn.content):
        return [_response_message(part) for part in responses]

    # Reasoning and tool calls have fields of their own. The content is the rest.
    message: dict[str, Any] = {"role": turn.role, "content": _message_content(turn.content, turn.text)}
    reasoning = "".join(part.text for part in _parts_of(turn.content, ReasoningFragment))
    if reasoning:
        message["reasoning_content"] = reasoning
    calls = _parts_of(turn.content, ToolCallFragment)
    if calls:
        message["tool_calls"] = [_call_message(call) for call in calls]
    return [message]


def _call_message(call: ToolCallFragment) -> dict[str, Any]:
    return {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}


def _response_message(part: ToolResponseFragment) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "tool", "content": part.text, "tool_call_id": part.id}
    if part.name is not None:
        message["name"] = part.name
    return message


def _message_content(fragments: tuple[Fragment, ...], text: str) -> str | list[dict[str, str]]:
    """Returns the text, or a list of parts if there is an image."""
    # Many templates accept only a str, so parts are used only where they must be.
    if not _parts_of(fragments, ImageFragment):
        return text
    parts = []
    for part in fragments:
        if isinstance(part, ImageFragment):
            parts.append({"type": "image", "url": part.url})
        elif isinstance(part, TextFragment | ToolResponseFragment):
            parts.append({"type": "text", "text": part.text})
    return parts


# -- validation ------------------------------------------------------------------------------------------------


def default_weight(turn: Turn) -> float:
    """Returns 1 for an assistant turn and 0 for any other."""
    return 1.0 if turn.role == "assistant" else 0.0


def content_as_json(content: Content) -> Any:
    """Returns the content as JSON values."""
    if isinstance(content, str):
        return content
    return [part.model_dump(mode="json") for part in content]


def parse_turns(turns: Any) -> tuple[Turn, ...]:
    """Returns the turns. Converts and validates every item that is not a `Turn`; a `Turn` is not checked.

    Raises ThreadError, which names the turn."""
    if isinstance(turns, str | bytes | Mapping) or not isinstance(turns, Iterable):
        raise ThreadError(
            f"turns is {short_repr(turns)}; expected a list of (role, content), as in [('user', 'Hello')]"
        )
    parsed: list[Turn] = []
    for index, turn in enumerate(turns):
        # Threads are copied often, and their turns were validated when the first thread was created.
        parsed.append(turn if isinstance(turn, Turn) else parse_turn(turn, index))
    return tuple(parsed)


def parse_turn(value: Any, index: int) -> Turn:
    """Returns the turn of a (role, content) pair or a {'role', 'content'} mapping. Raises ThreadError."""
    if isinstance(value, Mapping) and value.keys() == {"role", "content"}:
        value = (value["role"], value["content"])
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ThreadError(f"turn {index} is {short_repr(value)}; expected (role, content), as in ('user', 'Hello')")
    role, content = value
    if role not in ROLES:
        raise ThreadError(f"the role of turn {index} is {short_repr(role)}; expected one of {', '.join(ROLES)}")
    if isinstance(content, str):
        return Turn(role, _check_text(content, index))
    return Turn(role, _check_fragments(content, role, index))


def _check_text(text: str, index: int) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ThreadError(
            f"the content of turn {index} holds half a surrogate pair at character {error.start}; "
            "expected text that UTF-8 can encode: decode it with errors='replace' first"
        ) from error
    return text


def _check_fragments(content: Any, role: str, index: int) -> tuple[Fragment, ...]:
    where = f"the content of turn {index} ({role})"
    if not isinstance(content, list | tuple) or not content:
        raise ThreadError(f"{where} is {short_repr(content)}; expected a str, or a list of at least one fragment")
    try:
        parts = _FRAGMENTS.validate_python(content)
    except ValidationError as error:
        first_error = error.errors()[0]
        location = ".".join(str(step) for step in first_error["loc"])
        raise ThreadError(
            f"{where}, fragment {location}: {first_error['msg']}, given {short_repr(first_error['input'])}; "
            "expected the fragments of engine.text.fragments, as in [TextFragment(text='Hello')]"
        ) from error
    # A template writes only some kinds of fragments for each role, and would drop the others.
    for part in parts:
        allowed = ALLOWED_ROLES[part.kind]
        if role not in allowed:
            raise ThreadError(f"{where} holds a {part.kind} fragment; expected it in a turn of {' or '.join(allowed)}")
        _check_text(json.dumps(part.model_dump(mode="json"), ensure_ascii=False), index)
    return parts


def check_metadata(metadata: Any) -> dict[str, JsonValue]:
    """Returns a deep copy of the metadata. Raises ThreadError unless JSON can represent it exactly."""
    try:
        metadata_copy = _METADATA.validate_python(metadata)
        json.dumps(metadata_copy, allow_nan=False, ensure_ascii=False).encode("utf-8")
    except ValueError as error:
        problem = str(error)
        if isinstance(error, ValidationError):
            problem = error.errors()[0]["msg"]
        raise ThreadError(
            f"metadata is {short_repr(metadata)} ({problem}); expected a dict that JSON can represent: str keys, "
            "finite numbers, lists, no tuples, no numpy values"
        ) from error
    return metadata_copy


def check_tools(tools: Any) -> tuple[dict[str, JsonValue], ...]:
    """Returns a deep copy of the descriptions of tools. Raises ThreadError unless each is an object in JSON."""
    try:
        tools_copy = _TOOLS.validate_python(tools)
        json.dumps(tools_copy, allow_nan=False, ensure_ascii=False).encode("utf-8")
    except ValueError as error:
        raise ThreadError(
            f"tools is {short_repr(tools)}; expected a list of descriptions in the format of OpenAI's API, as in "
            '[{"type": "function", "function": {"name": "add", "parameters": {…}}}]'
        ) from error
    return tools_copy


def check_weights(weights: Any, turns: tuple[Turn, ...]) -> tuple[float, ...] | None:
    """Returns one finite weight per turn, or None if they are the default weights.

    A weight is at least 0, and above 0 only for an assistant turn. Raises ThreadError."""
    if weights is None:
        return None
    if not isinstance(weights, list | tuple) or len(weights) != len(turns):
        raise ThreadError(
            f"weights is {short_repr(weights)} for {len(turns)} turns; give a list of one number per turn"
        )
    for index, (weight, turn) in enumerate(zip(weights, turns, strict=True)):
        # bool is a subclass of int, and True as a weight is a mistake.
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not math.isfinite(weight) or weight < 0:
            raise ThreadError(
                f"the weight of turn {index} is {short_repr(weight)}; expected a finite number of at least 0"
            )
        if weight > 0 and turn.role != "assistant":
            raise ThreadError(f"turn {index} ({turn.role}) has weight {weight}; only assistant turns can be trained")
    float_weights = tuple(float(weight) for weight in weights)
    # The default has only one representation, so that threads with equal weights are equal and have equal bytes.
    defaults = tuple(default_weight(turn) for turn in turns)
    return None if float_weights == defaults else float_weights


def short_repr(value: Any) -> str:
    """Returns a value's repr for an error message, shortened to 77 characters and "…" if it has more than 80."""
    try:
        text = repr(value)
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply to be shown"
    return text if len(text) <= 80 else text[:77] + "…"
