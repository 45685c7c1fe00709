"""`reward_model` from end to end: what a batch holds, that it learns to rank and to rate, and what it publishes."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pandas
import pytest

import flows.training.supervised_loop
from engine.connect import connect
from engine.text.threads import StringThread
from flows.configs.preferences import RewardModelConfig
from flows.reward_model import RewardModelling, reward_model
from storage.chain.records import Chain, CommitRecord
from storage.store.objects import open_store
from tests.fixtures.preferences import preference_config, write_ratings

STAGE = "0-reward_model"


def config_of(folder: Path, tiny_folder: Path, run: str = "r", **changes: Any) -> RewardModelConfig:
    return RewardModelConfig.model_validate(preference_config(folder, tiny_folder, run=run, **changes))


def ratings(folder: Path) -> dict[str, Any]:
    path = str(write_ratings(folder / "ratings.jsonl"))
    return {"train": {"kind": "file", "path": path}, "use": "rating"}


def chain(folder: Path, run: str = "r") -> Chain:
    return Chain(open_store(str(folder / "data")), run, STAGE, "policy")


def records(folder: Path, run: str = "r") -> list[CommitRecord]:
    found = chain(folder, run)
    return list(found.records(0, found.head().step))


def batch_of(folder: Path, step: int, run: str = "r") -> pandas.DataFrame:
    steps = folder / "data" / "runs" / run / "stages" / STAGE / "steps"
    (file,) = (steps / f"{step:06d}" / "batch").glob("*.parquet")
    return pandas.read_parquet(file)


@pytest.fixture(scope="module")
def ranked(
    prefect_server: str, tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path
) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("reward")
    return folder, asyncio.run(reward_model(config_of(folder, tiny_folder)))


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


def test_a_batch_scores_each_conversation_as_a_whole(ranked: tuple[Path, dict[str, Any]]) -> None:
    batch = batch_of(ranked[0], 0)
    assert len(batch) == 8
    for _, pair in batch.groupby("group"):
        assert sorted(pair["preferred"]) == [False, True]
    for _, row in batch.iterrows():
        assert list(row["weights"]) == [0.0] * (len(row["weights"]) - 1) + [1.0]
        assert row["reference_logprobs"] is None and row["returns"] is None


def test_the_loss_is_of_the_difference_of_scores(ranked: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = ranked
    first = records(folder)[0]
    assert first.request.loss["kind"] == "ranking" and first.request.reference is None
    margin = first.metrics["score_chosen_mean"] - first.metrics["score_rejected_mean"]
    # -log σ is convex: its mean is at least that of the mean
    assert first.metrics["loss"] >= math.log1p(math.exp(-margin)) - 1e-5
    (file,) = (folder / "data" / "runs" / "r" / "stages" / STAGE / "metrics").glob("*0.json")
    line = json.loads(file.read_text())
    assert line["pair_margin"] == pytest.approx(margin, abs=1e-6)
    assert line["pair_accuracy"] == first.metrics["accuracy_mean"]


@pytest.mark.slow
def test_one_pair_a_step_has_the_loss_of_its_scores(prefect_server: str, tiny_folder: Path, tmp_path: Path) -> None:
    asyncio.run(reward_model(config_of(tmp_path, tiny_folder, algorithm={"steps": 2, "samples_per_batch": 1})))
    for record in records(tmp_path):
        margin = record.metrics["score_chosen_mean"] - record.metrics["score_rejected_mean"]
        assert record.metrics["loss"] == pytest.approx(math.log1p(math.exp(-margin)), abs=1e-5)
        assert record.metrics["accuracy_mean"] == float(margin > 0)


def test_ratings_are_learnt_by_squared_error(prefect_server: str, tiny_folder: Path, tmp_path: Path) -> None:
    data = ratings(tmp_path)
    asyncio.run(reward_model(config_of(tmp_path, tiny_folder, data=data, algorithm={"steps": 3})))
    assert records(tmp_path)[0].request.loss["kind"] == "mse"
    batch = batch_of(tmp_path, 0)
    assert len(batch) == 20
    assert sorted(float(value) for values in batch["returns"] for value in values) == [-1.0] * 10 + [1.0] * 10
    first = records(tmp_path)[0].metrics
    # mean of v² - 2v·r + 1: a new head's small values leave about the ratings' own square
    assert first["loss"] == pytest.approx(1.0, abs=0.5)
    assert first["return_mean"] == 0.0


def test_the_published_model_is_a_scalar_one(ranked: tuple[Path, dict[str, Any]]) -> None:
    folder, result = ranked
    name, _, version = result["model"].partition("@")
    published = folder / "data" / "models" / name / version
    assert json.loads((published / "config.json").read_text())["architectures"][0].endswith("ForSequenceClassification")


@pytest.mark.slow
def test_an_adapter_is_trained_beside_the_head(prefect_server: str, tiny_folder: Path, tmp_path: Path) -> None:
    algorithm = {"steps": 3, "samples_per_batch": 10}  # the same pairs in every step
    asyncio.run(reward_model(config_of(tmp_path, tiny_folder, model__adapter={"rank": 4}, algorithm=algorithm)))
    losses = [record.metrics["loss"] for record in records(tmp_path)]
    assert losses[2] < losses[0]
    root = chain(tmp_path).root()
    assert root is not None and (root.trainable["kind"], root.trainable["head"]) == ("lora", "scalar")


class Interrupted(Exception):
    """Ends a run in the middle of a test."""


@pytest.mark.slow
def test_an_interrupted_run_resumes_and_ends_in_the_same_bytes(
    prefect_server: str,
    tiny_folder: Path,
    tmp_path: Path,
    ranked: tuple[Path, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task, left = flows.training.supervised_loop.take_gradient_step, [2]

    async def raises_once(*args: Any, **kwargs: Any) -> Any:
        if kwargs["step"] in left:
            left.clear()
            raise Interrupted
        return await task(*args, **kwargs)

    monkeypatch.setattr(flows.training.supervised_loop, "take_gradient_step", raises_once)
    with pytest.raises(Interrupted):
        asyncio.run(reward_model(config_of(tmp_path, tiny_folder)))
    assert len(records(tmp_path)) == 2
    connect.cache_clear()  # what was in memory is gone, as after a crash
    asyncio.run(reward_model(config_of(tmp_path, tiny_folder)))
    mine, whole = ([record.weights_digest for record in records(folder)] for folder in (tmp_path, ranked[0]))
    assert mine == whole and len(set(whole) - {None}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("use", ["preference", "rating"])
def test_it_learns_which_answers_are_better(use: str, prefect_server: str, tiny_folder: Path, tmp_path: Path) -> None:
    changes = {"data": ratings(tmp_path)} if use == "rating" else {}
    algorithm = {"steps": 120, "samples_per_batch": 20}
    result = asyncio.run(reward_model(config_of(tmp_path, tiny_folder, algorithm=algorithm, **changes)))
    metrics = [record.metrics for record in records(tmp_path)]
    assert metrics[-1]["loss"] < 0.2 * metrics[0]["loss"]
    scores = asyncio.run(_scores(tmp_path, result["model"]))
    assert all(good > bad for good, bad in scores)


async def _scores(folder: Path, model: str) -> list[tuple[float, float]]:
    """What the published model says of the right and of the wrong answer to each digit."""
    from engine.handles import Model
    from engine.workspace import Workspace
    from storage.store.artifacts import Provenance

    provenance = Provenance(code_version="abc", config_digest="0" * 64, seed=0)

    class Here:
        workspace = Workspace(store=str(folder / "data"), run="scores", provenance=provenance)

    judge = await Model(model).to_builder(Here()).into_scoring_model().spawn_inference("judge")
    asked = [(StringThread().user(str(n)), str(n) * 3, str((n + 5) % 10) * 3) for n in range(10)]
    return [
        (await judge.score_last_token(thread.assistant(good)), await judge.score_last_token(thread.assistant(bad)))
        for thread, good, bad in asked
    ]
