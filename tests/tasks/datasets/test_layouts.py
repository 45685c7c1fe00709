"""Tests of the usual layouts of rows: ShareGPT's conversations, labels, tools and tool calls. The expected texts are
written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.datasets.errors import BadRow
from tasks.datasets.spec import DatasetUse, FileDataset
from tasks.environments.tools import INSTRUCTIONS, parse_tool_calls
from tests.fixtures.dataset_rows import read_pairs, read_threads

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
def test_tools_are_listed_in_the_system_turn(tmp_path: Path, as_text: bool) -> None:
    path = tmp_path / "rows.jsonl"
    tools = json.dumps([ADD]) if as_text else [ADD]
    path.write_text(json.dumps({"prompt": "1+1?", "completion": "2", "tools": tools}) + "\n")
    listed = INSTRUCTIONS + json.dumps(ADD)
    assert turns(FileDataset(path=str(path))) == [("system", listed), ("user", "1+1?"), ("assistant", "2")]
    with_system = FileDataset(path=str(path), system_prompt="Be brief.")
    assert turns(with_system)[0] == ("system", f"Be brief.\n\n{listed}")
    # only the answer is trained
    (thread,) = read_threads(with_system, use="completion")
    assert list(thread.get_turn_weights()) == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
def test_tool_calls_are_written_as_the_environments_read_them(write: Any, arguments: Any) -> None:
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
