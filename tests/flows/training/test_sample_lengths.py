"""`max_batch_size` of a spawned model in the training classes: a longer sample is refused or left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.errors import BadSpec, SampleTooLong
from engine.handles import Model, TrainingModel
from engine.text.threads import StringThread
from flows.callbacks import Cadence, ValidationLoss
from flows.catalogue import DPOConfig
from flows.dpo import DPO
from flows.grpo import GRPO
from flows.recipe import RecipeContext
from flows.reward_model import RewardModelling
from flows.sft import SFT
from storage.chain.records import Chain, PolicyRef
from storage.inspect.accounting import check_accounting
from storage.store.objects import open_store
from tasks.batches.truncation import LengthPlan
from tasks.evaluation.validation_curve import read_validations
from tasks.graders.spec import grader_spec
from tasks.reports.step_metrics import read_metrics
from tests.fixtures.engines import DETERMINISTIC
from tests.fixtures.spawning import own_engines

pytestmark = pytest.mark.usefixtures("prefect_server")
SIZE = 64
SHORT, LONG = "1", "1" * 100
EVERY_STEP: dict[str, Any] = {"lr": 1e-3, "samples_per_batch": 4, "checkpoint_frequency": None}


def answered(text: str) -> StringThread:
    return StringThread([("user", "?"), ("assistant", text)])


async def spawned(folder: Path, tiny_folder: Path, *, scalar: bool = False) -> TrainingModel:
    ctx = RecipeContext.open("lengths", store=str(folder / "data"), engine=DETERMINISTIC)
    builder = Model(str(tiny_folder)).to_builder(ctx, tokens_to_generate=4)
    return await (builder.into_scoring_model() if scalar else builder).spawn_train("policy", SIZE)


def trainer(kind: str, model: TrainingModel, truncation: str) -> SFT | DPO | RewardModelling | GRPO:
    texts = [SHORT, LONG, SHORT, SHORT]
    options = EVERY_STEP | {"truncation": truncation}
    if kind == "sft":
        return SFT([answered(text) for text in texts], model, **options)
    if kind in ("dpo", "reward_model"):
        pairs = [(answered(text), answered("2")) for text in texts]
        return DPO(pairs, model, **options) if kind == "dpo" else RewardModelling(pairs, model, **options)
    prompts = [StringThread([("user", text)]) for text in texts]
    grader = grader_spec("tests.fixtures.grading:even_share", None)
    return GRPO(prompts, model, grader, max_num_grpo_steps=1, completions_per_sample=1, **options)


@pytest.mark.parametrize(
    ("kind", "dropped"),
    [("sft", 1), ("dpo", 1), ("reward_model", 1), ("grpo", 0)],  # prompts are left out before a batch is formed
)
async def test_a_longer_sample_is_refused_or_left_out(
    tmp_path: Path, tiny_folder: Path, kind: str, dropped: int
) -> None:
    with own_engines():
        model = await spawned(tmp_path / "error", tiny_folder, scalar=kind == "reward_model")
        with pytest.raises(SampleTooLong, match=r"row \d.*max_batch_size.*drop"):
            await trainer(kind, model, "error").run()
    with own_engines():
        model = await spawned(tmp_path / "drop", tiny_folder, scalar=kind == "reward_model")
        policy: PolicyRef = await trainer(kind, model, "drop").run()
    store = open_store(str(tmp_path / "drop" / "data"))
    (metrics,) = read_metrics(store, policy.run, policy.stage, steps=1)
    assert (metrics.dropped, metrics.prompts) == (dropped, 3)
    record = Chain(store, policy.run, policy.stage, policy.model).record(1)
    assert record is not None and check_accounting(store, record) == []


@pytest.mark.parametrize("kind", ["dpo", "reward_model"])
async def test_a_held_out_pair_with_a_longer_answer_counts_for_nothing(
    tmp_path: Path, tiny_folder: Path, kind: str
) -> None:
    fits, longer = (answered("3"), answered("4")), (answered(LONG), answered("2"))
    measured = []
    for name, heldout in (("alone", [fits]), ("with-longer", [longer, fits])):
        validation = ValidationLoss(heldout, Cadence(every_steps=1), LengthPlan(truncation="drop"))
        with own_engines():
            model = await spawned(tmp_path / name, tiny_folder, scalar=kind == "reward_model")
            options = EVERY_STEP | {"callbacks": [validation]}
            trained = DPO([fits], model, **options) if kind == "dpo" else RewardModelling([fits], model, **options)
            policy = await trained.run()
        store = open_store(str(tmp_path / name / "data"))
        measured.append(read_validations(store, policy.run, policy.stage)[-1].measures)
    assert measured[0]["margin"] != 0 and measured[1] == pytest.approx(measured[0], rel=1e-4)


async def test_a_pair_is_in_one_forward_pass(tmp_path: Path, tiny_folder: Path) -> None:
    """Neither of its conversations is too long, but both are of other tokens and are computed together."""
    with own_engines():
        model = await spawned(tmp_path, tiny_folder)
        with pytest.raises(SampleTooLong, match="pair .*max_batch_size"):
            await DPO([(answered("a" * 40), answered("b" * 40))], model, **EVERY_STEP).run()


@pytest.mark.parametrize("kind", ["sft", "dpo"])
async def test_a_batch_of_longer_samples_only_is_an_error_that_counts_steps_from_1(
    tmp_path: Path, tiny_folder: Path, kind: str
) -> None:
    options = EVERY_STEP | {"truncation": "drop"}
    with own_engines():
        model = await spawned(tmp_path, tiny_folder)
        rows = [(answered(LONG), answered("2"))]
        train = DPO(rows, model, **options) if kind == "dpo" else SFT([rows[0][0]], model, **options)
        with pytest.raises(BadSpec, match=r"^step 1: .*dropped.*max_batch_size"):
            await train.run()


async def test_completions_leave_room_for_a_prompt(tmp_path: Path, tiny_folder: Path) -> None:
    with own_engines():
        model = (await spawned(tmp_path, tiny_folder)).max_gen_len(SIZE)
        with pytest.raises(BadSpec, match="no room for a prompt in the model's max_batch_size of 64"):
            await trainer("grpo", model, "error").run()


def test_pairs_are_not_cut() -> None:
    with pytest.raises(ValueError, match="truncation='left'.*error or drop"):
        DPO([], None, truncation="left")  # type: ignore[arg-type]
    body = {"model": {"key": "m"}, "data": {"train": {"kind": "file", "path": "p.jsonl"}}}
    with pytest.raises(ValueError, match="truncation='right'.*error or drop"):
        DPOConfig.model_validate(body | {"algorithm": {"truncation": "right"}})
