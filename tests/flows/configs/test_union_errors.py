"""Tests of the messages about values that do not fit a config: the field, what was given, what is expected."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import ValidationError as RefusedByPrefect
from prefect.utilities.schema_tools.validation import validate
from pydantic import BaseModel, ValidationError

from flows.configs.common import GRPOConfig
from flows.configs.overrides import ConfigError, parse_config, validation_lines
from flows.configs.recurring import RecurringConfig
from flows.grpo import grpo
from tests.fixtures.configs import with_changes

BODY: dict[str, Any] = {
    "model": {"key": "m"},
    "data": {"train": {"kind": "file", "path": "a.jsonl"}},
    "grader": {"path": "a:b"},
    "algorithm": {"steps": 2},
    "optimizer": {"lr": 1e-3},
}
OF_SUITES = "file, hub, python, reasoning_gym, registered"
SOURCES = f"{OF_SUITES}, mixture"
"""The kinds of datasets to train on. A suite takes no mixture."""


def lines_of(model: type[BaseModel], body: dict[str, Any]) -> list[str]:
    with pytest.raises(ValidationError) as refused:
        model.model_validate(body)
    return validation_lines(refused.value, model, body, remedy="give it")


CASES: list[tuple[dict[str, Any], str]] = [
    ({"data__train": {"kind": "fil", "path": "a"}}, f"data.train: given kind='fil'; give one of {SOURCES}"),
    (
        {"data__train": {"path": "a"}},
        f"data.train: given no kind; expected a group of keys, with kind: one of {SOURCES}",
    ),
    (
        {"data__train": "a.jsonl"},
        f"data.train: given 'a.jsonl'; expected a group of keys, with kind: one of {SOURCES}",
    ),
    ({"data__train": {"kind": "file"}}, "data.train.path: missing; give it"),
    ({"data__train": {"kind": "file", "path": "a", "pth": 1}}, "data.train.pth: unknown key; did you mean 'path'?"),
    # a dataset of the hub has a split, and a file has none
    (
        {"data__heldout": {"kind": "file", "path": "a", "split": "test"}},
        "data.heldout.split: unknown key of kind file; leave it out, or use a kind that has it: hub, reasoning_gym, "
        "split",
    ),
    ({"data__heldout": {"split": 2}}, "data.heldout.split: Input should be less than 1 (given: 2)"),
    (
        {"data__heldout": {"path": "a"}},
        f"data.heldout: given no kind; expected a group of keys, with kind: one of {OF_SUITES}, split",
    ),
    (
        {"data__heldout": {"kind": "hub", "path": "a/b", "splitt": "test"}},
        "data.heldout.splitt: unknown key; did you mean 'split'?",
    ),
    ({"engine": {"kind": "htp"}}, "engine: given kind='htp'; give one of local, http"),
    ({"engine": {"sampler": {"kind": "vlm"}}}, "engine.sampler: given kind='vlm'; give one of torch, vllm"),
    ({"engine": 5}, "engine: given 5; expected a group of keys, with kind: one of local, http"),
    (
        {"model": "m"},
        "model: given 'm'; expected a group of keys (key, name, publish_as, publish_dtype, publish_unchanged, adapter)",
    ),
    ({"storage": 5}, "storage: given 5; expected a group of keys (url)"),
    ({"storage": {"folder": "a"}}, "storage.folder: unknown key; leave it out, or use one of url"),
    ({"model__adapter": {"rank": 0}}, "model.adapter.rank: Input should be greater than or equal to 1 (given: 0)"),
    ({"grader__path": "rules"}, "grader.path: given 'rules'; expected an import path, package.module:name"),
    (
        {"optimizer": {"further settings": {"warmup_steps": -1}}},
        "optimizer.warmup_steps: Input should be greater than or equal to 0 (given: -1)",
    ),
    ({"algorithm__further settings": [1]}, "algorithm.further settings: expected settings by name (given: [1])"),
    (
        {"algorithm__samples_per_batch": 12},
        "algorithm: samples_per_batch=12 splits a group; use a multiple of completions_per_sample=8",
    ),
]


@pytest.mark.parametrize(("changes", "line"), CASES)
def test_a_value_that_does_not_fit_is_one_line(changes: dict[str, Any], line: str) -> None:
    body = with_changes(deepcopy(BODY), changes)
    assert lines_of(GRPOConfig, body) == [line]
    # within the training of another flow, nothing but the path is longer
    suite = {
        "datasets": [{"name": "a", "source": {"kind": "file", "path": "a"}}],
        "graders": [{"name": "b", "path": "a:b"}],
    }
    outer = {"model": "m", "training": {"kind": "grpo", "config": body}, "suite": suite}
    assert lines_of(RecurringConfig, outer) == [f"training.config.{line}"]


def test_a_list_with_a_wrong_item_is_not_called_empty() -> None:
    suite = {"datasets": [{"name": "a", "source": {"kind": "x"}}], "graders": [{"name": "b", "path": "a:b"}]}
    body = {"model": "m", "training": {"kind": "grpo", "config": BODY}, "suite": suite}
    assert lines_of(RecurringConfig, body) == [f"suite.datasets.0.source: given kind='x'; give one of {OF_SUITES}"]
    suite["datasets"] = []
    (line,) = lines_of(RecurringConfig, body)
    assert line.startswith("suite.datasets: Tuple should have at least 1 item")


def test_a_command_line_says_the_same() -> None:
    sets = ["model.key=m", "data.train={kind: fil}", "grader.path=a:b", "algorithm.steps=2"]
    with pytest.raises(ConfigError) as refused:
        parse_config(GRPOConfig, None, sets)
    heading, line = str(refused.value).splitlines()
    assert heading == "1 problem in the GRPOConfig config:"
    assert line == f"  data.train: given kind='fil'; give one of {SOURCES}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__train": {"kind": "file"}}, "Validation failed for field 'config.data.train'. .* 'path' is a required"),
        ({"data__heldout": {"kind": "reasoning_gym", "name": "x"}}, "'config.data.heldout'. .* 'size' is a required"),
        ({"data__heldout": None}, None),
        ({"grader__path": "rules"}, "Validation failed for field 'config.grader.path'. .*'rules' does not match"),
    ],
)
def test_prefects_server_names_what_a_kind_lacks(changes: dict[str, Any], message: str | None) -> None:
    schema = parameter_schema(grpo).model_dump()
    body = {"config": with_changes(deepcopy(BODY), changes)}
    if message is None:
        assert validate(body, schema, raise_on_error=True) == []
        return
    with pytest.raises(RefusedByPrefect, match=message):
        validate(body, schema, raise_on_error=True)
