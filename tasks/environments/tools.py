"""Environments in which the assistant calls tools.

The protocol is text that open models are trained on, and that their templates write (Hermes, Qwen): a call is

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

in the assistant's turn; the next turn holds the answers. The renderer passes no tools to a chat template and parses no
calls by it, so the system turn lists them, and any model can play; one whose template writes tool turns in its own way
does so here too.
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError, create_model

from engine.text.fragments import ToolResponseFragment
from engine.text.threads import StringThread
from tasks.environments.base import Environment, Grades, Reaction
from tasks.graders.base import in_thread

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(re.escape(OPEN) + r"(.*?)(?:" + re.escape(CLOSE) + r"|\Z)", re.DOTALL)
INSTRUCTIONS = (
    "You may call tools. For each call write a JSON object with the tool's name and arguments between <tool_call> and "
    "</tool_call>, like this:\n"
    '<tool_call>\n{"name": "tool", "arguments": {"argument": 1}}\n</tool_call>\n'
    "The answers come in the next turn. The tools, one a line:\n"
)


@dataclass(frozen=True)
class ToolCall:
    """One call. `problem` says what is wrong with it; nothing is called then."""

    name: str
    arguments: dict[str, Any]
    problem: str | None = None


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The calls in an assistant's answer, in order. What stands between the tags and is no call is one with a problem:
    the assistant is told, and may try again."""
    return [_parsed(match.group(1).strip()) for match in _CALL.finditer(text)]


def _parsed(body: str) -> ToolCall:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"not JSON: {error}")
    name = call.get("name") if isinstance(call, dict) else None
    arguments = call.get("arguments", {}) if isinstance(call, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall("", {}, 'not a call: expected {"name": …, "arguments": {…}}')
    return ToolCall(name, arguments)


class Tool:
    """A function that the assistant may call: its name, its docstring, its annotated arguments, which are checked."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.name = function, function.__name__
        hints = typing.get_type_hints(function)
        fields: dict[str, Any] = {
            name: (hints.get(name, Any), ... if one.default is inspect.Parameter.empty else one.default)
            for name, one in inspect.signature(function).parameters.items()
        }
        self.arguments = create_model(self.name, __config__=ConfigDict(extra="forbid"), **fields)

    def description(self) -> dict[str, Any]:
        """As OpenAI's API writes it."""
        schema = {key: value for key, value in self.arguments.model_json_schema().items() if key != "title"}
        about = {"name": self.name, "description": inspect.getdoc(self.function) or "", "parameters": schema}
        return {"type": "function", "function": about}

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """What the function returns, as text. Raises ValidationError for wrong arguments, and what the function does.
        A function that is not a coroutine runs in a thread."""
        checked = self.arguments.model_validate(dict(arguments))
        given = {name: getattr(checked, name) for name in self.arguments.model_fields}
        if inspect.iscoroutinefunction(self.function):
            result = await self.function(**given)
        else:
            result = await in_thread(self.function, **given)
        return result if isinstance(result, str) else TypeAdapter(Any).dump_json(result).decode()


def listed_tools(thread: StringThread, descriptions: Sequence[Mapping[str, Any]]) -> StringThread:
    """The thread with the tools, as OpenAI's API describes them, and the protocol in its system turn."""
    listed = INSTRUCTIONS + "\n".join(json.dumps(description) for description in descriptions)
    turns = list(thread.turns)
    if turns and turns[0].role == "system":
        return StringThread([("system", f"{turns[0].text}\n\n{listed}"), *turns[1:]], thread.metadata)
    return StringThread([("system", listed), *turns], thread.metadata)


class ToolEnvironment(Environment):
    """Subclass, name the `tools` and write `finish`. An answer without a call ends the episode.

    Wrong arguments, and what a tool raises, are told to the assistant: they are no failures of the environment.
    """

    tools: Sequence[Callable[..., Any]] = ()
    """Plain or async functions, or bound methods set in __init__, with annotations and a docstring."""
    answer_role: Literal["tool", "user"] = "tool"
    """Whose turn the answers are; "user" for a template without tool turns."""

    async def initialize_state(self, thread: StringThread) -> StringThread:
        """The prompt with the tools in its system turn."""
        return listed_tools(thread, [tool.description() for tool in self._tools().values()])

    async def react_to(self, thread: StringThread) -> Reaction:
        calls = parse_tool_calls(thread.last_content())
        if not calls:
            return None, await self.finish(thread)
        answers = [await self._answer(call) for call in calls]
        if self.answer_role == "user":
            return thread.user("\n".join(f"<tool_response>\n{answer}\n</tool_response>" for answer in answers)), None
        parts = [
            ToolResponseFragment(id=f"call_{number}", name=call.name or None, text=answer)
            for number, (call, answer) in enumerate(zip(calls, answers, strict=True))
        ]
        return thread.tool(parts), None

    @abstractmethod
    async def finish(self, thread: StringThread) -> Grades | None:
        """The grade of the final answer, the last turn of `thread`."""

    def _tools(self) -> dict[str, Tool]:
        return {tool.name: tool for tool in map(Tool, self.tools)}

    async def _answer(self, call: ToolCall) -> str:
        if call.problem is not None:
            return f"error: {call.problem}"
        tool = self._tools().get(call.name)
        if tool is None:
            return f"error: there is no tool {call.name!r}; there are {', '.join(self._tools()) or 'none'}"
        try:
            return await tool.call(call.arguments)
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            return f"error: {wrong}"
        except Exception as error:  # noqa: BLE001  the boundary to a tool's code: the assistant is told
            return f"error: {type(error).__name__}: {error}"
