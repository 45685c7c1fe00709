"""Tests of the usual layouts of rows: ShareGPT's conversations, labels, tools and tool calls. The expected texts are
written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from engine.text.fragments import TextFragment, ToolCallFragment, ToolResponseFragment
from engine.text.tool_calls import parse_tool_calls
from tasks.datasets.errors import BadRow
from tasks.datasets.spec import DatasetUse, FileDataset
from tests.engine.text.test_rendering import trained_text
from tests.fixtures.dataset_rows import read_pairs, read_threads
from tests.fixtures.tool_models import MODELS

SHAREGPT = {
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "1+1?"},
        {"from": "gpt", "value": "2"},
    ]
}
TURNS = [("system", "Be brief."), ("user", "1+1?"), ("assistant", "2")]


@pytest.fixture(params=["jsonl", "parquet"])
def write(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Writes rows into a file. Returns its spec."""

    def rows_file(*rows: dict[str, Any], **fields: Any) -> FileDataset:
        path = tmp_path / f"rows.{request.param}"
        if request.param == "parquet":
            pq.write_table(pa.Table.from_pylist(list(rows)), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return FileDataset(path=str(path), **fields)

    return rows_file


def turns(spec: FileDataset, use: DatasetUse = "completion") -> list[tuple[str, str]]:
    (thread,) = read_threads(spec, use=use)
    return [(turn.role, turn.text) for turn in thread.turns]


def test_sharegpt_conversations(write: Any) -> None:
    assert turns(write(SHAREGPT)) == TURNS
    prompt = {"conversations": SHAREGPT["conversations"][:2]}
    assert turns(write(prompt), "prompt") == TURNS[:2]
    # under another name, and in our own layout under ShareGPT's name
    assert turns(write({"chat": SHAREGPT["conversations"]}, columns={"messages": "chat"})) == TURNS
    messages = [{"role": role, "content": content} for role, content in TURNS]
    assert turns(write({"conversations": messages})) == TURNS


def test_an_unknown_sender_is_refused(write: Any) -> None:
    row = {"conversations": [{"from": "narrator", "value": "It rains."}]}
    with pytest.raises(BadRow, match=r"conversations\[0\].from': given 'narrator' .*expected one of system, human"):
        turns(write(row))


def test_sharegpt_preferences(write: Any) -> None:
    row = {
        "conversations": [{"from": "human", "value": "1+1?"}],
        "chosen": {"from": "gpt", "value": "2"},
        "rejected": {"from": "gpt", "value": "3"},
    }
    (pair,) = read_pairs(write(row))
    assert [[turn.text for turn in thread.turns] for thread in pair] == [["1+1?", "2"], ["1+1?", "3"]]


@pytest.mark.parametrize(("label", "rating"), [(True, 1.0), (False, 0.0), (0.25, 0.25), (3, 3)])
def test_a_label_is_the_rating(write: Any, label: Any, rating: float) -> None:
    row = {"prompt": "1+1?", "completion": "2", "label": label}
    (thread,) = read_threads(write(row), use="rating")
    assert thread.metadata == {"res": rating}
    (thread,) = read_threads(write(row), use="completion")
    assert thread.metadata == {}


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}


@pytest.mark.parametrize("as_text", [False, True])
def test_a_thread_has_the_tools_of_its_row(tmp_path: Path, as_text: bool) -> None:
    path = tmp_path / "rows.jsonl"
    tools = json.dumps([ADD]) if as_text else [ADD]
    path.write_text(json.dumps({"prompt": "1+1?", "completion": "2", "tools": tools}) + "\n")
    spec = FileDataset(path=str(path), system_prompt="Be brief.")
    (thread,) = read_threads(spec, use="completion")
    assert thread.tools == (ADD,)
    assert thread.turns == (("system", "Be brief."), ("user", "1+1?"), ("assistant", "2"))
    # only the answer is trained
    assert list(thread.get_turn_weights()) == [0.0, 0.0, 1.0]


CALLS = [
    {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
    {"id": "c2", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}},
]
TOOL_TALK = [
    {"role": "user", "content": "Add."},
    {"role": "assistant", "content": "I add.", "tool_calls": CALLS},
    {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
    {"role": "tool", "content": "3", "tool_call_id": "c2"},
    {"role": "assistant", "content": "2 and 3"},
]


def test_calls_and_answers_of_a_row_with_tools_are_fragments(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": TOOL_TALK, "tools": [ADD]}) + "\n")
    (thread,) = read_threads(FileDataset(path=str(path)), use="completion")
    called = [ToolCallFragment(id=f"c{a}", name="add", arguments={"a": a}) for a in (1, 2)]
    answers = [ToolResponseFragment(id="c1", name="add", text="2"), ToolResponseFragment(id="c2", text="3")]
    assert thread.turns == (
        ("user", "Add."),
        ("assistant", (TextFragment(text="I add."), *called)),
        ("tool", tuple(answers)),
        ("assistant", "2 and 3"),
    )
    assert thread.get_turn_weights() == [0.0, 1.0, 0.0, 1.0]

    # both turns of the assistant are trained, with the calls, as Qwen2.5 writes them
    renderer = MODELS["qwen2.5"].renderer()
    assert trained_text(renderer, renderer.tokenize(thread)) == [
        'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>',
        "2 and 3<|im_end|>",
    ]


def test_answers_without_an_id_belong_to_the_calls_in_order(tmp_path: Path) -> None:
    calls = [{name: value for name, value in call.items() if name != "id"} for call in CALLS]
    answers = [{"role": "tool", "content": text, "name": "add"} for text in "23"]
    row = {"messages": [TOOL_TALK[0], {"role": "assistant", "tool_calls": calls}, *answers], "tools": [ADD]}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (thread,) = read_threads(FileDataset(path=str(path)), use="prompt")
    ids = [[part.id for part in turn.content] for turn in thread.turns[1:]]
    assert ids == [["call00000", "call00001"]] * 2


def test_the_prompts_calls_are_not_trained(tmp_path: Path) -> None:
    row = {"prompt": TOOL_TALK[:4], "completion": "2 and 3", "tools": [ADD]}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (thread,) = read_threads(FileDataset(path=str(path)), use="completion")
    assert [turn.role for turn in thread.turns] == ["user", "assistant", "tool", "assistant"]
    assert thread.get_turn_weights() == [0.0, 0.0, 0.0, 1.0]
    pair = {"prompt": TOOL_TALK[:4], "chosen": "2 and 3", "rejected": "5", "tools": [ADD]}
    path.write_text(json.dumps(pair) + "\n")
    ((chosen, rejected),) = read_pairs(FileDataset(path=str(path)))
    assert chosen.tools == rejected.tools == (ADD,) and chosen.get_turn_weights() == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
def test_calls_of_a_row_without_tools_are_text(write: Any, arguments: Any) -> None:
    row = {
        "messages": [
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": arguments}}]},
            {"role": "tool", "content": "2", "name": "add", "tool_call_id": "c"},
            {"role": "assistant", "content": "2"},
        ]
    }
    _, (role, text), answer, last = turns(write(row))
    assert (role, answer, last) == ("assistant", ("tool", "2"), ("assistant", "2"))
    (call,) = parse_tool_calls(text)
    assert (call.name, call.arguments, call.problem) == ("add", {"a": 1}, None)


def test_malformed_tools_are_refused(write: Any) -> None:
    with pytest.raises(BadRow, match=r"column 'tools': given .*expected a list of descriptions of tools"):
        turns(write({"prompt": "1+1?", "completion": "2", "tools": "add(a, b)"}))
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": "a=1"}}]}
    with pytest.raises(BadRow, match="the fields tool_calls in addition to"):
        turns(write({"messages": [{"role": "user", "content": "1+1?"}, call]}))
