"""Tests of when checkpoints are due, which are written, and what they are named."""

from __future__ import annotations

import asyncio
import selectors
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.workspace import Workspace
from flows.configs.common import CheckpointConfig, GRPOConfig
from flows.display.terminal import TerminalProgress
from flows.runs.session import workspace_of
from flows.training.checkpointing import CheckpointSchedule, CheckpointWriter, Due
from flows.training.endings import Ending
from flows.training.finish import finish_recipe
from flows.training.step_reporter import TimeLeft
from flows.training.training_steps import _checkpoint_saved
from storage.chain.listing import stored_checkpoint_steps
from storage.chain.records import PolicyRef
from storage.errors import StorageUnavailable
from storage.store import keys
from storage.store.artifacts import Provenance
from tests.fixtures.runs.toy_run import ToyRun


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
    schedule.begun(1.0)
    schedule.ended(15.0)
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


WORKSPACE = Workspace(
    store="memory://slow-saves", run="run", provenance=Provenance(code_version="test", config_digest="0" * 64, seed=0)
)


class VirtualSelector(selectors.SelectSelector):
    """Moves the clock of the loop on instead of waiting."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select()
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when nothing else is to be done."""

    def __init__(self) -> None:
        self._clock = VirtualSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


class SlowSaves:
    """A run on a virtual clock with the real classes: a copy of the weights stops the training, an upload does not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, copy: float, upload: float) -> None:
        self.loop = VirtualLoop()
        self.begun: list[int] = []
        self.saving, self.most = 0, 0
        self.fails_at: int | None = None
        monkeypatch.setattr("flows.training.checkpointing.time.monotonic", self.loop.time)

        async def begin(_: object, policy: PolicyRef, **__: object) -> None:
            self.begun.append(policy.step)
            await asyncio.sleep(copy)

        async def save(_: object, policy: PolicyRef, **__: object) -> None:
            self.saving += 1
            self.most = max(self.most, self.saving)
            await asyncio.sleep(upload)
            self.saving -= 1
            if policy.step == self.fails_at:
                raise StorageUnavailable("the store is away")

        monkeypatch.setattr("flows.training.checkpointing.begin_checkpoint", begin)
        monkeypatch.setattr("flows.training.checkpointing.save_checkpoint", save)

    def saves_at_the_end(self, *models: str) -> list[tuple[str, int]]:
        """The checkpoints that are reported, of a run whose last step has a named checkpoint."""
        reported: list[tuple[str, int]] = []

        async def end() -> None:
            def saved(policy: PolicyRef, seconds: float) -> None:
                reported.append((policy.model, policy.step))

            policies = [policy_at(6).model_copy(update={"model": model}) for model in models]
            async with CheckpointWriter(WORKSPACE, CheckpointSchedule(), on_saved=saved) as writer:
                await writer.write(policies, Due("policy-1"))
                await writer.write_last(policies)

        try:
            self.loop.run_until_complete(end())
        finally:
            self.loop.close()
        return reported

    def run(
        self, config: CheckpointConfig, steps: int, *, step_seconds: float, models: int = 1
    ) -> tuple[float, float]:
        """(seconds until the last step is done, seconds until the last checkpoint is saved)"""

        async def train() -> tuple[float, float]:
            started = self.loop.time()
            schedule = CheckpointSchedule(config)
            async with CheckpointWriter(WORKSPACE, schedule) as writer:
                for step in range(steps):
                    await asyncio.sleep(step_seconds)
                    due = schedule.due(step, steps, model="policy")
                    if due is not None:
                        await writer.write([policy_at(step + 1)] * models, due)
                trained = self.loop.time() - started
            return trained, self.loop.time() - started

        try:
            return self.loop.run_until_complete(train())
        finally:
            self.loop.close()


def policy_at(step: int) -> PolicyRef:
    return PolicyRef(run="run", stage="stage", model="policy", step=step, state="0" * 64)


def test_recovery_checkpoints_that_take_longer_than_their_interval_do_not_stop_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 60 steps of 102 s are 6,120 s. A save takes 590 s, which is longer than the interval of 300 s.
    world = SlowSaves(monkeypatch, copy=5.0, upload=585.0)
    trained, ended = world.run(CheckpointConfig(frequency=None), 60, step_seconds=102.0)
    assert trained == 60 * 102.0 + 5.0 * len(world.begun), "only the copies of the weights stop the training"
    assert world.most == 1
    # After a commit, 300 s pass before the next begins at the end of a step: nine steps of 102 s from one to the next.
    assert world.begun == [3, 12, 21, 30, 39, 48, 57]
    assert ended == pytest.approx(max(trained, (57 * 102 + 7 * 5) + 585)), "the end waits for the last one"


def test_copies_take_at_most_a_fiftieth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # The copy takes 60 s, so that the next one is due 3,000 s after the last was committed, not 300 s.
    world = SlowSaves(monkeypatch, copy=60.0, upload=40.0)
    trained, _ = world.run(CheckpointConfig(frequency=None), 500, step_seconds=100.0)
    assert trained == 500 * 100.0 + 60.0 * len(world.begun)
    assert 60.0 * (len(world.begun) - 1) <= 0.02 * trained
    assert len(world.begun) > 10


def test_the_copies_of_two_models_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SlowSaves(monkeypatch, copy=60.0, upload=40.0)
    trained, _ = world.run(CheckpointConfig(frequency=None), 500, step_seconds=100.0, models=2)
    assert 60.0 * (len(world.begun) - 2) <= 0.02 * trained
    assert len(world.begun) > 10


def test_a_recovery_step_within_a_save_is_made_up_for_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Due after each fifth step; the save of step 5 ends between steps 11 and 12.
    world = SlowSaves(monkeypatch, copy=0.0, upload=65.0)
    config = CheckpointConfig(frequency=None, recovery_steps=5, recovery_seconds=1e6)
    world.run(config, 20, step_seconds=10.0)
    assert world.begun == [5, 12, 19]


def test_named_checkpoints_at_intervals_of_steps_are_all_saved_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SlowSaves(monkeypatch, copy=1.0, upload=100.0)
    trained, ended = world.run(CheckpointConfig(every_steps=2, recovery_seconds=1e6), 6, step_seconds=10.0)
    assert world.begun == [2, 4, 6] and world.most == 1
    assert trained == 6 * 10.0 + 3 * 1.0
    assert ended == 20.0 + 1.0 + 3 * 100.0


def test_the_checkpoint_of_the_last_step_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SlowSaves(monkeypatch, copy=1.0, upload=10.0)
    assert world.saves_at_the_end("policy", "value") == [("policy", 6), ("value", 6)]
    assert world.begun == [6, 6, 6, 6], "named, and again with what a finished run keeps"


@pytest.mark.parametrize(
    ("step", "total", "ending", "is_last"),
    [(5, 6, None, False), (5, None, None, False), (6, 6, None, True),
     (5, 6, Ending(step=5, rule="patience", reason="no better", limit=2), True)],
)  # fmt: skip
def test_the_line_of_a_checkpoint_says_what_a_kill_costs_until_the_next_one(
    step: int, total: int | None, ending: Ending | None, is_last: bool
) -> None:
    lines: list[str] = []
    logger = SimpleNamespace(note=lines.append)
    loop: Any = SimpleNamespace(logger=logger, ending=ending, checkpoints=CheckpointSchedule())
    _checkpoint_saved(loop, TimeLeft(total, {}), total, policy_at(step), 2.0)
    line = f"checkpoint of step {step} of policy saved in 2s"
    more = "; until the next one, a kill repeats up to about 5m00s of training"
    assert lines == [line if is_last else line + more]


def test_a_checkpoint_that_fails_ends_the_loop_at_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SlowSaves(monkeypatch, copy=1.0, upload=10.0)
    world.fails_at = 2
    with pytest.raises(StorageUnavailable):
        world.run(CheckpointConfig(every_steps=2, recovery_seconds=1e6), 60, step_seconds=10.0)
    assert world.begun == [2], "the next one, which was due after step 4, did not begin"


def test_a_finished_recipe_keeps_the_checkpoints_that_its_loops_wrote(toy_run: ToyRun, tmp_path: Path) -> None:
    toy = toy_run.copied(tmp_path / "copy")
    toy.store.delete(keys.result_json("toy"))
    workspace = workspace_of(GRPOConfig.model_validate(toy.config), "toy")
    steps = stored_checkpoint_steps(toy.chain)
    asyncio.run(finish_recipe(workspace, {"run": "toy"}, TerminalProgress()))
    assert stored_checkpoint_steps(toy.chain) == steps == [2, 4]
