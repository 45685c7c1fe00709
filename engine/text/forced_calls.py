"""Completions that must be a call of a tool: the text of the model's format before the JSON, and the JSON's schema.

The text is appended to the prompt, and the sampler is constrained to the schema. The completion is thus the JSON alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from engine.text.tool_calls import ToolFormat, Tools


class ForcedCall(NamedTuple):
    """The beginning of a call, and the JSON schema of the rest."""

    prefix: str
    json_schema: str | None
    """None: nothing is forced."""


def forced_call(tool_format: ToolFormat, tools: Tools) -> ForcedCall:
    """Returns the call of one of the tools in the model's format.

    Raises ValueError for a format in which no JSON schema describes such a call."""
    functions = [tool["function"] for tool in tools]
    family = tool_format.family
    if tool_format.before_arguments is not None:
        if len(functions) > 1:
            raise ValueError(
                f"given {len(functions)} tools to choose from; this model's format ({family}) writes the tool's name "
                "outside the JSON, so only a named tool can be forced: name it, or give auto"
            )
        schema, definitions = _arguments(functions[0])
        prefix = tool_format.before_arguments.format(name=functions[0]["name"])
        return ForcedCall(prefix, _with_definitions(schema, [definitions]))
    if family not in ("hermes", "llama", "mistral"):
        raise ValueError(f"this model's format of calls ({family}) is not JSON, to which decoding can be constrained")

    key = "parameters" if family == "llama" else "arguments"
    calls, all_definitions = [], []
    for function in functions:
        schema, definitions = _arguments(function)
        calls.append(_object({"name": {"const": function["name"]}, key: schema}))
        all_definitions.append(definitions)
    call = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if family == "mistral":
        call = {"type": "array", "items": call, "minItems": 1, "maxItems": 1}
    prefix = {"hermes": "<tool_call>\n", "llama": "", "mistral": "[TOOL_CALLS] "}[family]
    return ForcedCall(prefix, _with_definitions(call, all_definitions))


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }


def _arguments(function: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Returns the schema of a tool's arguments, and the definitions to which it refers."""
    schema = dict(function.get("parameters") or {})
    definitions = schema.pop("$defs", {})
    if not isinstance(definitions, Mapping):
        raise ValueError(
            f"given $defs of type {type(definitions).__name__} in the parameters of {function['name']!r}, expected an "
            "object that maps names to schemas: give an object, or leave $defs out"
        )
    schema.setdefault("type", "object")
    # A schema that is combined of others declares its arguments in them: these defaults would forbid all of them.
    if not {"$ref", "allOf", "anyOf", "oneOf"} & set(schema):
        schema.setdefault("properties", {})
        # Without this, a model may add any other argument.
        schema.setdefault("additionalProperties", False)
    return schema, definitions


def _with_definitions(schema: dict[str, Any], all_definitions: Sequence[Mapping[str, Any]]) -> str:
    """Returns the schema as text. The definitions move to its root, where references look for them."""
    joined: dict[str, Any] = {}
    for definitions in all_definitions:
        for name, definition in definitions.items():
            if joined.setdefault(name, definition) != definition:
                raise ValueError(f"two tools define {name!r} differently in $defs: rename one, or name a tool")
    return json.dumps(schema | {"$defs": joined} if joined else schema, ensure_ascii=False)
