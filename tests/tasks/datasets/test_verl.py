"""Rows of a dataset class written for verl."""

from __future__ import annotations

import logging
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from engine.text.threads import StringThread
from storage.store.artifacts import Provenance
from storage.store.objects import open_store
from storage.store.tables import read_table
from tasks.datasets.errors import DatasetError
from tasks.datasets.load import load_dataset
from tasks.datasets.spec import PythonDataset
from tasks.datasets.verl import ROWS

CLASS = """
import json

class Questions:
    def __init__(self, data_files, tokenizer, config, processor=None):
        self.rows = [json.loads(line) for file in data_files for line in open(file)]
        self.key, self.tag = config.prompt_key, config.get("tag", "none")

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        text = self.rows[index]["text"]
        conversation = [{"role": "user", "content": f"{self.tag}: {text}"}]
        return {"input_ids": object(), "raw_prompt": conversation, "data_source": "made", "index": index}

class Tensors(Questions):
    def __getitem__(self, index):
        return {"input_ids": object()}
"""
PROVENANCE = Provenance(code_version="test", config_digest="0" * 64, seed=0)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "made.py").write_text(CLASS)
    for name, text in (("a", "one"), ("b", "two")):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{text}"}}\n')
    return {"path": str(tmp_path / "made.py"), "files": [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]}


def load(tmp_path: Path, arguments: dict[str, Any]) -> list[StringThread]:
    spec = PythonDataset(path=ROWS, arguments=arguments, metadata_columns=("data_source",))
    store = open_store(f"file://{tmp_path}/store")
    table = read_table(store, load_dataset(store, spec, provenance=PROVENANCE).ref)
    return [StringThread.from_json(row) for row in table["thread"].to_pylist()]


def test_conversations_and_plain_values_are_rows(tmp_path: Path, files: dict[str, Any]) -> None:
    threads = load(tmp_path, files | {"name": "Questions", "options": {"tag": "ask"}})
    assert [thread.turns[-1].content for thread in threads] == ["ask: one", "ask: two"]
    assert threads[0].metadata == {"data_source": "made"}


def test_an_item_without_a_conversation_is_named(tmp_path: Path, files: dict[str, Any]) -> None:
    with pytest.raises(DatasetError, match="row 1 of Tensors has the keys input_ids; expected the conversation"):
        load(tmp_path, files | {"name": "Tensors"})


def test_a_file_that_changed_is_said(tmp_path: Path, files: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    then = sha256(b"another text").hexdigest()
    with caplog.at_level(logging.WARNING):
        load(tmp_path, files | {"name": "Questions", "sha256": then})
    assert f"the dataset class {files['path']} changed since" in caplog.text


def test_a_class_that_is_not_there(tmp_path: Path, files: dict[str, Any]) -> None:
    with pytest.raises(DatasetError, match="made.py has no dataset class 'Answers'"):
        load(tmp_path, files | {"name": "Answers"})
