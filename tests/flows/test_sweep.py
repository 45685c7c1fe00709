"""Tests of sweeps: their trials, and child runs that resume and are compared."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

import flows.grpo
import flows.sweep
from flows.cli.main import app
from flows.configs.evaluation import EvaluationFlowConfig
from flows.configs.overrides import parse_config
from flows.configs.recurring import RecurringConfig
from flows.configs.sweep import RandomSearch, SweepConfig, TrialsFailed
from flows.ops.deployments import deployments_in
from flows.sweep import sweep
from storage.chain.listing import list_runs
from storage.store.objects import open_store
from tests.fixtures.runs.toy_run import ToyRun
from tests.fixtures.toy import toy_config, write_prompts
from tests.fixtures.worklog import events

ROOT = Path(__file__).parents[2]
GRID = {"kind": "grid", "values": {"optimizer.lr": [1e-3, 3e-3], "seed": [0, 1]}}


def config_of(folder: Path, tiny_folder: Path, search: dict[str, Any], **changes: Any) -> SweepConfig:
    heldout = {"kind": "file", "path": str(write_prompts(folder / "heldout.jsonl")), "limit": 4}
    grpo = toy_config(
        folder, tiny_folder, grader__path="tests.fixtures.grading:even_share", algorithm__steps=1, data__heldout=heldout
    )
    grpo["model"].pop("publish_as")
    body = {"name": "search", "training": {"kind": "grpo", "config": grpo}, "search": search}
    return SweepConfig.model_validate(body | changes)


# -- trials ------------------------------------------------------------------------------------------------------


def test_a_grid_is_every_combination_each_with_a_key_of_its_config(tmp_path: Path) -> None:
    children = config_of(tmp_path, tmp_path, GRID).children()
    expected = [{"optimizer.lr": lr, "seed": seed} for lr, seed in product((1e-3, 3e-3), (0, 1))]
    assert [values for values, _ in children] == expected
    assert [(c.optimizer.lr, c.seed) for _, c in children] == [(1e-3, 0), (1e-3, 1), (3e-3, 0), (3e-3, 1)]
    runs = [child.run for _, child in children]
    assert len(set(runs)) == 4 and all(run.startswith("search/") for run in runs)


def test_a_larger_sweep_has_the_children_of_the_smaller_and_more(tmp_path: Path) -> None:
    small = config_of(tmp_path, tmp_path, {"kind": "grid", "values": {"seed": [0, 1]}}).children()
    large = config_of(tmp_path, tmp_path, {"kind": "grid", "values": {"seed": [1, 2, 0]}}).children()
    assert {child.run for _, child in small} < {child.run for _, child in large}


def test_equal_trials_are_one_run(tmp_path: Path) -> None:
    children = config_of(tmp_path, tmp_path, {"kind": "grid", "values": {"optimizer.lr": [0.001, 1e-3]}}).children()
    assert len(children) == 1


def test_a_random_search_draws_within_its_ranges_and_again_the_same() -> None:
    values = {
        "lr": {"kind": "range", "low": 1e-6, "high": 1e-2, "scale": "log"},
        "steps": {"kind": "range", "low": 1, "high": 3, "whole": True},
        "schedule": {"kind": "choice", "values": ["cosine", "linear"]},
    }
    search = RandomSearch.model_validate({"trials_wanted": 200, "values": values})
    drawn = search.trials()
    assert drawn == search.trials()
    assert all(1e-6 <= trial["lr"] <= 1e-2 for trial in drawn)
    # on a logarithmic scale the middle of 1e-6 and 1e-2 is 1e-4: about half of the draws lie below (sd 7 of 200)
    assert 65 <= sum(trial["lr"] < 1e-4 for trial in drawn) <= 135
    assert {trial["steps"] for trial in drawn} == {1, 2, 3} and {t["schedule"] for t in drawn} == {"cosine", "linear"}
    fewer = search.model_copy(update={"trials_wanted": 5})
    assert fewer.trials() == drawn[:5]
    assert math.isfinite(sum(trial["lr"] for trial in drawn))


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ({"kind": "grid", "values": {"optimizer.speed": [1]}}, "optimizer.speed: unknown key"),
        ({"kind": "grid", "values": {"optimizer.lr": [1e-3, -1]}}, r"the trial \{'optimizer.lr': -1\}.*greater than 0"),
        ({"kind": "grid", "values": {"nowhere.lr": [1]}}, "names no key within a group of the config"),
        ({"kind": "grid", "values": {"seed": []}}, "seed has no values"),
        ({"kind": "grid", "values": {"seed": list(range(40)), "optimizer.lr": [0.1] * 40}}, "1600 combinations"),
        ({"kind": "random", "values": {"seed": {"kind": "range", "low": 2, "high": 1}}}, "no range"),
        ({"kind": "random", "values": {"x": {"kind": "range", "low": 0, "high": 1, "scale": "log"}}}, "no logarithm"),
    ],
)  # fmt: skip
def test_a_search_that_makes_no_sense_is_refused_before_anything_runs(
    tmp_path: Path, search: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=f"(?s){message}"):
        config_of(tmp_path, tmp_path, search)


@pytest.mark.parametrize(
    ("name", "kind"), [("evaluation", EvaluationFlowConfig), ("recurring", RecurringConfig), ("sweep", SweepConfig)]
)
def test_the_examples_are_configs_and_the_deployments_name_flows_that_take_them(name: str, kind: type[Any]) -> None:
    parse_config(kind, ROOT / "examples" / f"{name}.yaml")
    (entry,) = (entry for entry in deployments_in(ROOT / "prefect.yaml") if entry["name"] == name)
    module, _, flow = entry["entrypoint"].rpartition(".")
    called = getattr(importlib.import_module(module), flow)
    (parameter,) = inspect.signature(called.fn, eval_str=True).parameters.values()
    assert parameter.annotation is kind
    assert kind.__name__ in called.parameters.definitions  # the form's schema


# -- runs --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_children_are_runs_a_failed_one_is_tried_again_and_all_are_compared(
    prefect_server: str, tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, tiny_folder, {"kind": "grid", "values": {"seed": [0, 1]}})
    worklog = tmp_path / "work.jsonl"
    monkeypatch.setenv("OSTINATO_WORKLOG", str(worklog))
    runs = [child.run for _, child in config.children()]
    step = flows.grpo.take_gradient_step

    # One of two children fails, and the sweep names it.
    async def fails_for_seed_1(workspace: Any, *arguments: Any, **options: Any) -> Any:
        if workspace.seed == 1:
            raise RuntimeError("the device fell off")
        return await step(workspace, *arguments, **options)

    monkeypatch.setattr(flows.grpo, "take_gradient_step", fails_for_seed_1)
    with pytest.raises(TrialsFailed, match=f"1 of 2 runs of sweep search failed:\n  {runs[1]}: .*fell off"):
        asyncio.run(sweep(config))
    # The next sweep runs only the child that failed.
    monkeypatch.setattr(flows.grpo, "take_gradient_step", step)
    worklog.write_text("")
    result = asyncio.run(sweep(config))
    steps = events(worklog, "step")
    assert len(steps) == 1  # of the child that failed
    assert result["runs"] == runs and {one["run"] for one in result["ranked"]} == set(runs)
    assert result["best"] == result["ranked"][0]["run"]
    assert result["ranked"][1]["difference"]["n"] == 4
    # All children are in the report and in the list of runs.
    page = Path(result["report"]).read_text()
    assert all(run in page for run in runs) and "<td>seed</td><td>0</td><td>1</td>" in page
    known = list_runs(open_store(config.training.config.storage.url))
    assert set(runs) <= set(known)
    assert asyncio.run(sweep(config)) == result


def test_runs_compare_from_a_terminal(toy_run: ToyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # fork writes the config of the new run to the current folder
    copy = toy_run.copied(tmp_path / "copy")
    storage = ["--storage", str(copy.folder)]
    forked = CliRunner().invoke(app, ["fork", "toy", "--step", "2", "--run", "other", *storage])
    assert forked.exit_code == 0, forked.output
    page = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["runs", "compare", "toy", "other", "--out", str(page), *storage])
    assert result.exit_code == 0, result.output
    assert "not evaluated" in result.output and str(page.name) in result.output
    assert "Reward" in page.read_text() and "other" in page.read_text()
    alone = CliRunner().invoke(app, ["runs", "compare", "toy", "toy", *storage])
    assert alone.exit_code == 2
    refused = CliRunner().invoke(app, ["runs", "compare", "toy", "unknown", *storage])
    assert refused.exit_code == 1 and "'unknown'" in refused.output


def test_a_sweep_whose_runs_failed_ends_with_their_reasons(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, prefect_server: str
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise TrialsFailed("1 of 4 runs of sweep search failed:\n  search/a: the device fell off")

    monkeypatch.setattr(flows.sweep, "sweep", fails)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "sweep.json"
    file.write_text(config_of(tmp_path, tiny_folder, GRID).model_dump_json())
    done = CliRunner().invoke(app, ["sweep", "--config", str(file), "--server", prefect_server])
    assert done.exit_code == 1
    assert "search/a: the device fell off\nthe traceback is in .ostinato/logs/sweep.log" in done.stdout
    assert "Traceback" not in done.output
