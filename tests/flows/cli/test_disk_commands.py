"""`ostinato runs du` and `ostinato runs delete` from a terminal."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from flows.cli.main import app
from flows.configs.common import GRPOConfig
from flows.grpo import grpo
from storage.chain.deletion import delete_runs
from storage.chain.fork import fork_run
from storage.chain.listing import list_runs
from storage.chain.records import Chain
from storage.store import keys
from storage.store.objects import open_store
from tests.fixtures.runs.toy_run import ToyRun
from tests.fixtures.toy import toy_config


@pytest.fixture
def toy(toy_run: ToyRun, tmp_path: Path) -> ToyRun:
    return toy_run.copied(tmp_path / "copy")


def ostinato(toy: ToyRun, *words: str) -> Result:
    return CliRunner().invoke(app, ["runs", *words, "--storage", str(toy.folder)])


def test_du_shows_the_largest_run_first(toy: ToyRun) -> None:
    fork_run(toy.store, "toy", "new", step=2, code_version="test")
    body = json.loads(ostinato(toy, "du", "--json").stdout)
    assert [row["run"] for row in body["runs"]] == ["toy", "new"]
    assert body["total"] == sum(info.size for info in toy.store.list())
    (row,) = json.loads(ostinato(toy, "du", "new", "--json").stdout)["runs"]
    assert row == body["runs"][1]
    shown = ostinato(toy, "du")
    assert shown.exit_code == 0
    assert "KiB" in shown.stdout and "imported models" in shown.stdout
    missing = ostinato(toy, "du", "none")
    assert missing.exit_code == 1 and "no run 'none'" in missing.stderr


def test_delete_shows_what_would_go_and_deletes_when_told(toy: ToyRun) -> None:
    shown = ostinato(toy, "delete", "toy")
    assert shown.exit_code == 0
    assert "would delete run toy" in shown.stdout
    assert "only with --force: model toy@" in shown.stdout
    assert "give --yes --force to delete" in shown.stdout
    assert ostinato(toy, "delete", "toy", "--dry-run", "--json").exit_code == 0
    refused = ostinato(toy, "delete", "toy", "--yes")
    assert refused.exit_code == 1
    assert "nothing was deleted, because toy cannot be deleted yet" in refused.stderr
    assert list_runs(toy.store) == ["toy"]
    deleted = ostinato(toy, "delete", "toy", "--yes", "--force")
    assert deleted.exit_code == 0, deleted.output
    assert "deleted run toy" in deleted.stdout
    assert list_runs(toy.store) == []
    assert ostinato(toy, "delete", "toy", "--yes").exit_code == 1


def test_the_key_of_a_deleted_run_begins_a_new_run(tmp_path: Path, tiny_folder: Path, prefect_server: str) -> None:
    """The engine of this process still has the weights of the deleted run in memory."""
    config = GRPOConfig.model_validate(toy_config(tmp_path, tiny_folder, run="again", algorithm__steps=2))
    store = open_store(tmp_path / "data")
    chain = Chain(store, "again", "0-grpo", "policy")
    asyncio.run(grpo(config))
    digests = [record.weights_digest for record in chain.records(0, 2)]
    delete_runs(store, "again", force=True)
    asyncio.run(grpo(config))
    assert [record.weights_digest for record in chain.records(0, 2)] == digests
    assert store.exists(keys.result_json("again"))
