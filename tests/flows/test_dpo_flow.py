"""Tests of `dpo` from end to end: the first loss, the batches, that the margin grows, and that the run resumes. The
last two are tests of `simpo` and `kto` as well, besides what differs in them."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pandas
import pytest
from pydantic import ValidationError

import flows.training.supervised_loop
from engine.losses.pairs import DPOSpec, KTOSpec, ORPOSpec, SimPOSpec
from engine.text.threads import StringThread
from engine.workspace import connect
from flows.catalogue import DPOConfig, KTOConfig, SimPOConfig
from flows.dpo import DPO, dpo
from flows.kto import KTO, kto
from flows.orpo import ORPO
from flows.simpo import SimPO, simpo
from tasks.evaluation.validation_curve import read_validations
from tests.fixtures.preferences import label_config, preference_config
from tests.fixtures.runs.flow_runs import FlowRuns
from tests.fixtures.runs.interruption import Interrupted, interrupt_at

FLOWS: dict[str, Any] = {"dpo": (dpo, DPOConfig), "simpo": (simpo, SimPOConfig), "kto": (kto, KTOConfig)}


def runs_of(request: pytest.FixtureRequest, folder: Path, tiny_folder: Path) -> FlowRuns:
    """Runs of the flow that the parameter of the fixture names: without one, of `dpo`."""
    name = getattr(request, "param", "dpo")
    make_config = label_config if name == "kto" else preference_config
    return FlowRuns(folder, tiny_folder, *FLOWS[name], stage=f"0-{name}", make_config=make_config)


@pytest.fixture
def runs(request: pytest.FixtureRequest, prefect_server: str, tmp_path: Path, tiny_folder: Path) -> FlowRuns:
    return runs_of(request, tmp_path, tiny_folder)


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest, prefect_server: str, tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path
) -> FlowRuns:
    """Runs with one finished run, `d`, of four steps."""
    runs = runs_of(request, tmp_path_factory.mktemp("preferences"), tiny_folder)
    runs.run("d")
    return runs


def test_its_defaults_are_those_of_the_algorithm() -> None:
    trainer = DPO([], None)  # type: ignore[arg-type]
    assert (trainer.loss.beta, trainer.loss.variant, trainer.loss.label_smoothing) == (0.1, "sigmoid", None)
    assert (trainer.samples_per_batch, trainer.epochs, trainer.optimizer.weight_decay) == (32, 1, 0.0)
    assert trainer.schedule.at(9, 100) == 1e-6  # the rate, once warm
    body = {"model": {"key": "m"}, "data": {"train": {"kind": "file", "path": "p.jsonl"}}}
    config = DPOConfig.model_validate(body | {"optimizer": {"schedule": "constant"}})
    assert (config.optimizer.lr, config.algorithm.kl_beta, config.algorithm.samples_per_batch) == (1e-6, 0.1, 32)


def test_dpo_without_a_reference_needs_no_pass_of_it() -> None:
    body = {"model": {"key": "m"}, "data": {"train": {"kind": "file", "path": "p.jsonl"}}}
    config = DPOConfig.model_validate(body | {"algorithm": {"reference_free": True, "length_normalised": True}})
    assert (config.needs_reference, config.passes_before_gradient) == (False, 0)
    assert config.algorithm.loss == DPOSpec(reference_free=True, length_normalised=True)
    assert DPO([], None, rpo_alpha=0.5).loss == DPOSpec(rpo_alpha=0.5)  # type: ignore[arg-type]
    assert ORPO([], None, beta=0.2).loss == ORPOSpec(beta=0.2)  # type: ignore[arg-type]


def test_the_defaults_of_simpo_are_those_of_its_config() -> None:
    trainer = SimPO([], None)  # type: ignore[arg-type]
    assert (trainer.loss, trainer.samples_per_batch) == (SimPOSpec(beta=2.0, gamma=1.0), 32)
    body = {"model": {"key": "m"}, "data": {"train": {"kind": "file", "path": "p.jsonl"}}}
    config = SimPOConfig.model_validate(body | {"algorithm": {"beta": 2.5, "simpo_gamma": 0.3}})
    assert config.algorithm.loss == SimPOSpec(beta=2.5, gamma=0.3)
    assert not config.needs_reference
    assert SimPO([], None, algorithm=config.algorithm, beta=2.0).loss == SimPOSpec(gamma=0.3)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["simpo"], indirect=True)
def test_simpo_has_no_reference_and_its_first_loss_is_that_of_the_mean_logprobs(trained: FlowRuns) -> None:
    first = trained.records("d")[0]
    assert first.request.reference is None
    assert first.request.loss == {"kind": "simpo", "beta": 2.0, "gamma": 1.0}
    assert trained.tables("d", "batch")[0]["reference_logprobs"].isna().all()
    assert first.metrics["reward_chosen_mean"] < 0 and first.metrics["loss"] > 0
    margin = first.metrics["reward_chosen_mean"] - first.metrics["reward_rejected_mean"]
    assert trained.metrics("d")[0]["pair_margin"] == pytest.approx(margin, abs=1e-5)


def test_the_defaults_of_kto_are_those_of_its_config() -> None:
    assert KTO([], None, undesirable_weight=1.5).loss == KTOSpec(beta=0.1, undesirable_weight=1.5)  # type: ignore[arg-type]
    body = {"model": {"key": "m"}, "data": {"train": {"kind": "file", "path": "p.jsonl"}}}
    config = KTOConfig.model_validate(body | {"algorithm": {"kl_beta": 0.2, "desirable_weight": 1.3}})
    assert config.algorithm.loss == KTOSpec(beta=0.2, desirable_weight=1.3) and config.needs_reference
    with pytest.raises(ValidationError, match="greater than or equal to 2"):
        KTOConfig.model_validate(body | {"algorithm": {"samples_per_batch": 1}})


@pytest.mark.slow
def test_the_first_loss_of_kto_is_one_half_and_held_out_answers_have_their_own_baseline(
    prefect_server: str, tmp_path: Path, tiny_folder: Path
) -> None:
    """At the reference every log-ratio and the baseline are 0, and 1 - σ(0) is one half."""
    body = label_config(tmp_path, tiny_folder, run="d", algorithm={"steps": 4, "samples_per_batch": 20})
    body["data"]["heldout"] = body["data"]["train"]
    runs = FlowRuns(tmp_path, tiny_folder, kto, KTOConfig, stage="0-kto", make_config=lambda *_, **__: body)
    runs.run("d")
    records = runs.records("d")
    metrics = [record.metrics for record in records]
    assert metrics[0]["loss"] == pytest.approx(0.5) and metrics[0]["kl_baseline_mean"] == 0.0
    assert metrics[-1]["loss"] < 0.5 and max(one["kl_baseline_mean"] for one in metrics) > 0
    batches = runs.tables("d", "batch")
    for batch, one, line in zip(batches, metrics, runs.metrics("d"), strict=True):
        assert batch["kl_baseline"].tolist() == pytest.approx([one["kl_baseline_mean"]] * 20)
        assert line["pair_margin"] == one["reward_chosen_mean"] - one["reward_rejected_mean"]
    # The batch of a step is all held-out rows: the loss before the step is the validation loss of its policy. The
    # baseline depends on the order of the rows, so that the two are equal only at the reference.
    validations = [one.measures["loss"] for one in read_validations(runs.store, "d", "0-kto")]
    assert validations[0] == pytest.approx(0.5) and validations[-1] < 0.5


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"loss_variant": "cdpo"}, "label_smoothing"),
        ({"label_smoothing": 0.1}, "label_smoothing"),
        ({"kl_beta": 0}, "greater than 0"),
        ({"rpo_alpha": -1}, "greater than or equal to 0"),
        ({"steps": 1, "epochs": 1}, "both steps=1 and epochs=1"),
    ],
)
def test_a_config_that_means_nothing_is_refused(algorithm: dict[str, Any], message: str) -> None:
    body = {"model": {"key": "m"}, "data": {"train": {"kind": "file", "path": "p.jsonl"}}, "algorithm": algorithm}
    with pytest.raises(ValidationError, match=message):
        DPOConfig.model_validate(body)


def test_the_loss_of_the_first_step_is_ln_2(trained: FlowRuns) -> None:
    first, second = trained.records("d")[:2]
    assert first.metrics["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert first.metrics["reward_margin_mean"] == pytest.approx(0, abs=1e-5)
    assert second.metrics["loss"] != pytest.approx(math.log(2), abs=1e-4)


def test_the_metrics_of_a_step_tell_how_the_pairs_stand(trained: FlowRuns) -> None:
    lines = trained.metrics("d")
    assert lines[0]["pair_margin"] == pytest.approx(0, abs=1e-5)
    for line, record in zip(lines, trained.records("d"), strict=True):
        assert line["pair_margin"] == record.metrics["reward_margin_mean"]
        assert 0 <= line["pair_accuracy"] <= 1 and line["prompts"] == 4
        assert line["reward_mean"] is None


def test_a_batch_is_pairs_with_the_reference_of_the_stage(trained: FlowRuns) -> None:
    start = trained.chain("d").policy(0)
    assert [record.request.reference for record in trained.records("d")] == [start] * 4
    batches = trained.tables("d", "batch")
    assert [len(batch) for batch in batches] == [8] * 4
    for batch in batches:
        for _, pair in batch.groupby("group"):
            assert sorted(pair["preferred"]) == [False, True]
            for _, row in pair.iterrows():
                trained_tokens = [t for t, w in zip(row["token_ids"], row["loss_mask"], strict=True) if w > 0]
                assert len(trained_tokens) == len(row["reference_logprobs"]) == 4  # three digits and the end of turn
                assert all(value < 0 for value in row["reference_logprobs"])


def test_the_reference_does_not_move_with_the_policy(trained: FlowRuns) -> None:
    """A pair that comes again, in the second epoch, has the reference logprobs it had in the first."""
    seen: dict[tuple[str, bool], list[float]] = {}
    repeated_rows = 0
    for _, row in pandas.concat(trained.tables("d", "batch")).iterrows():
        key = row["group"].partition("/")[0], row["preferred"]
        if key in seen:
            repeated_rows += 1
            assert list(row["reference_logprobs"]) == pytest.approx(seen[key], abs=1e-5)
        seen[key] = list(row["reference_logprobs"])
    assert repeated_rows == 2 * 6  # 16 pairs are drawn of 10


@pytest.mark.slow
def test_a_batch_larger_than_the_data_is_the_data(runs: FlowRuns) -> None:
    runs.run("d", algorithm={"samples_per_batch": 32})  # one epoch
    assert len(runs.records("d")) == 1
    (batch,) = runs.tables("d", "batch")
    assert len(batch) == 20


@pytest.mark.slow
def test_a_batch_that_reaches_into_the_next_epoch(runs: FlowRuns) -> None:
    """It may have the same pair twice: two pairs, and not a group of four."""
    runs.run("d", algorithm={"samples_per_batch": 8, "epochs": 2})
    batches = runs.tables("d", "batch")
    assert len(runs.records("d")) == len(batches) == 3  # 20 pairs in batches of 8
    groups = batches[1]["group"]
    assert len(groups) == 16 and groups.value_counts().tolist() == [2] * 8
    assert len({group.partition("/")[0] for group in groups}) <= 8


@pytest.mark.parametrize(
    ("variant", "first_loss"),
    [
        ({"loss_variant": "ipo"}, (1 / (2 * 0.1)) ** 2),  # (0 - 1 / 2β)²
        pytest.param({"loss_variant": "cdpo", "label_smoothing": 0.1}, math.log(2), marks=pytest.mark.slow),
    ],
)
def test_the_other_variants(runs: FlowRuns, variant: dict[str, Any], first_loss: float) -> None:
    algorithm = {"steps": 2, "samples_per_batch": 4} | variant
    runs.run("d", algorithm=algorithm)
    assert runs.records("d")[0].metrics["loss"] == pytest.approx(first_loss, rel=1e-4)
    assert runs.records("d")[1].request.loss["variant"] == variant["loss_variant"]


@pytest.mark.slow
def test_an_adapter_is_trained_alone(runs: FlowRuns) -> None:
    algorithm = {"steps": 3, "samples_per_batch": 10}  # the same pairs in every step
    runs.run("d", model__adapter={"rank": 4}, algorithm=algorithm)
    metrics = [record.metrics for record in runs.records("d")]
    assert metrics[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert metrics[2]["loss"] < metrics[0]["loss"]
    assert runs.chain("d").root().trainable["kind"] == "lora"  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize(("runs", "trained"), [(name, name) for name in FLOWS], indirect=True)
def test_an_interrupted_run_resumes_and_ends_in_the_same_bytes(
    runs: FlowRuns, trained: FlowRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(monkeypatch, flows.training.supervised_loop, "take_gradient_step", step=2)
    with pytest.raises(Interrupted):
        runs.run("d")
    assert len(runs.records("d")) == 2
    connect.cache_clear()  # after a crash nothing is in memory
    runs.run("d")
    assert runs.digests("d") == trained.digests("d")
    assert len(set(trained.digests("d")) - {None}) == 4


def test_a_dataset_of_threads_is_refused(trained: FlowRuns) -> None:
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
    from tests.fixtures.spawning import Context

    prompt = StringThread().user("1")
    pairs = [(prompt.assistant("111"), prompt.assistant("666"))]
    provenance = Provenance(code_version="abc", config_digest="0" * 64, seed=0)
    ctx = Context(Workspace(store=str(tmp_path / "data"), run="d", provenance=provenance))

    @flow
    async def train() -> int:
        model = await Model(str(tiny_folder)).to_builder(ctx).spawn_train("policy")
        before = [await model.logprobs(thread) for thread in pairs[0]]
        policy = await DPO(pairs, model, lr=1e-3, epochs=3).run()
        after = [await model.logprobs(thread) for thread in pairs[0]]
        assert (after[0] - after[1]) > (before[0] - before[1])
        return policy.step

    assert asyncio.run(train()) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("runs", "starts_at_0"), [("dpo", True), ("simpo", False), ("kto", True)], indirect=["runs"])
def test_the_margin_grows_until_every_pair_is_told_apart(runs: FlowRuns, starts_at_0: bool) -> None:
    algorithm = {"steps": 40, "samples_per_batch": 10 if runs.flow is not kto else 20}
    runs.run("d", algorithm=algorithm)
    metrics = [record.metrics for record in runs.records("d")]
    margins = [measures["reward_chosen_mean"] - measures["reward_rejected_mean"] for measures in metrics]
    assert (abs(margins[0]) < 1e-5) == starts_at_0 and margins[-1] > 1.0
    assert margins[-1] > margins[20] > margins[10] > margins[0]
    assert runs.flow is kto or metrics[-1]["accuracy_mean"] == 1.0
    assert metrics[-1]["loss"] < 0.3 < metrics[0]["loss"]
