"""Tests of the time per phase of a step when tasks overlap."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from tasks.reports.clock import StepClock, timed
from tasks.reports.metrics import StepMetrics


def test_the_parts_add_up_to_the_wall_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("tasks.reports.clock.time.perf_counter", lambda: now[0])
    clock = StepClock()
    now[0] = 1.0
    first, second, third = ExitStack(), ExitStack(), ExitStack()
    first.enter_context(timed("rollout"))
    second.enter_context(timed("rollout"))  # waits for the first
    now[0] = 5.0
    first.close()
    third.enter_context(timed("storage"))
    now[0] = 7.0  # two seconds, shared
    third.close()
    now[0] = 10.0
    second.close()
    now[0] = 11.0
    lap = clock.lap()
    assert lap.seconds == {"rollout": 8.0, "grade": 0, "train": 0, "sync": 0, "storage": 1.0, "orchestration": 2.0}
    # the rollouts were open for 9 of the 11 seconds, the storage for 2 of them, and the trainer not at all
    assert lap.idle("rollout") == pytest.approx(2 / 11)
    assert lap.idle("storage") == pytest.approx(9 / 11)
    assert lap.idle("train") == 1.0
    now[0] = 12.0
    assert sum(clock.lap().seconds.values()) == 1.0
    assert clock.lap().idle("train") is None


def test_a_step_without_a_finite_loss_is_read_back_as_it_was_written() -> None:
    written = StepMetrics(step=0, loss=float("nan"), grad_norm=float("nan"), learning_rate=0.1).model_dump_json()
    assert "null" not in written.split('"learning_rate"')[0].partition('"loss"')[2]
    read = StepMetrics.model_validate_json(written)
    assert read.loss != read.loss and read.grad_norm != read.grad_norm


def test_spans_count_from_the_begin_of_the_step_and_short_pauses_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("tasks.reports.clock.time.perf_counter", lambda: now[0])
    clock = StepClock()
    for begin, end in ((100, 130), (130.1, 150), (160, 170)):  # the first pause is 0.1 of 100 seconds
        now[0] = begin
        with timed("rollout"):
            now[0] = end
    with ExitStack() as open_at_the_end:
        now[0] = 180
        open_at_the_end.enter_context(timed("train"))
        now[0] = 200
        lap = clock.lap()
        now[0] = 210
    assert lap.merged_spans("rollout") == (pytest.approx((0, 50)), pytest.approx((60, 70)))
    assert lap.merged_spans("train") == (pytest.approx((80, 100)),)
    assert lap.merged_spans("grade") == ()
    # what is still open goes on in the next step
    assert clock.lap().merged_spans("train") == (pytest.approx((0, 10)),)
