"""Environments in which the assistant calls tools.

A model whose chat template knows tools, and whose format is a known one (`engine.text.tool_calls`), gets the tools and
writes its calls in its own format. For any other model the system turn lists the tools, and a call is

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

in the assistant's turn, as Hermes and Qwen write it. The next turn holds the results. Tool turns are rendered by the
model's own chat template.
"""

from __future__ import annotations

import inspect
import json
import typing
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError, create_model

from engine.text.fragments import ToolCallFragment, ToolResponseFragment
from engine.text.threads import StringThread
from engine.text.tool_calls import INSTRUCTIONS, ToolCall, parse_tool_calls
from engine.text.turns import fragments_of
from tasks.environments.base import Environment, Grades, Reaction
from tasks.graders.base import in_thread


class ToolFailed(Exception):
    """Raised when a tool cannot be used, whatever the assistant calls it with. The environment fails, and its episode
    is masked. Any other exception of a tool is reported to the assistant."""


class Tool:
    """A function that the assistant may call. Its arguments are checked against their annotations."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.name = function, function.__name__
        # A model with a field per parameter checks the arguments and gives their JSON schema.
        hints = typing.get_type_hints(function)
        fields: dict[str, Any] = {}
        for name, parameter in inspect.signature(function).parameters.items():
            is_required = parameter.default is inspect.Parameter.empty
            default = ... if is_required else parameter.default  # pydantic's sign for a required field
            fields[name] = (hints.get(name, Any), default)
        self.arguments = create_model(self.name, __config__=ConfigDict(extra="forbid"), **fields)

    def description(self) -> dict[str, Any]:
        """The description of the tool in the format of OpenAI's API."""
        schema = self.arguments.model_json_schema()
        schema.pop("title", None)  # the title repeats the name of the function
        function = {"name": self.name, "description": inspect.getdoc(self.function) or "", "parameters": schema}
        return {"type": "function", "function": function}

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Call the function and return its result as text. A function that is not a coroutine runs in a thread.

        Raises ValidationError for wrong arguments, and the exceptions of the function.
        """
        checked = self.arguments.model_validate(dict(arguments))
        keywords = {name: getattr(checked, name) for name in self.arguments.model_fields}
        if inspect.iscoroutinefunction(self.function):
            result = await self.function(**keywords)
        else:
            result = await in_thread(self.function, **keywords)
        if isinstance(result, str):
            return result
        return TypeAdapter(Any).dump_json(result).decode()


def listed_tools(thread: StringThread, descriptions: Sequence[Mapping[str, Any]]) -> StringThread:
    """Add the descriptions of the tools, and of the protocol, to the system turn of the thread."""
    listed = INSTRUCTIONS + "\n".join(json.dumps(description) for description in descriptions)
    turns = list(thread.turns)
    # Extend the system turn of the prompt: most chat templates accept only one.
    if turns and turns[0].role == "system":
        return StringThread([("system", f"{turns[0].text}\n\n{listed}"), *turns[1:]], thread.metadata)
    return StringThread([("system", listed), *turns], thread.metadata)


class ToolEnvironment(Environment):
    """An environment with tools. A subclass sets `tools` and defines `finish`.

    An answer without a call ends the episode. Wrong arguments and the exceptions of a tool are reported to the
    assistant. They are not failures of the environment.
    """

    tools: Sequence[Callable[..., Any]] = ()
    """Plain or async functions with annotations and a docstring. Bound methods are set in __init__."""
    answer_role: Literal["tool", "user"] = "tool"
    """Role of the turn that holds the results; "user" for a chat template without tool turns."""

    async def initialize_state(self, thread: StringThread) -> StringThread:
        """Return the prompt with the tools, which are listed in its system turn if the chat template knows none."""
        descriptions = [tool.description() for tool in self._tools().values()]
        if self.has_native_tools:
            return thread.with_tools(descriptions)
        return listed_tools(thread, descriptions)

    async def react_to(self, thread: StringThread) -> Reaction:
        fragments = fragments_of(thread.turns[-1].content)
        read_calls = [part for part in fragments if isinstance(part, ToolCallFragment)]
        if read_calls or self.has_native_tools:
            return await self._answer_fragments(thread, read_calls)
        calls = parse_tool_calls(thread.last_content())
        if not calls:
            return None, await self.finish(thread)
        # Execute the calls one after the other: a call may depend on the effect of an earlier one.
        answers = [await self._answer(call) for call in calls]
        if self.answer_role == "user":
            text = "\n".join(f"<tool_response>\n{answer}\n</tool_response>" for answer in answers)
            return thread.user(text), None
        parts = []
        for number, (call, answer) in enumerate(zip(calls, answers, strict=True)):
            parts.append(ToolResponseFragment(id=f"call_{number}", name=call.name or None, text=answer))
        return thread.tool(parts), None

    async def _answer_fragments(self, thread: StringThread, calls: Sequence[ToolCallFragment]) -> Reaction:
        """React to an answer whose calls the renderer has read in the model's format."""
        if not calls:
            return None, await self.finish(thread)
        parts = []
        for call in calls:
            answer = await self._answer(ToolCall(call.name, call.arguments, call.problem))
            parts.append(ToolResponseFragment(id=call.id, name=call.name, text=answer))
        return thread.tool(parts), None

    @abstractmethod
    async def finish(self, thread: StringThread) -> Grades | None:
        """Grade the final answer, the last turn of `thread`."""

    def _tools(self) -> dict[str, Tool]:
        tools = [Tool(function) for function in self.tools]
        return {tool.name: tool for tool in tools}

    async def _answer(self, call: ToolCall) -> str:
        """Execute a call and return its result, or a text that begins with "error"."""
        if call.problem is not None:
            return f"error: {call.problem}"
        tool = self._tools().get(call.name)
        if tool is None:
            return f"error: there is no tool {call.name!r}; there are {', '.join(self._tools()) or 'none'}"
        try:
            return await tool.call(call.arguments)
        except ValidationError as error:
            problems = []
            for detail in error.errors():
                location = ".".join(map(str, detail["loc"]))
                problems.append(f"{location}: {detail['msg']}")
            return f"error: {'; '.join(problems)}"
        except ToolFailed:
            raise
        except Exception as error:  # noqa: BLE001  the boundary to a tool's code: reported to the assistant
            return f"error: {type(error).__name__}: {error}"
