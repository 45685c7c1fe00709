"""The tool environment of the bench: a product of two numbers that the model cannot compute, and a tool that can."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from engine.text.threads import StringThread
from tasks.environments.base import EnvironmentFactory, Limit
from tasks.environments.tools import ToolEnvironment
from tasks.graders.rules import LastNumber

HINT = (
    "Multiply with the tool, then give the result. Example:\n"
    '<tool_call>{"name": "multiply", "arguments": {"a": 2, "b": 3}}</tool_call>'
)
"""The system turn. It is shorter than the list of tools of ToolEnvironment, which would be most of the tokens."""
TURNS = 3
"""Largest number of answers in an episode."""


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers."""
    return a * b


class Calculator(ToolEnvironment):
    """The last answer is right or wrong. An episode that ends without one is wrong."""

    tools = (multiply,)
    answer_role = "user"  # the chat template of the model has no tool turns

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = dict(metadata)

    async def initialize_state(self, thread: StringThread) -> StringThread:
        return StringThread([("system", HINT), *thread.turns], thread.metadata)

    async def finish(self, thread: StringThread) -> float:
        return (await LastNumber().grade(thread.with_metadata(self.metadata))).value

    async def on_limit(self, thread: StringThread, limit: Limit) -> float:
        return 0.0


class CalculatorFactory(EnvironmentFactory):
    def create_environment(self, metadata: Mapping[str, Any]) -> Calculator:
        return Calculator(metadata)


def products(number: int, source: Random) -> list[dict[str, Any]]:
    """Distinct questions with their answers."""
    pairs = [(a, b) for a in range(11, 100) for b in range(11, 100)]
    rows = []
    for a, b in source.sample(pairs, number):
        rows.append({"prompt": f"What is {a} times {b}?", "metadata": {"answer": a * b, "a": a, "b": b}})
    return rows


def shown_episode(row: dict[str, Any]) -> dict[str, Any]:
    """A conversation in which the tool is called and its result is repeated, to fine-tune on."""
    a, b, answer = (row["metadata"][name] for name in ("a", "b", "answer"))
    call = f'<tool_call>{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'
    turns = [
        ("system", HINT), ("user", row["prompt"]), ("assistant", call),
        ("user", f"<tool_response>\n{answer}\n</tool_response>"), ("assistant", str(answer)),
    ]  # fmt: skip
    return {"messages": [{"role": role, "content": content} for role, content in turns]}
