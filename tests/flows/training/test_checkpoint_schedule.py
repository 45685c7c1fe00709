"""Tests of when checkpoints are due, which are written, and what they are named."""

from __future__ import annotations

from typing import Any

import pytest

from flows.configs.common import CheckpointConfig
from flows.training.checkpointing import CheckpointSchedule


def named(total: int | None, steps: int | None = None, **config: Any) -> dict[int, str]:
    """Named checkpoints by the number of steps done."""
    schedule = CheckpointSchedule(CheckpointConfig(**config))
    due = {step + 1: schedule.due(step, total, model="policy") for step in range(steps or total or 0)}
    return {done: found.named for done, found in due.items() if found is not None and found.named is not None}


def test_a_fifth_of_ten_steps_is_every_second_step() -> None:
    assert named(10, frequency=0.2) == {
        2: "policy-0.2", 4: "policy-0.4", 6: "policy-0.6", 8: "policy-0.8", 10: "policy-1",
    }  # fmt: skip


def test_a_fifth_of_seven_steps_is_after_the_step_that_reaches_each_fifth() -> None:
    # ceil(7 k / 5) for k = 1 … 5
    assert list(named(7, frequency=0.2)) == [2, 3, 5, 6, 7]


@pytest.mark.parametrize("frequency", [0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 1 / 3, 0.7, 1.0])
@pytest.mark.parametrize("total", [1, 2, 3, 7, 10, 20, 60, 100, 199])
def test_a_checkpoint_stands_where_a_multiple_of_the_fraction_is_first_reached(frequency: float, total: int) -> None:
    expected = {-(-round(k * frequency * total * 3e6) // 3_000_000) for k in range(1, int(1 / frequency + 1e-9) + 1)}
    assert set(named(total, frequency=frequency)) == expected


def test_every_so_many_steps_goes_before_the_fraction_and_needs_no_end() -> None:
    assert named(10, every_steps=3, frequency=0.2) == {3: "policy-3", 6: "policy-6", 9: "policy-9"}
    assert named(None, 7, every_steps=3, frequency=None) == {3: "policy-3", 6: "policy-6"}
    assert named(None, 7, frequency=None) == {}


def test_a_resume_writes_the_named_checkpoint_that_a_crash_came_before() -> None:
    schedule = CheckpointSchedule(CheckpointConfig(every_steps=2, recovery_steps=1))
    missed = [schedule.missed(done, 4, model="policy") for done in range(5)]
    assert [found and found.named for found in missed] == [None, None, "policy-2", None, "policy-4"]


def test_recovery_checkpoints_are_unnamed() -> None:
    schedule = CheckpointSchedule(CheckpointConfig(frequency=None, recovery_steps=2))
    due = [schedule.due(step, 5, model="policy") for step in range(5)]
    assert [found is not None for found in due] == [False, True, False, True, False]
    assert all(found.named is None for found in due if found)


def test_a_recovery_checkpoint_is_due_when_the_last_is_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("flows.training.checkpointing.time.monotonic", lambda: now[0])
    schedule = CheckpointSchedule(CheckpointConfig(frequency=None, recovery_seconds=60.0))
    written = []
    for step in range(6):
        now[0] += 25.0
        if schedule.due(step, None, model="policy"):
            written.append(step)
    # 75 s and 150 s after the start: each counts from the last write
    assert written == [2, 5]


class FakeTime:
    """A clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("flows.training.checkpointing.time.monotonic", lambda: self.now)

    def due(self, schedule: CheckpointSchedule, total: int, *, step_seconds: float) -> dict[str, bool]:
        """The names of a run's checkpoints, and whether they are written."""
        found = {}
        for step in range(total):
            self.now += step_seconds
            due = schedule.due(step, total, model="policy")
            if due is not None and due.named is not None:
                found[due.named] = not due.name_only
        return found


def test_checkpoints_of_shares_that_would_be_seconds_apart_are_only_names(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime(monkeypatch)
    quick = clock.due(CheckpointSchedule(CheckpointConfig(frequency=0.2)), 5, step_seconds=10)
    assert quick == {
        "policy-0.2": False,
        "policy-0.4": False,
        "policy-0.6": False,
        "policy-0.8": False,
        "policy-1": True,
    }
    # 60 s after the last one, which was written after 75 s
    slow = clock.due(CheckpointSchedule(CheckpointConfig(frequency=0.2)), 10, step_seconds=25)
    assert slow == {"policy-0.2": False, "policy-0.4": True, "policy-0.6": False, "policy-0.8": True, "policy-1": True}


def test_a_long_save_makes_checkpoints_of_shares_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime(monkeypatch)
    schedule = CheckpointSchedule(CheckpointConfig(frequency=0.25, recovery_seconds=1e6))
    schedule.saved(15.0)
    # 150 s is ten times 15 s
    found = clock.due(schedule, 4, step_seconds=100)
    assert found == {"policy-0.25": False, "policy-0.5": True, "policy-0.75": False, "policy-1": True}


def test_steps_and_recovery_checkpoints_are_never_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime(monkeypatch)
    by_steps = clock.due(CheckpointSchedule(CheckpointConfig(every_steps=1)), 3, step_seconds=0)
    assert by_steps == {"policy-1": True, "policy-2": True, "policy-3": True}
    recovery = clock.due(CheckpointSchedule(CheckpointConfig(frequency=0.5, recovery_steps=1)), 4, step_seconds=0)
    assert recovery == {"policy-0.5": True, "policy-1": True}


def test_a_resume_gives_the_name_and_writes_the_last_checkpoint() -> None:
    schedule = CheckpointSchedule(CheckpointConfig(frequency=0.5))
    missed = [schedule.missed(done, 4, model="policy") for done in range(5)]
    assert [found and (found.named, found.name_only) for found in missed] == [
        None, None, ("policy-0.5", True), None, ("policy-1", False),
    ]  # fmt: skip
