"""Two models that the same training class trains in one recipe."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine import workspace as connecting
from engine.handles import TrainingModel
from engine.text.threads import StringThread
from flows.grpo import GRPO
from flows.ppo import PPO
from flows.recipe import RecipeContext
from flows.sft import SFT
from storage.chain.checkpoint_names import named_checkpoints
from storage.chain.records import Chain, PolicyRef
from storage.inspect.audit import audit_store
from tasks.graders.spec import grader_spec
from tests.fixtures.engines import DETERMINISTIC
from tests.fixtures.spawning import language_model, scoring_model

pytestmark = pytest.mark.usefixtures("prefect_server")
THREADS = [StringThread([("user", str(digit)), ("assistant", str(digit) * 3)]) for digit in range(4)]
PROMPTS = [StringThread([("user", str(digit))]) for digit in range(4)]


def opened(folder: Path, run: str = "pair") -> RecipeContext:
    connecting.connect.cache_clear()  # as another process would be
    return RecipeContext.open(run, store=str(folder / "data"), engine=DETERMINISTIC)


async def fine_tune(model: TrainingModel) -> PolicyRef:
    return await SFT(THREADS, model, lr=3e-3, samples_per_batch=2, checkpoint_frequency=1.0).run()


def digests(ctx: RecipeContext, policy: PolicyRef) -> list[str | None]:
    chain = Chain.of(ctx.workspace.open_store(), policy)
    return [record.weights_digest for record in chain.records(after=0, until=policy.step)]


@pytest.mark.parametrize("together", [True, pytest.param(False, marks=pytest.mark.slow)])
async def test_each_is_trained_as_it_would_be_alone(tmp_path: Path, tiny_folder: Path, together: bool) -> None:
    alone_ctx = opened(tmp_path, "alone")
    alone = await fine_tune(await language_model(alone_ctx, tiny_folder, "solo"))

    async def recipe(names: list[str]) -> list[PolicyRef]:
        models = [await language_model(ctx, tiny_folder, name) for name in names]
        if together:
            return await asyncio.gather(*map(fine_tune, models))
        return [await fine_tune(model) for model in models]

    ctx = opened(tmp_path)
    teacher, student = await recipe(["teacher", "student"])
    assert (teacher.stage, student.stage) == ("0-sft", "0-sft.student")
    assert digests(ctx, teacher) == digests(ctx, student) == digests(alone_ctx, alone)
    store = ctx.workspace.open_store()
    assert [named.title for named in named_checkpoints(store, "pair")] == [
        "pair/0-sft/teacher-1", "pair/0-sft.student/student-1",
    ]  # fmt: skip
    assert audit_store(store).problems == ()

    ctx = opened(tmp_path)
    assert await recipe(["student", "teacher"]) == [student, teacher]  # each finds its stage again, in any order


async def test_two_policies_sample_apart(tmp_path: Path, tiny_folder: Path) -> None:
    ctx = opened(tmp_path)
    stages = []
    for name in ("first", "second"):
        model = (await language_model(ctx, tiny_folder, name)).max_gen_len(4)
        policy = await GRPO(
            PROMPTS, model, grader_spec("tests.fixtures.grading:even_share", None),
            max_num_grpo_steps=1, samples_per_batch=4, completions_per_sample=2, checkpoint_frequency=None,
        ).run()  # fmt: skip
        stages.append(policy.stage)
    assert stages == ["0-grpo", "0-grpo.second"]
    assert audit_store(ctx.workspace.open_store()).problems == ()


@pytest.mark.slow
async def test_each_value_model_is_in_its_policys_stage(tmp_path: Path, tiny_folder: Path) -> None:
    ctx = opened(tmp_path)
    for name in ("first", "second"):
        model = (await language_model(ctx, tiny_folder, name)).max_gen_len(4)
        value = await scoring_model(ctx, tiny_folder, f"{name}-value")
        policy = await PPO(
            PROMPTS, model, value, grader_spec("tests.fixtures.grading:even_share", None),
            max_num_ppo_steps=2, value_only_fraction=0.5, samples_per_batch=2, checkpoint_frequency=None,
        ).run()  # fmt: skip
        assert (await value.policy()).stage == policy.stage == {"first": "0-ppo", "second": "0-ppo.second"}[name]


async def test_two_models_of_one_name_are_refused(tmp_path: Path, tiny_folder: Path) -> None:
    ctx = opened(tmp_path)
    await language_model(ctx, tiny_folder, "policy")
    with pytest.raises(ValueError, match=r"'policy'.*another name"):
        await language_model(ctx, tiny_folder, "policy")
