"""Every text that a person reads about a run counts its steps from 1: the run's log and page in Prefect, its report and
model card, and the output of the commands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.main import app
from storage.store import keys
from tests.fixtures.runs.task_graph import flow_run_id, read_all
from tests.fixtures.runs.toy_run import ToyRun
from tests.fixtures.waiting import wait_until

COUNTED_FROM_0 = re.compile(r"\b(step|steps|rollout|grade|batch)[-/ @]+0+\b(?!\.\d)", re.IGNORECASE)
"""The first step with the number 0: step 0, step-000000, rollout-000000/00."""

COMMANDS = {
    "ls": ["runs", "ls"],
    "show": ["runs", "show", "toy"],
    "lineage": ["runs", "lineage", "toy"],
    "verify": ["verify", "toy"],
    "replay": ["replay", "toy", "--step", "1"],
    "config": ["runs", "config", "toy"],
    "card": ["models", "card", "toy"],
}


def assert_counted_from_1(text: str, *expected: str) -> None:
    assert (match := COUNTED_FROM_0.search(text)) is None, text[max(0, match.start() - 80) : match.end() + 80]
    missing = [words for words in expected if words not in " ".join(text.split())]
    assert missing == [], text


def test_the_log_and_the_page_of_the_flow_run_count_from_1(toy_run: ToyRun, prefect_server: str) -> None:
    of_flow_run = {"flow_run_id": {"any_": [flow_run_id(prefect_server, "toy")]}}
    log = ""

    def is_complete() -> bool:
        # the last lines are sent after the run has ended
        nonlocal log
        lines = read_all(prefect_server, "logs/filter", {"logs": of_flow_run})
        log = "\n".join(line["message"] for line in lines)
        return "step 4/4" in log

    wait_until(is_complete, seconds=60, interval=0.2)
    assert_counted_from_1(log, "step 1/4", "step 2/4", "step 4/4")
    page = json.dumps(read_all(prefect_server, "artifacts/filter", {"artifacts": of_flow_run}))
    # without the picture
    assert_counted_from_1(re.sub(r"base64,[^)]*", "", page), "step 4 of 4")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("ls", ["grpo"]),
        ("show", ["last metrics of 0-grpo"]),
        ("lineage", ["steps 1 to 4"]),
        ("verify", ["toy/0-grpo/policy"]),
        ("replay", ["step 1 of toy/0-grpo/policy"]),
        ("config", ["steps: 4"]),
        ("card", ["| 1–4 |"]),
    ],
)
def test_the_commands_count_from_1(toy_run: ToyRun, command: str, expected: list[str]) -> None:
    result = CliRunner().invoke(app, [*COMMANDS[command], "--storage", str(toy_run.folder)])
    assert result.exit_code == 0, result.output
    assert_counted_from_1(result.output, *expected)


def test_the_last_metrics_and_the_report_count_from_1(toy_run: ToyRun) -> None:
    result = CliRunner().invoke(app, [*COMMANDS["show"], "--json", "--storage", str(toy_run.folder)])
    assert json.loads(result.stdout)["last_metrics"]["0-grpo"]["step"] == 4
    report = toy_run.store.get(keys.report("toy")).decode()
    assert_counted_from_1(re.sub(r"<svg.*?</svg>", "", report, flags=re.DOTALL))
    assert "of 4" in report


def test_a_fork_names_its_last_shared_step(toy_run: ToyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    toy = toy_run.copied(tmp_path / "copy")
    result = CliRunner().invoke(app, ["fork", "toy", "--step", "1", "--run", "new", "--storage", str(toy.folder)])
    assert_counted_from_1(result.output, "up to step 1")
