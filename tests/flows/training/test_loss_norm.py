"""The constant norm of the loss in the configs of reinforcement learning."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from pydantic import ValidationError

from flows.configs.common import GRPOAlgorithm, GRPOConfig
from flows.configs.env_ppo import ENVPPOAlgorithm
from flows.configs.environments import ENVGRPOAlgorithm, ENVGSPOAlgorithm
from flows.configs.gspo import GSPOAlgorithm, GSPOConfig
from flows.configs.ppo import PPOAlgorithm, PPOConfig
from flows.configs.reinforcement import Regularisation
from flows.grpo import GRPO, longest

ALGORITHMS = [GRPOAlgorithm, GSPOAlgorithm, PPOAlgorithm, ENVGRPOAlgorithm, ENVGSPOAlgorithm, ENVPPOAlgorithm]
BODY: dict[str, Any] = {
    "model": {"key": "m"}, "data": {"train": {"kind": "file", "path": "p.jsonl"}}, "grader": {"path": "a:b"},
}  # fmt: skip


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_has_the_constant_norm(algorithm: type[GRPOAlgorithm]) -> None:
    assert longest(512, algorithm(loss_norm="constant")) == 512
    assert longest(512, algorithm()) is None
    assert set(algorithm.model_fields) - {"steps"} <= set(inspect.signature(GRPO.__init__).parameters)


@pytest.mark.parametrize("make", [GRPOConfig, GSPOConfig, PPOConfig])
def test_the_constant_goes_with_its_norm(make: type[GRPOConfig]) -> None:
    constant = {"algorithm": {"steps": 1, "loss_norm": "constant"}, "regularisation": {"norm_constant": 512}}
    assert make.model_validate(BODY | constant).semantic()["regularisation"]["norm_constant"] == 512
    with pytest.raises(ValidationError, match="acts only with"):
        make.model_validate(BODY | constant | {"algorithm": {"steps": 1}})
    plain = {"algorithm": {"steps": 1}, "regularisation": {"entropy_coef": 0.1}}
    assert "norm_constant" not in make.model_validate(BODY | plain).semantic()["regularisation"]


@pytest.mark.parametrize("make", [GRPOConfig, GSPOConfig])
def test_a_kl_term_under_the_ratio(make: type[GRPOConfig]) -> None:
    body = BODY | {"algorithm": {"steps": 1}}
    plain = make.model_validate(body).semantic()
    on = body | {"regularisation": {"kl_importance": True}}
    assert make.model_validate(on).semantic() == plain | {
        "regularisation": {**Regularisation().model_dump(exclude={"norm_constant"}), "kl_importance": True}
    }
    # runs from before it, with another setting of the group
    entropy = make.model_validate(body | {"regularisation": {"entropy_coef": 0.1}}).semantic()
    assert "kl_importance" not in entropy["regularisation"]
    with pytest.raises(ValidationError, match="kl_importance acts only with kl_in='loss'"):
        make.model_validate(body | {"regularisation": {"kl_importance": True, "kl_in": "reward"}})
    with pytest.raises(ValidationError, match="kl_importance acts only with algorithm.kl_beta above 0"):
        make.model_validate(on | {"algorithm": {"steps": 1, "kl_beta": 0}})


def test_a_class_weighs_its_kl_term() -> None:
    def loss(**options: Any) -> Any:
        return GRPO([], None, None, max_num_grpo_steps=1, **options).loss  # type: ignore[arg-type]

    assert loss(kl_importance=True).kl_importance and not loss().kl_importance
    assert loss(kl_importance=True, policy_loss="cispo").kl_importance
    with pytest.raises(ValidationError, match="kl_importance acts only with kl_in='loss', and that is 'reward'"):
        loss(kl_importance=True, kl_in="reward")
