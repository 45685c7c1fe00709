"""Configs refuse the numbers that the engine would refuse later, in the middle of a run."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from flows.configs.common import GRPOAlgorithm
from flows.configs.optimizer import OptimizerConfig
from flows.configs.ppo import CreditConfig, ValueModelConfig
from flows.configs.preferences import DPOAlgorithm
from flows.configs.reinforcement import Regularisation
from flows.configs.validation import EvaluationConfig
from tasks.credit.kl_controllers import AdaptiveKL, FixedKL


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
