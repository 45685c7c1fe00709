"""A run whose grader crashes the interpreter on some completions."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from flows.configs.common import GRPOConfig
from flows.grpo import grpo
from storage.store.objects import open_store
from tasks.reports.step_metrics import read_metrics
from tests.fixtures.toy import toy_config


@pytest.mark.slow
def test_crashes_of_an_isolated_grader_are_masked_and_counted(
    tmp_path: Path, tiny_folder: Path, prefect_server: str
) -> None:
    """Three steps of four prompts see all ten prompts, and so the four completions of the prompt "0" once or twice."""
    patience = {"retries": 0, "max_masked_fraction": 0.6}
    grader = {"path": "tests.fixtures.crashing:segfault_at_zero", "workers": "local"} | patience
    config = toy_config(tmp_path, tiny_folder, run="crashing", algorithm__steps=3) | {"grader": grader}
    result = asyncio.run(grpo(GRPOConfig.model_validate(config)))
    metrics = read_metrics(open_store(tmp_path / "data"), "crashing", "0-grpo", steps=3)
    assert sum(step.masked for step in metrics) in (4, 8)
    # where the grader runs does not decide the result: the key is the same run's
    elsewhere = config | {"grader": grader | {"workers": "none"}}
    assert asyncio.run(grpo(GRPOConfig.model_validate(elsewhere))) == result
