"""Tests of `ostinato data add`: equal rows are one version, and only a new version sends an event."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli.main import app
from flows.runs import events
from storage.store.objects import open_store
from tests.fixtures.toy import write_prompts


class Data:
    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, write_prompts(folder / "digits.jsonl")

    def add(self, *words: str) -> Any:
        store = str(self.folder / "data")
        return CliRunner().invoke(app, ["data", "add", str(self.file), "--storage", store, "--json", *words])


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Data:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    return Data(tmp_path)


def test_the_same_rows_are_the_same_version_and_other_rows_another(data: Data) -> None:
    first, again = json.loads(data.add().stdout), json.loads(data.add().stdout)
    assert (first["new"], again["new"], first["rows"]) == (True, False, 10)
    assert first["dataset"] == again["dataset"] and first["dataset"].startswith("digits@")
    assert open_store(data.folder / "data").exists(first["ref"]["key"] + ".json")
    write_prompts(data.file, repeats=2)
    assert json.loads(data.add().stdout)["dataset"] != first["dataset"]


def test_only_a_new_version_is_an_event(data: Data, prefect_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[dict[str, Any]] = []
    monkeypatch.setattr(events, "emit_event", lambda **body: heard.append(body))
    dataset = json.loads(data.add("--server", prefect_server).stdout)
    assert json.loads(data.add("--server", prefect_server).stdout)["new"] is False
    (event,) = heard
    assert event["event"] == "ostinato.dataset.registered"
    assert event["resource"]["prefect.resource.id"] == "ostinato.dataset.digits"
    payload = event["payload"]
    assert (payload["dataset"], payload["use"], payload["rows"]) == (dataset["dataset"], "prompt", 10)
    assert payload["source"] == str(data.file)


def test_a_file_that_is_no_dataset_of_its_use_is_refused(data: Data) -> None:
    refused = data.add("--use", "completion")
    assert refused.exit_code == 2
    assert not list(open_store(data.folder / "data").list("datasets/"))
    assert data.add("--set", "colums.prompt=q").exit_code == 2
