"""`ostinato gc` from a terminal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.main import app
from storage.store import keys
from storage.store.artifacts import Provenance, commit_bytes, read_bytes
from storage.store.objects import ObjectStore, open_store

ORPHAN = f"{keys.step_artifact('r', '0-s', 1, 'graded', 0)}.{'0123456789abcdef' * 2}.parquet"


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    store = open_store(tmp_path / "store")
    store.put(ORPHAN, b"x" * 2048)
    return store


def run(store: ObjectStore, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["gc", "--storage", store.url, *options], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_shown_then_deleted(store: ObjectStore) -> None:
    provenance = Provenance(code_version="a", config_digest="0" * 64, seed=0)
    ref = commit_bytes(store, "runs/r/x", b"live", kind="thing", suffix=".x", provenance=provenance)
    options = ("--older-than", "0m", "--no-active-runs")
    code, shown = run(store, *options, "--dry-run")
    assert code == 0 and "would delete 1 objects, 2.0 KiB" in shown and ORPHAN in shown
    assert store.exists(ORPHAN)
    code, shown = run(store, *options)
    assert code == 0 and "deleted 1 objects, 2.0 KiB" in shown and "attempt without a manifest" in shown
    assert not store.exists(ORPHAN) and read_bytes(store, ref) == b"live"


def test_young_data_stays(store: ObjectStore) -> None:
    code, shown = run(store)
    assert code == 0 and "deleted 0 objects, 0 B" in shown and "younger than the given age" in shown
    assert store.exists(ORPHAN)


@pytest.mark.parametrize("age", ["12h", "1m", "-1h", "yesterday"])
def test_an_age_that_a_writer_may_reach_or_that_is_none_is_refused(store: ObjectStore, age: str) -> None:
    code, shown = run(store, f"--older-than={age}")
    assert code == 1 and "give" in shown and shown.count("\n") == 1
    assert store.exists(ORPHAN)


def test_a_refused_age_names_the_option_that_allows_it(store: ObjectStore) -> None:
    assert "--no-active-runs" in run(store, "--older-than=12h")[1]


def test_a_store_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    code, shown = run(open_store(tmp_path / "elsewhere"))
    assert code == 0 and "deleted 0 objects" in shown and os.listdir(tmp_path) == []
