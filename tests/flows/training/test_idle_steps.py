"""Tests of idle steps: the user is told at the first one, a run of too many fails, and what learnt nothing is not
published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.handles import Model
from engine.text.threads import StringThread
from engine.workspace import connect
from flows.grpo import GRPO
from flows.recipe import RecipeContext
from flows.runs import events as flow_events
from flows.sft import SFT
from flows.training.idle_steps import IdleSteps, NothingLearned, has_learnt, idle_cause
from flows.training.schedules import ConstantScheduler
from storage.chain.records import (
    Chain,
    CommitRecord,
    MinibatchPlan,
    Numerics,
    OptimizerSpec,
    PolicyRef,
    StepRequest,
)
from storage.registry.models import list_models
from storage.store.artifacts import ArtifactRef
from tasks.graders.spec import grader_spec
from tests.fixtures.engines import DETERMINISTIC
from tests.fixtures.runs.flow_runs import FlowRuns, grpo_runs
from tests.fixtures.worklog import events

EQUAL = {"grader": {"path": "tests.fixtures.grading:constant", "arguments": {"value": 0.0}}}
"""Every completion gets the reward 0."""


def record(*, lr: float = 0.1, epochs: int = 1, updates: int = 1, skipped: int = 0, **metrics: float) -> CommitRecord:
    request = StepRequest(
        parent=PolicyRef(run="r", stage="0-s", model="m", step=4, state="0"),
        batch=ArtifactRef(kind="batch", key="k", sha256="0", bytes=1, rows=1, parents=()),
        loss={},
        optimizer=OptimizerSpec(lr=lr),
        minibatches=MinibatchPlan(epochs=epochs),
    )
    numerics = Numerics(backend="torch", device="cpu", compute_dtype="float32", threads=1, max_tokens=1)
    return CommitRecord(
        request=request, state="1", updates=updates, skipped=skipped, metrics=metrics, numerics=numerics,
        weights_digest="0",
    )


@pytest.mark.parametrize(
    ("step", "cause"),
    [
        (record(grad_norm=0.5), None),
        (record(grad_norm=0.5, informative_fraction=0.1), None),
        (record(grad_norm=0.0), "its gradient was 0"),
        # rounding of the KL term leaves a gradient that is no information
        (record(grad_norm=1e-7, informative_fraction=0.0), "all rewards of each group were equal"),
        (record(grad_norm=0.5, lr=0.0), "the learning rate was 0"),
        (record(updates=0, skipped=2), "gradient held NaN or infinity"),
        (record(updates=0), "no trained token"),
        # the policy's step while only the value model is trained
        (record(updates=0, epochs=0), None),
    ],
)
def test_a_step_is_idle_if_no_gradient_or_no_rate_moved_its_weights(step: CommitRecord, cause: str | None) -> None:
    found = idle_cause(step)
    assert (found is None) is (cause is None)
    assert found is None or (cause is not None and cause in found[0])


def idle_steps(notes: list[str], limit: int | None) -> IdleSteps:
    chain: Any = type("NoChain", (), {"run": "r"})()
    return IdleSteps(chain, last_step=0, limit=limit, note=notes.append)


def test_idle_steps_are_counted_in_a_row_and_said_once() -> None:
    notes: list[str] = []
    idle = idle_steps(notes, limit=3)
    for grad_norm in (0.0, 0.0, 0.5, 0.0, 0.0):
        idle.add(record(grad_norm=grad_norm))
        idle.check(5)
    idle.add(record(updates=0, epochs=0))  # a skipped step is neither idle nor does it end the row
    idle.check(6)
    assert len(notes) == 1 and notes[0].startswith("step 5 taught the model nothing: its gradient was 0. To change")
    assert "3 such steps in a row end the run as failed (rules.max_idle_steps)" in notes[0]
    idle.add(record(grad_norm=0.0))
    with pytest.raises(NothingLearned, match="the last 3 steps of run r, up to step 8, .* raise rules.max_idle"):
        idle.check(8)


def test_one_step_at_a_rate_of_zero_is_part_of_a_warm_up() -> None:
    notes: list[str] = []
    idle = idle_steps(notes, limit=None)
    idle.add(record(lr=0.0))
    idle.add(record(grad_norm=0.5))
    assert notes == []
    for _ in range(30):
        idle.add(record(lr=0.0))
        idle.check(30)  # no limit
    assert len(notes) == 1 and "raise the learning rate" in notes[0] and "max_idle_steps" not in notes[0]


@pytest.fixture
def runs(prefect_server: str, tmp_path: Path, tiny_folder: Path) -> FlowRuns:
    return grpo_runs(tmp_path, tiny_folder, algorithm__steps=3, model__publish_unchanged=False)


def test_a_run_of_equal_rewards_says_so_and_fails_and_says_so_again(
    runs: FlowRuns, worklog: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(flow_events, "_emit", lambda event, kind, name, payload: sent.append({event: payload}))
    with pytest.raises(NothingLearned, match="last 2 steps of run idle, up to step 2, taught the model nothing: all"):
        runs.run("idle", rules={"max_idle_steps": 2}, **EQUAL)
    said = capfd.readouterr()
    assert "step 1 taught the model nothing: all rewards of each group were equal" in said.out + said.err
    assert {"ostinato.run.idle"} <= {name for event in sent for name in event}
    assert len(runs.records("idle")) == 2 and list_models(runs.store) == ["tiny"]
    # the same command counts the steps of the records, and trains no further
    connect.cache_clear()
    taken = len(events(worklog, "step"))
    with pytest.raises(NothingLearned, match="the last 2 steps of run idle"):
        runs.run("idle", rules={"max_idle_steps": 2}, **EQUAL)
    assert len(events(worklog, "step")) == taken == 2
    # a higher limit continues the run, in the bytes of a run without interruption
    connect.cache_clear()
    result = runs.run("idle", rules={"max_idle_steps": None}, **EQUAL)
    assert result["model"] is None and list_models(runs.store) == ["tiny"]
    whole = runs.run("whole", model__publish_unchanged=True, **EQUAL)
    assert runs.digests("idle") == runs.digests("whole")
    assert runs.published(whole).is_dir()
    assert not any(has_learnt(runs.store, runs.chain(run).head()) for run in ("idle", "whole"))


async def test_a_stage_that_learns_nothing_after_one_that_does(
    prefect_server: str, tmp_path: Path, tiny_folder: Path
) -> None:
    ctx = RecipeContext.open("two", store=str(tmp_path / "data"), engine=DETERMINISTIC)
    model = await Model(str(tiny_folder)).to_builder(ctx).spawn_train("policy")
    threads = [StringThread([("user", "1"), ("assistant", "2")])]
    learnt = await SFT(threads, model, lr=1e-3, max_steps=1).run()
    grader = grader_spec("tests.fixtures.grading:constant", {"value": 1.0})
    options: dict[str, Any] = {"samples_per_batch": 4, "completions_per_sample": 2, "checkpoint_frequency": None}
    trainer = GRPO(
        [StringThread([("user", str(digit))]) for digit in range(2)], model.max_gen_len(3), grader,
        max_num_grpo_steps=1, **options,
    )  # fmt: skip
    policy = await trainer.run()
    store = ctx.workspace.open_store()
    assert idle_cause(Chain.of(store, policy).committed_record(1)) is not None
    assert has_learnt(store, learnt) and has_learnt(store, policy)
    assert not has_learnt(store, learnt.model_copy(update={"step": 0}))


async def test_fine_tuning_at_a_rate_of_zero_ends(prefect_server: str, tmp_path: Path, tiny_folder: Path) -> None:
    ctx = RecipeContext.open("still", store=str(tmp_path / "data"), engine=DETERMINISTIC)
    model = await Model(str(tiny_folder)).to_builder(ctx).spawn_train("policy")
    threads = [StringThread([("user", "1"), ("assistant", "2")])]
    trainer = SFT(threads, model, lr_scheduler=ConstantScheduler(0.0), max_steps=30, checkpoint_frequency=None)
    with pytest.raises(NothingLearned, match="the last 20 steps .* the learning rate was 0"):
        await trainer.run()
