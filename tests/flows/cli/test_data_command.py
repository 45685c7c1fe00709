"""Tests of `ostinato data add`: equal rows are one version, and only a new version sends an event."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from typer.testing import CliRunner

from flows.cli import data as data_command
from flows.cli.main import app
from flows.display import load_progress
from flows.display.load_progress import LoadBar, describe_load
from flows.runs import events
from storage.store import keys
from storage.store.objects import open_store
from tasks.datasets.load import LoadProgress
from tasks.datasets.registered import select_version
from tasks.datasets.spec import FileDataset, RegisteredDataset
from tasks.datasets.votes import Vote, VotedAnswer, commit_vote
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


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_columns_that_are_not_read_are_named(tmp_path: Path, suffix: str) -> None:
    rows = [{"prompt": "2+2?", "answer": "4", "level": 1}]
    file = tmp_path / f"sums.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def add(*words: str) -> Any:
        return CliRunner().invoke(app, ["data", "add", str(file), "--storage", str(tmp_path / "data"), *words])

    assert "not read: answer, level; --set 'metadata_columns=[answer, level]'" in " ".join(add().stderr.split())
    assert "not read: level;" in " ".join(add("--set", "metadata_columns=[answer]").stderr.split())
    assert add("--set", "metadata_columns=[answer, level]").stderr == ""


@pytest.mark.parametrize("reads_columns", [True, False])
def test_a_file_with_a_skipped_first_line_is_announced(
    tmp_path: Path, reads_columns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced: list[str] = []
    monkeypatch.setattr(data_command, "_announce", lambda data, *_: announced.append(data.ref.key))

    def unreadable(*_: Any) -> list[str]:
        raise OSError("the file is gone")

    if not reads_columns:
        monkeypatch.setattr(FileDataset, "unread_columns", unreadable)
    (file := tmp_path / "sums.jsonl").write_text('no JSON\n{"prompt": "2+2?", "answer": "4"}\n')
    words = ["data", "add", str(file), "--storage", str(tmp_path / "data"), "--set", "on_bad_row=skip"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0 and "1 rows, 1 skipped, new" in result.stdout
    assert ("not read: answer;" in result.stderr) == reads_columns
    assert len(announced) == 1


def test_older_rows_that_are_added_again_are_not_what_the_name_means(data: Data) -> None:
    older = json.loads(data.add().stdout)["dataset"]
    write_prompts(data.file, repeats=2)
    newer = json.loads(data.add().stdout)["dataset"]
    words = ["data", "add", str(data.file), "--storage", str(data.folder / "data")]
    assert "alone" not in CliRunner().invoke(app, words).stderr
    write_prompts(data.file)
    said = " ".join(CliRunner().invoke(app, words).stderr.split())
    short_older, short_newer = older[: len("digits@") + 12], newer[: len("digits@") + 12]
    assert f"digits alone means the newer version {short_newer};" in said
    assert f"needs {short_older}" in said
    # as a config reads these keys
    store = open_store(data.folder / "data")
    assert select_version(store, RegisteredDataset(key="digits"), "prompt").key == newer
    assert select_version(store, RegisteredDataset(key=short_older), "prompt").key == older


def test_files_whose_names_have_no_ascii_letter_are_different_datasets(data: Data) -> None:
    added = []
    for name in ("дом.jsonl", "ö.jsonl", "file.jsonl"):
        data.file = write_prompts(data.folder / name)
        added.append(json.loads(data.add().stdout)["dataset"].partition("@")[0])
    assert len(set(added)) == 3 and added[2] == "file"
    assert all(name.startswith("file-") and keys.is_name(name) for name in added[:2])


def test_datasets_are_listed(data: Data) -> None:
    added = json.loads(data.add().stdout)
    storage = ["--storage", str(data.folder / "data")]
    (row,) = json.loads(CliRunner().invoke(app, ["data", "ls", "--json", *storage]).stdout)
    assert row["dataset"] == added["dataset"] and row["bytes"] == added["ref"]["bytes"]
    assert (row["use"], row["rows"], row["source"]) == ("prompt", 10, str(data.file))
    name, _, version = added["dataset"].partition("@")
    listed = CliRunner().invoke(app, ["data", "ls", *storage]).stdout
    assert f"{name}@{version[:12]} " in listed and version not in listed


def test_a_long_load_says_how_far_it_is(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_progress, "LINE_SECONDS", 0.0)
    result = data.add()
    assert json.loads(result.stdout)["rows"] == 10
    assert re.search(r"loading .*digits\.jsonl: 10 rows, 100 %, [\d,]+ rows/s, 0s left", result.stderr)


def test_the_words_and_the_bar_of_a_load() -> None:
    assert describe_load(LoadProgress(412_000, 0.4), 33.5) == "412,000 rows, 40 %, 12,299 rows/s, 50s left"
    assert describe_load(LoadProgress(100, None), 10.0) == "100 rows, 10 rows/s"
    terminal = Console(file=io.StringIO(), force_terminal=True, width=120)
    with LoadBar(terminal, clock=iter([0.0, 33.5]).__next__) as bar:
        bar(LoadProgress(412_000, 0.4))
        bar._bar.refresh()
    assert "412,000 rows, 40 %" in terminal.file.getvalue()  # type: ignore[attr-defined]


def test_the_votes_of_the_chat_are_a_dataset(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data")
    command = ["data", "votes", "--storage", str(tmp_path / "data")]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2 and "no vote prefers an answer yet" in refused.output
    answers = [VotedAnswer(model=f"m@{number}", policy="policy:p", text=str(number)) for number in (4, 5)]
    commit_vote(store, Vote(
        id="a", messages=(("user", "2+2?"),), left=answers[0], right=answers[1], choice="left", blind=True,
        created="2026-11-28T19:00:00+00:00",
    ))  # fmt: skip
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and re.fullmatch(r"votes@[0-9a-f]{32}: 1 rows, new\n", done.output)
