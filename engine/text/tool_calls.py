"""Tool calls in the text of an answer, in the format of the model's family.

`tool_format_of` recognises the family by its chat template. A model of no known family gets Hermes' format as text: the
system message lists the tools and explains a call, so that any model can call tools.

transformers' `parse_response` is not used: few models come with the response template that it needs, and it fails
as a whole at the first malformed call. Here a malformed call has a `problem`, and the others are still read.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pydantic import JsonValue

from engine.text.fragments import TextFragment, ToolCallFragment
from engine.text.turns import Content

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL_PATTERN = re.compile(re.escape(OPEN) + r"(.*?)(?:" + re.escape(CLOSE) + r"|\Z)", re.DOTALL)
_HERMES_EXAMPLE = '<tool_call>\n{"name": "tool", "arguments": {"argument": 1}}\n</tool_call>'
_ANSWERS_FOLLOW = "\nThe answers come in the next turn. The tools, one a line:\n"
INSTRUCTIONS = (
    "You may call tools. For each call write a JSON object with the tool's name and arguments between <tool_call> and "
    f"</tool_call>, like this:\n{_HERMES_EXAMPLE}{_ANSWERS_FOLLOW}"
)
"""What a system message says before the list of tools, where the chat template lists none."""

Tools = Sequence[Mapping[str, Any]]
"""Descriptions of tools in the format of OpenAI's API."""


@dataclass(frozen=True)
class ToolCall:
    """A tool call of the assistant. A call with a `problem` is malformed and is not executed."""

    name: str
    arguments: dict[str, Any]
    problem: str | None = None
    id: str | None = None
    """The id that the model wrote; only some families write one."""
    text: str = field(default="", compare=False)
    """What the model wrote."""


class ParsedAnswer(NamedTuple):
    """An answer without its calls, and its calls in order."""

    text: str
    calls: list[ToolCall]

    def content(self, first_number: int) -> Content:
        """Returns the content of the assistant's turn. Calls without an id are numbered from `first_number`."""
        if not self.calls:
            return self.text
        parts: list[TextFragment | ToolCallFragment] = []
        if self.text.strip():
            parts.append(TextFragment(text=self.text))
        for number, call in enumerate(self.calls, first_number):
            call_id = call.id or f"call{number:05d}"  # nine letters and digits, which Mistral's templates demand
            # A malformed call is shown again as what the model wrote.
            arguments = call.arguments if call.problem is None else {"text": call.text}
            name = call.name or "unknown"
            parts.append(ToolCallFragment(id=call_id, name=name, arguments=arguments, problem=call.problem))
        return tuple(parts)


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes tool calls."""

    family: str
    parse_answer: Callable[[str, Tools], ParsedAnswer]
    """Returns the text and the calls of an answer. The descriptions of the tools tell the types of arguments in a
    format that has none."""
    begins_with: tuple[str, ...]
    """The texts with one of which the first call begins."""
    markers: tuple[str, ...] = ()
    """Texts of the format that may be special tokens of the model, so that decoding must keep them."""
    example: str = _HERMES_EXAMPLE
    """A call, for a system message that explains the format."""
    is_native: bool = True
    """Whether the chat template writes the calls."""
    lists_tools: bool = True
    """Whether the chat template lists the tools."""
    arguments_as_text: bool = False
    """Whether the chat template expects the arguments of a call as JSON text instead of an object."""
    before_arguments: str | None = None
    """The text before the arguments, with {name}, in formats that write the name of the tool outside the JSON."""

    def released(self, text: str) -> str:
        """Returns the beginning of an unfinished answer that is certainly text and no part of a call."""
        if self.family == "harmony":
            return ""  # which channel is text is known at the end
        if self.family == "llama" and text.lstrip()[:1] in ("", "{"):
            return ""
        end = len(text)
        for marker in self.begins_with:
            position = text.find(marker)
            end = min(end, overlap_start(text, marker) if position < 0 else position)
        return text[:end].rstrip()

    def listing(self, tools: Tools) -> str:
        """Returns the part of a system message that lists the tools and explains a call."""
        if self.example == _HERMES_EXAMPLE:
            instructions = INSTRUCTIONS
        else:
            instructions = f"You may call tools. Write a call exactly like this:\n{self.example}{_ANSWERS_FOLLOW}"
        return instructions + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)

    def messages(self, messages: list[dict[str, Any]], tools: Tools) -> list[dict[str, Any]]:
        """Returns the messages in the form that the chat template takes. The tools are listed in the system message
        if the template does not list them."""
        if self.is_native:
            messages = [self._native_message(message) for message in messages]
        elif tools:
            messages = [_message_as_text(message) for message in messages]
        if not tools or self.lists_tools:
            return messages

        # Extend the system message of the prompt: most chat templates accept only one.
        listing = self.listing(tools)
        if messages and messages[0]["role"] == "system" and isinstance(messages[0]["content"], str):
            first = messages[0] | {"content": f"{messages[0]['content']}\n\n{listing}"}
            return [first, *messages[1:]]
        return [{"role": "system", "content": listing}, *messages]

    def _native_message(self, message: dict[str, Any]) -> dict[str, Any]:
        message = dict(message)
        if self.family == "harmony" and "reasoning_content" in message:
            message["thinking"] = message.pop("reasoning_content")
        if self.family == "mistral" and "tool_call_id" in message:
            message["tool_call_id"] = _mistral_id(message["tool_call_id"])
        if "tool_calls" in message:
            message["tool_calls"] = [self._native_call(call) for call in message["tool_calls"]]
        return message

    def _native_call(self, call: dict[str, Any]) -> dict[str, Any]:
        if self.family == "mistral":
            call = call | {"id": _mistral_id(call["id"])}
        if self.arguments_as_text:
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            call = call | {"function": call["function"] | {"arguments": arguments}}
        return call


def overlap_start(text: str, marker: str) -> int:
    """Returns where the longest end of `text` begins that is a beginning of `marker`; the text's length if none is."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:size]):
            return len(text) - size
    return len(text)


def call_as_text(name: str, arguments: Mapping[str, Any]) -> str:
    """Returns a call in Hermes' format."""
    return f"{OPEN}\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n{CLOSE}"


def _message_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message with its calls in its content."""
    calls = message.get("tool_calls")
    if not calls or not isinstance(message["content"], str):
        return message
    texts = [call_as_text(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    content = "\n".join(part for part in (message["content"], *texts) if part)
    return {name: value for name, value in message.items() if name != "tool_calls"} | {"content": content}


def _mistral_id(call_id: str) -> str:
    """Returns an id of nine letters and digits, which Mistral's templates demand: the same one if it has this form."""
    if re.fullmatch("[a-zA-Z0-9]{9}", call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


# -- calls in JSON ---------------------------------------------------------------------------------------------


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        # Python reads it as infinity, which no JSON text of the call could hold later.
        raise ValueError(f"{text[:80]} is too large for a number")
    return number


_JSON = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite_float)


def _load_json(text: str) -> Any:
    """Raises ValueError, RecursionError."""
    return _JSON.decode(text)


def arguments_of(text: str) -> dict[str, Any]:
    """Returns the arguments of a call from their JSON text. Raises ValueError unless it is a JSON object."""
    try:
        arguments = _load_json(text) if text.strip() else {}
        json.dumps(arguments, ensure_ascii=False).encode()
        return ToolCallFragment(id="", name="", arguments=arguments).arguments
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the arguments {text[:80]!r} are no JSON object: give the arguments as they came") from error


def _checked_call(value: Any, text: str, keys: tuple[str, ...] = ("arguments",)) -> ToolCall:
    """Returns the call in a JSON value. The first of `keys` in it is the name of the arguments."""
    if isinstance(value, dict):
        name, call_id = value.get("name"), value.get("id")
        arguments: Any = next((value[key] for key in keys if key in value), {})
        if isinstance(name, str) and isinstance(arguments, dict):
            return _call(name, arguments, text, call_id if isinstance(call_id, str) and call_id else None)
    return ToolCall("", {}, f'not a call: expected {{"name": …, "{keys[0]}": {{…}}}}', text=text)


def _call(name: str, arguments: dict[str, Any], text: str, call_id: str | None = None) -> ToolCall:
    if not name:
        return ToolCall("", {}, "not a call: the name of the tool is empty", text=text)
    try:
        # JSON can spell half a surrogate pair, and nest deeper than a thread can hold.
        json.dumps([name, call_id, arguments], ensure_ascii=False).encode()
        ToolCallFragment(id=call_id or "", name=name, arguments=arguments)
    except (ValueError, RecursionError):
        return ToolCall("", {}, "not a call: its JSON holds half a surrogate pair, or is nested too deeply", text=text)
    return ToolCall(name, arguments, id=call_id, text=text)


def _call_of_json(body: str, text: str) -> ToolCall:
    try:
        value = _load_json(body)
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"not JSON: {error}", text=text)
    return _checked_call(value, text)


def _arguments_of_json(name: str, body: str, text: str) -> ToolCall:
    """Returns the call of a tool whose name stands apart from its arguments."""
    try:
        arguments = _load_json(body) if body.strip() else {}
    except (ValueError, RecursionError) as error:
        return ToolCall(name, {}, f"not JSON: {error}", text=text)
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, "the arguments are no JSON object", text=text)
    return _call(name, arguments, text)


def parse_tool_calls(text: str) -> list[ToolCall]:
    """Returns the calls in an assistant's answer in Hermes' format, in order.

    Text between the tags that is not a valid call becomes a call with a `problem`, which is reported to the assistant.
    """
    return [_call_of_json(match[1].strip(), match[0]) for match in _CALL_PATTERN.finditer(text)]


# -- the families ----------------------------------------------------------------------------------------------


def _after_reasoning(text: str) -> int:
    """Returns where the text after the reasoning begins. A call in the reasoning is only a thought."""
    end = text.rfind("</think>")
    if end >= 0:
        return end + len("</think>")
    return len(text) if "<think>" in text else 0


def _split(text: str, pattern: re.Pattern[str], call_of: Callable[[re.Match[str]], ToolCall]) -> ParsedAnswer:
    """Returns the text outside the matches of the pattern, and the calls that they are."""
    end, kept, calls = 0, "", []
    for match in pattern.finditer(text, _after_reasoning(text)):
        calls.append(call_of(match))
        kept += text[end : match.start()]
        end = match.end()
    if not calls:
        return ParsedAnswer(text, [])
    return ParsedAnswer((kept + text[end:]).rstrip(), calls)


def _parse_hermes(text: str, tools: Tools) -> ParsedAnswer:
    return _split(text, _CALL_PATTERN, lambda match: _call_of_json(match[1].strip(), match[0]))


_XML_CALL = re.compile(r"<function=([^<>\n]*)>(.*?)(?:</function>|\Z)", re.DOTALL)
# A name stops at the next tag: without this, the search takes quadratic time in repeated beginnings of a tag.
_XML_PARAMETER = re.compile(r"<parameter=([^<>\n]*)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _parse_xml(text: str, tools: Tools) -> ParsedAnswer:
    """Qwen3-Coder's format: a tag for the function, and one for each argument, whose value is plain text."""

    def call_of(match: re.Match[str]) -> ToolCall:
        function = _XML_CALL.fullmatch(match[1].strip())
        if function is None:
            return ToolCall("", {}, "not a call: expected <function=name> and </function>", text=match[0])
        name, body = function[1].strip(), function[2]
        types = _argument_types(name, tools)
        arguments: dict[str, JsonValue] = {}
        # Up to the last closing tag, every opening tag is closed: without this, a search takes quadratic time.
        end = body.rfind("</parameter>") + len("</parameter>") if "</parameter>" in body else 0
        for key, value in _XML_PARAMETER.findall(body[:end]):
            arguments[key.strip()] = _typed_value(value, types.get(key.strip(), {"string"}))
        rest = (_XML_PARAMETER.sub("", body[:end]) + body[end:]).strip()
        if rest:
            return ToolCall(name, {}, f"not a parameter: {rest[:80]!r}", text=match[0])
        return _call(name, arguments, match[0])

    return _split(text, _CALL_PATTERN, call_of)


def _argument_types(name: str, tools: Tools) -> dict[str, set[str]]:
    """Returns the JSON types of each argument of a tool."""
    types: dict[str, set[str]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            for key, schema in _mapping(_mapping(function.get("parameters")).get("properties")).items():
                types[key] = _schema_types(schema)
    return types


def _schema_types(schema: Any) -> set[str]:
    """Returns the JSON types that a schema allows. Schemas come from clients: an invalid part of it is ignored."""
    declared = _mapping(schema).get("type")
    declared_types = declared if isinstance(declared, list) else [declared]
    types = {kind for kind in declared_types if isinstance(kind, str)}
    for key in ("anyOf", "oneOf"):
        choices = _mapping(schema).get(key)
        for choice in choices if isinstance(choices, list) else ():
            types |= _schema_types(choice)
    # A schema without a type, such as a reference to an object, allows every value.
    return types or {"any"}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _typed_value(text: str, types: set[str]) -> JsonValue:
    """Returns the value of an argument that is written as text. What does not fit stays text, for the tool's check."""
    words = {"true": True, "false": False, "none": None, "null": None}
    word = text.strip().lower()
    if word in words and ({"boolean", "any"} & types if words[word] is not None else {"null", "any"} & types):
        return words[word]
    if "string" in types:
        return text
    try:
        return _load_json(text)  # type: ignore[no-any-return]
    except (ValueError, RecursionError):
        return text


_PYTHON_TAG = "<|python_tag|>"


def _parse_llama(text: str, tools: Tools) -> ParsedAnswer:
    """Llama 3's format: the answer is a JSON object. Its template takes one call per turn: what follows stays text."""
    start = text.find(_PYTHON_TAG)
    if start < 0 and not text.lstrip().startswith("{"):
        return ParsedAnswer(text, [])
    body = text if start < 0 else text[start + len(_PYTHON_TAG) :]
    before = "" if start < 0 else text[:start]
    try:
        stripped = body.lstrip()
        value, end = _JSON.raw_decode(stripped)
    except (ValueError, RecursionError) as error:
        # An answer in JSON that is no call is text.
        if start < 0 and '"parameters"' not in body and '"arguments"' not in body:
            return ParsedAnswer(text, [])
        return ParsedAnswer(before.rstrip(), [ToolCall("", {}, f"not JSON: {error}", text=text[len(before) :])])
    if start < 0 and not (isinstance(value, dict) and "name" in value and {"parameters", "arguments"} & set(value)):
        return ParsedAnswer(text, [])
    call = _checked_call(value, stripped[:end], ("parameters", "arguments"))
    return ParsedAnswer((before + stripped[end:]).rstrip(), [call])


_MISTRAL_CALL = re.compile(
    r"\[TOOL_CALLS\]\s*([\w.-]+)(?:\[CALL_ID\]([a-zA-Z0-9]*))?(?:\[ARGS\])?(.*?)(?=\[TOOL_CALLS\]|\Z)", re.DOTALL
)


def _parse_mistral(text: str, tools: Tools) -> ParsedAnswer:
    """Mistral's format: [TOOL_CALLS] and a JSON list of calls or, in newer models, a name and its arguments."""
    before, marker, body = text.partition("[TOOL_CALLS]")
    if not marker:
        return ParsedAnswer(text, [])
    if body.lstrip()[:1] not in ("[", "{"):
        calls = []
        for match in _MISTRAL_CALL.finditer(text, len(before)):
            call = _arguments_of_json(match[1], match[3], match[0])
            calls.append(ToolCall(call.name, call.arguments, call.problem, match[2] or None, match[0]))
        calls = calls or [ToolCall("", {}, "not a call: expected a JSON list of calls", text=marker + body)]
        return ParsedAnswer(before.rstrip(), calls)
    try:
        value, end = _JSON.raw_decode(body.lstrip())
    except (ValueError, RecursionError) as error:
        return ParsedAnswer(before.rstrip(), [ToolCall("", {}, f"not JSON: {error}", text=marker + body)])
    values = value if isinstance(value, list) else [value]
    # In ASCII: half a surrogate pair in a malformed call stays an escape, so that its text can be stored.
    calls = [_checked_call(item, json.dumps(item)) for item in values]
    calls = calls or [ToolCall("", {}, "an empty list of calls", text=marker + body)]
    return ParsedAnswer((before + body.lstrip()[end:]).rstrip(), calls)


_DEEPSEEK_BEGIN = "<｜tool▁calls▁begin｜>"
_DEEPSEEK_MARKERS = (
    _DEEPSEEK_BEGIN, "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
)  # fmt: skip
_DEEPSEEK_CALLS = re.compile(r"<｜tool▁calls▁begin｜>(.*?)(?:<｜tool▁calls▁end｜>|\Z)", re.DOTALL)
_DEEPSEEK_CALL = re.compile(r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|\Z)", re.DOTALL)


def _parse_deepseek(text: str, tools: Tools) -> ParsedAnswer:
    """DeepSeek's formats: V3 and R1 write a type, the name and the arguments in a code block, V3.1 no type and no code
    block."""
    start = _after_reasoning(text)
    section = _DEEPSEEK_CALLS.search(text, start)
    if section is None:
        return ParsedAnswer(text, [])
    calls = []
    for match in _DEEPSEEK_CALL.finditer(section[1]):
        before, separator, after = match[1].partition("<｜tool▁sep｜>")
        name, fence, arguments = after.partition("\n```json\n")
        if fence:
            arguments = arguments.rstrip().removesuffix("```")
        else:
            name, arguments = before, after
        if separator:
            calls.append(_arguments_of_json(name.strip(), arguments, match[0]))
        else:
            calls.append(ToolCall("", {}, "not a call: expected a name, a separator and arguments", text=match[0]))
    calls = calls or [ToolCall("", {}, "an empty list of calls", text=section[0])]
    return ParsedAnswer((text[: section.start()] + text[section.end() :]).rstrip(), calls)


_HARMONY_MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
_HARMONY_END = re.compile(r"<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)")
_HARMONY_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


def _parse_harmony(text: str, tools: Tools) -> ParsedAnswer:
    """gpt-oss' format: messages in channels. A message to a function is a call, analysis is reasoning, which is left
    out, and the others are text."""
    if "<|message|>" not in text:
        return ParsedAnswer(text, [])
    kept, calls = [], []
    for message in _HARMONY_END.split(text):
        header, separator, body = message.partition("<|message|>")
        recipient = _HARMONY_RECIPIENT.search(header)
        if not separator:
            continue
        if recipient is not None:
            calls.append(_arguments_of_json(recipient[1], body, message))
        elif "<|channel|>analysis" not in header:
            kept.append(body)
    return ParsedAnswer("\n".join(kept), calls)


HERMES_TEXT = ToolFormat("hermes", _parse_hermes, (OPEN,), is_native=False, lists_tools=False)
"""The format of models whose chat template knows no tools, or those of an unknown family."""
_HERMES = ToolFormat("hermes", _parse_hermes, (OPEN,), (OPEN, CLOSE))
_XML = ToolFormat("xml", _parse_xml, (OPEN,), (OPEN, CLOSE))
_LLAMA = ToolFormat("llama", _parse_llama, (_PYTHON_TAG,), (_PYTHON_TAG,))
_MISTRAL = ToolFormat("mistral", _parse_mistral, ("[TOOL_CALLS]",), ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"))
_DEEPSEEK = ToolFormat("deepseek", _parse_deepseek, (_DEEPSEEK_BEGIN,), _DEEPSEEK_MARKERS)
_DEEPSEEK_V3_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
    "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
)
"""The text before the arguments, and the text after them."""
_DEEPSEEK_V31_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
)
_HARMONY = ToolFormat(
    "harmony",
    _parse_harmony,
    (),
    _HARMONY_MARKERS,
    before_arguments=" to=functions.{name}<|channel|>commentary json<|message|>",
)


def tool_format_of(template: str | None, variables: Iterable[str]) -> ToolFormat:
    """Returns the format of a model by its chat template. `variables` are the names that the template reads."""
    if template is None or "tool_calls" not in template:
        return HERMES_TEXT
    lists_tools = "tools" in set(variables)
    if "<|channel|>" in template and "<|call|>" in template:
        return _HARMONY if lists_tools else HERMES_TEXT
    if _DEEPSEEK_BEGIN in template:
        return _deepseek(template, lists_tools=lists_tools)
    # The other families' instructions are part of their templates, so one without the tools is of another kind.
    if not lists_tools:
        return HERMES_TEXT
    if "[TOOL_CALLS]" in template:
        return _MISTRAL
    if "<function=" in template and OPEN in template:
        return _XML
    if OPEN in template and "<arg_key>" not in template and '"arguments' in template.replace("\\", ""):
        return _HERMES
    if "<|start_header_id|>" in template and '"parameters"' in template:
        return _LLAMA
    return HERMES_TEXT


def _deepseek(template: str, *, lists_tools: bool) -> ToolFormat:
    # The model's own template joins the arguments to its text. Others write them as JSON.
    writes_json = re.search(r"arguments['\"]?\]?\s*\|\s*tojson", template) is not None
    before, after = _DEEPSEEK_V3_CALL if "```json" in template else _DEEPSEEK_V31_CALL
    return replace(
        _DEEPSEEK,
        example=before.format(name="tool") + '{"argument": 1}' + after,
        lists_tools=lists_tools,
        arguments_as_text=not writes_json,
        before_arguments=before,
    )
