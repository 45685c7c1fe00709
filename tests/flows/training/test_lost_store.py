"""Tests of a run whose store folder disappears: it continues when the folder is back, and creates no other store."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.handles import Model
from engine.text.threads import StringThread
from flows.loggers import StageNotifier
from flows.recipe import RecipeContext
from flows.sft import SFT
from flows.training.schedules import ConstantScheduler
from storage.chain.records import Chain, PolicyRef
from storage.errors import OtherStore
from storage.store.objects import open_store, store_id
from storage.store.retry import RetryPolicy
from tests.fixtures.engines import DETERMINISTIC
from tests.fixtures.spawning import own_engines

pytestmark = pytest.mark.usefixtures("prefect_server")
THREADS = [StringThread([("user", str(digit)), ("assistant", str(digit) * 3)]) for digit in range(4)]
STEPS = 3


class AfterOneStep(StageNotifier):
    """Calls `act` once, when the first step is committed."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__("SFT Training")
        self.act, self.acted = act, False

    def report_progress(self, done: float, total: float = 1.0) -> None:
        if done > 0 and not self.acted:
            self.acted = True
            self.act()


async def train(folder: Path, tiny_folder: Path, after_one_step: Callable[[], object]) -> PolicyRef:
    with own_engines():
        context = RecipeContext.open("r", store=str(folder), engine=DETERMINISTIC)
        model = await Model(str(tiny_folder)).to_builder(context).spawn_train("policy")
        notifier = AfterOneStep(after_one_step)
        return await SFT(
            THREADS, model, lr_scheduler=ConstantScheduler(1e-3), samples_per_batch=4, max_steps=STEPS,
            stage_notifier=notifier,
        ).run()  # fmt: skip


async def test_the_run_goes_on_when_the_folder_is_back(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, away = tmp_path / "data", tmp_path / "away"
    began_another = []

    def mount_again(_policy: RetryPolicy, _attempt: int) -> float:
        if away.exists():
            began_another.append(folder.exists())
            away.rename(folder)
        return 0.0

    monkeypatch.setattr(RetryPolicy, "delay", mount_again)  # the wait between two tries of the store
    policy = await train(folder, tiny_folder, lambda: folder.rename(away))
    assert policy.step == STEPS
    assert list(Chain.of(open_store(folder), policy).steps()) == [1, 2, 3]
    assert began_another == [False]


async def test_another_store_in_its_place_is_refused_and_not_written_to(tmp_path: Path, tiny_folder: Path) -> None:
    folder, other = tmp_path / "data", tmp_path / "other"
    store_id(open_store(other))

    def replace() -> None:
        folder.rename(tmp_path / "away")
        shutil.copytree(other, folder)

    with pytest.raises(OtherStore, match="holds another store than before"):
        await train(folder, tiny_folder, replace)
    written = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert written == {"store.json", "index/complete.json"}
    first = Chain(open_store(tmp_path / "away"), "r", "0-sft", "policy")
    assert list(first.steps()) == [1]
