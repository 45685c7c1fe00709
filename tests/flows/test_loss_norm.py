"""The norms of the loss in the configs of reinforcement learning."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from pydantic import ValidationError

from flows.config import GRPOAlgorithm
from flows.env_config import ENVGRPOAlgorithm, ENVGSPOAlgorithm
from flows.grpo import GRPO
from flows.gspo_config import GSPOAlgorithm
from flows.ppo_config import PPOAlgorithm

ALGORITHMS = [GRPOAlgorithm, GSPOAlgorithm, PPOAlgorithm, ENVGRPOAlgorithm, ENVGSPOAlgorithm]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_has_the_constant_norm(algorithm: type[GRPOAlgorithm]) -> None:
    assert algorithm(loss_norm="constant", norm_constant=512).norm_constant == 512
    assert set(algorithm.model_fields) - {"steps"} <= set(inspect.signature(GRPO.__init__).parameters)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("wrong", [{"loss_norm": "constant"}, {"norm_constant": 512}, {"norm_constant": -1}])
def test_the_constant_goes_with_its_norm(algorithm: type[GRPOAlgorithm], wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="norm_constant"):
        algorithm(**wrong)
