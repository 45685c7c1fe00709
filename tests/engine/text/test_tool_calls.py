"""Tests of tool calls in the formats of six families of models: golden texts of their templates, which parts are
trained, and the calls that are read from an answer. The expected texts are worked out by hand from the templates."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from engine.backends.torch.tiny import CHAT_TEMPLATE
from engine.errors import TemplateNotPrefixStable, TemplateRefused
from engine.text.answer_builder import AnswerBuilder
from engine.text.fragments import TextFragment, ToolCallFragment, ToolResponseFragment
from engine.text.rendering import Renderer
from engine.text.threads import StringThread
from engine.text.tool_calls import INSTRUCTIONS, ToolCall
from tests.engine.text.test_rendering import renderer_with, trained_text
from tests.fixtures.tool_models import ADD, ADD_JSON, ASKED, CALL, MODELS, RESPONSE, TALK, ToolModel

XML_CALL = "<tool_call>\n<function=set>\n{}\n</function>\n</tool_call>"
SET = {
    "type": "function",
    "function": {
        "name": "set",
        "parameters": {
            "type": "object",
            "properties": {
                "word": {"type": "string"},
                "count": {"type": "integer"},
                "on": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                "items": {"type": "array"},
                "either": {"type": ["string", "null"]},
            },
        },
    },
}


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest) -> ToolModel:
    return MODELS[request.param]


@pytest.fixture(scope="module")
def renderer(model: ToolModel) -> Renderer:
    return model.renderer()


def text_of(renderer: Renderer, token_ids: list[int]) -> str:
    return renderer.tokenizer.decode(token_ids, skip_special=False)


def calls_of(name: str, text: str, tools: Any = (ADD,)) -> tuple[str, list[ToolCall]]:
    return MODELS[name].renderer().tokenizer.tool_format.parse_answer(text, tools)


# -- the template ----------------------------------------------------------------------------------------------


def test_the_family_is_known_by_its_template(model: ToolModel, renderer: Renderer) -> None:
    tool_format = renderer.tokenizer.tool_format
    assert (tool_format.family, tool_format.is_native) == (model.family, True)


def test_a_conversation_with_a_call(model: ToolModel, renderer: Renderer) -> None:
    prompt = text_of(renderer, renderer.prompt_ids(ASKED))
    assert model.listed in prompt and prompt.endswith(model.asked)
    whole = text_of(renderer, renderer.tokenize(TALK).token_ids)
    assert whole.removeprefix(prompt).rstrip("\n") == model.call + model.response + model.answer


def test_the_assistants_turns_are_trained_with_their_calls(model: ToolModel, renderer: Renderer) -> None:
    tokenized = renderer.tokenize(TALK)
    assert trained_text(renderer, tokenized) == [model.call, model.answer]
    only_last = renderer.tokenize(TALK.with_weight_last_assistant_turn())
    assert trained_text(renderer, only_last) == [model.answer]
    assert tokenized.token_ids == only_last.token_ids and tokenized.tools == (ADD,)


def test_a_sampled_call_is_read_and_answered(model: ToolModel, renderer: Renderer) -> None:
    prompt = renderer.prompt(ASKED)
    sampled = renderer.tokenizer.encode(model.call)
    answered = renderer.with_completion(prompt, sampled, [-1.0] * len(sampled))
    assert renderer.detokenize(answered).turns[-1] == ("assistant", (CALL,))

    # the sampled ids stay, and the template writes what comes after them
    following = renderer.prompt(renderer.append(answered, "tool", [RESPONSE]))
    assert following.token_ids[: len(answered)] == answered.token_ids
    added = text_of(renderer, following.token_ids[len(prompt) :])
    assert added == model.call + model.response


def test_an_answer_without_a_call(model: ToolModel, renderer: Renderer) -> None:
    prompt = renderer.prompt(ASKED)
    sampled = renderer.tokenizer.encode(model.answer)
    answered = renderer.with_completion(prompt, sampled, [-1.0] * len(sampled))
    assert renderer.detokenize(answered).last_content().strip() == "It is 2."


def test_a_stream_releases_no_part_of_a_call(model: ToolModel, renderer: Renderer) -> None:
    tool_format = renderer.tokenizer.tool_format
    builder = AnswerBuilder(renderer.tokenizer, with_calls=True)
    for token in renderer.tokenizer.encode(model.call):
        builder.feed(token, -1.0)
        assert tool_format.released(builder.text) == ""
    builder.close("stop")
    assert tool_format.parse_answer(builder.text, [ADD]).calls == [
        ToolCall("add", {"a": 1, "b": 1}, id="call00000" if model.family == "mistral" else None)
    ]
    assert tool_format.parse_answer("no call", [ADD]) == ("no call", [])


def test_qwen3_writes_the_same_calls_as_qwen2_5() -> None:
    renderer = ToolModel("qwen3", "hermes", ("<|im_end|>",), "", "", "", "", "").renderer()
    text = text_of(renderer, renderer.prompt_ids(TALK.user("2+2?")))
    assert text.endswith(
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n<tool_call>\n"
        '{"name": "add", "arguments": {"a": 1, "b": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\nIt is 2.<|im_end|>\n"
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    # its template drops the reasoning of earlier turns, so that a whole conversation cannot be trained
    with pytest.raises(TemplateNotPrefixStable):
        renderer.tokenize(TALK)


def test_ids_that_mistral_would_refuse_are_replaced_in_pairs() -> None:
    call, response = (part.model_copy(update={"id": "call_7f3a"}) for part in (CALL, RESPONSE))
    renderer = MODELS["mistral"].renderer()
    text = text_of(renderer, renderer.tokenize(ASKED.assistant([call]).tool([response])).token_ids)
    replaced = text.partition('"id": "')[2][:9]
    assert replaced.isalnum() and f'"call_id": "{replaced}"' in text and "call_7f3a" not in text


def test_two_calls_in_a_turn() -> None:
    second = ToolCallFragment(id="call00001", name="add", arguments={"a": 5})
    two = ASKED.assistant([TextFragment(text="I add."), CALL, second])
    two = two.tool([RESPONSE, ToolResponseFragment(id="call00001", text="5")])
    renderer = MODELS["qwen2.5"].renderer()
    assert text_of(renderer, renderer.tokenize(two).token_ids).endswith(
        '<|im_start|>assistant\nI add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 5}}\n</tool_call><|im_end|>\n<|im_start|>user\n'
        "<tool_response>\n2\n</tool_response>\n<tool_response>\n5\n</tool_response><|im_end|>\n"
    )
    # Llama's template takes one call per turn
    with pytest.raises(TemplateRefused, match="single tool-calls"):
        MODELS["llama3.1"].renderer().tokenize(two)


def test_a_template_without_tools_gets_them_as_text() -> None:
    renderer = renderer_with(CHAT_TEMPLATE)
    assert not renderer.tokenizer.tool_format.is_native
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 1}}\n</tool_call>'
    expected = (
        f"<|im_start|>system\n{INSTRUCTIONS}{ADD_JSON}<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
        f"<|im_start|>assistant\n{call}<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n"
        "<|im_start|>assistant\nIt is 2.<|im_end|>\n"
    )
    tokenized = renderer.tokenize(TALK)
    assert text_of(renderer, tokenized.token_ids) == expected
    assert trained_text(renderer, tokenized) == [f"{call}<|im_end|>", "It is 2.<|im_end|>"]
    # after the system prompt of the conversation
    brief = StringThread([("system", "Be brief."), *ASKED.turns], tools=[ADD])
    assert text_of(renderer, renderer.prompt_ids(brief)).startswith(
        f"<|im_start|>system\nBe brief.\n\n{INSTRUCTIONS}{ADD_JSON}<|im_end|>\n"
    )


def test_a_turn_is_shown_with_its_calls() -> None:
    turn = ASKED.assistant([TextFragment(text="I add."), CALL]).turns[-1]
    assert (turn.text, turn.text_with_calls) == ("I add.", 'I add.\nadd({"a": 1, "b": 1})')
    assert TALK.turns[-1].text_with_calls == "It is 2."


def test_the_bytes_of_a_thread_without_tools_are_the_old_ones() -> None:
    plain = ASKED.with_tools([])
    assert plain.to_json() == '{"metadata":{},"turns":[{"content":"1+1?","role":"user"}],"weights":null}'
    assert StringThread.from_json(TALK.to_json()) == TALK and TALK.with_metadata({"m": 1}).tools == (ADD,)
    assert json.loads(TALK.to_json())["tools"] == [ADD]
    assert "problem" not in TALK.to_json()


# -- calls in answers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "rest", "calls"),
    [
        (
            "qwen2.5",
            'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
            '<tool_call>{"name": "now"}</tool_call>',
            "I add.",
            [ToolCall("add", {"a": 1}), ToolCall("now", {})],
        ),
        (
            "qwen2.5",
            '<think>Maybe <tool_call>{"name": "now"}</tool_call>?</think>\n<tool_call>{"name": "add"}</tool_call>',
            '<think>Maybe <tool_call>{"name": "now"}</tool_call>?</think>',
            [ToolCall("add", {})],
        ),
        (
            "qwen2.5",
            '<think><tool_call>{"name": "now"}</tool_call>',
            '<think><tool_call>{"name": "now"}</tool_call>',
            [],
        ),
        ("llama3.1", '<|python_tag|>{"name": "now", "parameters": {}}', "", [ToolCall("now", {})]),
        ("llama3.1", '{"name": "now", "arguments": {"a": 1}}', "", [ToolCall("now", {"a": 1})]),
        ("llama3.1", '{"sum": 2}', '{"sum": 2}', []),
        ("llama3.1", "{never closed", "{never closed", []),
        ("llama3.1", 'Use {"name": "now", "parameters": {}}', 'Use {"name": "now", "parameters": {}}', []),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "now", "arguments": {}}, '
            '{"name": "add", "arguments": {"a": 1}, "id": "abc123XYZ"}]',
            "",
            [ToolCall("now", {}), ToolCall("add", {"a": 1}, id="abc123XYZ")],
        ),
        (
            "mistral",
            'Yes. [TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[CALL_ID]abc123XYZ[ARGS]{}',
            "Yes.",
            [ToolCall("add", {"a": 1}), ToolCall("now", {}, id="abc123XYZ")],
        ),
        ("mistral", '[TOOL_CALLS]add{"a": 1}', "", [ToolCall("add", {"a": 1})]),
        (
            "deepseek-v3",
            "Two.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
            '{"a": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "Two.",
            [ToolCall("add", {"a": 1}), ToolCall("now", {})],
        ),
        (
            "deepseek-v3",  # as V3.1 writes it
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
            "<｜tool▁calls▁end｜>",
            "",
            [ToolCall("add", {"a": 1})],
        ),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>I need a tool.<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>',
            "",
            [ToolCall("add", {"a": 1})],
        ),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>It is 2.",
            "It is 2.",
            [],
        ),
        (
            "gpt-oss",
            "<|channel|>commentary<|message|>I will add.<|end|><|start|>assistant to=functions.now<|channel|>"
            "commentary json<|message|>{}",
            "I will add.",
            [ToolCall("now", {})],
        ),
    ],
)
def test_calls_and_the_text_around_them(name: str, text: str, rest: str, calls: list[ToolCall]) -> None:
    assert calls_of(name, text) == (rest, calls)


@pytest.mark.parametrize(
    ("name", "text", "called", "problem"),
    [
        ("qwen2.5", "<tool_call>add(1)</tool_call>", "", "not JSON"),
        ("qwen2.5", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "", "NaN is no JSON"),
        ("qwen2.5", '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>', "", "surrogate"),
        ("qwen2.5", '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', "", "1e999 is too large"),
        ("qwen2.5", '<tool_call>{"name": "", "arguments": {}}</tool_call>', "", "name of the tool is empty"),
        ("qwen3.5", "<tool_call><function=></function></tool_call>", "", "name of the tool is empty"),
        ("llama3.1", '{"name": "add", "parameters": {"a": -1e999}}', "", "-1e999 is too large"),
        ("llama3.1", '{"name": "add", "arguments": {"a": 1e999}}', "", "1e999 is too large"),
        ("llama3.1", '{"name": "", "parameters": {}}', "", "name of the tool is empty"),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": [1e999]}}]', "", "1e999 is too large"),
        ("mistral", '[TOOL_CALLS] [{"name": "", "arguments": {}}]', "", "name of the tool is empty"),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1e999}', "add", "1e999 is too large"),
        ("deepseek-v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜><｜tool▁sep｜>{}", "", "name of the tool is empty"),
        ("gpt-oss", ' to=functions.add<|message|>{"a": 1e999}<|call|>', "add", "1e999 is too large"),
        ("qwen2.5", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "", "not a call"),
        ("qwen3.5", "<tool_call>add(1)</tool_call>", "", "not a call"),
        ("qwen3.5", "<tool_call><function=add>\n1 and 2\n</function></tool_call>", "add", "not a parameter: '1 and 2'"),
        ("llama3.1", '{"name": "add", "parameters": {"a": 1', "", "not JSON"),
        ("llama3.1", '{"name": "add", "parameters": "a=1"}', "", "not a call"),
        ("llama3.1", '<|python_tag|>add.call(a="1")', "", "not JSON"),
        ("mistral", "[TOOL_CALLS] [{]", "", "not JSON"),
        ("mistral", "[TOOL_CALLS] []", "", "an empty list"),
        ("mistral", "[TOOL_CALLS]add[ARGS]{a}", "add", "not JSON"),
        ("mistral", "[TOOL_CALLS] ?", "", "not a call"),
        ("deepseek-v3", "<｜tool▁calls▁begin｜>add<｜tool▁calls▁end｜>", "", "an empty list"),
        ("deepseek-v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add(1)<｜tool▁call▁end｜>", "", "not a call"),
        (
            "deepseek-v3",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{a}\n```<｜tool▁call▁end｜>",
            "add",
            "not JSON",
        ),
        ("gpt-oss", " to=functions.add<|channel|>commentary json<|message|>[1]<|call|>", "add", "no JSON object"),
    ],
)
def test_a_malformed_call_has_a_problem(name: str, text: str, called: str, problem: str) -> None:
    _, (call,) = calls_of(name, text)
    assert (call.name, call.arguments) == (called, {}) and problem in (call.problem or "")


def test_a_malformed_call_is_a_fragment_with_its_problem() -> None:
    renderer = MODELS["qwen2.5"].renderer()
    sampled = renderer.tokenizer.encode("<tool_call>add(1)</tool_call><|im_end|>")
    answered = renderer.with_completion(renderer.prompt(ASKED), sampled, [-1.0] * len(sampled))
    (part,) = renderer.detokenize(answered).turns[-1].content
    assert isinstance(part, ToolCallFragment) and part.name == "unknown" and part.id == "call00000"
    assert part.problem is not None and part.problem.startswith("not JSON")
    assert part.arguments == {"text": "<tool_call>add(1)</tool_call>"}


def test_the_text_of_a_malformed_call_can_be_stored() -> None:
    answer = MODELS["mistral"].renderer().tokenizer.tool_format.parse_answer('[TOOL_CALLS] [{"name": "\\ud800"}]', [])
    (part,) = answer.content(0)
    assert isinstance(part, ToolCallFragment) and part.problem is not None
    assert part.arguments == {"text": '{"name": "\\ud800"}'}


def test_the_name_of_a_parameter_stops_at_the_next_tag() -> None:
    # Otherwise each beginning of a tag is searched up to the end of all the others, which takes quadratic time.
    body = "<parameter=<parameter=count>\n7\n</parameter>"
    _, (call,) = calls_of("qwen3.5", XML_CALL.format(body), [SET])
    assert (call.name, call.problem) == ("set", "not a parameter: '<parameter='")

    beginnings = "<parameter=" * (200_000 // len("<parameter="))
    _, (call,) = calls_of("qwen3.5", XML_CALL.format(beginnings + body), [SET])
    assert call.problem is not None and call.problem.startswith("not a parameter: '<parameter=<parameter=")


@pytest.mark.parametrize("name", list(MODELS))
def test_an_endless_answer_is_read_in_linear_time(name: str) -> None:
    tool_format = MODELS[name].renderer().tokenizer.tool_format
    pieces = [
        " ", "a", "{", "[", '{"name": ', "<tool_call>", "<function=f>", "<parameter=a>", "<parameter=a></parameter>",
        "<|python_tag|>", "[TOOL_CALLS]", "[TOOL_CALLS]f", "[ARGS]", *tool_format.markers,
    ]  # fmt: skip
    start = time.process_time()
    for piece in pieces:
        repeated = piece * (100_000 // len(piece))
        for text in (repeated, f"<tool_call><function=f>{repeated}", f"<|message|>a<|end|>{repeated}"):
            tool_format.parse_answer(text, [ADD]).content(0)
            tool_format.released(text)
    # It takes about a second. In quadratic time, one of the texts would take a minute.
    assert time.process_time() - start < 30


@pytest.mark.parametrize(
    ("parameter", "value", "expected"),
    [
        ("word", "7", "7"),
        ("word", "two\nlines", "two\nlines"),
        ("word", "", ""),
        ("count", "7", 7),
        ("count", "many", "many"),  # the tool's check reports it
        ("on", "True", True),
        ("on", "false", False),
        ("on", "None", None),
        ("items", '["a", 1]', ["a", 1]),
        ("either", "null", None),
        ("either", "7", "7"),
        ("other", "7", "7"),
        ("count", "1e999", "1e999"),
    ],
)
def test_arguments_as_text_get_the_types_of_the_tool(parameter: str, value: str, expected: Any) -> None:
    text = XML_CALL.format(f"<parameter={parameter}>\n{value}\n</parameter>")
    assert calls_of("qwen3.5", text, [SET]) == ("", [ToolCall("set", {parameter: expected})])


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": 5}, 7),
        ({"type": [["a"], "string"]}, "7"),
        ({"anyOf": 5}, 7),
        ({"oneOf": [{"type": "string"}, 5]}, "7"),
    ],
)
def test_an_invalid_part_of_a_schema_is_ignored(schema: Any, expected: Any) -> None:
    tool = {"function": {"name": "set", "parameters": {"properties": {"a": schema}}}}
    text = XML_CALL.format("<parameter=a>\n7\n</parameter>")
    assert calls_of("qwen3.5", text, [tool]) == ("", [ToolCall("set", {"a": expected})])


def test_the_text_before_a_call_is_released_without_its_beginning() -> None:
    tool_format = MODELS["qwen2.5"].renderer().tokenizer.tool_format
    assert tool_format.released("I add.\n<tool_") == "I add."
    assert tool_format.released("1 < 2") == "1 < 2"
    assert tool_format.released('I add.\n<tool_call>\n{"name"') == "I add."
    assert MODELS["llama3.1"].renderer().tokenizer.tool_format.released("It is {2}") == "It is {2}"
