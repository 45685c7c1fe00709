"""Tests of the configs of flows in environments: which fields decide the result, and which values are refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from flows.configs.environments import ENVGRPOConfig, ENVGSPOConfig
from tests.fixtures.configs import with_changes

CONFIG: dict[str, Any] = {
    "model": {"key": "m"},
    "data": {"train": {"kind": "reasoning_gym", "name": "chain_sum", "size": 10}},
    "environment": {"path": "tests.fixtures.guessing:Guess", "arguments": {"guesses": 2}},
    "algorithm": {"steps": 3},
}


def changed(**changes: Any) -> dict[str, Any]:
    return with_changes({name: dict(group) for name, group in CONFIG.items()}, changes)


def test_defaults_are_the_classes() -> None:
    grpo, gspo = ENVGRPOConfig.model_validate(CONFIG).algorithm, ENVGSPOConfig.model_validate(CONFIG).algorithm
    assert (grpo.kl_beta, grpo.clip_range, grpo.loss_norm) == (0.1, 0.1, "token_mean")
    assert (gspo.kl_beta, gspo.clip_range, gspo.loss_norm) == (0.1, 0.01, "sequence_mean")


def test_the_environment_decides_the_result_and_patience_does_not() -> None:
    config = ENVGRPOConfig.model_validate(CONFIG)
    for name, value in {"reaction_seconds": 5, "concurrency": 1, "max_masked_fraction": 0.5}.items():
        assert ENVGRPOConfig.model_validate(changed(**{f"environment__{name}": value})).semantic() == config.semantic()
    for name, value in {"path": "a:B", "arguments": {}, "max_turns": 2, "max_tokens": 99, "episode_seconds": 1}.items():
        other = ENVGRPOConfig.model_validate(changed(**{f"environment__{name}": value}))
        assert other.semantic() != config.semantic(), name
    assert config.other()["environment"].keys() == {"reaction_seconds", "concurrency", "max_masked_fraction"}


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (ENVGRPOConfig, {"data__truncation": "left"}, "Input should be 'error' or 'drop'"),
        (ENVGRPOConfig, {"environment__max_turns": 0}, "greater than or equal to 1"),
        (ENVGRPOConfig, {"algorithm__advantage_estimator": "reinforce_plus_plus"}, "Input should be 'group'"),
        (ENVGRPOConfig, {"algorithm__steps": None}, "neither algorithm.steps nor algorithm.epochs is given"),
        (ENVGRPOConfig, {"sampling__temperature": 0}, "gives a group equal completions"),
        (ENVGSPOConfig, {"algorithm__dual_clip": 3.0}, "which GSPO does not have"),
        (ENVGRPOConfig, {"grader__path": "a:b"}, "Extra inputs are not permitted"),
    ],
)
def test_what_cannot_be_run_is_refused(config: type[ENVGRPOConfig], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config.model_validate(changed(**changes))


def test_a_run_is_called_by_its_flow() -> None:
    assert ENVGRPOConfig.model_validate(CONFIG).title == "env_grpo m on chain_sum, seed 0"
    assert ENVGSPOConfig.model_validate(CONFIG).title == "env_gspo m on chain_sum, seed 0"
