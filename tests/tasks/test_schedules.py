"""Learning rates at single steps, by hand from the definition in the algorithm notes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from flows.schedules import SCHEDULES
from tasks.schedules import (
    CombinedSchedule,
    ConstantScheduler,
    CosineScheduler,
    CosineSchedulerWithoutWarmup,
    LinearScheduler,
)

LR = 2e-5


@pytest.mark.parametrize(("step", "share"), [(0, 0.1), (1, 0.2), (9, 1.0), (10, 1.0), (99, 0.1)])
def test_cosine_over_a_hundred_steps(step: int, share: float) -> None:
    assert CosineScheduler(LR).at(step, 100) == pytest.approx(share * LR, rel=1e-12)


def test_cosine_halfway_down() -> None:
    # N = 12, W = 1: q = (6 - 1) / (12 - 1 - 1) = 1/2, so lr/10 + 0.9 lr / 2
    assert CosineScheduler(LR).at(6, 12) == pytest.approx(0.55 * LR, rel=1e-12)


def test_cosine_of_short_runs() -> None:
    assert CosineScheduler(LR).at(0, 1) == LR
    assert [CosineScheduler(LR).at(k, 3) for k in range(3)] == pytest.approx([LR, LR, 0.1 * LR])


def test_cosine_rises_then_falls() -> None:
    rates = [CosineScheduler(1.0).at(k, 50) for k in range(50)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])  # W = 5
    assert all(earlier > later for earlier, later in pairwise(rates[5:]))


def test_without_warmup() -> None:
    schedule = CosineSchedulerWithoutWarmup(LR)
    assert [schedule.at(k, 5) for k in (0, 2, 4)] == pytest.approx([LR, 0.55 * LR, 0.1 * LR])
    assert schedule.at(0, 1) == LR


def test_linear_and_constant() -> None:
    assert [LinearScheduler(LR).at(k, 4) for k in range(4)] == pytest.approx([LR, 0.75 * LR, 0.5 * LR, 0.25 * LR])
    assert {ConstantScheduler(LR).at(k, 4) for k in range(4)} == {LR}


def test_combined_gives_each_part_a_run_of_its_own() -> None:
    schedule = CombinedSchedule(ConstantScheduler(1.0), LinearScheduler(0.5), switch_at=0.6)
    assert [schedule.at(k, 5) for k in range(5)] == pytest.approx([1, 1, 1, 0.5, 0.25])
    assert schedule.at(0, 1) == 1
    assert [schedule.at(k, 2) for k in range(2)] == [1, 0.5]
    assert schedule(0.5) == 1
    assert schedule(0.8) == pytest.approx(0.25)  # half of the second part


@pytest.mark.parametrize("switch_at", [0.0, 1.0, -1.0])
def test_combined_needs_two_parts(switch_at: float) -> None:
    with pytest.raises(ValueError, match="expected a share"):
        CombinedSchedule(ConstantScheduler(1.0), ConstantScheduler(2.0), switch_at=switch_at)


@pytest.mark.parametrize(("progress", "share"), [(0.05, 0.5), (0.1, 1.0), (0.55, 0.55), (1.0, 0.1)])
def test_progress_form_of_the_cosine(progress: float, share: float) -> None:
    assert CosineScheduler(LR)(progress) == pytest.approx(share * LR)


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
def test_what_lies_outside_the_run_is_refused(make) -> None:
    schedule = make(LR)
    for step, total in ((-1, 10), (10, 10), (0, 0)):
        with pytest.raises(ValueError, match="0-based step"):
            schedule.at(step, total)
    for progress in (-0.1, 1.1):
        with pytest.raises(ValueError, match="between 0 and 1"):
            schedule(progress)


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
def test_schedules_are_functions_of_the_step(make) -> None:
    forwards = [make(LR).at(k, 20) for k in range(20)]
    one = make(LR)
    assert [one.at(k, 20) for k in reversed(range(20))] == forwards[::-1]
    assert max(forwards) == pytest.approx(LR)
