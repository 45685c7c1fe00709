"""Tests of tool calls in text: which text is a call, the message for a wrong call, and the environment's answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Literal

import pytest
from pydantic import JsonValue

from engine.backends.torch.tiny import byte_tokenizer
from engine.protocol import Completion
from engine.text.rendering import Renderer
from engine.text.threads import StringThread
from engine.text.tokenizers import Tokenizer
from engine.text.tool_calls import INSTRUCTIONS, ToolCall, parse_tool_calls
from tasks.environments.base import Environment, EnvironmentFactory, Grades
from tasks.environments.episodes import Episode, EpisodeLimits, EpisodePlayer
from tasks.environments.runner import EnvironmentRunner
from tasks.environments.tools import Tool, ToolEnvironment
from tests.engine.text.test_rendering import trained_text
from tests.fixtures.tool_models import MODELS


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def add(a: int, b: int = 1) -> int:
    """The sum of two numbers."""
    return a + b


def lookup(word: str) -> dict[str, str]:
    """What a word means."""
    if word == "nothing":
        raise KeyError(word)
    return {"word": word}


class Desk(ToolEnvironment):
    tools = (add, lookup)

    async def finish(self, thread: StringThread) -> Grades | None:
        return float("7" in thread.last_content())


class PlainDesk(Desk):
    answer_role: Literal["tool", "user"] = "user"


def react(text: str, desk: ToolEnvironment | None = None) -> Any:
    thread = StringThread([("user", "q")]).assistant(text)
    return asyncio.run((desk or Desk()).react_to(thread))


def answers(text: str) -> list[str]:
    following, grade = react(text)
    assert grade is None
    return [part.text for part in following.turns[-1].content]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("no call here", []),
        (f"I will. {call('add', a=1)}", [ToolCall("add", {"a": 1})]),
        (call("add", a=1) + "\n" + call("now"), [ToolCall("add", {"a": 1}), ToolCall("now", {})]),
        ('<tool_call>{"name": "now"}</tool_call>', [ToolCall("now", {})]),
        ('<tool_call>{"name": "add", "arguments": {"a": 2}}', [ToolCall("add", {"a": 2})]),  # cut before its end
        ("<tool_call></tool_call>", None),
        ("<tool_call>[1]</tool_call>", None),
        ('<tool_call>{"name": 1, "arguments": {}}</tool_call>', None),
        ('<tool_call>{"name": "add", "arguments": "a=1"}</tool_call>', None),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", None),
        ("<tool_call>" + "7" * 5_000 + "</tool_call>", None),
    ],
)  # fmt: skip
def test_what_is_a_call(text: str, calls: list[ToolCall] | None) -> None:
    parsed = parse_tool_calls(text)
    if calls is None:
        assert len(parsed) == 1 and parsed[0].problem
    else:
        assert parsed == calls


def test_calls_are_answered_in_their_order_in_a_tool_turn() -> None:
    following, grade = react(call("add", a=2, b=3) + call("lookup", word="sun"))
    assert grade is None
    (turn,) = following.turns[2:]
    assert turn.role == "tool"
    assert [(part.id, part.name, part.text) for part in turn.content] == [
        ("call_0", "add", "5"), ("call_1", "lookup", '{"word":"sun"}'),
    ]  # fmt: skip


def test_what_is_wrong_with_a_call_is_told() -> None:
    assert answers(call("add", a="two"))[0].startswith("error: a: Input should be a valid integer")
    assert answers(call("add")) == ["error: a: Field required"]
    assert answers(call("add", a=1, c=2)) == ["error: c: Extra inputs are not permitted"]
    assert answers(call("subtract", a=1)) == ["error: there is no tool 'subtract'; there are add, lookup"]
    assert answers(call("lookup", word="nothing")) == ["error: KeyError: 'nothing'"]
    assert answers("<tool_call>oops</tool_call>")[0].startswith("error: not JSON: ")


def test_an_answer_without_a_call_ends_the_episode() -> None:
    assert react("it is 7") == (None, 1.0)


def test_a_template_without_tool_turns_gets_the_answers_as_the_users() -> None:
    following, _ = react(call("add", a=2), PlainDesk())
    assert following.turns[-1] == ("user", "<tool_response>\n3\n</tool_response>")


def test_the_system_turn_lists_the_tools() -> None:
    first = asyncio.run(Desk().initialize_state(StringThread([("system", "Be brief."), ("user", "q")], {"m": 1})))
    assert [turn.role for turn in first.turns] == ["system", "user"] and first.metadata == {"m": 1}
    text = first.turns[0].text
    assert text.startswith("Be brief.\n\n")
    add, second_tool = (json.loads(line) for line in text.splitlines()[-2:])
    assert add["function"]["name"] == "add" and add["function"]["description"] == "The sum of two numbers."
    assert add["function"]["parameters"]["required"] == ["a"]
    assert add["function"]["parameters"]["properties"]["b"]["default"] == 1
    assert second_tool["function"]["name"] == "lookup"
    bare = asyncio.run(Desk().initialize_state(StringThread([("user", "q")])))
    assert [turn.role for turn in bare.turns] == ["system", "user"]


def test_a_bound_method_is_a_tool() -> None:
    class Counter:
        def __init__(self) -> None:
            self.total = 0

        def count(self, by: int) -> str:
            """Counts on."""
            self.total += by
            return f"now {self.total}"

    tool = Tool(Counter().count)
    assert [asyncio.run(tool.call({"by": 2})) for _ in range(2)] == ["now 2", "now 4"]


# -- models whose chat template knows tools --------------------------------------------------------------------------


class ScriptedAnswers:
    """Answers of a policy, by turn."""

    def __init__(self, renderer: Renderer, *answers: str) -> None:
        self.renderer, self.answers = renderer, answers
        self.prompts: list[str] = []

    async def __call__(self, prompts: list[list[int]], live: list[Episode]) -> list[Completion]:
        completions = []
        for prompt, episode in zip(prompts, live, strict=True):
            self.prompts.append(self.renderer.tokenizer.decode(prompt, skip_special=False))
            ids = self.renderer.tokenizer.encode(self.answers[episode.turn])
            completions.append(Completion(ids, [-1.0] * len(ids), "eos"))
        return completions


class DeskFactory(EnvironmentFactory):
    def create_environment(self, metadata: Mapping[str, JsonValue]) -> Environment:
        return Desk()


def play(renderer: Renderer, *answers: str) -> tuple[Episode, list[str]]:
    row = {"id": "p", "index": 0, "thread": StringThread([("user", "1+1?")]).to_json()}
    episode = Episode(row, 0, environment=EnvironmentRunner(DeskFactory(), seed=0, seconds=5))
    script = ScriptedAnswers(renderer, *answers)
    limits = EpisodeLimits(turns=4, tokens=None, seconds=None, new_tokens=3)
    player = EpisodePlayer(renderer, limits, concurrency=1, name_row=lambda index: f"row {index}")
    asyncio.run(player.play([episode], script))
    return episode, script.prompts


@pytest.mark.parametrize("name", list(MODELS))
def test_a_model_calls_tools_in_its_format(name: str) -> None:
    model = MODELS[name]
    renderer = model.renderer()
    last = model.answer.replace("It is 2.", "It is 7.")
    episode, prompts = play(renderer, model.call, last)
    assert (episode.ending, episode.reason, episode.current_segment.grades) == ("environment", None, {1: 1.0})
    # one segment: the conversation grew by the template's text, and the answers are the trained part
    assert len(episode.segments) == 1
    assert INSTRUCTIONS not in prompts[0] and prompts[0].endswith(model.asked)
    assert prompts[1] == prompts[0] + model.call + model.response
    assert trained_text(renderer, episode.current_segment.tokenized) == [model.call, last]


def test_a_malformed_call_is_answered_with_its_problem() -> None:
    model = MODELS["gpt-oss"]
    bad = model.call.replace('{"a": 1, "b": 1}', "{a: 1}")
    episode, prompts = play(model.renderer(), bad, model.answer)
    assert episode.ending == "environment"
    assert prompts[1].startswith(prompts[0] + bad + "<|start|>functions.add to=assistant")
    assert '<|message|>"error: not JSON: ' in prompts[1]


def test_a_template_without_tools_keeps_the_text_format() -> None:
    raw = byte_tokenizer()
    renderer = Renderer(Tokenizer(raw, name="tiny", eos_token_ids=[raw.eos_token_id]))
    episode, prompts = play(renderer, call("add", a=1) + "<|im_end|>", "7<|im_end|>")
    assert episode.current_segment.grades == {1: 1.0} and INSTRUCTIONS in prompts[0]
    assert prompts[1].endswith("<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n")
