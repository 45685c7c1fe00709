"""Tests of forced calls: the text before the JSON and the schema of the JSON, by family. Expected values are worked out
by hand."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from engine.protocol import SamplingParams
from engine.text.forced_calls import forced_call
from engine.text.json_grammar import JsonMatcher, guidance_schema
from engine.text.tool_calls import ToolCall, tool_format_of
from tests.fixtures.tool_models import ADD, MODELS

ADD_ARGUMENTS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


def call_schema(key: str, name: str = "add", arguments: Any = None) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: arguments or ADD_ARGUMENTS},
        "required": ["name", key],
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    ("name", "prefix", "schema", "completion"),
    [
        ("qwen2.5", "<tool_call>\n", call_schema("arguments"), '{"name": "add", "arguments": {"a": 1}}'),
        ("llama3.1", "", call_schema("parameters"), '{"name": "add", "parameters": {"a": 1}}'),
        (
            "mistral",
            "[TOOL_CALLS] ",
            {"type": "array", "items": call_schema("arguments"), "minItems": 1, "maxItems": 1},
            '[{"name": "add", "arguments": {"a": 1}}]',
        ),
        (
            "deepseek-v3",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n",
            ADD_ARGUMENTS,
            '{"a": 1}',
        ),
        ("gpt-oss", " to=functions.add<|channel|>commentary json<|message|>", ADD_ARGUMENTS, '{"a": 1}'),
    ],
)
def test_a_call_of_one_tool(name: str, prefix: str, schema: dict[str, Any], completion: str) -> None:
    tokenizer = MODELS[name].renderer().tokenizer
    forced = forced_call(tokenizer.tool_format, [ADD])
    assert (forced.prefix, json.loads(forced.json_schema or "")) == (prefix, schema)
    # a completion of the schema is a call of the format, and the schema is one that the sampler can use
    assert tokenizer.tool_format.parse_answer(prefix + completion, [ADD]).calls == [ToolCall("add", {"a": 1})]
    guidance_schema(tokenizer, forced.json_schema or "")


def test_a_call_of_one_of_two_tools() -> None:
    now = {"type": "function", "function": {"name": "now"}}
    tool_format = MODELS["qwen2.5"].renderer().tokenizer.tool_format
    empty = {"type": "object", "properties": {}, "additionalProperties": False}
    forced = forced_call(tool_format, [ADD, now])
    assert json.loads(forced.json_schema or "") == {
        "anyOf": [call_schema("arguments"), call_schema("arguments", "now", empty)]
    }
    with pytest.raises(ValueError, match="given 2 tools to choose from"):
        forced_call(MODELS["gpt-oss"].renderer().tokenizer.tool_format, [ADD, now])
    with pytest.raises(ValueError, match="is not JSON"):
        forced_call(MODELS["qwen3.5"].renderer().tokenizer.tool_format, [ADD])


def test_definitions_move_to_the_root() -> None:
    def tool(name: str, kind: str) -> dict[str, Any]:
        properties = {"at": {"$ref": "#/$defs/Place"}}
        parameters = {"type": "object", "properties": properties, "$defs": {"Place": {"type": kind}}}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    tool_format = MODELS["llama3.1"].renderer().tokenizer.tool_format
    schema = json.loads(forced_call(tool_format, [tool("go", "string"), tool("look", "string")]).json_schema or "")
    assert schema["$defs"] == {"Place": {"type": "string"}}
    assert all("$defs" not in call["properties"]["parameters"] for call in schema["anyOf"])
    with pytest.raises(ValueError, match="two tools define 'Place' differently"):
        forced_call(tool_format, [tool("go", "string"), tool("look", "integer")])


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/Numbers"},
        {"allOf": [{"$ref": "#/$defs/Numbers"}]},
        {"anyOf": [{"$ref": "#/$defs/Numbers"}, {"type": "object", "properties": {"b": {"type": "string"}}}]},
        {"oneOf": [{"$ref": "#/$defs/Numbers"}]},
    ],
)
def test_arguments_that_are_declared_in_other_schemas(parameters: dict[str, Any]) -> None:
    numbers = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tool = {"function": {"name": "add", "parameters": parameters | {"$defs": {"Numbers": numbers}}}}
    tokenizer = MODELS["qwen2.5"].renderer().tokenizer
    params = SamplingParams(json_schema=forced_call(tokenizer.tool_format, [tool]).json_schema)
    size, ends = tokenizer.vocab_size, tokenizer.eos_token_ids
    matcher = JsonMatcher.of(tokenizer, params, vocab_size=size, eos_token_ids=ends)
    assert matcher is not None
    for token in tokenizer.encode('{"name": "add", "arguments": {"a": 1}}'):
        matcher.advance(token)  # raises if the schema does not allow the token
    # nothing but the end may follow
    assert set(np.flatnonzero(JsonMatcher.allowed([matcher], size)[0]).tolist()) == set(ends)


def test_definitions_that_are_no_object() -> None:
    tool = {"function": {"name": "go", "parameters": {"type": "object", "$defs": [1]}}}
    with pytest.raises(ValueError, match=r"given \$defs of type list in the parameters of 'go', expected an object"):
        forced_call(MODELS["qwen2.5"].renderer().tokenizer.tool_format, [tool])


def test_deepseek_v31_writes_no_type_and_no_code_block() -> None:
    template = (
        "{% for call in message['tool_calls'] %}{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + "
        "call['function']['name'] + '<｜tool▁sep｜>' + call['function']['arguments'] + '<｜tool▁call▁end｜>' }}"
        "{% endfor %}{{ '<｜tool▁calls▁end｜>' }}"
    )
    tool_format = tool_format_of(template, ["message"])
    prefix = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
    assert forced_call(tool_format, [ADD]).prefix == prefix
    # the system message shows the same format
    assert tool_format.example == (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool<｜tool▁sep｜>{"argument": 1}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )
