"""Reads the usual layouts of conversations besides `role` and `content`: ShareGPT's turns, tool calls in OpenAI's
format, and a column with the tools that the assistant may call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.text.fragments import ImageFragment, TextFragment, ToolCallFragment, ToolResponseFragment
from engine.text.tool_calls import call_as_text

RawTurn = tuple[str, str | tuple[TextFragment | ImageFragment | ToolCallFragment | ToolResponseFragment, ...]]
"""(role, content) of a turn whose thread is not built yet."""
CONVERSATIONS = "conversations"
"""Column of ShareGPT's layout. It is read where a row has no `messages` and no `prompt`."""
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""ShareGPT's `from` -> role."""


def usual_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with the fields `role` and `content`, where ShareGPT has `from` and `value`. `tool_calls` are
    fragments; those without an id have an empty one.

    An unknown `from` or a malformed call stays as it is, for the check of the message.
    """
    # Parquet gives every message the union of the fields, null where absent.
    fields = {name: value for name, value in message.items() if value is not None}
    if "from" in fields and "role" not in fields:
        sender = fields.pop("from")
        role = SHAREGPT_ROLES.get(sender, sender) if isinstance(sender, str) else sender
        fields |= {"role": role, "content": fields.pop("value", None)}
    if fields.get("role") == "assistant" and "tool_calls" in fields:
        calls = fields["tool_calls"] if isinstance(fields["tool_calls"], list) else [fields["tool_calls"]]
        fragments = [_call_fragment(call) for call in calls]
        if None not in fragments:
            fields["tool_calls"] = fragments
    return fields


def _call_fragment(call: Any) -> ToolCallFragment | None:
    """None: the call is malformed."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict | None):
        return None
    call_id = call.get("id")
    arguments = _without_nulls(arguments or {})
    try:
        json.dumps(arguments, allow_nan=False)
        return ToolCallFragment(
            id=call_id if isinstance(call_id, str) else "", name=function["name"], arguments=arguments
        )
    except (ValueError, TypeError, RecursionError):
        return None  # its arguments are no JSON


def turns_with_calls(turns: Sequence[RawTurn]) -> list[RawTurn]:
    """The turns with the answers of several tools in one turn. Calls and answers without an id get one: the answers are
    in the order of the calls."""
    joined: list[RawTurn] = []
    call_ids: list[str] = []  # of the last assistant turn with calls
    count = 0
    for role, content in turns:
        parts: list[Any] = []
        previous = joined[-1] if joined else ("", "")
        answers_before = previous[1] if role == previous[0] == "tool" else ()
        for part in content if isinstance(content, tuple) else ():
            if isinstance(part, ToolCallFragment):
                part = part if part.id else part.model_copy(update={"id": f"call{count:05d}"})
                count += 1
            elif isinstance(part, ToolResponseFragment) and not part.id:
                place = len(answers_before) + len(parts)
                part = part.model_copy(update={"id": call_ids[place] if place < len(call_ids) else "unknown"})
            parts.append(part)
        ids = [part.id for part in parts if isinstance(part, ToolCallFragment)]
        call_ids = ids or call_ids
        if parts and answers_before and _are_answers(parts) and _are_answers(answers_before):
            joined[-1] = (role, (*answers_before, *parts))
        else:
            joined.append((role, tuple(parts) if parts else content))
    return joined


def _are_answers(parts: Any) -> bool:
    return isinstance(parts, list | tuple) and all(isinstance(part, ToolResponseFragment) for part in parts)


def turns_as_text(turns: Sequence[RawTurn]) -> list[RawTurn]:
    """The turns with their tool calls as text in Hermes' format, and with the answers of tools as text."""
    texts: list[RawTurn] = []
    for role, content in turns:
        if isinstance(content, str):
            texts.append((role, content))
            continue
        calls = [part for part in content if isinstance(part, ToolCallFragment)]
        if calls:
            text = "".join(part.text for part in content if isinstance(part, TextFragment))
            written = [call_as_text(call.name, call.arguments) for call in calls]
            content = "\n".join(part for part in (text, *written) if part)
        elif _are_answers(content):
            content = "".join(part.text for part in content if isinstance(part, ToolResponseFragment))
        texts.append((role, content))
    return texts


def tools_of(value: Any) -> list[dict[str, Any]]:
    """The descriptions of the tools of a row: a list, or its JSON text. Empty: the row has no tools. Raises ValueError
    for another value."""
    if isinstance(value, str):
        value = json.loads(value) if value.strip() else None
    if value in (None, []):
        return []
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ValueError(f"not a list of objects but a {type(value).__name__}")
    return [_without_nulls(tool) for tool in value]


def rating_of_label(label: Any) -> Any:
    """The rating that a label means: 1 or 0 for a yes or no. A number stays as it is."""
    return float(label) if isinstance(label, bool) else label


def _without_nulls(value: Any) -> Any:
    """The value without the nulls that Parquet adds to the fields of a list of objects."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
