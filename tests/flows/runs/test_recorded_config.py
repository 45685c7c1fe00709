"""Tests of the recorded config of a run: written as YAML and read back, it is the config that the run was started
with, also with the settings that do not decide the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Set  # noqa: UP035 - as recipes write it

import pytest

from engine.specs.engine import HttpEngineSpec
from flows.catalogue import TRAININGS
from flows.configs.common import FlowConfig, GRPOConfig, SFTConfig
from flows.configs.evaluation import EvaluationFlowConfig
from flows.configs.evaluation import semantic as evaluation_semantic
from flows.configs.overrides import load_config, parse_config
from flows.configs.recurring import RecurringConfig
from flows.configs.sweep import SweepConfig
from flows.parameters import Dataset, Grader, Model, dataset_kinds
from flows.recipe import InputConfig
from flows.runs.recipe_context import RecipeContext
from flows.runs.recorded_config import FLOW, config_yaml, read_config, suite_of_run, write_config
from storage.chain.fork import fork_run
from storage.chain.records import Chain, Root
from storage.chain.run_record import create_or_check_run
from storage.errors import CorruptArtifact, ObjectNotFound, RunBeingDeleted
from storage.store import keys
from storage.store.objects import ObjectStore, open_store
from tasks.datasets.load import load_dataset
from tasks.datasets.spec import HeldoutSplit, RegisteredDataset
from tests.fixtures.page import PROVENANCE, publish
from tests.fixtures.runs.toy_run import ToyRun

SETS = {
    "seed": "3", "model.publish_as": "mine", "storage.url": "s3://bucket/a", "checkpoints.keep_last": "5",
    "engine": "{kind: http, url: 'http://gpu-1:8777'}",
}  # fmt: skip
"""Settings that differ from every example."""
FILE = {"kind": "file", "path": "a.jsonl"}
LIMITS = {"grader.timeout_seconds": "7", "grader.workers": "local"}
"""Settings of a grader that do not decide the result."""


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "store"))


def record(store: ObjectStore, flow: str, config: FlowConfig) -> None:
    """Records the config as the flow does."""
    create_or_check_run(
        store,
        config.run,
        semantic=config.semantic() | {"inputs": {"dataset": "d" * 64, "model": "e" * 64}},
        other=config.other() | {FLOW: flow},
        code_version="test",
    )


def written_and_read(store: ObjectStore, config: FlowConfig, folder: Path) -> tuple[FlowConfig, str]:
    recorded = read_config(store, config.run)
    path, is_new = write_config(recorded, folder)
    assert is_new
    return parse_config(type(config), path), path.read_text()


@pytest.mark.parametrize("flow", sorted(TRAININGS))
def test_the_config_of_every_flow_is_read_back(flow: str, store: ObjectStore, tmp_path: Path) -> None:
    example = Path("examples/demo.yaml" if flow == "grpo" else f"examples/{flow}.yaml")
    config_type = TRAININGS[flow].config
    sets = SETS | (LIMITS if "grader" in config_type.model_fields else {})
    config = parse_config(config_type, example, [f"{key}={value}" for key, value in {**sets, "run": "r"}.items()])
    record(store, flow, config)
    again, text = written_and_read(store, config, tmp_path)
    assert again == config
    assert f"ostinato run {flow} " in text
    # what nobody set is left out
    assert len(text.splitlines()) < 45


def test_the_child_runs_of_a_sweep_and_of_recurring_are_read_back(store: ObjectStore, tmp_path: Path) -> None:
    _, child = parse_config(SweepConfig, Path("examples/sweep.yaml")).children()[1]
    recurring = parse_config(RecurringConfig, Path("examples/recurring.yaml"))
    model = recurring.training.config.model.model_copy(update={"key": "m@1", "publish_as": recurring.model})
    challenger = recurring.training.config.model_copy(update={"run": "recurring-m/0a", "model": model})
    for config in (child, challenger):
        record(store, "grpo", config)
        again, _ = written_and_read(store, config, tmp_path)
        assert again == config


def test_the_suite_of_a_run_has_its_held_out_rows_and_its_grader(store: ObjectStore, tmp_path: Path) -> None:
    rows = tmp_path / "sums.jsonl"
    rows.write_text("\n".join(f'{{"prompt": "{n}+1?", "completion": "{n + 1}"}}' for n in range(20)))
    source = {"kind": "file", "path": str(rows)}
    sets = [f"model.key={tmp_path}", "run=tuned", f"data.train={json.dumps(source)}", "data.heldout={split: 0.2}"]
    config = parse_config(SFTConfig, None, sets)
    heldout = config.data.heldout_rows
    assert heldout is not None
    (train, use), = config.data.inputs.values()
    parts = [load_dataset(store, part, use=use, provenance=PROVENANCE) for part in (train, heldout)]
    # another split of the same rows, which another run made
    other = HeldoutSplit(split=0.5).part(config.data.train, "heldout")
    load_dataset(store, other, use=use, provenance=PROVENANCE)
    create_or_check_run(
        store, "tuned", semantic=config.semantic() | {"inputs": {"dataset": parts[0].ref.sha256, "model": "e" * 64}},
        other=config.other() | {FLOW: "sft"}, code_version="test",
    )  # fmt: skip
    name, version = keys.dataset_of(parts[1].ref.key)
    expected = [{"source": {"kind": "registered", "key": f"{name}@{version}"}}]
    assert name == "sums-heldout" and suite_of_run(store, "tuned") == {"suite.datasets": expected}
    # completions are prompts, too
    prompts = RegisteredDataset(key=f"{name}@{version}")
    assert load_dataset(store, prompts, use="prompt", provenance=PROVENANCE).rows == parts[1].rows > 0
    # held-out rows of their own, and a grader without those of its settings that are defaults
    sets = [sets[0], "run=graded", "algorithm.steps=1", sets[2], f"data.heldout={json.dumps(FILE)}"]
    grader = {"path": "tasks.graders:ExactMatch", "timeout_seconds": 7.0}
    record(store, "grpo", parse_config(GRPOConfig, None, [*sets, f"grader={json.dumps(grader)}"]))
    suite = suite_of_run(store, "graded")
    assert suite == {"suite.datasets": [{"source": FILE}], "suite.graders": [grader]}
    EvaluationFlowConfig.model_validate(
        {"models": ["m"], "suite": {"datasets": suite["suite.datasets"], "graders": suite["suite.graders"]}}
    )
    # neither a run of a recipe nor an unknown one is an error
    create_or_check_run(store, "recipe", semantic={"seed": 0}, other={}, code_version="test")
    assert suite_of_run(store, "recipe") == suite_of_run(store, "none") == {}


def test_a_run_of_an_earlier_version_has_what_was_recorded(toy_run: ToyRun, tmp_path: Path) -> None:
    """Earlier versions recorded neither the flow nor the settings that `semantic` leaves out."""
    toy = toy_run.copied(tmp_path / "copy")
    config = GRPOConfig.model_validate(toy.config)
    groups = ("run", "engine", "storage", "checkpoints", "logging", "evaluation")
    other = config.model_dump(mode="json", include=set(groups))
    semantic = config.semantic() | {"inputs": {"dataset": "d" * 64}}
    toy.store.delete("runs/toy/run.json")
    create_or_check_run(toy.store, "toy", semantic=semantic, other=other, code_version="old")
    recorded = read_config(toy.store, "toy")
    assert (recorded.flow, recorded.is_complete) == ("grpo", False)
    assert "did not record model.publish_as" in recorded.text
    left_out = {"publish_as": None, "publish_dtype": "base", "publish_unchanged": False}
    unpublished = config.model_copy(update={"model": config.model.model_copy(update=left_out)})
    assert GRPOConfig.model_validate(recorded.values) == unpublished


def test_a_fork_has_the_config_of_its_origin(toy_run: ToyRun, tmp_path: Path) -> None:
    toy = toy_run.copied(tmp_path / "copy")
    fork_run(toy.store, "toy", "nightly/1", step=2, code_version="test")
    fork_run(toy.store, "nightly/1", "again", step=1, code_version="test")
    recorded = read_config(toy.store, "again")
    expected = toy_run.config | {"run": "again", "storage": {"url": toy.store.url}}
    assert GRPOConfig.model_validate(recorded.values) == GRPOConfig.model_validate(expected)
    # a file that exists may have been edited, so it is kept
    path, is_new = write_config(read_config(toy.store, "nightly/1"), tmp_path)
    assert (path.name, is_new) == ("nightly+1.yaml", True)
    path.write_text("edited")
    assert write_config(read_config(toy.store, "nightly/1"), tmp_path) == (path, False)
    assert path.read_text() == "edited"
    with pytest.raises(ObjectNotFound, match="run 'none' has no config"):
        read_config(toy.store, "none")


def test_a_copy_names_the_versions_of_the_value_model_and_of_the_teacher(store: ObjectStore, tmp_path: Path) -> None:
    """Policy and value model name one registered model, which had another version when each of them began."""
    refs = {version: publish(store, tmp_path, "m", version) for version in ("1", "2", "3")}
    sets = SETS | {"model.key": "m", "data.train": str(FILE), "algorithm.steps": "5"}
    grader = {"grader.path": "tests.fixtures.toy:digit_share"}
    for flow, part, sets_of_flow in (
        ("ppo", "value_model", sets | grader | {"value_model.key": "m", "value_model.name": "critic"}),
        ("distill", "teacher", sets | {"teacher.key": "m"}),
    ):
        values = load_config(None, [f"{name}={text}" for name, text in sets_of_flow.items()]) | {"run": flow}
        config = TRAININGS[flow].config.model_validate(values)
        inputs = {"dataset": "d" * 64, "model": refs["1"].sha256}
        semantic, other = config.semantic() | {"inputs": inputs}, config.other() | {FLOW: flow}
        create_or_check_run(store, flow, semantic=semantic, other=other, code_version="test")
        name = "critic" if part == "value_model" else "teacher"
        # before its chain begins, the version is not known
        assert read_config(store, flow).copied(store)[part]["key"] == "m"
        Chain(store, flow, f"0-{flow}", name).create_root(Root(base=refs["2"], base_digest=refs["2"].sha256))
        copied = read_config(store, flow).copied(store)
        assert (copied["model"]["key"], copied[part]["key"]) == ("m@1", "m@2")
        # the config itself names what was given
        assert read_config(store, flow).values[part]["key"] == "m"


class Config(InputConfig):
    """The config of a recipe."""

    model: Model
    prompts: Dataset[dataset_kinds.Prompt]
    graders: Set[Grader]  # noqa: UP006
    steps: int = 100


def test_the_parameters_of_a_recipe_are_read_back(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    config = Config.model_validate({
        "run": "r", "seed": 4, "model": "tiny", "prompts": "a.jsonl", "graders": ["a.b:c", "a.b:d"], "steps": 7,
        "engine": {"kind": "http", "url": "http://gpu-1:8777"}, "storage": {"url": url},
    })  # fmt: skip
    semantic = {"config": config.semantic()}
    RecipeContext.open("r", store=url, seed=config.seed, engine=config.engine, semantic=semantic)
    recorded = read_config(open_store(url), "r")
    assert (recorded.flow, recorded.engine_token) == (None, "OSTINATO_ENGINE_TOKEN")
    path, _ = write_config(recorded, tmp_path)
    assert parse_config(Config, path) == config


def test_the_values_of_a_recipe_without_a_config(tmp_path: Path) -> None:
    RecipeContext.open("r", store=str(tmp_path), seed=4, semantic={"rate": 1e-5})
    values = read_config(open_store(str(tmp_path)), "r").values
    assert values == {"run": "r", "seed": 4, "rate": 1e-5, "storage": {"url": str(tmp_path)}}


def test_a_recipe_may_call_a_value_inputs(tmp_path: Path) -> None:
    RecipeContext.open("r", store=str(tmp_path), seed=4, semantic={"inputs": {"dataset": "a"}})
    recorded = read_config(open_store(str(tmp_path)), "r")
    assert recorded.flow is None
    assert recorded.values["inputs"] == {"dataset": "a"}


def test_an_engine_of_another_version_is_named(store: ObjectStore) -> None:
    other = {"engine": {"kind": "local", "warp": 9}, "storage": {"url": store.url}}
    create_or_check_run(store, "r", semantic={"seed": 0}, other=other, code_version="test")
    with pytest.raises(CorruptArtifact, match=r"runs/r/run\.json has no engine of this version: (.|\n)*warp"):
        read_config(store, "r")


def test_what_trains_nothing_has_no_config(store: ObjectStore) -> None:
    body = EvaluationFlowConfig.model_validate({
        "models": ["m@1"],
        "suite": {"datasets": [{"name": "a", "source": FILE}], "graders": [{"name": "b", "path": "a:b"}]},
    })
    other = body.model_dump(mode="json", include={"engine", "storage", "models"})
    semantic = evaluation_semantic(body.suite, models={})
    create_or_check_run(store, "evaluation-abc", semantic=semantic, other=other, code_version="test")
    create_or_check_run(store, "s/comparison-abc", semantic={"runs": ["a"]}, other={}, code_version="test")
    for run in ("evaluation-abc", "s/comparison-abc"):
        with pytest.raises(ObjectNotFound, match="trains nothing"):
            read_config(store, run)


def test_a_run_that_is_deleted_in_part_is_named(store: ObjectStore) -> None:
    store.put(keys.deletion("r"), b"{}")
    with pytest.raises(RunBeingDeleted, match="ostinato runs delete r --yes"):
        read_config(store, "r")


@pytest.mark.parametrize(
    "value",
    ["1e5", "1.5", "007", "no", "on", "1:30", "2026-01-02", "null", "", "a: b", "# c", "<<", ".inf", "x\ny", "é"],
)
def test_a_text_stays_a_text(value: str, tmp_path: Path) -> None:
    body: dict[str, Any] = {"a": {"b": value, "c": [value, 1e-6, 1e20, 5, None, True]}}
    (file := tmp_path / "config.yaml").write_text(config_yaml(body))
    assert load_config(file) == body


def test_no_config_holds_a_token(monkeypatch: pytest.MonkeyPatch, store: ObjectStore) -> None:
    monkeypatch.setenv("OSTINATO_ENGINE_TOKEN", "hush-4f1c9b")
    config = parse_config(GRPOConfig, Path("examples/demo.yaml"), ["run=r"])
    record(store, "grpo", config.model_copy(update={"engine": HttpEngineSpec(url="http://gpu-1:8777")}))
    recorded = read_config(store, "r")
    assert recorded.engine_token == "OSTINATO_ENGINE_TOKEN" and "hush" not in recorded.text
