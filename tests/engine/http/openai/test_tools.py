"""Tests of tool calls over the OpenAI-compatible routes, with the `openai` client: what the model is shown, and how its
calls are returned, whole and streamed. The engine's answers are scripted."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from engine.protocol import Completion, GenerateRequest
from tests.fixtures.servers.openai_calls import OpenAIRun, client_of
from tests.fixtures.servers.openai_server import running_openai_server
from tests.fixtures.tool_models import ADD, MODELS

ADD_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 1}}\n</tool_call>'
ASKED: list[Any] = [{"role": "user", "content": "1+1?"}]


class ScriptedEngine:
    """Samples the text of `answer`, token by token, whatever the prompt."""

    def __init__(self, run: OpenAIRun) -> None:
        self.run, self.answer, self.prompt = run, "", ""

    async def generate(
        self, request: GenerateRequest, *, epoch: int = 0, on_token: Any = None
    ) -> list[Completion]:
        self.prompt = self.run.tokenizer.decode(request.prompts[0], skip_special=False)
        ids = self.run.tokenizer.encode(self.answer)[: request.sampling.max_new_tokens]
        for index in range(len(request.prompts)):
            for token in ids if on_token is not None else ():
                on_token(index, token, -1.0)
        cut = ids[-1] not in self.run.tokenizer.eos_token_ids
        return [Completion(ids, [-1.0] * len(ids), "length" if cut else "eos") for _ in request.prompts]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[ScriptedEngine]:
    """The tiny model with Qwen2.5's chat template."""
    tmp = tmp_path_factory.mktemp("tools")
    folder = shutil.copytree(tiny_folder, tmp / "model")
    (folder / "chat_template.jinja").write_text(MODELS["qwen2.5"].source)
    run = OpenAIRun(tmp, folder)
    yield ScriptedEngine(run)
    asyncio.run(run.local.close())


@pytest.fixture(scope="module")
def client(engine: ScriptedEngine) -> Iterator[openai.OpenAI]:
    with running_openai_server(engine, engine.run.store) as url, client_of(url) as client:
        yield client


@pytest.fixture(scope="module")
def real_client(engine: ScriptedEngine) -> Iterator[openai.OpenAI]:
    """The same model, sampled."""
    with running_openai_server(engine.run.local, engine.run.store) as url, client_of(url) as client:
        yield client


def ask(client: openai.OpenAI, engine: ScriptedEngine, answer: str, **options: Any) -> Any:
    engine.answer = answer
    body = {"model": "r", "messages": ASKED, "tools": [ADD], "max_tokens": 500, **options}
    return client.chat.completions.create(**body)


def streamed(client: openai.OpenAI, engine: ScriptedEngine, answer: str, **options: Any) -> tuple[str, list[Any], Any]:
    """(content, tool calls, finish reason) of a stream, put together as clients do."""
    content, calls, finish = "", [], None
    for chunk in ask(client, engine, answer, stream=True, **options):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        calls += choice.delta.tool_calls or []
        finish = choice.finish_reason or finish
    return content, calls, finish


def test_the_template_gets_the_tools_and_the_call_is_returned(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    answer = ask(client, engine, f"I add.\n{ADD_CALL}<|im_end|>")
    model = MODELS["qwen2.5"]
    assert model.listed in engine.prompt and engine.prompt.endswith(model.asked)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I add.")
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "add", {"a": 1, "b": 1})

    # the loop of a client: its answer goes back with the results of the tools
    following = [*ASKED, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "2"}]
    last = ask(client, engine, "It is 2.<|im_end|>", messages=following)
    assert engine.prompt.endswith(
        f"<|im_start|>assistant\nI add.\n{ADD_CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n2\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (last.choices[0].message.content, last.choices[0].message.tool_calls) == ("It is 2.", None)
    assert last.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("answer", "content", "names", "finish"),
    [
        (f"{ADD_CALL}<|im_end|>", None, ["add"], "tool_calls"),
        (f"Two.\n{ADD_CALL}\n{ADD_CALL}<|im_end|>", "Two.", ["add", "add"], "tool_calls"),
        ("1 < 2 and <tool<|im_end|>", "1 < 2 and <tool", [], "stop"),
        # a malformed call is text
        ("No.\n<tool_call>add(1)</tool_call><|im_end|>", "No.\n<tool_call>add(1)</tool_call>", [], "stop"),
        # cut by the limit of tokens, after a whole call
        (f"{ADD_CALL}\nand", "and", ["add"], "length"),
    ],
)
def test_whole_and_streamed_answers_are_equal(
    client: openai.OpenAI, engine: ScriptedEngine, answer: str, content: str | None, names: list[str], finish: str
) -> None:
    (choice,) = ask(client, engine, answer).choices
    whole = choice.message
    assert (whole.content and whole.content.strip()) == content and choice.finish_reason == finish
    assert [call.function.name for call in whole.tool_calls or []] == names
    assert len({call.id for call in whole.tool_calls or []}) == len(names)

    text, calls, reason = streamed(client, engine, answer)
    assert (text or None, reason) == (whole.content, finish)
    assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [
        (index, call.function.name, call.function.arguments) for index, call in enumerate(whole.tool_calls or [])
    ]


def test_the_ids_of_calls_depend_on_the_prompt_and_the_answer_alone(
    client: openai.OpenAI, engine: ScriptedEngine
) -> None:
    def ids(answer: str, **options: Any) -> list[str]:
        choices = ask(client, engine, answer, **options).choices
        return [call.id for choice in choices for call in choice.message.tool_calls]

    two = f"{ADD_CALL}\n{ADD_CALL}<|im_end|>"
    first = ids(two, n=2)
    assert len(set(first)) == 4 and ids(two, n=2) == first
    assert [call.id for call in streamed(client, engine, two)[1]] == first[:2]
    others = {*ids(f"{ADD_CALL}<|im_end|>"), *ids(two, messages=[{"role": "user", "content": "2+2?"}])}
    assert len(others) == 3 and not others & set(first)


def test_a_stream_sends_the_text_before_a_call_at_once(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    chunks = list(ask(client, engine, f"I add.\n{ADD_CALL}<|im_end|>", stream=True))
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
    assert pieces == ["I", " a", "d", "d", "."]  # a token per byte; white space waits for what follows it
    assert chunks[-2].choices[0].delta.tool_calls and chunks[-1].choices[0].finish_reason == "tool_calls"


def test_the_tokens_of_a_streamed_call_are_sent(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    chunks = ask(client, engine, f"{ADD_CALL}<|im_end|>", stream=True, extra_body={"return_token_ids": True})
    ids: list[int] = []
    for chunk in chunks:
        ids += getattr(chunk.choices[0], "token_ids", None) or []
    assert ids == engine.run.tokenizer.encode(f"{ADD_CALL}<|im_end|>")


def test_tool_choice_none_reads_no_calls(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    (choice,) = ask(client, engine, f"{ADD_CALL}<|im_end|>", tool_choice="none").choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (ADD_CALL, None, "stop")
    assert MODELS["qwen2.5"].listed in engine.prompt


def test_without_parallel_calls_the_first_one_is_returned(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    second = ADD_CALL.replace('"a": 1', '"a": 2')
    (choice,) = ask(client, engine, f"{ADD_CALL}\n{second}<|im_end|>", parallel_tool_calls=False).choices
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"a": 1, "b": 1}


NAMED = {"type": "function", "function": {"name": "switch"}}
SWITCH = {
    "type": "function",
    "function": {
        "name": "switch",
        "parameters": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
    },
}


@pytest.mark.parametrize(("choice", "names"), [("required", {"switch", "add"}), (NAMED, {"switch"})])
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_is_sampled(real_client: openai.OpenAI, choice: Any, names: set[str], stream: bool) -> None:
    # The tiny model has random weights: without the constraint it would write no call.
    for seed in range(3):
        answer = real_client.chat.completions.create(
            model="r", messages=ASKED, tools=[SWITCH, ADD], tool_choice=choice, max_tokens=200, seed=seed, stream=stream
        )
        if stream:
            chunks = [chunk.choices[0] for chunk in answer]
            calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
            assert "".join(chunk.delta.content or "" for chunk in chunks) == ""
            finish = chunks[-1].finish_reason
        else:
            calls, finish = answer.choices[0].message.tool_calls, answer.choices[0].finish_reason
            assert answer.choices[0].message.content is None
        (call,) = calls
        arguments = json.loads(call.function.arguments)
        assert finish == "tool_calls" and call.function.name in names
        if call.function.name == "switch":
            assert arguments in ({"on": True}, {"on": False})
        else:
            assert set(arguments) in ({"a"}, {"a", "b"}) and all(isinstance(value, int) for value in arguments.values())


def test_a_forced_call_begins_after_the_prompt(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    answer = '{"name": "add", "arguments": {"a": 1}}<|im_end|>'
    (choice,) = ask(client, engine, answer, tool_choice="required").choices
    assert engine.prompt.endswith(f"{MODELS['qwen2.5'].asked}<tool_call>\n")
    assert choice.message.tool_calls[0].function.arguments == '{"a": 1}'


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tool_choice": "required", "tools": []}, "a tool that is not in tools, which has: none"),
        ({"tool_choice": NAMED}, "a tool that is not in tools, which has: add"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": "required", "extra_body": {"min_tokens": 2}}, "min_tokens with a tool_choice"),
    ],
)
def test_a_call_that_cannot_be_forced_is_refused(
    client: openai.OpenAI, engine: ScriptedEngine, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        ask(client, engine, "x", **options)


def test_two_answers_of_tools_are_one_turn(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    calls = [
        {"id": name, "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}} for name in ("c1", "c2")
    ]
    answers = [{"role": "tool", "tool_call_id": name, "content": name} for name in ("c1", "c2")]
    following = [*ASKED, {"role": "assistant", "content": None, "tool_calls": calls}, *answers]
    ask(client, engine, "x<|im_end|>", messages=following)
    assert engine.prompt.endswith(
        "<|im_start|>user\n<tool_response>\nc1\n</tool_response>\n<tool_response>\nc2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_tools_that_are_far_too_long_are_refused(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "x" * 3_000_000}}
    with pytest.raises(openai.BadRequestError, match="far more than the context") as refused:
        ask(client, engine, "x", tools=[tool])
    assert refused.value.code == "context_length_exceeded"
