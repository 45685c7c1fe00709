"""Callbacks of a training class that is used by hand, and rewards by the data source of the prompts."""

from __future__ import annotations

from pathlib import Path

import pandas
import pytest

from engine.handles import Model
from engine.spec import LocalEngineSpec
from engine.text.threads import StringThread
from flows.callbacks import Cadence, GraderEvaluation, ValidationLoss
from flows.grpo import GRPO
from flows.recipe import RecipeContext
from tasks.graders.spec import grader_spec
from tasks.loggers.base import figures_of
from tasks.schedules import ConstantScheduler
from tasks.step_metrics import read_metrics
from tasks.validations import means_by_source, read_validations, sums_by_source


def test_the_mean_of_a_source_is_over_all_its_rewards() -> None:
    threads = [f'{{"turns": [], "metadata": {{"data_source": "{one}"}}}}' for one in "aab"] + ['{"turns": []}']
    parts = [sums_by_source(threads, [1.0, None, 0.5, 9.0]), sums_by_source(threads[:2], [0.0, 0.5]), {}]
    assert parts[0] == {"a": [1.0, 1], "b": [0.5, 1]}
    assert means_by_source(parts) == {"a": 0.5, "b": 0.5}
    assert means_by_source([]) == {}


async def test_a_grader_evaluation_and_the_rewards_of_each_source(
    prefect_server: str, tmp_path: Path, tiny_folder: Path
) -> None:
    engine = LocalEngineSpec(threads=1, deterministic=True)
    ctx = RecipeContext.open("named", store=str(tmp_path / "data"), engine=engine)
    model = await Model(str(tiny_folder)).to_builder(ctx).spawn_train("policy")
    prompts = [
        StringThread([("user", str(digit))], metadata={"data_source": "odd" if digit % 2 else "even"})
        for digit in range(4)
    ]
    grader = grader_spec("tests.grading:even_share", None)
    evaluation = GraderEvaluation(prompts[:2], grader, Cadence(every=0.5), name="held-out digits")
    trainer = GRPO(
        prompts, model.max_gen_len(6), grader, lr_scheduler=ConstantScheduler(1e-3), max_num_grpo_steps=2,
        samples_per_batch=16, samples_per_mini_batch=16, completions_per_sample=4, checkpoint_frequency=None,
        callbacks=[evaluation],
    )  # fmt: skip
    policy = await trainer.run()
    store = ctx.workspace.open_store()

    found = read_validations(store, "named", policy.stage)
    assert [(one.step, one.name) for one in found] == [(step, "held-out digits") for step in (0, 1, 2)]
    assert set(found[0].measures) == {"reward", "reward of even", "reward of odd"}

    stage = tmp_path / "data" / "runs" / "named" / "stages" / policy.stage / "steps"
    for step, metrics in enumerate(read_metrics(store, "named", policy.stage, steps=2)):
        graded = pandas.concat(pandas.read_parquet(file) for file in (stage / f"{step:06d}/graded").glob("*.parquet"))
        parity = graded["prompt_index"] % 2
        for name, rest in (("even", 0), ("odd", 1)):
            assert metrics.by_source[name] == pytest.approx(graded["reward"][parity == rest].mean())
        assert figures_of(metrics)["reward/even"] == metrics.by_source["even"]


async def test_a_validation_loss_is_not_of_rewards(prefect_server: str, tmp_path: Path, tiny_folder: Path) -> None:
    ctx = RecipeContext.open("wrong", store=str(tmp_path / "data"), engine=LocalEngineSpec(threads=1))
    model = await Model(str(tiny_folder)).to_builder(ctx).spawn_train("policy")
    prompts = [StringThread([("user", "1")])]
    trainer = GRPO(
        prompts, model.max_gen_len(6), grader_spec("tests.grading:even_share", None), max_num_grpo_steps=1,
        samples_per_batch=4, completions_per_sample=4, callbacks=[ValidationLoss(prompts)],
    )  # fmt: skip
    with pytest.raises(ValueError, match="a validation loss is of SFT and DPO"):
        await trainer.run()
