"""Tests of the remaining time of a loop, against sums that were computed by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from pytest import approx

from flows.callbacks import Cadence, HeldoutEvaluation, SamplesTable
from flows.configs.common import CheckpointConfig
from flows.training.checkpointing import CheckpointSchedule
from flows.training.step_reporter import TimeLeft
from flows.training.training_steps import time_left_of
from tests.fixtures.clocks import Clock


def test_steps_checkpoints_and_evaluations_to_come_are_added_up() -> None:
    clock = Clock(0.0)
    planned = {"checkpoint": [2, 4, 6, 8, 10], "evaluation": [5, 10, 10], "never measured": [9]}
    left = TimeLeft(10, planned, clock=clock)
    assert left.remaining_seconds(0) is None  # nothing is measured
    with left.measure("evaluation"):  # before training
        clock.now += 20
    clock.now += 3
    left.finish_step()
    assert left.remaining_seconds(1) == approx(9 * 3 + 3 * 20)
    clock.now += 5
    left.finish_step()
    assert left.remaining_seconds(2) == approx(8 * 4 + 3 * 20)  # the checkpoint that is due now is not measured yet
    with left.measure("checkpoint"):
        clock.now += 7
    clock.now += 4
    left.finish_step()  # 4 s: the seconds of the checkpoint are not the step's
    assert left.remaining_seconds(3) == approx(7 * 4 + 4 * 7 + 3 * 20)
    for _ in range(3):
        clock.now += 4
        left.finish_step()
    with left.measure("evaluation"):
        clock.now += 10
    assert left.remaining_seconds(6) == approx(4 * 4 + 3 * 7 + 2 * 15)


def test_the_latest_ten_steps_count() -> None:
    clock = Clock(0.0)
    left = TimeLeft(100, {}, clock=clock)
    for step in range(30):
        clock.now += 100 if step < 20 else 1
        left.finish_step()
    assert left.remaining_seconds(30) == approx(70)


def test_a_run_without_an_end_has_no_remaining_time() -> None:
    left = TimeLeft(None, {})
    left.finish_step()
    assert left.remaining_seconds(1) is None


@dataclass
class Loop:
    """What is asked of a training class."""

    callbacks: list[Any]
    checkpoints: CheckpointSchedule
    model: Any = field(default_factory=lambda: SimpleNamespace(name="policy"))


async def evaluate(_: Any) -> None: ...


def test_a_loop_plans_what_its_schedules_will_find_due() -> None:
    """20 steps: named checkpoints after 5, 10, 15, 20, recovery checkpoints after 8 and 16, evaluations after 6, 12, 18
    and at the end, tables after 4, …, 20."""
    callbacks = [
        HeldoutEvaluation(evaluate, Cadence(every_steps=6), prompts=3),
        SamplesTable(Cadence(0.2)),
    ]
    checkpoints = CheckpointSchedule(CheckpointConfig(frequency=0.25, recovery_steps=8))
    left = time_left_of(Loop(callbacks, checkpoints), 7, 20)  # type: ignore[arg-type]
    assert left.planned == {
        "checkpoint": [8, 10, 15, 16, 20, 20],  # the loop saves once more at its end
        "last checkpoint": [20],
        "evaluation": [12, 18, 20],
        "callback 1": [8, 12, 16, 20],
    }
    left.record("evaluation", 20.0)
    left.finish_step()
    assert left.remaining_seconds(8) == approx(12 * left.mean_step_seconds + 3 * 20.0)
