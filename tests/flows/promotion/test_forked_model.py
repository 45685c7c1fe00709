"""Tests of what a forked model says about its origin: its lineage and its card name the run, the rate and the settings
of each step. The runs: `toy` takes steps at 1e-3; `new` shares its first two and goes on at 3e-3; `third` shares three
steps of `new` and goes on at 5e-3."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli.data import add_dataset
from flows.cli.main import app
from flows.promotion.model_card import render_card
from storage.chain.fork import fork_run
from storage.chain.records import Chain
from storage.chain.run_record import create_or_check_run, read_run
from storage.inspect.lineage import lineage_of, training_datasets
from storage.registry.models import publish_model
from storage.store.artifacts import Provenance
from tasks.datasets.spec import FileDataset
from tests.fixtures.runs.toy_run import ToyRun

PROVENANCE = Provenance(code_version="test", config_digest="0" * 64, seed=0)
OTHER_DATA = "d" * 64
"""Digest of the dataset of the run `new`."""


@pytest.fixture
def toy(toy_run: ToyRun, tmp_path: Path) -> ToyRun:
    return toy_run.copied(tmp_path / "copy")


def fork_and_go_on(toy: ToyRun, run: str, new: str, *, step: int, until: int, lr: float, **changes: Any) -> None:
    """Forks `run` after `step`, and commits the steps up to `until` with another rate. `changes` are those of the
    config: a group, or a group and a key with __ between them."""
    fork_run(toy.store, run, new, step=step, code_version="test")
    semantic: dict[str, Any] = json.loads(json.dumps(read_run(toy.store, run).semantic))
    for name, value in ({"optimizer__lr": lr} | changes).items():
        group, _, key = name.partition("__")
        semantic[group][key] = value
    create_or_check_run(toy.store, new, semantic=semantic, other={}, code_version="test")
    chain = Chain(toy.store, new, "0-grpo", "policy")
    for number in range(step + 1, until + 1):
        record = toy.chain.committed_record(number)
        optimizer = record.request.optimizer.model_copy(update={"lr": lr})
        request = record.request.model_copy(update={"parent": chain.head(), "optimizer": optimizer})
        chain.commit(record.model_copy(update={"request": request, "state": request.next_state()}))


@pytest.fixture
def forks(toy: ToyRun, tmp_path: Path) -> ToyRun:
    """The three runs, and the model `forked` of the last policy of `third`."""
    changes = {"algorithm__kl_beta": 0.05, "inputs__dataset": OTHER_DATA}
    fork_and_go_on(toy, "toy", "new", step=2, until=4, lr=3e-3, **changes)
    fork_and_go_on(toy, "new", "third", step=3, until=4, lr=5e-3, sampling__temperature=0.5)
    (file := tmp_path / "config.json").write_text("{}")
    policy = Chain(toy.store, "third", "0-grpo", "policy").head()
    publish_model(toy.store, "forked", "1", {file.name: file}, provenance=PROVENANCE, parents=[policy.uri])
    return toy


def test_the_lineage_names_the_run_and_the_rate_of_each_step(forks: ToyRun) -> None:
    (segment,) = lineage_of(forks.store, "forked").segments
    assert segment.runs == (("toy", 1, 2), ("new", 3, 3), ("third", 4, 4))
    assert [part.learning_rates for part in segment.forked] == [(1e-3, 1e-3), (3e-3, 3e-3), (5e-3, 5e-3)]
    shared = {"optimizer.lr", "algorithm.kl_beta", "sampling.temperature", "inputs.dataset"}
    assert all(part.settings.keys() == shared for part in segment.forked)
    assert [part.settings["algorithm.kl_beta"] for part in segment.forked] == [0.01, 0.05, 0.05]
    assert [part.settings["sampling.temperature"] for part in segment.forked] == [1.0, 1.0, 0.5]
    # the run that was forked is none itself, also where its chain is longer
    assert lineage_of(forks.store, "toy").segments[0].forked == ()


def test_a_fork_that_has_not_run_has_only_steps_of_its_origin(toy: ToyRun) -> None:
    fork_run(toy.store, "toy", "waiting", step=3, code_version="test")
    (segment,) = lineage_of(toy.store, "waiting").segments
    assert segment.runs == (("toy", 1, 3),)
    assert segment.forked[0].settings == {}


def test_runs_without_a_config_are_compared_by_their_requests(toy: ToyRun) -> None:
    toy.store.delete("runs/toy/run.json")
    fork_run(toy.store, "toy", "new", step=2, code_version="test")
    chain, record = Chain(toy.store, "new", "0-grpo", "policy"), toy.chain.committed_record(3)
    loss = record.request.loss | {"kl_beta": 0.5}
    request = record.request.model_copy(update={"parent": chain.head(), "loss": loss})
    chain.commit(record.model_copy(update={"request": request, "state": request.next_state()}))
    (segment,) = lineage_of(toy.store, "new").segments
    assert [part.settings for part in segment.forked] == [{"loss.kl_beta": 0.01}, {"loss.kl_beta": 0.5}]


def test_a_fork_was_trained_on_the_data_of_both_runs(forks: ToyRun) -> None:
    first = read_run(forks.store, "toy").semantic["inputs"]
    assert isinstance(first, dict)
    assert training_datasets(forks.store, "forked") == {first["dataset"], OTHER_DATA}


def test_the_card_has_a_row_for_each_run_and_the_settings_that_differ(forks: ToyRun) -> None:
    text = render_card(forks.store, "forked", "1")
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    steps = [row[:5] for row in rows if row[1:2] == ["0-grpo"]]
    assert steps == [
        ["toy", "0-grpo", "grpo", "1–2", "0.001"],
        ["new", "0-grpo", "grpo", "3", "0.003"],
        ["third", "0-grpo", "grpo", "4", "0.005"],
    ]
    assert "third/0-grpo/policy is a fork" in text.replace("`", "")
    assert ["", "steps 1 to 2 of toy", "step 3 of new", "step 4 of third"] in rows
    assert ["algorithm.kl_beta", "0.01", "0.05", "0.05"] in rows
    assert ["sampling.temperature", "1.0", "1.0", "0.5"] in rows
    (data,) = (row for row in rows if row[0] == "inputs.dataset")
    assert data[2:] == [OTHER_DATA[:12]] * 2


def test_the_card_names_the_datasets_as_they_are_registered(forks: ToyRun, tmp_path: Path) -> None:
    """A dataset has the name of its file, also where it was not added first."""
    (sums := tmp_path / "sums.jsonl").write_text('{"prompt": "1+1"}\n')
    data = add_dataset(forks.store, FileDataset(path=str(sums)), "prompt")
    record = json.loads(forks.store.get("runs/toy/run.json"))
    record["semantic"]["inputs"]["dataset"] = data.ref.sha256
    forks.store.put("runs/toy/run.json", json.dumps(record).encode())
    text = render_card(forks.store, "forked", "1").partition("## Data\n\n")[2].partition("\n\n")[0]
    # the other one, of the two forks, was never in this store
    assert text.splitlines() == [
        f"- `sums` (sha256 `{data.ref.sha256[:12]}`)",
        f"- a dataset that is not in this store (sha256 `{OTHER_DATA[:12]}`)",
    ]


def test_the_lineage_command_shows_the_fork(forks: ToyRun) -> None:
    words = ["runs", "lineage", "forked", "--storage", str(forks.folder)]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    for text in ("third/0-grpo/policy is a fork", "steps 1 to 2 of toy", "step 3 of new", "algorithm.kl_beta", "0.005"):
        assert text in shown.stdout
    (segment,) = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["segments"]
    assert [(part["run"], part["first"], part["last"]) for part in segment["forked"]] == [
        ("toy", 1, 2), ("new", 3, 3), ("third", 4, 4),
    ]  # fmt: skip
