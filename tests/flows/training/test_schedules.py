"""Tests of learning rates at single steps against values computed by hand from the definitions."""

from __future__ import annotations

from itertools import pairwise

import pytest

from flows.training.schedules import (
    SCHEDULES,
    CombinedSchedule,
    ConstantScheduler,
    ConstantWithWarmupScheduler,
    CosineScheduler,
    CosineSchedulerWithoutWarmup,
    InverseSqrtScheduler,
    LinearScheduler,
    Ramp,
    WSDScheduler,
    is_endless,
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


@pytest.mark.parametrize(
    ("progress", "share"), [(0.0, 0.1), (0.05, 0.6), (0.095, 1.0), (0.1, 1.0), (0.55, 0.55), (1.0, 0.1)]
)
def test_progress_form_of_the_cosine(progress: float, share: float) -> None:
    assert CosineScheduler(LR)(progress) == pytest.approx(share * LR)


@pytest.mark.parametrize("make", [CosineScheduler, WSDScheduler, InverseSqrtScheduler])
def test_a_hand_written_loop_warms_up_as_a_training_class_does(make) -> None:
    schedule = make(LR)
    by_progress = [schedule(step / 100) for step in range(10)]
    assert by_progress == pytest.approx([schedule.at(step, 100) for step in range(10)], rel=1e-12)
    assert by_progress[0] == pytest.approx(LR / 10)


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
    scheduler = make(LR)
    assert [scheduler.at(k, 20) for k in reversed(range(20))] == forwards[::-1]
    assert max(forwards) == pytest.approx(LR)


def test_warmup_by_steps_or_by_a_share() -> None:
    # W = 4 of 8, then q = 0, 1/3, 2/3, 1: cos(pi q) = 1, 1/2, -1/2, -1
    cosine = [0.25, 0.5, 0.75, 1, 1, 0.75, 0.25, 0]
    by_steps = CosineScheduler(LR, warmup_steps=4, min_lr_ratio=0)
    by_share = CosineScheduler(LR, warmup_ratio=0.5, min_lr_ratio=0)
    for schedule in (by_steps, by_share):
        assert [schedule.at(k, 8) / LR for k in range(8)] == pytest.approx(cosine, abs=1e-12)
    linear = LinearScheduler(1.0, warmup_steps=2, min_lr_ratio=0.2)  # 4 steps are left: 1 - 0.8 k / 4
    assert [linear.at(k, 6) for k in range(6)] == pytest.approx([0.5, 1, 1, 0.8, 0.6, 0.4])
    constant = ConstantScheduler(1.0, warmup_steps=4)
    assert [constant.at(k, 6) for k in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert constant.at(1, 2) == 0.5  # a run that ends within the warm-up


def test_a_warmup_of_no_steps_is_none() -> None:
    assert [CosineScheduler(1.0, warmup_steps=0).at(k, 3) for k in range(3)] == pytest.approx([1, 0.55, 0.1])


def test_cycles_of_the_cosine_each_begin_at_the_rate() -> None:
    # no warm-up, 6 steps in 2 cycles of 3: q = 0, 1/2, 1 each
    two = CosineSchedulerWithoutWarmup(1.0, cycles=2)
    assert [two.at(k, 6) for k in range(6)] == pytest.approx([1, 0.55, 0.1] * 2)
    # 5 steps in 2 cycles: those whose share of the run, k/5, is below 1/2, and the others
    assert [two.at(k, 5) for k in range(5)] == pytest.approx([1, 0.55, 0.1, 1, 0.1])
    assert [two.at(k, 1) for k in range(1)] == [1]
    assert [two.at(k, 2) for k in range(2)] == [1, 1]  # a cycle of one step has the rate
    assert [two(p) for p in (0, 0.25, 0.5, 0.75, 1)] == pytest.approx([1, 0.55, 1, 0.55, 0.1])
    with pytest.raises(ValueError, match="cycles=0"):
        CosineScheduler(1.0, cycles=0)


def test_warmup_stable_decay() -> None:
    # N = 20: W = 2; the last 20 % are 4 steps, down to 0 in the last
    schedule = WSDScheduler(1.0, min_lr_ratio=0, decay_ratio=0.2)
    expected = [0.5, 1] + [1] * 14 + [0.75, 0.5, 0.25, 0]
    assert [schedule.at(k, 20) for k in range(20)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("total", "expected"), [(1, [1.0]), (2, [1.0, 0.1]), (3, [1.0, 1.0, 0.1]), (4, [1.0, 1.0, 1.0, 0.1])]
)
def test_warmup_stable_decay_of_short_runs(total: int, expected: list[float]) -> None:
    assert [WSDScheduler(1.0).at(k, total) for k in range(total)] == pytest.approx(expected)
    none = WSDScheduler(1.0, warmup_ratio=0)
    assert [none.at(k, total) for k in range(total)] == pytest.approx(expected)


def test_the_decay_gives_way_to_the_warmup() -> None:
    schedule = WSDScheduler(1.0, warmup_steps=2, min_lr_ratio=0.5, decay_ratio=1.0)
    assert [schedule.at(k, 4) for k in range(4)] == pytest.approx([0.5, 1, 0.75, 0.5])
    assert [schedule.at(k, 2) for k in range(2)] == [0.5, 1]
    continuous = WSDScheduler(1.0, warmup_ratio=0.5, min_lr_ratio=0, decay_ratio=0.8)
    assert [continuous(p) for p in (0.25, 0.5, 0.75, 1)] == pytest.approx([26 / 50, 1, 0.5, 0])


def test_inverse_square_root() -> None:
    schedule = InverseSqrtScheduler(1.0, warmup_steps=4)
    assert [schedule.at(k, 100) for k in (0, 3, 15, 35, 99)] == pytest.approx([0.25, 1, 0.5, 1 / 3, 0.2])
    assert schedule.at(15, 16) == schedule.at(15, 1000)
    assert InverseSqrtScheduler(1.0, warmup_steps=4, min_lr_ratio=0.3).at(99, 100) == 0.3
    by_share = InverseSqrtScheduler(1.0, warmup_ratio=0.25)
    assert [by_share.at(k, 16) for k in (3, 15)] == pytest.approx([1, 0.5])
    assert [by_share(p) for p in (0, 0.12, 0.25, 1)] == pytest.approx([1 / 25, 13 / 25, 1, 0.5])
    assert [InverseSqrtScheduler(1.0).at(0, total) for total in (1, 2, 3)] == [1, 1, 1]
    for none in ({"warmup_steps": 0}, {"warmup_ratio": 0}):
        with pytest.raises(ValueError, match="there is none"):
            InverseSqrtScheduler(1.0, **none)


def test_which_schedules_fit_a_run_without_an_end() -> None:
    assert is_endless(ConstantScheduler(1.0))
    assert is_endless(ConstantScheduler(1.0, warmup_steps=10))
    assert is_endless(InverseSqrtScheduler(1.0, warmup_steps=10))
    for bent in (
        ConstantScheduler(1.0, warmup_ratio=0.1), InverseSqrtScheduler(1.0), CosineScheduler(1.0, warmup_steps=10),
        LinearScheduler(1.0), WSDScheduler(1.0), Ramp(0.0, 1.0),
    ):  # fmt: skip
        assert not is_endless(bent)


def test_a_warmup_of_steps_has_no_continuous_form() -> None:
    with pytest.raises(ValueError, match="no share of a run"):
        ConstantScheduler(1.0, warmup_steps=3)(0.5)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [("linear", [0.1, 0.2, 0.3, 0.4, 0.5]), ("cosine", [0.1, 0.158578644, 0.3, 0.441421356, 0.5])],
)
def test_a_ramp_of_the_weight_decay(shape: str, expected: list[float]) -> None:
    ramp = Ramp(0.1, 0.5, shape)  # type: ignore[arg-type]
    assert [ramp.at(k, 5) for k in range(5)] == pytest.approx(expected)
    assert [ramp(k / 4) for k in range(5)] == pytest.approx(expected)
    assert [ramp.at(k, 2) for k in range(2)] == pytest.approx([0.1, 0.5])
    assert ramp.at(0, 1) == 0.1


@pytest.mark.parametrize(
    "wrong", [{"warmup_ratio": 1.5}, {"warmup_steps": -1}, {"min_lr_ratio": 2.0}, {"min_lr_ratio": -0.1}]
)
def test_wrong_shares_are_refused(wrong: dict[str, float]) -> None:
    for make in (CosineScheduler, LinearScheduler, WSDScheduler, InverseSqrtScheduler):
        with pytest.raises(ValueError, match="expected"):
            make(1.0, **wrong)


def test_a_constant_with_warm_up_begins_at_zero() -> None:
    # Hugging Face's get_constant_schedule_with_warmup: k / W
    schedule = ConstantWithWarmupScheduler(2.0, warmup_steps=4)
    assert [schedule.at(step, 6) for step in range(6)] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.0]
    assert is_endless(schedule) and not is_endless(ConstantWithWarmupScheduler(2.0, warmup_ratio=0.5))
    # by the progress of a run of 100 steps, of which 10 warm up
    by_share = ConstantWithWarmupScheduler(2.0, warmup_ratio=0.1)
    assert [by_share(progress) for progress in (0.0, 0.05, 0.1, 1.0)] == pytest.approx([0.0, 1.0, 2.0, 2.0])
