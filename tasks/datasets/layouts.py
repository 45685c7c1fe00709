"""Reads the usual layouts of conversations besides `role` and `content`: ShareGPT's turns, tool calls in OpenAI's
format, and a column with the tools that the assistant may call."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tasks.environments.tools import CLOSE, INSTRUCTIONS, OPEN

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
    """The message with the fields `role` and `content`, where ShareGPT has `from` and `value`. Tool calls are written
    into the content, and the name and the id of a tool's answer are left out: the turns are in the order of the calls.

    An unknown `from` or a malformed call stays as it is, for the check of the message.
    """
    # Parquet gives every message the union of the fields, null where absent.
    fields = {name: value for name, value in message.items() if value is not None}
    if "from" in fields and "role" not in fields:
        sender = fields.pop("from")
        role = SHAREGPT_ROLES.get(sender, sender) if isinstance(sender, str) else sender
        fields |= {"role": role, "content": fields.pop("value", None)}
    if fields.get("role") == "tool":
        fields = {name: value for name, value in fields.items() if name not in ("name", "tool_call_id")}
    if fields.get("role") == "assistant" and "tool_calls" in fields:
        calls = fields["tool_calls"] if isinstance(fields["tool_calls"], list) else [fields["tool_calls"]]
        texts = [_call_text(call) for call in calls]
        if None not in texts:
            del fields["tool_calls"]
            fields["content"] = "\n".join(part for part in (fields.get("content"), *texts) if part)
    return fields


def _call_text(call: Any) -> str | None:
    """A tool call as the environments with tools write it. None: the call is malformed."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    body = {"name": function["name"], "arguments": _without_nulls(arguments or {})}
    return f"{OPEN}\n{json.dumps(body, ensure_ascii=False)}\n{CLOSE}"


def tools_text(value: Any) -> str | None:
    """The part of a system turn that lists the tools of a row: a list of descriptions, or its JSON text. None: the row
    has no tools. Raises ValueError for another value."""
    if isinstance(value, str):
        value = json.loads(value) if value.strip() else None
    if value in (None, []):
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ValueError(f"not a list of objects but a {type(value).__name__}")
    return INSTRUCTIONS + "\n".join(json.dumps(_without_nulls(tool), ensure_ascii=False) for tool in value)


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
