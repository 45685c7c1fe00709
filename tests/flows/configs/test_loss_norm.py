"""The constant norm of the loss in the configs of reinforcement learning."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import ValidationError

from engine.handles import TrainingModel
from engine.protocol import SamplingParams
from flows.configs.common import GRPOAlgorithm, GRPOConfig
from flows.configs.environments import ENVGRPOAlgorithm, ENVGSPOAlgorithm, ENVPPOAlgorithm
from flows.configs.overrides import ConfigError
from flows.configs.ppo import GSPOAlgorithm, GSPOConfig, PPOAlgorithm, PPOConfig
from flows.configs.reinforcement import Regularisation
from flows.grpo import GRPO
from flows.training.options import AlgorithmOptions
from flows.training.rollout_flow import norm_constant
from tasks.graders.spec import grader_spec

ALGORITHMS = [GRPOAlgorithm, GSPOAlgorithm, PPOAlgorithm, ENVGRPOAlgorithm, ENVGSPOAlgorithm, ENVPPOAlgorithm]
BODY: dict[str, Any] = {
    "model": {"key": "m"}, "data": {"train": {"kind": "file", "path": "p.jsonl"}}, "grader": {"path": "a:b"},
}  # fmt: skip


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_has_the_constant_norm(algorithm: type[GRPOAlgorithm]) -> None:
    assert norm_constant(algorithm(loss_norm="constant"), 512) == 512
    assert norm_constant(algorithm(), 512) is None
    assert set(algorithm.model_fields) - {"steps"} <= set(AlgorithmOptions.__annotations__)


@pytest.mark.parametrize("make", [GRPOConfig, GSPOConfig, PPOConfig])
def test_the_constant_goes_with_its_norm(make: type[GRPOConfig]) -> None:
    constant = {"algorithm": {"steps": 2, "loss_norm": "constant"}, "regularisation": {"norm_constant": 512}}
    assert make.model_validate(BODY | constant).semantic()["regularisation"]["norm_constant"] == 512
    with pytest.raises(ValidationError, match="acts only with"):
        make.model_validate(BODY | constant | {"algorithm": {"steps": 2}})
    plain = {"algorithm": {"steps": 2}, "regularisation": {"entropy_coef": 0.1}}
    assert make.model_validate(BODY | plain).semantic()["regularisation"]["norm_constant"] is None


@pytest.mark.parametrize("make", [GRPOConfig, GSPOConfig])
def test_a_kl_term_under_the_ratio(make: type[GRPOConfig]) -> None:
    body = BODY | {"algorithm": {"steps": 1}}
    plain = make.model_validate(body).semantic()
    on = body | {"regularisation": {"kl_importance": True}}
    assert plain["regularisation"]["kl_importance"] is False
    assert make.model_validate(on).semantic() == plain | {
        "regularisation": {**Regularisation().model_dump(), "kl_importance": True}
    }
    with pytest.raises(ValidationError, match="kl_importance acts only with kl_in='loss'"):
        make.model_validate(body | {"regularisation": {"kl_importance": True, "kl_in": "reward"}})
    with pytest.raises(ValidationError, match="kl_importance acts only with algorithm.kl_beta above 0"):
        make.model_validate(on | {"algorithm": {"steps": 1, "kl_beta": 0}})


def test_a_class_weighs_its_kl_term() -> None:
    def loss(**options: Any) -> Any:
        grader = grader_spec("tests.fixtures.grading:even_share")
        model = cast(TrainingModel, SimpleNamespace(sampling=SamplingParams()))
        return GRPO([], model, grader, max_num_grpo_steps=1, **options).loss

    assert loss(kl_importance=True).kl_importance and not loss().kl_importance
    assert loss(kl_importance=True, policy_loss="cispo").kl_importance
    with pytest.raises(ConfigError, match="kl_importance acts only with kl_in='loss', and that is 'reward'"):
        loss(kl_importance=True, kl_in="reward")
