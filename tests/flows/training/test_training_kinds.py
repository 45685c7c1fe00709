"""Tests of `recurring` and `sweep` over every training flow: their configs, and one short sweep."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from pydantic import TypeAdapter, ValidationError

from flows.catalogue import TRAININGS, AnyTraining
from flows.configs.recurring import RecurringConfig
from flows.configs.sweep import SweepConfig
from flows.recurring import recurring
from flows.sweep import sweep
from storage.chain.records import Chain
from storage.inspect.lineage import training_datasets
from storage.registry.decisions import commit_decision
from storage.store.artifacts import Provenance
from storage.store.objects import open_store
from tests.fixtures.preferences import preference_config, write_pairs
from tests.fixtures.toy import toy_config, write_prompts

FILE = {"kind": "file", "path": "rows.jsonl"}
GYM = {"kind": "reasoning_gym", "name": "chain_sum", "size": 10}
GRADER = {"path": "tests.fixtures.toy:digit_share"}
ENVIRONMENT = {"path": "tests.fixtures.guessing:Guessing"}
EPISODES = {"data": {"train": GYM}, "environment": ENVIRONMENT, "algorithm": {"steps": 3}}
GRADED = {"data": {"train": GYM}, "grader": GRADER, "algorithm": {"steps": 3}}
STAGES = {"data": {"train": FILE, "prompts": GYM}, "grader": GRADER, "gspo": {"algorithm": {"steps": 3}}}
BODIES: dict[str, dict[str, Any]] = {
    **{kind: {"data": {"train": FILE}} for kind in ("sft", "dpo", "simpo", "orpo", "kto", "reward_model")},
    "grpo": GRADED, "gspo": GRADED, "ppo": GRADED, "sft_to_gspo": STAGES,
    "distill": GRADED | {"teacher": {"key": "t"}},
    "rft": GRADED | {"algorithm": {}},
    "env_grpo": EPISODES, "env_gspo": EPISODES, "env_ppo": EPISODES,
}  # fmt: skip
SUITE = {"datasets": [{"source": GYM}], "graders": [GRADER]}


def training(kind: str, **changes: Any) -> dict[str, Any]:
    return {"kind": kind, "config": {"model": {"key": "m"}} | BODIES[kind] | changes}


def a_sweep(kind: str) -> SweepConfig:
    search = {"kind": "grid", "values": {"seed": [0, 1]}}
    return SweepConfig.model_validate({"name": "s", "training": training(kind), "search": search})


def a_recurrence(kind: str) -> RecurringConfig:
    return RecurringConfig.model_validate({"model": "helper", "training": training(kind), "suite": SUITE})


def test_there_is_a_config_of_every_training_flow() -> None:
    assert BODIES.keys() == TRAININGS.keys()


@pytest.mark.parametrize("kind", sorted(BODIES))
def test_a_sweep_takes_every_training_flow(kind: str) -> None:
    config = a_sweep(kind)
    config_type = TRAININGS[kind].config
    assert type(config.training.config) is config_type
    children = config.children()
    assert [(type(child), child.seed) for _, child in children] == [(config_type, 0), (config_type, 1)]
    flow = TRAININGS[kind].import_flow()
    assert flow.name == kind and get_type_hints(flow.fn)["config"] is config_type
    again = SweepConfig.model_validate(config.model_dump(mode="json"))
    assert [child.run for _, child in again.children()] == [child.run for _, child in children]


@pytest.mark.parametrize("kind", sorted(BODIES.keys() - {"reward_model"}))
def test_a_recurrence_takes_every_flow_whose_model_answers(kind: str) -> None:
    assert type(a_recurrence(kind).training.config) is TRAININGS[kind].config


def test_what_no_flow_takes_is_refused() -> None:
    with pytest.raises(ValidationError, match="reward_model"):  # a suite has nothing to ask a model of scores
        a_recurrence("reward_model")
    with pytest.raises(ValidationError, match="'trpo' found .*does not match any of the expected tags: 'grpo', 'sft'"):
        TypeAdapter(AnyTraining).validate_python({"kind": "trpo", "config": {}})
    with pytest.raises(ValidationError, match="grader"):
        TypeAdapter(AnyTraining).validate_python(training("dpo", grader=GRADER))
    with pytest.raises(ValidationError, match="publish_as"):
        body = training("ppo", model={"key": "m", "publish_as": "mine"})
        RecurringConfig.model_validate({"model": "helper", "training": body, "suite": SUITE})


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("sft", {"dataset": "completion"}), ("dpo", {"dataset": "preference"}), ("env_ppo", {"dataset": "prompt"}),
        ("reward_model", {"dataset": "preference"}), ("kto", {"dataset": "rating"}),
        ("sft_to_gspo", {"dataset": "completion", "prompts": "prompt"}),
    ],
)  # fmt: skip
def test_what_a_flow_trains_on(kind: str, expected: dict[str, str]) -> None:
    inputs = TypeAdapter(AnyTraining).validate_python(training(kind)).config.data.inputs
    assert {name: use for name, (_, use) in inputs.items()} == expected
    rated = TypeAdapter(AnyTraining).validate_python(training("reward_model", data={"train": FILE, "use": "rating"}))
    assert rated.config.data.inputs["dataset"][1] == "rating"


@pytest.mark.slow
def test_a_sweep_of_dpo(prefect_server: str, tmp_path: Path, tiny_folder: Path) -> None:
    body = preference_config(tmp_path, tiny_folder, algorithm={"steps": 1, "samples_per_batch": 4})
    search = {"kind": "grid", "values": {"algorithm.kl_beta": [0.1, 0.3]}}
    config = SweepConfig.model_validate(
        {"name": "betas", "training": {"kind": "dpo", "config": body}, "search": search}
    )
    result = asyncio.run(sweep(config))
    assert result["runs"] == [child.run for _, child in config.children()]
    for (_, child), beta in zip(config.children(), (0.1, 0.3), strict=True):
        record = Chain(open_store(str(tmp_path / "data")), child.run, "0-dpo", "policy").record(1)
        assert record is not None and record.request.loss["beta"] == beta


@pytest.mark.slow
def test_new_prompts_of_two_stages_are_new_data(prefect_server: str, tmp_path: Path, tiny_folder: Path) -> None:
    toy = toy_config(tmp_path, tiny_folder, grader__path="tests.fixtures.grading:even_share", algorithm__steps=1)
    chats = {"kind": "file", "path": str(write_pairs(tmp_path / "chats.jsonl")), "columns": {"completion": "chosen"}}
    algorithm, optimizer, prompts = toy.pop("algorithm"), toy.pop("optimizer"), toy["data"]["train"]
    del toy["model"]["publish_as"]
    # Two stages, each with a dataset of its own.
    body = toy | {
        "data": {"train": chats, "prompts": prompts},
        "sft": {"algorithm": {"steps": 1, "samples_per_batch": 4}, "optimizer": optimizer},
        "gspo": {"algorithm": algorithm, "optimizer": optimizer},
    }
    suite = {
        "datasets": [{"name": "all", "source": {"kind": "file", "path": str(write_prompts(tmp_path / "suite.jsonl"))}}],
        "graders": [{"name": "even", "path": "tests.fixtures.grading:even_share"}],
        "sampling": {"max_new_tokens": 6, "min_new_tokens": 6, "temperature": 0.0},
    }

    def run() -> dict[str, Any]:
        whole = {"model": "digits", "training": {"kind": "sft_to_gspo", "config": body}, "suite": suite}
        return asyncio.run(recurring(RecurringConfig.model_validate(whole)))

    # Without new data the second run changes nothing. New prompts of the second stage are new data.
    first = run()
    store = open_store(str(tmp_path / "data"))
    name, version = first["model"].split("@")
    provenance = Provenance(code_version="abc", config_digest="0" * 64, seed=0)
    commit_decision(store, name, version, "promote", over=None, reasons=["a start"], who="ada", provenance=provenance)
    assert len(training_datasets(store, first["model"])) == 2  # the conversations and the prompts
    assert run()["outcome"] == "unchanged"
    write_prompts(Path(prompts["path"]), repeats=2)
    third = run()
    assert third["outcome"] in ("promoted", "held") and third["model"] != first["model"]
