"""Tests of a run's session: what it says at its start, and that it ends soon even when a server is away."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from engine.specs.engine import HttpEngineSpec
from engine.workspace import Workspace
from flows.cli.main import app
from flows.configs.common import GRPOConfig
from flows.display import load_progress
from flows.display.terminal import TerminalProgress
from flows.runs import session
from flows.runs.recorded_config import read_config
from flows.runs.session import open_run, release_run, take_lease
from storage.chain.leases import current_epoch, is_held
from storage.chain.run_record import read_run
from storage.store import keys
from tasks.datasets.load import LoadedDataset, load_dataset
from tests.fixtures.architectures import save_experts
from tests.fixtures.engines import PROVENANCE
from tests.fixtures.runs.toy_run import ToyRun
from tests.fixtures.toy import write_prompts


def workspace_at(port: int) -> Workspace:
    spec = HttpEngineSpec(url=f"http://127.0.0.1:{port}", patience_seconds=3600, timeout_seconds=3600)
    return take_lease(Workspace(store=f"memory://leave-{port}", engine=spec, run="r", provenance=PROVENANCE))


@pytest.mark.parametrize("listening", [False, True], ids=["no server", "a server that does not answer"])
async def test_an_engine_that_is_away_does_not_keep_a_worker_from_ending(
    listening: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "RELEASE_TIMEOUT", 0.2)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listening:
            server.listen()
        workspace = workspace_at(server.getsockname()[1])
        assert is_held(workspace.open_store(), "r")
        async with asyncio.timeout(60):  # an hour, by the patience of the run
            await release_run(workspace)
    assert current_epoch(workspace.open_store(), "r") == workspace.epoch == 1
    assert not is_held(workspace.open_store(), "r")


class Notes(TerminalProgress):
    """Keeps the lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def no_task_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads datasets outside of Prefect's tasks, which other tests count."""

    def load(workspace: Workspace, source: Any, use: Any, on_progress: Any) -> LoadedDataset:
        store = workspace.open_store()
        return load_dataset(store, source, use=use, provenance=workspace.provenance, on_progress=on_progress)

    monkeypatch.setattr(session, "load_prompts", load)


async def opened(config: dict[str, Any]) -> list[str]:
    """Opens and closes the run, and returns what was noted."""
    notes = Notes()
    async with open_run(GRPOConfig.model_validate(config), notes):
        pass
    return notes.lines


@pytest.mark.usefixtures("no_task_runs")
async def test_the_estimate_is_of_what_is_left(
    toy_run: ToyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy, committed = toy_run.copied(tmp_path / "copy"), []
    estimate = session.estimate

    def recorded(*args: Any, **options: Any) -> Any:
        committed.append(options["committed"])
        return estimate(*args, **options)

    monkeypatch.setattr(session, "estimate", recorded)
    # a finished run takes no time, and its store is not measured
    assert not any("estimate" in line for line in await opened(toy.config))
    assert committed == []
    # one that was stopped after two of its steps
    toy.store.delete(keys.result_json("toy"))
    for step in (3, 4):
        toy.store.delete(keys.chain_record("toy", "0-grpo", "policy", step))
    assert any(line.startswith("estimate: ") for line in await opened(toy.config))
    assert committed == [(2,)]


@pytest.mark.usefixtures("no_task_runs")
async def test_the_load_of_held_out_rows_says_how_far_it_is(
    toy_run: ToyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_progress, "LINE_SECONDS", 0.0)
    toy, heldout = toy_run.copied(tmp_path / "copy"), write_prompts(tmp_path / "heldout.jsonl", repeats=2)
    data = toy.config["data"] | {"heldout": {"kind": "file", "path": str(heldout)}}
    lines = await opened(toy.config | {"data": data, "run": "new"})
    assert any("heldout" in line and "20 rows" in line for line in lines)


@pytest.mark.usefixtures("no_task_runs")
async def test_a_run_of_a_mixture_of_experts_says_and_records_that_it_has_no_router_loss(
    toy_run: ToyRun, tiny_folder: Path, tmp_path: Path
) -> None:
    toy, folder = toy_run.copied(tmp_path / "copy"), save_experts(tiny_folder, tmp_path / "experts")
    assert not any("router loss" in line for line in await opened(toy.config | {"run": "dense"}))
    assert read_run(toy.store, "dense").warnings == ()
    config = toy.config | {"run": "experts", "model": toy.config["model"] | {"key": str(folder)}}
    # at its start, and at each resume
    for _ in range(2):
        (line,) = [line for line in await opened(config) if "router loss" in line]
        assert line.startswith("warning: models/experts/")
        assert "is a mixture of experts (num_local_experts=4), and is trained without its router loss" in line
    assert [f"warning: {warning}" for warning in read_run(toy.store, "experts").warnings] == [line]
    shown = CliRunner().invoke(app, ["runs", "show", "experts", "--storage", str(toy.folder)])
    assert "without its router loss" in " ".join(shown.output.split())
    assert read_config(toy.store, "experts").run == "experts"  # the record is still a config
