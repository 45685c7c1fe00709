"""The division of GPUs between trainer and samplers, by hand, and the option of `ostinato engine plan` for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.lane_plan import LaneSeconds, best, divisions, measured_lanes
from flows.cli.main import app
from flows.configs.overrides import ConfigError
from storage.chain.records import PolicyRef
from storage.store.objects import open_store
from tasks.reports.metrics import StepMetrics
from tasks.reports.step_metrics import write_metrics

EXAMPLE = Path(__file__).parents[3] / "examples" / "engines" / "eight-gpus.toml"
HEAD = PolicyRef(run="grpo-1", stage="grpo", model="policy", step=4, state="0" * 64)


@pytest.fixture
def store_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store with the metrics of four steps. The first was resumed, and the second has no lanes."""
    monkeypatch.setattr("flows.cli.lane_plan.last_policy_of_run", lambda store, run: HEAD)
    url = f"file://{tmp_path}"
    store = open_store(url)
    common = {"loss": 0.0, "grad_norm": 1.0, "learning_rate": 1e-5}
    for step in range(4):
        metrics = StepMetrics(step=step, seconds={"rollout": 6.0, "grade": 1.0, "train": 2.0}, **common)
        if step == 0:
            metrics = metrics.model_copy(update={"resumed": True, "seconds": {"rollout": 99.0}})
        if step > 1:
            lanes = {"rollout": ((0.0, 4.0), (5.0, 7.0)), "grade": ((4.0, 5.0),), "train": ((1.0, 3.0),)}
            metrics = metrics.model_copy(update={"lanes": lanes, "seconds": {"rollout": 5.0, "train": 1.0}})
        write_metrics(store, HEAD, metrics)
    return url


def test_a_step_takes_the_longer_lane_or_its_share_of_all() -> None:
    lanes = LaneSeconds(sample=6.0, grade=1.0, train=2.0, train_gpus=4, sample_gpus=4)
    assert lanes.step_seconds(0) == 9.0
    assert lanes.step_seconds(1) == 6.0  # half of all would be 4.5
    assert LaneSeconds(3.0, 4.0, 2.0, 1, 1).step_seconds(1) == 4.5  # grading is hidden by a larger lag only
    assert LaneSeconds(3.0, 4.0, 2.0, 1, 1).step_seconds(2) == 3.0


def test_gpus_that_move_change_the_seconds_in_proportion() -> None:
    lanes = LaneSeconds(sample=6.0, grade=1.0, train=2.0, train_gpus=4, sample_gpus=4)
    moved = lanes.divided(2)
    assert (moved.sample, moved.grade, moved.train) == (4.0, 1.0, 4.0)
    assert [(each.train_gpus, each.sample_gpus) for each in divisions(lanes, 2)] == [(6, 2), (4, 4), (2, 6)]
    # 4.0 s at 2 + 6 is the least of all; half of the sum, 4.5 s, is more than 5 % above it
    assert best(lanes, 2) == (moved, 2)


def test_the_seconds_are_medians_of_measured_steps(store_url: str) -> None:
    lanes = measured_lanes(open_store(store_url), "grpo-1", train_gpus=4, sample_gpus=4)
    assert (lanes.sample, lanes.grade, lanes.train) == (6.0, 1.0, 2.0)


def test_a_run_without_rollouts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.cli.lane_plan.last_policy_of_run", lambda store, run: HEAD)
    with pytest.raises(ConfigError, match="has no measured step that sampled"):
        measured_lanes(open_store(f"file://{tmp_path}"), "grpo-1", train_gpus=4, sample_gpus=4)


def test_the_command_proposes_a_division(store_url: str) -> None:
    words = ["engine", "plan", "--config", str(EXAMPLE), "--model", "8B", "--gpu", "h100-80", "--devices", "8"]
    words += ["--node-gib", "1024", "--run", "grpo-1", "--storage", store_url]
    document = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["lanes"]
    assert document["measured_seconds"] == {"sample": 6.0, "grade": 1.0, "train": 2.0}
    # 3 + 5 GPUs: 4.8 and 2.67 s; 2 + 6: 4 and 4 s; 1 + 7: 3.43 and 8 s
    assert document["proposal"] == {"train_gpus": 2, "sample_gpus": 6, "max_staleness": 2}
    assert len(document["divisions"]) == 7
    printed = " ".join(CliRunner().invoke(app, words).stdout.split())
    assert "2 GPUs train and 6 sample with rules.max_staleness=2, 4.0 s a step" in printed


def test_an_engine_whose_lanes_share_devices_is_refused() -> None:
    laptop = EXAMPLE.with_name("laptop-cpu.toml")
    words = ["engine", "plan", "--config", str(laptop), "--model", "0.5B", "--run", "grpo-1", "--storage", "memory://"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "divides GPUs between the ranks" in " ".join(result.output.split())
