"""The check of a config as a whole: every problem at once, and what the run would take."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine.specs.engine import LocalEngineSpec
from flows.configs.common import GRPOConfig, SFTConfig
from flows.configs.evaluation import EvaluationFlowConfig
from flows.configs.evaluation import semantic as semantic_of_suite
from flows.runs.expected_errors import DoesNotFit
from flows.runs.preflight import check_config, expected_of_run, field_texts
from storage.chain.run_record import create_or_check_run
from storage.store.objects import open_store
from tests.fixtures.toy import toy_config

STORE = open_store("memory://preflight")


@pytest.fixture
def right(tmp_path: Path, tiny_folder: Path) -> dict[str, Any]:
    return toy_config(tmp_path, tiny_folder)


def problems(values: dict[str, Any]) -> dict[str, str]:
    checked = check_config(GRPOConfig, values, STORE)
    assert (checked.config is None) == bool(checked.problems)
    return checked.problems


def test_a_right_config_has_no_problems_and_stays_as_it_is(right: dict[str, Any]) -> None:
    before = repr(right)
    checked = check_config(GRPOConfig, right, STORE)
    assert checked.problems == {} and checked.config == GRPOConfig.model_validate(right)
    assert repr(right) == before


def test_the_key_of_a_run_with_other_settings_is_refused_at_the_run(right: dict[str, Any], tmp_path: Path) -> None:
    """What the data and the model contain is known only to the run itself."""
    store, config = open_store(tmp_path / "runs"), GRPOConfig.model_validate(right | {"run": "taken"})
    semantic = config.semantic() | {"inputs": {"dataset": "d", "model": "m"}}
    create_or_check_run(store, "taken", semantic=semantic, other={}, code_version="test")
    # the same settings continue the run, and those that do not decide its result may differ
    again = right | {"run": "taken", "checkpoints": {"every_steps": 3}}
    assert check_config(GRPOConfig, again, store).problems == {}
    wrong = check_config(GRPOConfig, right | {"run": "taken", "seed": 99}, store).problems
    assert set(wrong) == {"run"}
    assert "run 'taken' was started with another configuration" in wrong["run"]
    assert f"seed: the run has {config.seed}, given 99" in wrong["run"] and "inputs" not in wrong["run"]
    assert check_config(GRPOConfig, right | {"run": "free", "seed": 99}, store).problems == {}
    # an evaluation with the key of a training
    suite = {"datasets": [{"source": right["data"]["train"]}], "graders": [right["grader"]]}
    values = {"models": ["m"], "suite": suite}
    wrong = check_config(EvaluationFlowConfig, values | {"run": "taken"}, store).problems
    assert "another configuration" in wrong["run"]
    body = semantic_of_suite(EvaluationFlowConfig.model_validate(values).suite, models={"m@1": "0"})
    create_or_check_run(store, "judged", semantic=body, other={}, code_version="test")
    assert "run" not in check_config(EvaluationFlowConfig, values | {"run": "judged"}, store).problems
    suite["seed"] = 1
    assert "evaluation.seed: the run has 0, given 1" in check_config(
        EvaluationFlowConfig, values | {"run": "judged"}, store
    ).problems["run"]


def test_wrong_types_missing_files_and_rules_about_several_fields_come_together(right: dict[str, Any]) -> None:
    right["optimizer"] |= {"lr": "fast"}
    right["data"]["train"]["path"] = "/no/rows.jsonl"
    right["grader"]["path"] = "tests.fixtures.toy:no_such_grader"
    # a rule about two fields of the group
    right["algorithm"] |= {"samples_per_batch": 15}
    wrong = problems(right)
    assert set(wrong) == {"optimizer.lr", "data.train", "grader", "algorithm"}
    assert "/no/rows.jsonl" in wrong["data.train"] and "no_such_grader" in wrong["grader"]


def test_a_missing_value_is_reported_once_and_hides_no_other_problem(right: dict[str, Any]) -> None:
    del right["model"], right["grader"]["path"], right["data"]["train"]
    right["seed"] = "x"
    wrong = problems(right)
    assert {path: "missing" in message for path, message in wrong.items()} == {
        "model.key": True, "grader.path": True, "data.train": True, "seed": False,
    }  # fmt: skip


def test_an_unknown_key_is_named_with_the_nearest_one(right: dict[str, Any]) -> None:
    right["optimizer"]["learning_rte"] = 1
    right["model"]["key"] = "/no/model"
    wrong = problems(right)
    assert "unknown key" in wrong["optimizer.learning_rte"] and "/no/model" in wrong["model.key"]


def test_values_that_are_no_config_at_all(right: dict[str, Any]) -> None:
    assert problems({"model": 3, "data": [], "grader": "x"}).keys() >= {"model", "data", "grader"}
    assert problems({}).keys() >= {"model.key", "data.train", "grader.path"}


def test_the_estimate_is_that_of_the_run(right: dict[str, Any], tmp_path: Path) -> None:
    config = GRPOConfig.model_validate(right)
    store = open_store(tmp_path / "data")
    text = asyncio.run(expected_of_run(config, store, LocalEngineSpec(threads=1)))
    assert text.startswith("estimate: ") and "storage" in text and "about" in text
    with pytest.raises(DoesNotFit, match="memory"):
        asyncio.run(expected_of_run(config, store, LocalEngineSpec(threads=1, memory_gib=0.001)))


def test_each_field_of_a_form_has_a_text() -> None:
    values = {"seed": 1, "data": {"train": {"kind": "file", "path": "a"}}, "model": {"key": "m"}}
    texts = {"seed": "1", "data.train": '{"kind": "file", "path": "a"}', "model.key": "m"}
    assert field_texts(SFTConfig, values) == texts
