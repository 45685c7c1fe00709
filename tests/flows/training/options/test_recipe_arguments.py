"""Tests of arguments of recipes: counts as floats, runs without a length, the client of a judge, and devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from engine.errors import BadSpec
from engine.handles import InferenceModel, Model
from engine.local.engine import LocalEngine
from engine.protocol import SamplingParams
from engine.text.threads import StringThread
from flows.dpo import DPO
from flows.grpo import GRPO
from flows.gspo import GSPO
from flows.ppo import PPO
from flows.recipe import RecipeContext
from flows.reward_model import RewardModelling
from flows.sft import SFT
from flows.training.schedules import ConstantScheduler
from storage.chain.records import Chain
from tasks.graders.base import GraderError
from tasks.graders.judges import BinaryJudgeGrader
from tasks.graders.range_judge import RangeJudgeGrader
from tasks.graders.setting import grading_in
from tasks.graders.spec import grader_spec
from tests.fixtures.engines import DETERMINISTIC
from tests.fixtures.runs.batch_workspace import sampled_ids
from tests.fixtures.servers.http_engine import running_server
from tests.fixtures.spawning import language_model, own_engines, scoring_model

MODEL: Any = SimpleNamespace(sampling=SamplingParams())
"""A model that is only passed on."""
EVEN = grader_spec("tests.fixtures.grading:even_share", None)
PROMPTS = [StringThread([("user", str(digit))]) for digit in range(4)]


@pytest.fixture(autouse=True)
def engines() -> Iterator[None]:
    with own_engines():
        yield


def opened(folder: Path, run: str = "mine", **options: Any) -> RecipeContext:
    return RecipeContext.open(run, store=str(folder / "data"), **{"engine": DETERMINISTIC, **options})


# -- counts ----------------------------------------------------------------------------------------------------

MAKE: dict[str, Callable[..., Any]] = {
    "SFT": lambda **options: SFT([], MODEL, **options),
    "DPO": lambda **options: DPO([], MODEL, **options),
    "RewardModelling": lambda **options: RewardModelling([], MODEL, **options),
    "GRPO": lambda **options: GRPO([], MODEL, EVEN, **options),
    "GSPO": lambda **options: GSPO([], MODEL, EVEN, **options),
}


class WithoutCadence:
    async def at(self, moment: object) -> None: ...


class NumberAsCadence(WithoutCadence):
    cadence = 0.2


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.parametrize("callback", [WithoutCadence(), NumberAsCadence(), print])
def test_an_object_that_is_no_callback_is_refused_when_the_class_is_made(
    make: Callable[..., Any], callback: object
) -> None:
    with pytest.raises(TypeError, match=r"cadence = Cadence\(every=0.2\).*async def at\(self, moment\)"):
        make(callbacks=[callback])


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_a_whole_number_of_epochs_may_be_a_float_or_of_numpy(make: Callable[..., Any]) -> None:
    for two, sixteen in ((2.0, 16.0), (np.int64(2), np.int32(16))):
        trainer = make(epochs=two, samples_per_batch=sixteen)
        assert (trainer.epochs, trainer.samples_per_batch) == (2, 16)
        assert (type(trainer.epochs), type(trainer.samples_per_batch)) == (int, int)


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.parametrize("epochs", [0, -1, 1.5, float("nan"), float("inf"), "1", True])
def test_other_epochs_are_refused_when_the_class_is_made(make: Callable[..., Any], epochs: Any) -> None:
    with pytest.raises(ValueError, match=r"epochs=.*; give a whole number, 1 or more"):
        make(epochs=epochs)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        ("SFT", "max_steps"), ("SFT", "samples_per_batch"), ("GRPO", "max_num_grpo_steps"),
        ("GSPO", "max_num_gspo_steps"), ("GRPO", "completions_per_sample"), ("GRPO", "samples_per_batch"),
        ("GRPO", "samples_per_mini_batch"), ("GRPO", "mini_epochs_per_batch"),
    ],
)  # fmt: skip
def test_other_counts_are_named(make: str, name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}=0\.5; give a whole number"):
        MAKE[make](**{name: 0.5})


# -- runs without a given length -----------------------------------------------------------------------------


async def test_at_its_defaults_a_run_ends_with_the_data(
    prefect_server: str, tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """128 samples per batch are 16 prompts of 8 completions; 20 prompts are two steps."""
    ctx = opened(tmp_path)
    model = await language_model(ctx, tiny_folder, tokens=2)
    prompts = [StringThread([("user", str(number))]) for number in range(20)]
    policy = await GRPO(prompts, model, EVEN).run()
    assert policy.step == 2
    rates = [record.request.optimizer.lr for record in Chain.of(ctx.workspace.open_store(), policy).records(0, 2)]
    assert rates == pytest.approx([7.5e-7, 7.5e-7])  # one step of warm-up, then the top of the cosine
    assert "neither max_num_grpo_steps nor epochs was given: the run ends after one pass" in capsys.readouterr().out


@pytest.mark.slow
async def test_ppo_at_its_defaults_ends_with_the_data(prefect_server: str, tmp_path: Path, tiny_folder: Path) -> None:
    ctx = opened(tmp_path)
    model, value = await language_model(ctx, tiny_folder, tokens=2), await scoring_model(ctx, tiny_folder)
    policy = await PPO(PROMPTS, model, value, EVEN, samples_per_batch=2).run()
    assert policy.step == 2 and (await value.policy()).step == 2


def test_a_run_that_follows_no_progress_has_no_end() -> None:
    options: dict[str, Any] = {"lr_scheduler": ConstantScheduler(1e-6), "checkpoint_frequency": None}
    trainer = GRPO([], MODEL, EVEN, **options)
    assert (trainer.max_steps, trainer.epochs) == (None, None)
    assert GRPO([], MODEL, EVEN).epochs == GSPO([], MODEL, EVEN).epochs == 1


# -- sampling settings of the handle ---------------------------------------------------------------------------


async def test_a_stop_string_of_the_handle_ends_the_rollouts_of_a_recipe(
    prefect_server: str, tmp_path: Path, tiny_folder: Path
) -> None:
    """Two letters, which are two tokens. Up to them, the rollouts are those without a stop string."""

    async def rollouts(run: str, *stop: str) -> list[dict[str, Any]]:
        model = (await language_model(opened(tmp_path, run), tiny_folder, tokens=48)).stop(*stop)
        await GRPO(
            PROMPTS, model, EVEN, max_num_grpo_steps=1, samples_per_batch=32, checkpoint_frequency=None
        ).run()  # fmt: skip
        (shard,) = (tmp_path / "data").glob(f"runs/{run}/**/rollouts/**/*.parquet")
        return pq.read_table(shard).to_pylist()  # type: ignore[no-any-return]

    whole = await rollouts("whole")
    pairs = [row["text"][start : start + 2] for row in whole for start in range(4, len(row["text"]) - 1)]
    string = next(pair for pair in pairs if pair.isascii() and pair.isprintable())
    stopped = 0
    for cut, free in zip(await rollouts("cut", string), whole, strict=True):
        assert sampled_ids(cut) == sampled_ids(free)[: len(sampled_ids(cut))]
        assert string not in cut["text"][:-1]
        if cut["text"].endswith(string):
            assert cut["stop_reasons"] == ["stop"]
            stopped += 1
    assert stopped


# -- judges named by a key -------------------------------------------------------------------------------------


async def test_a_judge_named_by_a_key_is_spawned_in_the_open_context(tmp_path: Path, tiny_folder: Path) -> None:
    ctx = opened(tmp_path)
    judge = BinaryJudgeGrader("j", model=str(tiny_folder), criteria="Is it good?")
    await judge.setup()
    assert isinstance(judge.model, InferenceModel)
    assert judge.model.workspace.store == ctx.workspace.store


async def test_a_judge_takes_the_client_of_its_context(tmp_path: Path, tiny_folder: Path) -> None:
    first, second = opened(tmp_path / "first"), opened(tmp_path / "second")
    for client in (second.client, second, None):
        judge = BinaryJudgeGrader(grader_key="j", client=client, model=str(tiny_folder), criteria="Is it good?")
        await judge.setup()
        assert isinstance(judge.model, InferenceModel) and judge.model.workspace.store == second.workspace.store
    grader = RangeJudgeGrader("r", str(tiny_folder), "Is it good?", evaluation_steps=["Read it."], client=first)
    await grader.setup()
    assert isinstance(grader.model, InferenceModel) and grader.model.workspace.store == first.workspace.store
    with pytest.raises(GraderError, match=r"client=.* is not the engine of the run .*'mine'.*ctx\.client"):
        await BinaryJudgeGrader("j", client=first.client, model=str(tiny_folder), criteria="?").setup()
    with grading_in(first):
        await BinaryJudgeGrader("j", client=first.client, model=str(tiny_folder), criteria="?").setup()


async def test_a_client_beside_a_spawned_judge_changes_nothing(tmp_path: Path, tiny_folder: Path) -> None:
    ctx = opened(tmp_path)
    spawned = await Model(str(tiny_folder)).to_builder(ctx).spawn_inference("judge")
    judge = BinaryJudgeGrader(grader_key="j", client=ctx.client, model=spawned, criteria="Is it good?")
    await judge.setup()
    assert judge.model is spawned


# -- devices ---------------------------------------------------------------------------------------------------


async def test_the_world_is_the_devices_of_the_engine(tmp_path: Path, tiny_folder: Path) -> None:
    engine = LocalEngine(f"file://{tmp_path}/data", DETERMINISTIC)
    engine.devices = 4  # of a trainer over four GPUs, say
    with running_server(engine) as spec:
        ctx = opened(tmp_path, engine=spec)
        assert ctx.world_size == 4
        builder = Model(str(tiny_folder)).to_builder(ctx, tokens_to_generate=2)
        model = await builder.tp(ctx.world_size).spawn_inference("whole")
        assert (await model.generate(PROMPTS[0])).turns[-1].role == "assistant"
        with pytest.raises(BadSpec, match=r"tp\(3\)"):
            await (await builder.tp(3).spawn_inference("part")).generate(PROMPTS[0])


async def test_one_cpu_is_a_world_of_one(tmp_path: Path) -> None:
    assert opened(tmp_path).world_size == 1
