"""Tests of `restart_from_checkpoint` and `stage_notifier`. A stage starts at a named checkpoint with a new optimizer,
also after an interruption, and the notifier receives the progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flows.training.supervised_loop
from engine.errors import BadSpec
from engine.handles import Model, TrainingModel
from engine.text.threads import StringThread
from flows.configs.common import CheckpointConfig
from flows.loggers import StageNotifier
from flows.ppo import PPO
from flows.recipe import RecipeContext
from flows.sft import SFT
from flows.training.checkpointing import CheckpointSchedule
from flows.training.schedules import ConstantScheduler
from storage.chain.checkpoint_names import named_checkpoints
from storage.chain.fork import fork_run
from storage.chain.listing import stored_checkpoint_steps
from storage.chain.records import Chain, PolicyRef
from storage.chain.retention import remove_checkpoints
from storage.errors import NoSuchCheckpoint
from storage.registry.models import registered_key
from storage.store import keys
from storage.store.objects import ObjectStore
from tasks.graders.spec import grader_spec
from tests.fixtures.engines import DETERMINISTIC
from tests.fixtures.spawning import own_engines

pytestmark = pytest.mark.usefixtures("prefect_server")
THREADS = [StringThread([("user", str(digit)), ("assistant", str(digit) * 3)]) for digit in range(8)]
STEPS = 4


class RecordingNotifier(StageNotifier):
    """Records (done, total) of each report."""

    def __init__(self) -> None:
        super().__init__("SFT Training")
        self.reports: list[tuple[float, float]] = []

    def report_progress(self, done: float, total: float = 1.0) -> None:
        self.reports.append((done, total))


class SFTRuns:
    """Short SFT runs in one store, each in an engine of its own."""

    def __init__(self, folder: Path, tiny_folder: Path) -> None:
        self.folder, self.base = folder, str(tiny_folder)

    def open(self, run: str) -> RecipeContext:
        return RecipeContext.open(run, store=str(self.folder / "data"), engine=DETERMINISTIC)

    @property
    def store(self) -> ObjectStore:
        return self.open("reader").workspace.open_store()

    async def spawn(self, run: str, *, key: str = "", name: str = "policy") -> TrainingModel:
        return await Model(key or self.base).to_builder(self.open(run)).spawn_train(name)

    async def sft(self, run: str, *, key: str = "", **options: Any) -> PolicyRef:
        with own_engines():
            return await self.train(await self.spawn(run, key=key), **options)

    async def train(self, model: TrainingModel, **options: Any) -> PolicyRef:
        defaults: dict[str, Any] = {
            "lr_scheduler": ConstantScheduler(3e-3), "samples_per_batch": 4, "max_steps": STEPS,
            "checkpoint_every_steps": 2, "weight_decay": 0.1,
        }  # fmt: skip
        return await SFT(THREADS, model, **{**defaults, **options}).run()

    async def publish(self, policy: PolicyRef) -> str:
        with own_engines():
            workspace = self.open("publisher").workspace
            ref = await workspace.connect().export_model(policy, "published", provenance=workspace.provenance)
            return registered_key(ref)

    def digests(self, policy: PolicyRef) -> list[str | None]:
        chain = Chain.of(self.store, policy)
        return [record.weights_digest for record in chain.records(0, chain.head().step)]


@pytest.fixture
def runs(tmp_path: Path, tiny_folder: Path) -> SFTRuns:
    return SFTRuns(tmp_path, tiny_folder)


async def test_it_begins_with_the_checkpoints_weights_and_a_new_optimizer(runs: SFTRuns) -> None:
    first = await runs.sft("first")
    middle = Chain.of(runs.store, first).policy(2)
    again = await runs.sft("again", restart_from_checkpoint="first/0-sft/policy-2")
    root = Chain.of(runs.store, again).root()
    assert root is not None and root.start == middle
    # By definition the steps are those of a new run on the published weights.
    plain = await runs.sft("plain", key=await runs.publish(middle))
    assert None not in runs.digests(plain)
    assert runs.digests(again) == runs.digests(plain)
    assert runs.digests(again) != runs.digests(first)


async def test_a_share_of_a_quick_run_is_a_name_to_restart_from(runs: SFTRuns) -> None:
    first = await runs.sft("first", checkpoint_every_steps=None, checkpoint_frequency=0.25)
    chain = Chain.of(runs.store, first)
    names = [checkpoint.name for checkpoint in named_checkpoints(runs.store, "first")]
    assert names == ["policy-0.25", "policy-0.5", "policy-0.75", "policy-1"]
    assert stored_checkpoint_steps(chain) == [STEPS]
    # The stage begins with the weights that the committed steps lead to.
    again = await runs.sft("again", max_steps=1, restart_from_checkpoint="first/policy-0.5")
    root = Chain.of(runs.store, again).root()
    assert root is not None and root.start == chain.policy(2)
    plain = await runs.sft("plain", max_steps=1, key=await runs.publish(chain.policy(2)))
    assert runs.digests(again) == runs.digests(plain)


@pytest.mark.slow
async def test_an_interrupted_restart_ends_with_the_same_bytes(runs: SFTRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    await runs.sft("first")
    restart = {"restart_from_checkpoint": "first/policy-2"}
    whole = await runs.sft("whole", **restart)
    take, calls = flows.training.supervised_loop.take_gradient_step, []

    async def interrupted(*args: Any, step: int, **rest: Any) -> PolicyRef:
        calls.append(step)
        if calls == [0, 1, 2]:
            raise RuntimeError("the power went out")
        return await take(*args, step=step, **rest)

    monkeypatch.setattr(flows.training.supervised_loop, "take_gradient_step", interrupted)
    with pytest.raises(RuntimeError, match="power"):
        await runs.sft("cut", **restart)
    # A stage that has begun keeps its start, also when another checkpoint takes the name.
    with own_engines():
        model = await runs.spawn("first")
        await runs.train(model)
        await runs.train(model)
    cut = await runs.sft("cut", **restart)
    assert calls == [0, 1, 2, 0, 1, 2, 3, 2, 3]  # cut; the stage named alike; the rest
    assert runs.digests(cut) == runs.digests(whole)
    assert cut.state == whole.state


@pytest.mark.slow
async def test_an_earlier_stage_of_the_own_run(runs: SFTRuns) -> None:
    with own_engines():
        model = await runs.spawn("two")
        first = await runs.train(model)
        second = await runs.train(model, restart_from_checkpoint="policy-2")
        assert (first.stage, second.stage) == ("0-sft", "1-sft")
        root = Chain.of(runs.store, second).root()
        assert root is not None and root.start == Chain.of(runs.store, first).policy(2)
        # Now both stages have a checkpoint of that name.
        with pytest.raises(NoSuchCheckpoint, match="names 2 checkpoints: two/0-sft/policy-2, two/1-sft/policy-2"):
            await runs.train(model, restart_from_checkpoint="policy-2")
        third = await runs.train(model, restart_from_checkpoint="1-sft/policy-2")
        root = Chain.of(runs.store, third).root()
        assert root is not None and root.start == Chain.of(runs.store, second).policy(2)


async def test_a_stage_of_another_model_of_the_own_run(runs: SFTRuns) -> None:
    options: dict[str, Any] = {"max_steps": 2, "checkpoint_every_steps": None, "checkpoint_frequency": 0.5}
    with own_engines():
        await runs.train(await runs.spawn("both"), **options)
        second = await runs.train(await runs.spawn("both", name="q"), **options)
        assert second.stage == "0-sft.q"
        # Each model counts its own stages, so this one is a stage 0, too.
        for number, text in enumerate(("q-0.5", "0-sft.q/q-0.5", "both/q-0.5", "both/0-sft.q/q-0.5")):
            model = await runs.spawn("both", name=f"r{number}")
            third = await runs.train(model, **options | {"max_steps": 1}, restart_from_checkpoint=text)
            root = Chain.of(runs.store, third).root()
            assert root is not None and root.start == Chain.of(runs.store, second).policy(1)
        with pytest.raises(NoSuchCheckpoint) as refused:
            await runs.train(await runs.spawn("both", name="s"), restart_from_checkpoint="q-0.6")
    for title in ("both/0-sft/policy-0.5", "both/0-sft.q/q-0.5", "both/0-sft.q/q-1"):
        assert title in str(refused.value)


async def test_a_stage_does_not_restart_from_itself(runs: SFTRuns) -> None:
    await runs.sft("first")
    message = r"'0-sft/policy-2' to restart 0-sft of first.*; first/0-sft/policy-2 is of this stage or a later one"
    with pytest.raises(NoSuchCheckpoint, match=message):
        await runs.sft("first", restart_from_checkpoint="0-sft/policy-2")


async def test_what_does_not_exist_is_an_error_that_lists_what_does(runs: SFTRuns) -> None:
    first = await runs.sft("first")
    assert [checkpoint.title for checkpoint in named_checkpoints(runs.store, "first")] == [
        "first/0-sft/policy-2", "first/0-sft/policy-4",
    ]  # fmt: skip
    with pytest.raises(NoSuchCheckpoint, match="there are first/0-sft/policy-2, first/0-sft/policy-4"):
        await runs.sft("second", restart_from_checkpoint="first/policy-3")
    with pytest.raises(NoSuchCheckpoint, match="no named checkpoint was found.* given as run/stage/name"):
        # A checkpoint of another run needs the name of that run.
        await runs.sft("second", restart_from_checkpoint="policy-2")
    assert Chain(runs.store, "second", first.stage, "policy").root() is None


@pytest.mark.slow
async def test_a_stage_that_began_outlives_the_checkpoint_it_began_with(runs: SFTRuns) -> None:
    first = await runs.sft("first")
    restart = {"restart_from_checkpoint": "first/policy-2"}
    again = await runs.sft("again", max_steps=2, **restart)
    pruned = keys.checkpoint(first.run, first.stage, first.model, 2)
    for info in list(runs.store.list(f"{pruned}/")):
        runs.store.delete(info.key)
    assert [checkpoint.name for checkpoint in named_checkpoints(runs.store, "first")] == ["policy-4"]
    assert await runs.sft("again", max_steps=2, **restart) == again
    with pytest.raises(NoSuchCheckpoint):
        await runs.sft("late", max_steps=2, **restart)


@pytest.mark.slow
async def test_a_run_goes_on_after_its_named_checkpoints_were_removed(runs: SFTRuns) -> None:
    whole = await runs.sft("whole")
    half = await runs.sft("half", max_steps=2)
    (named,) = named_checkpoints(runs.store, "half")
    remove_checkpoints(runs.store, [named.policy])
    assert (half.step, named.policy) == (2, half)
    resumed = await runs.sft("half")
    assert runs.digests(resumed) == runs.digests(whole)
    assert resumed.state == whole.state


async def test_only_the_latest_named_checkpoints_are_kept(runs: SFTRuns) -> None:
    schedule = CheckpointSchedule(CheckpointConfig(every_steps=1, keep_named=2))
    with own_engines():
        await runs.train(await runs.spawn("r"), checkpoints=schedule)
    names = [checkpoint.name for checkpoint in named_checkpoints(runs.store, "r")]
    assert names == ["policy-3", "policy-4"]


async def test_a_checkpoint_of_another_base_or_trained_part_is_refused(runs: SFTRuns) -> None:
    first = await runs.sft("first")
    restart = {"restart_from_checkpoint": "first/policy-2"}
    with own_engines():
        builder = Model(runs.base).to_builder(runs.open("adapter")).with_adapter(rank=2)
        with pytest.raises(BadSpec, match="'full'.* and 'policy' trains .*'lora'"):
            await runs.train(await builder.spawn_train("policy"), **restart)
    key = await runs.publish(first)
    with pytest.raises(BadSpec, match="descends from .*, and 'policy' was spawned from models/published/"):
        await runs.sft("other", key=key, **restart)


@pytest.mark.slow
async def test_a_fork_of_a_restarted_run_begins_where_it_began(runs: SFTRuns) -> None:
    await runs.sft("first")
    restarted = await runs.sft("restarted", restart_from_checkpoint="first/policy-2")
    fork_run(runs.store, "restarted", "forked", step=2, code_version="test")
    forked = await runs.sft("forked", restart_from_checkpoint="first/policy-2")
    assert runs.digests(forked) == runs.digests(restarted)


@pytest.mark.slow
async def test_ppo_takes_the_value_model_of_the_same_iteration(runs: SFTRuns) -> None:
    prompts = [StringThread([("user", str(digit))]) for digit in range(4)]

    async def ppo(run: str, **options: Any) -> PPO:
        with own_engines():
            builder = Model(runs.base).to_builder(runs.open(run))
            model, value = await builder.spawn_train("policy"), await builder.into_scoring_model().spawn_train("value")
            trainer = PPO(
                prompts, model.max_gen_len(6), value, grader_spec("tests.fixtures.grading:even_share", None),
                max_num_ppo_steps=2, value_only_fraction=0, samples_per_batch=4, samples_per_mini_batch=4,
                lr_policy=1e-3, lr_value=1e-3, checkpoint_every_steps=1, **options,
            )  # fmt: skip
            await trainer.run()
            return trainer

    await ppo("first")
    await ppo("again", restart_from_checkpoint="first/policy-1")
    for name in ("policy", "value"):
        root = Chain(runs.store, "again", "0-ppo", name).root()
        assert root is not None
        assert root.start == Chain(runs.store, "first", "0-ppo", name).policy(1)


async def test_a_stage_notifier_hears_of_every_step(runs: SFTRuns) -> None:
    notifier = RecordingNotifier()
    await runs.sft("heard", stage_notifier=notifier)
    assert notifier.reports == [(done, STEPS) for done in range(STEPS + 1)]
    again = RecordingNotifier()
    await runs.sft("heard", stage_notifier=again)
    assert again.reports == [(STEPS, STEPS)]  # of a finished stage
