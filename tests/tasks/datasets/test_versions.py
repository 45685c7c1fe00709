"""Tests that equal rows keep their version: digests that earlier code computed, and the direct JSON of plain rows."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from storage.store.artifacts import Provenance
from storage.store.objects import open_store
from storage.store.tables import TableWriter, read_table
from tasks.datasets.convert import RowLocation, conversation_from_row, thread_of
from tasks.datasets.errors import BadRow
from tasks.datasets.load import load_dataset
from tasks.datasets.repetition_counter import RepetitionCounter
from tasks.datasets.spec import DatasetUse, FileDataset
from tasks.datasets.stored import stored_item, stored_row

PROVENANCE = Provenance(code_version="test", config_digest="0" * 64, seed=0)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+3?"},
    {"role": "assistant", "content": "5"},
    {"role": "tool", "content": "ok"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "6"},
]
PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "é"}]},
    {"role": "assistant", "content": "b"},
]
METADATA = {
    "z": 1, "a": [1, 2.5, None, True], "big": 10**30, "nested": {"ü": {"x": -0.0, "e": 1e-7}}, "s": "\u2028\"\\\n",
}  # fmt: skip

CASES: dict[str, tuple[DatasetUse, dict[str, Any], list[Any]]] = {
    "prompts": ("prompt", {}, [{"prompt": f'q{i} é\U0001f600\t"\\ \u2028\u007f/'} for i in range(300)]),
    "repeated prompts": (
        "prompt",
        {},
        [{"prompt": "same"}, {"prompt": "other"}, {"prompt": "same"}, {"prompt": "same", "metadata": {}}],
    ),
    "system prompt": (
        "prompt",
        {"system_prompt": 'Be "brief".'},
        [{"prompt": "one"}, {"prompt": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]}],
    ),
    "metadata": (
        "prompt",
        {},
        [
            {"prompt": "one", "metadata": METADATA},
            {"prompt": "two", "metadata": None},
            {"prompt": "three", "metadata": '{"b": 1.0, "a": "x"}'},
        ],
    ),
    "metadata columns": (
        "prompt",
        {"columns": {"prompt": "question"}, "metadata_columns": ("answer", "level")},
        [
            {"question": "one", "answer": 1, "level": 2.0, "metadata": {"k": "v"}},
            {"question": "two", "answer": None, "level": [1]},
        ],
    ),
    "completions": (
        "completion",
        {},
        [
            {"prompt": "2+3?", "completion": "5"},
            {"prompt": "2+3?", "completion": ""},
            {"prompt": CHAT[:3] + CHAT[4:5], "completion": "6"},
        ],
    ),
    "completions with a system prompt": (
        "completion",
        {"system_prompt": "s"},
        [{"prompt": "2+3?", "completion": "5"}],
    ),
    "messages": (
        "completion",
        {},
        [
            {"messages": CHAT},
            {"messages": CHAT[:3], "prompt": None},
            {"messages": PARTS},
            {
                "prompt": "p",
                "completion": [
                    {"role": "assistant", "content": "x"},
                    {"role": "user", "content": "y"},
                    {"role": "assistant", "content": "z"},
                ],
            },
        ],
    ),
    "message prompts": (
        "prompt",
        {},
        [{"messages": CHAT[:2]}, {"messages": CHAT[:5]}, {"messages": CHAT[:4]}, {"messages": PARTS[:1]}],
    ),
    "ratings": (
        "rating",
        {"metadata_columns": ("res",)},
        [{"prompt": "p", "completion": "c", "res": 1}, {"prompt": "p", "completion": "c", "res": -0.5}],
    ),
    "pairs": (
        "preference",
        {},
        [
            {"prompt": "p", "chosen": "a", "rejected": "b"},
            {
                "chosen": CHAT[:3],
                "rejected": [*CHAT[:2], {"role": "assistant", "content": "no"}],
                "metadata": {"k": 1},
            },
            {"prompt": "p", "chosen": "a", "rejected": "b"},
        ],
    ),
    "skipped rows": (
        "prompt",
        {"on_bad_row": "skip"},
        [
            {"prompt": "one"},
            "not json",
            {"prompt": ""},
            {"prompt": "\ud800"},
            {"prompt": "two", "metadata": {"x": "\ud800"}},
            '{"prompt": "x", "n": NaN}',
            '{"prompt": "x", "prompt": "last"}',
            "[1]",
            {"prompt": "three"},
        ],
    ),
    "limited rows": ("prompt", {"limit": 2}, [{"prompt": "one"}, {"prompt": "two"}, "not json"]),
    "mixed values": (
        "prompt",
        {"metadata_columns": ("v",)},
        [
            {"prompt": "one", "v": 1},
            {"prompt": "two", "v": 1.0},
            {"prompt": "three", "v": "2026-01-01T00:00:00"},
            {"prompt": "four", "v": {"a": None}},
            {"prompt": "five", "v": True, "messages": None},
        ],
    ),
}
"""Rows of every layout, by name: use, options of the FileDataset, and lines of the file."""

VERSIONS = {
    "prompts": ("7eff028a333861359ac9cfca400e61a6", "9c29b79e0ac3c484281e595656f23983"),
    "repeated prompts": ("b68b4e8ffa5453a626aa15c156c9874c", "5815a7a5cc1950c6d525d48044438cdf#2"),
    "system prompt": ("8e66d38263e31bb1cc1e8dc8b2a7cec7", "0e8690e18803828de6f567364b8ecf7b"),
    "metadata": ("4791e8029a5d0d33e3ebeface3378dfb", "3b82f5a5c38ec88a89da0c2655e1cba6"),
    "metadata columns": ("db81ed7cbdca224091fe05b523e07254", "fa10f38a47ec69d6a683c27b9bb1fb9b"),
    "completions": ("fba84412a8dd14c66f1a0c431706b8ae", "3aee425982021bc9f240aa3cda23afad"),
    "completions with a system prompt": ("a225810b7b5028a688466473c53f4815", "15660bda16bd0327dcc2b5c0a68e34fd"),
    "messages": ("bb2483ec5d78ddfc308da44d54a8ca34", "1b440c8bb1ebdababa7763fe7ac70483"),
    "message prompts": ("24b8cbbe4d355013f84e9225211001f2", "b205470363009d49f27694e670706d05"),
    "ratings": ("e4d4cf7d8776c8cd7b5ea9e815d519e1", "a438397feb6b694ea1857743702f9fa1"),
    "pairs": ("5c3042bff5c91b0ae45ca3c0e38b4445", "609affe891f659f7d573c37dd396e357#1"),
    "skipped rows": ("316c6721eced26814246433024f63d42", "ab436381d3a21a194498365ad8acc622"),
    "limited rows": ("79b38def018a9a35fcfa06fcfd8d3bd2", "9cc13f60f9185cf9bd2daf873147cc85"),
    "mixed values": ("b8cf69d4740af9249da074f1e50d5797", "28d8ef230a2fdbbe9cfec611031afd12"),
}
"""Version of the dataset and id of its last row, as ff75d96 computed them. Stored runs depend on them."""


def lines(rows: list[Any]) -> list[str]:
    return [row if isinstance(row, str) else json.dumps(row) for row in rows]


@pytest.mark.parametrize("case", CASES)
def test_versions_and_ids_stay_the_same(case: str, tmp_path: Path) -> None:
    use, options, rows = CASES[case]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(lines(rows)))
    store = open_store(tmp_path / "store")
    loaded = load_dataset(store, FileDataset(path=str(file), **options), use=use, provenance=PROVENANCE)
    table = read_table(store, loaded.ref)
    assert (loaded.ref.key.split("/")[2], table["id"].to_pylist()[-1]) == VERSIONS[case]
    # the file has the bytes that a writer of single rows makes, because runs compare its digest
    with TableWriter(loaded.ref.kind) as writer:
        for row in table.to_pylist():
            writer.write([row])
        assert writer.digest() == loaded.ref.sha256


@pytest.mark.parametrize("case", [case for case, (use, _, _) in CASES.items() if use != "preference"])
def test_the_direct_json_of_a_row_is_that_of_its_thread(case: str) -> None:
    use, options, rows = CASES[case]
    spec = FileDataset(path="rows.jsonl", **options)
    location = RowLocation("rows.jsonl", 1)
    for row in rows:
        if not isinstance(row, dict):
            continue
        try:
            expected = stored_item(thread_of(conversation_from_row(row, location, spec, use), location, use))
        except BadRow as error:
            with pytest.raises(BadRow, match=re.escape(str(error))):
                stored_row(row, location, spec, use)
        else:
            assert stored_row(row, location, spec, use) == expected


def test_metadata_that_a_thread_refuses_is_a_bad_row() -> None:
    deep: Any = 1
    for _ in range(400):
        deep = [deep]
    for metadata in ({"a": deep}, {1: "a number as a key"}):
        with pytest.raises(BadRow, match="make no thread"):
            stored_row({"prompt": "one", "metadata": metadata}, RowLocation("f", 1), FileDataset(path="f"), "prompt")
    with pytest.raises(BadRow, match="surrogate"):
        stored_row({"prompt": "one"}, RowLocation("f", 1), FileDataset(path="f", system_prompt="\ud800"), "prompt")


def test_a_block_of_keys_counts_like_single_keys() -> None:
    blocks = [["b", "a"], ["c", "a", "c", "b", "c"], [], ["a", "d"]]
    with RepetitionCounter() as counter, RepetitionCounter() as single:
        for block in blocks:
            assert counter.add_all(block) == [single.add(key) for key in block]
