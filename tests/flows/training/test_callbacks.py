"""Tests of when callbacks are due, and of evaluations during a run, which an interruption does not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas
import pytest
from pydantic import ValidationError

from flows.callbacks import Cadence
from flows.configs.validation import EvaluationConfig
from flows.training.held_out import HeldoutEvaluator
from tasks.evaluation.validation_curve import read_validations, reward_by_prompt
from tests.fixtures.runs.flow_runs import FlowRuns, grpo_runs
from tests.fixtures.toy import write_prompts

served = pytest.mark.usefixtures("prefect_server")


@pytest.mark.parametrize(
    ("cadence", "total", "expected"),
    [
        (Cadence(every=0.2), 10, [0, 2, 4, 6, 8, 10]),
        (Cadence(every=0.1), 30, [0, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30]),
        (Cadence(every=0.3), 10, [0, 3, 6, 9, 10]),
        (Cadence(every=0.25), 10, [0, 3, 5, 8, 10]),  # at 2.5, 5, 7.5, 10: the first step that reaches it
        (Cadence(every=0.5), 1, [0, 1]),
        (Cadence(every=0.1), 3, [0, 1, 2, 3]),
        (Cadence(every_steps=4), 10, [0, 4, 8, 10]),
        (Cadence(every_steps=4, at_start=False, at_end=False), 8, [4]),
        (Cadence(), 3, [0, 3]),
    ],
)
def test_cadences(cadence: Cadence, total: int, expected: list[int]) -> None:
    assert [step for step in range(total + 1) if cadence.due(step, total)] == expected


def test_a_run_without_an_end_has_no_fractions() -> None:
    assert [step for step in range(7) if Cadence(every_steps=3).due(step, None)] == [0, 3, 6]
    with pytest.raises(ValueError, match="has no end"):
        Cadence(every=0.5).due(1, None)


@pytest.mark.parametrize("wrong", [{"every": 0.1, "every_steps": 1}, {"every": 0}, {"every": 1.5}, {"every_steps": 0}])
def test_wrong_cadences_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="every"):
        Cadence(**wrong)
    with pytest.raises(ValidationError, match="every"):
        EvaluationConfig(**wrong)


def test_copies_of_a_greedy_completion_are_refused() -> None:
    with pytest.raises(ValidationError, match="copies of one completion"):
        EvaluationConfig(samples_per_prompt=2)


def test_the_mean_of_a_prompts_completions_is_its_reward() -> None:
    rows = [("a", 1.0), ("a", 0.0), ("b", None), ("b", 0.5), ("c", None)]
    rewards = reward_by_prompt({"prompt_id": prompt, "reward": reward} for prompt, reward in rows)
    assert rewards == {"a": 0.5, "b": 0.5, "c": None}


@pytest.fixture
def runs(tmp_path: Path, tiny_folder: Path) -> FlowRuns:
    """Runs of three steps, with three held-out prompts."""
    heldout = {"kind": "file", "path": str(write_prompts(tmp_path / "heldout.jsonl")), "limit": 3}
    return grpo_runs(tmp_path, tiny_folder, algorithm__steps=3, data__heldout=heldout)


def reward_curve(runs: FlowRuns, run: str) -> list[tuple[int, float]]:
    """(step, held-out reward) of each evaluation."""
    validations = read_validations(runs.store, run, "0-grpo")
    return [(validation.step, validation.measures["reward"]) for validation in validations]


@pytest.mark.slow
@served
def test_evaluation_on_the_way(runs: FlowRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {"every_steps": 1, "temperature": 1.0, "top_k": 50, "top_p": 0.9, "samples_per_prompt": 2}
    whole = runs.run("whole", evaluation=drawn)

    # An evaluation before the first step and after each step, with two completions per prompt.
    tables = [pandas.read_parquet(path) for path in runs.files("whole", "evaluations")]
    assert [path.name[:6] for path in runs.files("whole", "evaluations")] == ["000000", "000001", "000002", "000003"]
    for table in tables:
        assert list(table["prompt_index"]) == [0, 0, 1, 1, 2, 2]
    assert tables[0].groupby("prompt_index")["text"].nunique().max() == 2  # the two of a prompt are drawn apart
    means = [table.groupby("prompt_index")["reward"].mean().mean() for table in tables]
    assert reward_curve(runs, "whole") == [(step, pytest.approx(mean)) for step, mean in enumerate(means)]
    assert whole["heldout"]["n"] == 3
    assert "Held-out: reward" in Path(whole["report"]).read_text()

    # A run interrupted at an evaluation has the same evaluations.
    evaluate, calls = HeldoutEvaluator.evaluate, []

    async def interrupted(self: HeldoutEvaluator, policy: Any) -> Any:
        calls.append(policy.step)
        if policy.step == 2 and calls.count(2) == 1:
            raise RuntimeError("the power went out")
        return await evaluate(self, policy)

    monkeypatch.setattr(HeldoutEvaluator, "evaluate", interrupted)
    with pytest.raises(RuntimeError, match="power"):
        runs.run("cut", evaluation=drawn)
    runs.run("cut", evaluation=drawn)
    assert calls.count(2) == 2, "the committed step whose evaluation was missed is evaluated after the restart"
    assert reward_curve(runs, "cut") == reward_curve(runs, "whole")
    for mine, other in zip(runs.files("cut", "evaluations"), runs.files("whole", "evaluations"), strict=True):
        assert pandas.read_parquet(mine).equals(pandas.read_parquet(other))


@served
@pytest.mark.slow
def test_without_the_evaluation_before(runs: FlowRuns) -> None:
    result = runs.run("late", evaluation={"before": False, "every": 0.5})
    assert [step for step, _ in reward_curve(runs, "late")] == [2, 3]  # 1.5 steps are reached after 2
    assert result["heldout"] is None
