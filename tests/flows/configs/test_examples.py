"""Tests of the files of examples/: each is a config of the flow in its first line, and its data exist."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from flows.catalogue import TRAININGS
from flows.configs.evaluation import EvaluationFlowConfig
from flows.configs.overrides import parse_config
from flows.configs.recurring import RecurringConfig
from flows.configs.sweep import SweepConfig
from tasks.datasets.load import ReadPosition, SkippedRows
from tasks.datasets.spec import FileDataset

EXAMPLES = Path("examples")
OF_COMMAND: dict[str, type[BaseModel]] = {
    "evaluate": EvaluationFlowConfig, "recurring": RecurringConfig, "sweep": SweepConfig,
    **{f"run {flow}": training.config for flow, training in TRAININGS.items()},
}  # fmt: skip


def command_of(file: Path) -> str:
    if file.name == "demo.yaml":
        return "run grpo"
    match = re.match(r"# `ostinato (.+) --config " + re.escape(str(file)) + "`", file.read_text())
    assert match, f"the first line of {file} does not say how it is run"
    return match[1]


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_an_example_is_a_config_of_its_flow(file: Path) -> None:
    config = parse_config(OF_COMMAND[command_of(file)], file, [])
    for source in files_in(config):
        assert next(iter(source.items(use_of(source), SkippedRows(), ReadPosition())))


def test_every_flow_has_an_example() -> None:
    assert {command_of(file) for file in EXAMPLES.glob("*.yaml")} == set(OF_COMMAND)


def files_in(value: Any) -> list[FileDataset]:
    if isinstance(value, FileDataset):
        return [value]
    if isinstance(value, BaseModel):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return []
    return list(chain.from_iterable(files_in(item) for item in value))


def use_of(source: FileDataset) -> Any:
    text = Path(source.path).read_text().splitlines()[0]
    return "preference" if '"chosen"' in text else "completion" if '"completion"' in text else "prompt"
