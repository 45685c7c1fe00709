"""Tests of `reward_model` from end to end: its batches, that it learns to rank and to rate, and its published model."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flows.training.supervised_loop
from engine.text.threads import StringThread
from engine.workspace import connect
from flows.catalogue import RewardModelConfig
from flows.reward_model import RewardModelling, reward_model
from tests.fixtures.preferences import preference_config, write_ratings
from tests.fixtures.runs.flow_runs import FlowRuns
from tests.fixtures.runs.interruption import Interrupted, interrupt_at

STAGE = "0-reward_model"


def reward_runs(folder: Path, tiny_folder: Path) -> FlowRuns:
    return FlowRuns(folder, tiny_folder, reward_model, RewardModelConfig, stage=STAGE, make_config=preference_config)


@pytest.fixture
def runs(prefect_server: str, tmp_path: Path, tiny_folder: Path) -> FlowRuns:
    return reward_runs(tmp_path, tiny_folder)


def ratings(folder: Path) -> dict[str, Any]:
    path = str(write_ratings(folder / "ratings.jsonl"))
    return {"train": {"kind": "file", "path": path}, "use": "rating"}


@pytest.fixture(scope="module")
def ranked(
    prefect_server: str, tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path
) -> tuple[FlowRuns, dict[str, Any]]:
    """Runs with one finished run, `r`, of four steps over pairs, and its result."""
    runs = reward_runs(tmp_path_factory.mktemp("reward"), tiny_folder)
    return runs, runs.run("r")


def test_its_defaults_are_those_of_the_algorithm() -> None:
    trainer = RewardModelling([], None)  # type: ignore[arg-type]
    assert (trainer.loss.kind, trainer.samples_per_batch, trainer.epochs) == ("ranking", 64, 1)
    assert trainer.schedule.at(9, 100) == 1e-6
    rated = [StringThread().user("q").assistant("a").with_metadata({"res": 1.0})]
    assert RewardModelling(rated, None).loss.kind == "mse"  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one kind at a time"):
        RewardModelling([rated[0], (rated[0], rated[0])], None)  # type: ignore[list-item, arg-type]
    body = {"model": {"key": "m"}, "data": {"train": {"kind": "file", "path": "p.jsonl"}}}
    config = RewardModelConfig.model_validate(body)
    assert (config.optimizer.lr, config.algorithm.samples_per_batch, config.data.use) == (1e-6, 64, "preference")


def test_a_batch_scores_each_conversation_as_a_whole(ranked: tuple[FlowRuns, dict[str, Any]]) -> None:
    runs, _ = ranked
    batch = runs.tables("r", "batch")[0]
    assert len(batch) == 8
    for _, pair in batch.groupby("group"):
        assert sorted(pair["preferred"]) == [False, True]
    for _, row in batch.iterrows():
        assert list(row["loss_mask"]) == [0.0] * (len(row["loss_mask"]) - 1) + [1.0]
        assert row["reference_logprobs"] is None and row["returns"] is None


def test_the_loss_is_of_the_difference_of_scores(ranked: tuple[FlowRuns, dict[str, Any]]) -> None:
    runs, _ = ranked
    first = runs.records("r")[0]
    assert first.request.loss["kind"] == "ranking" and first.request.reference is None
    margin = first.metrics["score_chosen_mean"] - first.metrics["score_rejected_mean"]
    # -log σ is convex: its mean is at least that of the mean
    assert first.metrics["loss"] >= math.log1p(math.exp(-margin)) - 1e-5
    line = runs.metrics("r")[0]
    assert line["pair_margin"] == pytest.approx(margin, abs=1e-6)
    assert line["pair_accuracy"] == first.metrics["accuracy_mean"]


@pytest.mark.slow
def test_one_pair_a_step_has_the_loss_of_its_scores(runs: FlowRuns) -> None:
    runs.run("r", algorithm={"steps": 2, "samples_per_batch": 1})
    for record in runs.records("r"):
        margin = record.metrics["score_chosen_mean"] - record.metrics["score_rejected_mean"]
        assert record.metrics["loss"] == pytest.approx(math.log1p(math.exp(-margin)), abs=1e-5)
        assert record.metrics["accuracy_mean"] == float(margin > 0)


def test_ratings_are_learnt_by_squared_error(runs: FlowRuns) -> None:
    data = ratings(runs.folder)
    runs.run("r", data=data, algorithm={"steps": 3})
    assert runs.records("r")[0].request.loss["kind"] == "mse"
    batch = runs.tables("r", "batch")[0]
    assert len(batch) == 20
    assert sorted(np.concatenate(list(batch["returns"]))) == [-1.0] * 10 + [1.0] * 10
    first = runs.records("r")[0].metrics
    # mean of v² - 2v·r + 1: a new head's small values leave about the ratings' own square
    assert first["loss"] == pytest.approx(1.0, abs=0.5)
    assert first["return_mean"] == 0.0


def test_the_published_model_is_a_scalar_one(ranked: tuple[FlowRuns, dict[str, Any]]) -> None:
    runs, result = ranked
    config = json.loads((runs.published(result) / "config.json").read_text())
    assert config["architectures"][0].endswith("ForSequenceClassification")


@pytest.mark.slow
def test_an_adapter_is_trained_beside_the_head(runs: FlowRuns) -> None:
    algorithm = {"steps": 3, "samples_per_batch": 10}  # the same pairs in every step
    runs.run("r", model__adapter={"rank": 4}, algorithm=algorithm)
    losses = [record.metrics["loss"] for record in runs.records("r")]
    assert losses[2] < losses[0]
    root = runs.chain("r").root()
    assert root is not None and (root.trainable["kind"], root.trainable["head"]) == ("lora", "scalar")


@pytest.mark.slow
def test_an_interrupted_run_resumes_and_ends_in_the_same_bytes(
    runs: FlowRuns, ranked: tuple[FlowRuns, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(monkeypatch, flows.training.supervised_loop, "take_gradient_step", step=2)
    with pytest.raises(Interrupted):
        runs.run("r")
    assert len(runs.records("r")) == 2
    connect.cache_clear()  # after a crash nothing is in memory
    runs.run("r")
    whole, _ = ranked
    assert runs.digests("r") == whole.digests("r")
    assert len(set(whole.digests("r")) - {None}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("use", ["preference", "rating"])
def test_it_learns_which_answers_are_better(use: str, runs: FlowRuns) -> None:
    changes = {"data": ratings(runs.folder)} if use == "rating" else {}
    algorithm = {"steps": 120, "samples_per_batch": 20}
    result = runs.run("r", algorithm=algorithm, **changes)
    metrics = [record.metrics for record in runs.records("r")]
    assert metrics[-1]["loss"] < 0.2 * metrics[0]["loss"]
    scores = asyncio.run(_scores(runs.data, result["model"]))
    assert all(good > bad for good, bad in scores)


async def _scores(store: Path, model: str) -> list[tuple[float, float]]:
    """The scores that the published model gives to the right and to the wrong answer to each digit."""
    from engine.handles import Model
    from engine.workspace import Workspace
    from storage.store.artifacts import Provenance
    from tests.fixtures.spawning import Context

    provenance = Provenance(code_version="abc", config_digest="0" * 64, seed=0)
    ctx = Context(Workspace(store=str(store), run="scores", provenance=provenance))
    judge = await Model(model).to_builder(ctx).into_scoring_model().spawn_inference("judge")
    scores = []
    for digit in range(10):
        prompt = StringThread().user(str(digit))
        right = await judge.score_last_token(prompt.assistant(str(digit) * 3))
        wrong = await judge.score_last_token(prompt.assistant(str((digit + 5) % 10) * 3))
        scores.append((right, wrong))
    return scores
