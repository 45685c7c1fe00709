"""Callbacks of a training class that is used by hand, and rewards by the data source of the prompts."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pandas
import pytest
from rich.console import Console

from engine.handles import Model
from engine.specs.engine import LocalEngineSpec
from engine.text.threads import StringThread
from flows.callbacks import Cadence, GraderEvaluation, SamplesTable, ValidationLoss
from flows.display.terminal import TerminalProgress
from flows.grpo import GRPO
from flows.recipe import RecipeContext
from flows.sft import SFT
from flows.training.schedules import ConstantScheduler
from storage.chain.records import PolicyRef
from tasks.evaluation.validation_curve import means_by_source, read_validations, sums_by_source
from tasks.graders.spec import grader_spec
from tasks.loggers.base import figures_of
from tasks.reports.html_report import text_for_page
from tasks.reports.step_metrics import read_metrics
from tasks.reports.table_cells import table_cells


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
    grader = grader_spec("tests.fixtures.grading:even_share", None)
    evaluation = GraderEvaluation(prompts[:2], grader, Cadence(every=0.5), name="held-out digits")
    trainer = GRPO(
        prompts, model.max_gen_len(6), grader, lr_scheduler=ConstantScheduler(1e-3), max_num_grpo_steps=2,
        samples_per_batch=16, samples_per_mini_batch=16, completions_per_sample=4, checkpoint_frequency=None,
        callbacks=[evaluation],
    )  # fmt: skip
    policy = await trainer.run()
    store = ctx.workspace.open_store()

    # The callback has evaluated before training and after each step.
    validations = read_validations(store, "named", policy.stage)
    assert [validation.step for validation in validations] == [0, 1, 2]
    assert {validation.name for validation in validations} == {"held-out digits"}
    assert set(validations[0].measures) == {"reward", "reward of even", "reward of odd"}

    # The metrics have the mean reward of each data source.
    stage = tmp_path / "data" / "runs" / "named" / "stages" / policy.stage / "steps"
    for step, metrics in enumerate(read_metrics(store, "named", policy.stage, steps=2)):
        graded = pandas.concat(pandas.read_parquet(file) for file in (stage / f"{step:06d}/graded").glob("*.parquet"))
        parity = graded["prompt_index"] % 2
        for name, rest in (("even", 0), ("odd", 1)):
            assert metrics.by_source[name] == pytest.approx(graded["reward"][parity == rest].mean())
        assert figures_of(metrics)["reward/even"] == metrics.by_source["even"]


async def test_a_table_of_what_was_sampled(
    prefect_server: str, tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, out = LocalEngineSpec(threads=1, deterministic=True), io.StringIO()
    pages: list[tuple[str, list[dict[str, Any]], str]] = []

    async def put(key: str, rows: list[dict[str, Any]], *, description: str = "") -> None:
        pages.append((key, rows, description))

    monkeypatch.setattr("flows.training.step_reporter.put_table", put)
    monkeypatch.setattr("flows.training.step_reporter.flow_run_page", object)  # as in a flow
    prompts = [StringThread([("user", str(digit))]) for digit in range(4)]

    async def train() -> PolicyRef:
        ctx = RecipeContext.open("table", store=str(tmp_path / "data"), engine=engine)
        model = await Model(str(tiny_folder)).to_builder(ctx).spawn_train("policy")
        return await GRPO(
            prompts, model.max_gen_len(6), grader_spec("tests.fixtures.grading:even_share", None), max_num_grpo_steps=2,
            lr_scheduler=ConstantScheduler(1e-3), samples_per_batch=16, samples_per_mini_batch=16, prompts_per_shard=2,
            completions_per_sample=4, checkpoint_frequency=None, logger=TerminalProgress(Console(file=out, width=200)),
            callbacks=[SamplesTable(Cadence(every=0.5), samples=4)],
        ).run()  # fmt: skip

    policy = await train()
    assert [(key, output) for key, _, output in pages] == [
        ("samples-table", "0-grpo after 1 steps"), ("samples-table", "0-grpo after 2 steps"),
    ]  # fmt: skip
    stage = tmp_path / "data" / "runs" / "table" / "stages" / policy.stage / "steps"
    output = out.getvalue()
    for step, (_, rows, _) in enumerate(pages):
        folders = (stage / f"{step:06d}/{kind}" for kind in ("rollouts", "graded"))
        tables = ([pandas.read_parquet(file) for file in sorted(folder.glob("*.parquet"))] for folder in folders)
        drawn, graded = (pandas.concat(shards) for shards in tables)
        # two of the eight of each shard: the first and the fifth
        chosen = [0, 4, 8, 12]
        texts = drawn["text"].iloc[chosen]
        cells = [table_cells({"completion": text_for_page(text)})["completion"] for text in texts]
        assert [row["completion"] for row in rows] == cells
        assert all(f"completion {text_for_page(text)!r}" in output for text in texts)
        assert [row["grade"] for row in rows] == pytest.approx(list(graded["reward"].iloc[chosen]), abs=1e-4)
        assert [row["prompt"] for row in rows] == [str(digit) for digit in drawn["prompt_index"].iloc[chosen]]
    assert "samples table after 1 steps" in output
    await train()  # of a finished run: the last table is on the page already
    assert len(pages) == 2


async def test_a_samples_table_is_not_of_conversations(prefect_server: str, tmp_path: Path, tiny_folder: Path) -> None:
    ctx = RecipeContext.open("none", store=str(tmp_path / "data"), engine=LocalEngineSpec(threads=1))
    model = await Model(str(tiny_folder)).to_builder(ctx).spawn_train("policy")
    threads = [StringThread([("user", "1"), ("assistant", "1")])]
    with pytest.raises(ValueError, match="this class does not sample"):
        await SFT(threads, model, max_steps=1, callbacks=[SamplesTable()]).run()


async def test_a_validation_loss_is_not_of_rewards(prefect_server: str, tmp_path: Path, tiny_folder: Path) -> None:
    ctx = RecipeContext.open("wrong", store=str(tmp_path / "data"), engine=LocalEngineSpec(threads=1))
    model = await Model(str(tiny_folder)).to_builder(ctx).spawn_train("policy")
    prompts = [StringThread([("user", "1")])]
    trainer = GRPO(
        prompts, model.max_gen_len(6), grader_spec("tests.fixtures.grading:even_share", None), max_num_grpo_steps=1,
        samples_per_batch=4, completions_per_sample=4, callbacks=[ValidationLoss(prompts)],
    )  # fmt: skip
    with pytest.raises(ValueError, match="ValidationLoss works with SFT, DPO and RewardModelling"):
        await trainer.run()
