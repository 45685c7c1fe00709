"""Tests of a run with a learning rate of 0: weights do not move, so every ratio is 1 and every gap comes from the
sampler."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from engine.handles import Model
from engine.specs.engine import LocalEngineSpec
from engine.text.threads import StringThread
from flows.grpo import GRPO
from flows.recipe import RecipeContext
from flows.training.schedules import ConstantScheduler
from storage.chain.records import Chain
from tasks.graders.spec import grader_spec
from tasks.reports.step_metrics import read_metrics


async def test_nothing_moves_and_sampler_and_trainer_agree(
    prefect_server: str, tmp_path: Path, tiny_folder: Path
) -> None:
    engine = LocalEngineSpec(compute_dtype="float32", threads=1)
    ctx = RecipeContext.open("still", store=str(tmp_path / "data"), engine=engine)
    model = await Model(str(tiny_folder)).to_builder(ctx).spawn_train("policy")
    prompts = [StringThread([("user", str(digit))]) for digit in range(8)]
    trainer = GRPO(
        prompts, model.max_gen_len(6), grader_spec("tests.fixtures.grading:even_share", None),
        lr_scheduler=ConstantScheduler(0.0), max_num_grpo_steps=3, samples_per_batch=16, samples_per_mini_batch=4,
        mini_epochs_per_batch=2, completions_per_sample=4, checkpoint_frequency=None,
    )  # fmt: skip
    policy = await trainer.run()
    chain = Chain.of(ctx.workspace.open_store(), policy)
    records = list(chain.records(after=0, until=3))
    assert [record.updates for record in records] == [8, 8, 8]
    assert len({record.weights_digest for record in records}) == 1
    for record in records:
        assert record.metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        assert record.metrics["kl_mean"] == pytest.approx(0.0, abs=1e-8)
    for metrics in read_metrics(ctx.workspace.open_store(), "still", policy.stage, steps=3):
        assert metrics.logprob_gap is not None and math.isfinite(metrics.logprob_gap)
        assert metrics.logprob_gap < 1e-4
