"""Tests of `ostinato data grade-difficulty`: the pass rates of prompts become a column that a config can filter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import yaml
from typer.testing import CliRunner

from flows.cli.main import app
from storage.registry.datasets import list_datasets
from storage.store.artifacts import Provenance
from storage.store.objects import open_store
from storage.store.tables import read_table
from tasks.datasets.load import load_dataset
from tasks.datasets.load_order import load_order
from tasks.datasets.order import DataCursor
from tasks.datasets.spec import RegisteredDataset
from tests.fixtures.toy import toy_config

PROVENANCE = Provenance(code_version="test", config_digest="0" * 64, seed=0)


@pytest.fixture
def config(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    body = toy_config(tmp_path, tiny_folder, grader={"path": "tests.fixtures.grading:even_share"})
    path = tmp_path / "grpo.yaml"
    path.write_text(yaml.safe_dump(body))
    return path


def grade(config: Path, server: str, *words: str) -> Any:
    return CliRunner().invoke(
        app, ["data", "grade-difficulty", "--config", str(config), "--server", server, *words], env={"COLUMNS": "250"}
    )


def test_pass_rates_become_a_column(config: Path, prefect_server: str) -> None:
    """An answer passes if at least half of its characters are even."""
    words = ("--samples", "4", "--correct-from", "0.5")
    result = grade(config, prefect_server, *words)
    assert result.exit_code == 0, result.output
    store = open_store(config.parent / "data")
    source, graded = list_datasets(store)
    assert f"{graded.key}: 10 rows, 0 without a grade" in result.output
    assert f"train: {{kind: registered, key: {graded.key}, keep: {{column: pass_rate" in result.output
    # the rates are those of the committed grades
    rows = [json.loads(row["metadata"]) for row in read_table(store, graded.ref).to_pylist()]
    passed: dict[int, list[bool]] = {}
    for path in (config.parent / "data" / "runs").rglob("*.parquet"):
        table = pyarrow.parquet.read_table(path)
        for row in table.to_pylist() if "reason" in table.column_names else []:
            passed.setdefault(row["prompt_index"], []).append(row["reward"] >= 0.5)
    assert {len(answers) for answers in passed.values()} == {4}
    assert [row["pass_rate"] for row in rows] == [sum(passed[index]) / 4 for index in range(10)]
    assert [row["n"] for row in rows] == [0] * 10 and graded.name == source.name
    # the same command measures nothing again
    assert grade(config, prefect_server, *words).exit_code == 0 and len(list_datasets(store)) == 2
    # a config keeps the prompts within limits
    half = {"column": "pass_rate", "max": 0.5}
    spec = RegisteredDataset.model_validate({"key": graded.key, "order": "file", "keep": half})
    order = load_order(store, load_dataset(store, spec, provenance=PROVENANCE), seed=0)
    expected = [index for index, row in enumerate(rows) if row["pass_rate"] <= 0.5]
    assert order.take(DataCursor(), order.rows)[0] == expected
    # a column is never overwritten
    registered = json.dumps({"kind": "registered", "key": graded.key})
    again = grade(config, prefect_server, *words, "--set", f"data.train={registered}")
    assert again.exit_code == 1 and "has 'pass_rate' in its metadata already" in " ".join(again.output.split())


def test_what_cannot_be_graded_is_refused(config: Path) -> None:
    mixture = {"kind": "mixture", "parts": [{"dataset": {"kind": "file", "path": "prompts.jsonl"}}] * 2}
    result = grade(config, "local", "--set", f"data.train={json.dumps(mixture)}")
    assert result.exit_code == 2 and "data.train is a mixture, and a column is added to one" in result.output
