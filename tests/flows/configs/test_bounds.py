"""Configs refuse the numbers that the engine would refuse later, in the middle of a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from flows.catalogue import DPOAlgorithm
from flows.configs.common import GRPOAlgorithm, SFTConfig
from flows.configs.optimizer import OptimizerConfig
from flows.configs.overrides import ConfigError, load_config
from flows.configs.ppo import CreditConfig, ValueModelConfig
from flows.configs.reinforcement import Regularisation
from flows.configs.validation import EvaluationConfig
from tasks.batches.advantages import AdaptiveKL, FixedKL


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (GRPOAlgorithm, "kl_beta", 1e308),
        (GRPOAlgorithm, "clip_range_high", 1e308),
        (Regularisation, "importance_cap", 1e308),
        (Regularisation, "entropy_coef", 1e308),
        (Regularisation, "norm_constant", 1e-320),
        (DPOAlgorithm, "kl_beta", 1e-320),
        (CreditConfig, "value_clip", 1e308),
        (ValueModelConfig, "lr", 1e30),
        (OptimizerConfig, "lr", 1e30),
        (OptimizerConfig, "weight_decay", 1e30),
        (OptimizerConfig, "eps", 1e-320),
        (OptimizerConfig, "max_grad_norm", float("inf")),
        (EvaluationConfig, "temperature", 1e-320),
        (EvaluationConfig, "temperature", 1e308),
        (FixedKL, "beta", 1e308),
        (AdaptiveKL, "beta", float("nan")),
    ],
)
def test_numbers_that_no_model_can_compute_with_are_refused(config: type[BaseModel], field: str, value: Any) -> None:
    with pytest.raises(ValidationError) as refused:
        config.model_validate({field: value})
    assert [error["loc"] for error in refused.value.errors()] == [(field,)]


@pytest.mark.parametrize("run", ["a" * 300, "../x", "a/b/c", "-x", "\0"])
def test_the_name_of_a_run_is_checked_with_the_config(run: str) -> None:
    with pytest.raises(ValidationError, match=r"run\n.*Value error, .* is not a "):
        SFTConfig.model_validate({"run": run, "model": {"key": "tiny"}, "data": {"train": "x.jsonl"}})


def test_a_config_is_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "c.yaml")
    (tmp_path / "d.yaml").symlink_to("/dev/zero")
    for name in ("c.yaml", "d.yaml"):
        with pytest.raises(ConfigError, match="is no regular file; give the path of a config file"):
            load_config(tmp_path / name)


def test_the_names_of_keys_count_for_the_size(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"a: &a {{{'k' * 900}: 1}}\nb: [{', '.join(['*a'] * 2000)}]\n")
    with pytest.raises(ConfigError, match="characters when its YAML aliases are written out"):
        load_config(file)
