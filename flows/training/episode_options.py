"""The options of the training classes in environments: the limits of an episode, and what episodes do not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flows.configs.defaults import default_of
from flows.configs.reinforcement import BatchRules
from flows.training.options import EpisodeLimits
from tasks.credit.advantages import ESTIMATORS
from tasks.environments.base import EnvironmentFactory
from tasks.environments.spec import EnvironmentSpec, in_process_spec
from tasks.sampling.episodes import EpisodePlan

NOT_OF_EPISODES = (
    "dynamic_sampling", "mask_truncated", "overlong_buffer", "overlong_penalty", "max_refill_rounds", "refill_end",
)  # fmt: skip
"""Options that act on single answers, of which an episode has several."""


def episode_plan(environment: EnvironmentFactory | EnvironmentSpec, options: EpisodeLimits) -> EpisodePlan:
    """The environment and the limits of its episodes. A factory is one of this process."""
    if isinstance(environment, EnvironmentFactory):
        environment = in_process_spec(environment)
    limits = {name: value for name, value in options.items() if name in EpisodeLimits.__annotations__}
    return EpisodePlan.model_validate({"environment": environment, **limits})


def check_episode_options(options: Mapping[str, Any]) -> None:
    """Raises ValueError for options that act on single answers."""
    acting = [name for name in NOT_OF_EPISODES if name in options and options[name] != default_of(BatchRules, name)]
    if acting:
        raise ValueError(f"{acting} act on single answers, and an episode has several; leave them out")
    if "grader" in options:
        raise ValueError("the environment grades the turns of an episode; leave the grader out")


def check_turn_options(options: Mapping[str, Any]) -> None:
    """Raises ValueError for options that have no meaning where each turn has one advantage."""
    kl_in = options.get("kl_in", "loss")
    if kl_in != "loss":
        raise ValueError(f"kl_in={kl_in!r}: in environments the KL term is in the loss; leave it out")
    estimator = options.get("advantage_estimator")
    if estimator is not None and estimator not in ESTIMATORS:
        raise ValueError(
            f"advantage_estimator={estimator!r} has no advantage per turn; take one of {', '.join(ESTIMATORS)}"
        )
