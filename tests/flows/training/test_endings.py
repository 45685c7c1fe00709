"""Tests of the endings of a run before its last step: patience with a held-out score, and budgets."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engine.specs.engine import LocalEngineSpec
from engine.workspace import Workspace, connect
from flows.configs.common import SFTConfig
from flows.configs.reinforcement import BatchRules, RunRules
from flows.runs import session
from flows.training import endings
from flows.training.endings import Patience, budget_ending, check_ending, ending_of, read_history, use_after
from storage.chain.fork import fork_run
from storage.chain.records import PolicyRef, RunUse
from storage.serialization import canonical_json
from storage.store import keys
from storage.store.artifacts import Provenance
from storage.store.objects import read_json
from tasks.evaluation.validation_curve import Validation
from tests.fixtures.runs.flow_runs import FlowRuns, grpo_runs
from tests.fixtures.worklog import events

HELDOUT = {"data__heldout": {"kind": "file", "path": "prompts.jsonl"}, "evaluation": {"every_steps": 1}}


def rewards(*scores: float | None, first: int = 0, name: str = "held-out") -> list[Validation]:
    measurements = []
    for step, score in enumerate(scores, start=first):
        measurements.append(Validation(name=name, step=step, measures={} if score is None else {"reward": score}))
    return measurements


@pytest.mark.parametrize(
    ("scores", "limit", "ends"),
    [
        ((0.1, 0.3, 0.2, 0.3), 2, True),  # an equal score is not better
        ((0.1, 0.3, 0.2, 0.3), 3, False),
        ((0.1, 0.3, 0.2, 0.31), 1, False),
        ((0.5, 0.4, None), 2, True),  # a measurement without a grade is not better
        ((0.5, 0.4, None), None, False),
    ],
)
def test_patience_counts_the_measurements_since_the_best(
    scores: tuple[float | None, ...], limit: int | None, ends: bool
) -> None:
    patience = Patience(limit, rewards(*scores))
    assert (patience.ending(len(scores) - 1) is not None) is ends


def test_the_reason_has_the_best_score_as_it_was_measured() -> None:
    negative = Patience(2, rewards(-0.5, -0.7, -0.6)).ending(2)
    assert negative is not None and "were not better than -0.5 after step 0" in negative.reason
    nothing = Patience(2, rewards(None, None)).ending(1)
    assert nothing is not None and "2 measurements in a row had no result" in nothing.reason


def test_the_score_is_that_of_the_flow_and_a_loss_is_better_when_it_is_smaller() -> None:
    mixed = [*rewards(0.1, 0.2, 0.3), *rewards(0.9, 0.8, 0.7, name="a")]
    assert Patience(1, mixed).ending(2) is None
    losses = [Validation(name="validation", step=step, measures={"loss": 2.0 - step}) for step in range(3)]
    patience = Patience(1, losses)
    assert (patience.best_step, patience.best, patience.ending(2)) == (2, 0.0, None)
    # a resumed run measures its last policy again; it counts once
    patience.add([Validation(name="validation", step=2, measures={"loss": 0.0})])
    assert patience.ending(2) is None
    patience.add([Validation(name="validation", step=3, measures={"loss": 0.5})])
    ending = patience.ending(3)
    assert ending is not None
    expected = "1 measurements in a row were not better than 0 after step 2, and rules.patience=1"
    assert ending.model_dump() == {"rule": "rules.patience", "step": 3, "reason": expected, "limit": 1}


def test_a_budget_ends_the_run_that_reaches_it() -> None:
    used = RunUse(seconds=7200.0, gpu_seconds=28800.0, tokens_sampled=1000)
    assert budget_ending(BatchRules(max_hours=2.1, max_gpu_hours=8.1, max_tokens_sampled=1001), used, 3) is None
    for rules in (RunRules(max_hours=2.0), RunRules(max_gpu_hours=8.0), BatchRules(max_tokens_sampled=1000)):
        ending = budget_ending(rules, used, 3)
        assert ending is not None and ending.step == 3 and ending.rule.removeprefix("rules.") in str(rules)
    hours = budget_ending(RunRules(max_hours=2.0), used, 3)
    assert hours is not None and hours.reason == "it has used 2 hours, and rules.max_hours=2"


def test_a_result_of_a_later_stage_replaces_one_of_an_earlier_stage(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    provenance = Provenance(code_version="a", config_digest="0" * 64, seed=0)
    workspace = Workspace(store=store, engine=LocalEngineSpec(), run="r", seed=0, provenance=provenance)

    def result(stage: str, step: int) -> dict[str, Any]:
        policy = PolicyRef(run="r", stage=stage, model="policy", step=step, state="s")
        return {"policy": policy.uri, "ending": {"step": step}}

    first, later, middle = result("0-rft-1", 40), result("10-rft-11", 38), result("2-rft-3", 39)
    for written, stored in ((first, first), (later, later), (middle, later), (first, later)):
        assert session.write_result(workspace, written) == stored


def test_what_cannot_be_measured_or_continued_is_refused(tmp_path: Path) -> None:
    body: dict[str, Any] = {"model": {"key": "m"}, "data": {"train": {"kind": "file", "path": "a.jsonl"}}}
    with pytest.raises(ValidationError, match=r"rules.patience=2 counts measurements on held-out rows .* give data.h"):
        SFTConfig.model_validate(body | {"rules": {"patience": 2}})
    heldout = {"heldout": {"kind": "file", "path": "b.jsonl"}}
    body["data"] |= heldout
    with pytest.raises(ValidationError, match=r"validation.every_steps"):
        SFTConfig.model_validate(body | {"rules": {"patience": 2}})
    config = SFTConfig.model_validate(body | {"rules": {"patience": 2}, "validation": {"every_steps": 3}})
    assert "rules" not in config.semantic() and config.other()["rules"]["patience"] == 2


@pytest.fixture
def runs(prefect_server: str, tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> FlowRuns:
    monkeypatch.chdir(tmp_path)
    return grpo_runs(tmp_path, tiny_folder, **HELDOUT)


def test_a_budget_of_tokens_ends_a_run_and_a_larger_one_continues_it(runs: FlowRuns, worklog: Path) -> None:
    """Each step samples 16 completions of 6 tokens: 96."""
    ended = runs.run("budget", rules={"max_tokens_sampled": 150})
    assert ended["ending"] == {
        "rule": "rules.max_tokens_sampled", "step": 2,
        "reason": "it has used 192 sampled tokens, and rules.max_tokens_sampled=150", "limit": 150,
    }  # fmt: skip
    assert runs.published(ended).is_dir() and len(runs.records("budget")) == 2
    # it was evaluated at its end, and its last weights are in a checkpoint
    history = read_history(runs.store, runs.chain("budget").head())
    assert [measurement.step for measurement in history] == [0, 1, 2]
    assert runs.store.exists(keys.manifest_of_files(keys.checkpoint("budget", "0-grpo", "policy", 2)))
    # the same rules return the same result
    connect.cache_clear()
    assert runs.run("budget", rules={"max_tokens_sampled": 150}) == ended
    assert len(events(worklog, "step")) == 2
    # a larger budget continues to the bytes of a run without interruption
    connect.cache_clear()
    longer = runs.run("budget", rules={"max_tokens_sampled": 1000})
    assert "ending" not in longer and longer["model"] != ended["model"]
    whole = runs.run("whole")
    assert runs.digests("budget") == runs.digests("whole") and len(runs.records("whole")) == 4
    assert longer["heldout"] == whole["heldout"]
    # a process that lost its lease writes the shorter result again, and does not hide the longer one
    stale = runs.store
    stale.delete(keys.result_json("budget"))
    stale.put(keys.result_json("budget"), canonical_json(ended))
    workspace = session.workspace_of(runs.config("budget"), "budget")
    assert session.write_result(workspace, longer) == longer == read_json(stale, keys.result_json("budget"))
    assert session.write_result(workspace, ended) == longer


@pytest.mark.slow
def test_hours_are_those_of_all_processes(runs: FlowRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is an hour later. A process looks when its steps begin, and once per step."""
    hours = iter(range(1, 1000))

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return 3600.0 * next(hours)

    monkeypatch.setattr(endings, "time", Clock)
    first = runs.run("hours", rules={"max_hours": 2})
    assert first["ending"]["reason"] == "it has used 2 hours, and rules.max_hours=2"
    used = [record.request.used for record in runs.records("hours")]
    assert used == [RunUse(seconds=3600.0), RunUse(seconds=7200.0, tokens_sampled=96)]
    connect.cache_clear()
    assert runs.run("hours", rules={"max_hours": 3})["ending"]["step"] == 3
    last = runs.records("hours")[-1]
    assert last.request.used == RunUse(seconds=10800.0, tokens_sampled=192)
    assert use_after(runs.store, last.policy).tokens_sampled == 288


@pytest.mark.slow
def test_patience_ends_a_run_and_its_fork_after_the_same_step(runs: FlowRuns) -> None:
    """No greedy answer has an odd code point: every held-out score is equal."""
    odd = {"grader__path": "tests.fixtures.grading:odd_share", "optimizer__lr": 1e-12}
    ended = runs.run("still", **odd, rules={"patience": 2})
    assert ended["ending"]["rule"] == "rules.patience" and ended["ending"]["step"] == 2
    head = runs.chain("still").head()
    assert ending_of(runs.store, head, RunRules(patience=2)) is not None
    assert ending_of(runs.store, head, RunRules(patience=3)) is None
    # the fork counts the measurements that it shares
    fork_run(runs.store, "still", "fork", step=1, code_version="test")
    connect.cache_clear()
    forked = runs.run("fork", **odd, rules={"patience": 2})
    assert forked["ending"] == ended["ending"] and runs.digests("fork") == runs.digests("still")
    # what the result says follows from the measurements
    assert check_ending(runs.store, ended) is None and check_ending(runs.store, {}) is None
    changed = ended | {"ending": ended["ending"] | {"limit": 3.0}}
    problem = check_ending(runs.store, changed)
    assert problem is not None and problem.endswith("its records say: nothing that ends it")
    # more patience continues the run
    connect.cache_clear()
    assert runs.run("still", **odd, rules={"patience": 3})["ending"]["step"] == 3
    assert math.isfinite(Patience(3, read_history(runs.store, head)).best)
