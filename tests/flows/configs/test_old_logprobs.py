"""Tests of where a step takes the old logprobs from: which settings need a pass before the step."""

from __future__ import annotations

from typing import Any

import pytest

from flows.configs.common import GRPOAlgorithm
from flows.configs.environments import ENVGRPOAlgorithm, ENVPPOAlgorithm, ENVPPORegularisation, EpisodeRegularisation
from flows.configs.ppo import GSPOAlgorithm, PPOAlgorithm, PPORegularisation
from flows.configs.reinforcement import Regularisation, old_logprobs_of_step

GROUPS: dict[str, Any] = {
    "grpo": (GRPOAlgorithm, Regularisation),
    "gspo": (GSPOAlgorithm, Regularisation),
    "env_grpo": (ENVGRPOAlgorithm, EpisodeRegularisation),
    "ppo": (PPOAlgorithm, PPORegularisation),
    "env_ppo": (ENVPPOAlgorithm, ENVPPORegularisation),
}


@pytest.mark.parametrize(
    ("flow", "algorithm", "regularisation", "expected"),
    [
        ("grpo", {}, {}, "forward"),
        ("gspo", {}, {}, "forward"),
        ("env_grpo", {}, {}, "forward"),
        # several updates
        ("grpo", {"samples_per_mini_batch": 64}, {}, "trainer"),
        ("gspo", {"mini_epochs_per_batch": 2}, {}, "trainer"),
        # what the loss computes from the logprobs of its own forward pass
        ("grpo", {"kl_beta": 0.5}, {"importance_cap": 2.0, "kl_importance": True, "entropy_coef": 0.1}, "forward"),
        ("grpo", {}, {"kl_controller": "adaptive"}, "forward"),
        # a KL penalty of the reward, which PPO has by default
        ("grpo", {}, {"kl_in": "reward"}, "trainer"),
        ("grpo", {"kl_beta": 0.0}, {"kl_in": "reward"}, "forward"),
        ("ppo", {}, {}, "trainer"),
        ("ppo", {"kl_beta": 0.0}, {}, "forward"),
        ("ppo", {}, {"kl_in": "loss"}, "forward"),
        ("env_ppo", {}, {}, "trainer"),
        # the user's choice
        ("grpo", {"old_logprobs": "sampler"}, {}, "sampler"),
        ("grpo", {"old_logprobs": "sampler", "mini_epochs_per_batch": 2}, {}, "sampler"),
    ],
)
def test_a_pass_before_the_step_is_made_where_something_needs_it(
    flow: str, algorithm: dict[str, Any], regularisation: dict[str, Any], expected: str
) -> None:
    algorithm_type, regularisation_type = GROUPS[flow]
    assert old_logprobs_of_step(algorithm_type(**algorithm), regularisation_type(**regularisation)) == expected
