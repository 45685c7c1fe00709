"""`dpo` from end to end: the first loss, what a batch holds, that the margin grows, and that the run resumes."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pandas
import pytest
from pydantic import ValidationError

import flows.training.supervised_loop
from engine.connect import connect
from engine.text.threads import StringThread
from flows.configs.preferences import DPOConfig
from flows.dpo import DPO, dpo
from storage.chain.records import Chain, CommitRecord
from storage.store.objects import open_store
from tests.fixtures.preferences import preference_config

STAGE = "0-dpo"


def config_of(folder: Path, tiny_folder: Path, run: str = "d", **changes: Any) -> DPOConfig:
    return DPOConfig.model_validate(preference_config(folder, tiny_folder, run=run, **changes))


def chain(folder: Path, run: str = "d") -> Chain:
    return Chain(open_store(str(folder / "data")), run, STAGE, "policy")


def records(folder: Path, run: str = "d") -> list[CommitRecord]:
    found = chain(folder, run)
    return list(found.records(0, found.head().step))


def batch_of(folder: Path, step: int, run: str = "d") -> pandas.DataFrame:
    steps = folder / "data" / "runs" / run / "stages" / STAGE / "steps"
    (file,) = (steps / f"{step:06d}" / "batch").glob("*.parquet")
    return pandas.read_parquet(file)


@pytest.fixture(scope="module")
def trained(
    prefect_server: str, tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path
) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("dpo")
    return folder, asyncio.run(dpo(config_of(folder, tiny_folder)))


def test_its_defaults_are_those_of_the_algorithm() -> None:
    trainer = DPO([], None)  # type: ignore[arg-type]
    assert (trainer.loss.beta, trainer.loss.variant, trainer.loss.label_smoothing) == (0.1, "sigmoid", None)
    assert (trainer.samples_per_batch, trainer.epochs, trainer.optimizer.weight_decay) == (32, 1, 0.0)
    assert trainer.schedule.at(9, 100) == 1e-6  # the rate, once warm
    body = {"model": {"key": "m"}, "data": {"train": {"kind": "file", "path": "p.jsonl"}}}
    config = DPOConfig.model_validate(body | {"optimizer": {"schedule": "constant"}})
    assert (config.optimizer.lr, config.algorithm.kl_beta, config.algorithm.samples_per_batch) == (1e-6, 0.1, 32)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"loss_variant": "cdpo"}, "label_smoothing"),
        ({"label_smoothing": 0.1}, "label_smoothing"),
        ({"kl_beta": 0}, "greater than 0"),
        ({"steps": 1, "epochs": 1}, "both steps=1 and epochs=1"),
    ],
)
def test_a_config_that_means_nothing_is_refused(algorithm: dict[str, Any], message: str) -> None:
    body = {"model": {"key": "m"}, "data": {"train": {"kind": "file", "path": "p.jsonl"}}, "algorithm": algorithm}
    with pytest.raises(ValidationError, match=message):
        DPOConfig.model_validate(body)


def test_the_loss_of_the_first_step_is_ln_2(trained: tuple[Path, dict[str, Any]]) -> None:
    first, second = records(trained[0])[:2]
    assert first.metrics["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert first.metrics["reward_margin_mean"] == pytest.approx(0, abs=1e-5)
    assert second.metrics["loss"] != pytest.approx(math.log(2), abs=1e-4)


def test_the_metrics_of_a_step_tell_how_the_pairs_stand(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = trained
    files = sorted((folder / "data" / "runs" / "d" / "stages" / STAGE / "metrics").glob("*.json"))
    lines = [json.loads(file.read_text()) for file in files]
    assert lines[0]["pair_margin"] == pytest.approx(0, abs=1e-5)
    for line, record in zip(lines, records(folder), strict=True):
        assert line["pair_margin"] == record.metrics["reward_margin_mean"]
        assert 0 <= line["pair_accuracy"] <= 1 and line["prompts"] == 4
        assert line["reward_mean"] is None


def test_a_batch_is_pairs_with_the_reference_of_the_stage(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = trained
    start = chain(folder).policy(0)
    assert all(record.request.reference == start for record in records(folder))
    for step in range(4):
        batch = batch_of(folder, step)
        assert len(batch) == 8
        for _, pair in batch.groupby("group"):
            assert sorted(pair["preferred"]) == [False, True]
            for _, row in pair.iterrows():
                trained_tokens = [t for t, w in zip(row["token_ids"], row["weights"], strict=True) if w > 0]
                assert len(trained_tokens) == len(row["reference_logprobs"]) == 4  # three digits and the end of turn
                assert all(value < 0 for value in row["reference_logprobs"])


def test_the_reference_does_not_move_with_the_policy(trained: tuple[Path, dict[str, Any]]) -> None:
    """A pair that comes again, in the second epoch, has the reference logprobs it had in the first."""
    folder, _ = trained
    seen: dict[tuple[str, bool], list[float]] = {}
    again = 0
    for step in range(4):
        for _, row in batch_of(folder, step).iterrows():
            key = row["group"].partition("/")[0], row["preferred"]
            if key in seen:
                again += 1
                assert list(row["reference_logprobs"]) == pytest.approx(seen[key], abs=1e-5)
            seen[key] = list(row["reference_logprobs"])
    assert again == 2 * 6  # 16 pairs are drawn of 10


@pytest.mark.slow
def test_a_batch_larger_than_the_data_is_the_data(prefect_server: str, tiny_folder: Path, tmp_path: Path) -> None:
    asyncio.run(dpo(config_of(tmp_path, tiny_folder, algorithm={"samples_per_batch": 32})))  # one epoch
    assert len(records(tmp_path)) == 1
    assert len(batch_of(tmp_path, 0)) == 20


@pytest.mark.slow
def test_a_batch_that_reaches_into_the_next_epoch(prefect_server: str, tiny_folder: Path, tmp_path: Path) -> None:
    """It may have the same pair twice: two pairs, and not a group of four."""
    asyncio.run(dpo(config_of(tmp_path, tiny_folder, algorithm={"samples_per_batch": 8, "epochs": 2})))
    assert len(records(tmp_path)) == 3  # 20 pairs in batches of 8
    twice = batch_of(tmp_path, 1)
    assert len(twice) == 16 and twice.groupby("group").size().tolist() == [2] * 8
    bare = {group.partition("/")[0] for group in twice["group"]}
    assert len(bare) <= 8


@pytest.mark.parametrize(
    ("variant", "first"),
    [
        ({"loss_variant": "ipo"}, (1 / (2 * 0.1)) ** 2),  # (0 - 1 / 2β)²
        pytest.param({"loss_variant": "cdpo", "label_smoothing": 0.1}, math.log(2), marks=pytest.mark.slow),
    ],
)
def test_the_other_variants(
    prefect_server: str, tiny_folder: Path, tmp_path: Path, variant: dict[str, Any], first: float
) -> None:
    algorithm = {"steps": 2, "samples_per_batch": 4} | variant
    asyncio.run(dpo(config_of(tmp_path, tiny_folder, algorithm=algorithm)))
    assert records(tmp_path)[0].metrics["loss"] == pytest.approx(first, rel=1e-4)
    assert records(tmp_path)[1].request.loss["variant"] == variant["loss_variant"]


@pytest.mark.slow
def test_an_adapter_is_trained_alone(prefect_server: str, tiny_folder: Path, tmp_path: Path) -> None:
    algorithm = {"steps": 3, "samples_per_batch": 10}  # the same pairs in every step
    asyncio.run(dpo(config_of(tmp_path, tiny_folder, model__adapter={"rank": 4}, algorithm=algorithm)))
    metrics = [record.metrics for record in records(tmp_path)]
    assert metrics[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert metrics[2]["loss"] < metrics[0]["loss"]
    assert chain(tmp_path).root().trainable["kind"] == "lora"  # type: ignore[union-attr]


class Interrupted(Exception):
    """Ends a run in the middle of a test."""


@pytest.mark.slow
def test_an_interrupted_run_resumes_and_ends_in_the_same_bytes(
    prefect_server: str,
    tiny_folder: Path,
    tmp_path: Path,
    trained: tuple[Path, dict[str, Any]],
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
        asyncio.run(dpo(config_of(tmp_path, tiny_folder)))
    assert len(records(tmp_path)) == 2
    connect.cache_clear()  # what was in memory is gone, as after a crash
    asyncio.run(dpo(config_of(tmp_path, tiny_folder)))
    mine, whole = ([record.weights_digest for record in records(folder)] for folder in (tmp_path, trained[0]))
    assert mine == whole and len(set(whole) - {None}) == 4


def test_a_dataset_of_threads_is_refused(trained: tuple[Path, dict[str, Any]]) -> None:
    from storage.store.artifacts import ArtifactRef
    from tasks.datasets.load import LoadedDataset

    ref = ArtifactRef(key="datasets/x/1", kind="threads", sha256="0" * 64, bytes=1, rows=1, parents=())
    with pytest.raises(ValueError, match="holds threads; DPO needs pairs"):
        DPO(LoadedDataset(ref=ref, rows=1), None).load_dataset()  # type: ignore[arg-type]


def test_pairs_given_in_process(prefect_server: str, tiny_folder: Path, tmp_path: Path) -> None:
    from prefect import flow

    from engine.handles import Model
    from engine.workspace import Workspace
    from storage.store.artifacts import Provenance

    asked = StringThread().user("1")
    pairs = [(asked.assistant("111"), asked.assistant("666"))]
    provenance = Provenance(code_version="abc", config_digest="0" * 64, seed=0)

    class Here:
        workspace = Workspace(store=str(tmp_path / "data"), run="d", provenance=provenance)

    @flow
    async def train() -> int:
        model = await Model(str(tiny_folder)).to_builder(Here()).spawn_train("policy")
        before = [await model.logprobs(thread) for thread in pairs[0]]
        policy = await DPO(pairs, model, lr=1e-3, epochs=3).run()
        after = [await model.logprobs(thread) for thread in pairs[0]]
        assert (after[0] - after[1]) > (before[0] - before[1])
        return policy.step

    assert asyncio.run(train()) == 3


@pytest.mark.slow
def test_the_margin_grows_until_every_pair_is_told_apart(
    prefect_server: str, tiny_folder: Path, tmp_path: Path
) -> None:
    algorithm = {"steps": 40, "samples_per_batch": 10}
    asyncio.run(dpo(config_of(tmp_path, tiny_folder, algorithm=algorithm)))
    metrics = [record.metrics for record in records(tmp_path)]
    margins = [each["reward_margin_mean"] for each in metrics]
    assert abs(margins[0]) < 1e-5 and margins[-1] > 1.0
    assert margins[-1] > margins[20] > margins[10] > margins[0]
    assert metrics[-1]["accuracy_mean"] == 1.0
    assert metrics[-1]["loss"] < 0.3 < metrics[0]["loss"]
