"""GRPO on episodes with an environment (ENVGRPO). The loop is GRPO's; the flow around it is `env_grpo`.

A group is the episodes of one prompt. The grades of all their turns are normalised together, and a turn's advantage is
the sum of its episode's normalised grades at and after it (the outcome and process supervision of arXiv:2402.03300,
section 4.1, over turns). Only the policy's own tokens are trained.

    ostinato run env_grpo --config examples/env_grpo.yaml
"""

from __future__ import annotations

from typing import Any, Unpack

from engine.handles import TrainingModel
from engine.text.threads import StringThread
from flows.configs.environments import ENVGRPOAlgorithm, ENVGRPOConfig, EpisodeRegularisation
from flows.grpo import GRPO
from flows.runs.checked_flow import checked_flow
from flows.training.arguments import accept_aliases
from flows.training.options import EpisodeOptions, check_episode_options, check_names, check_turn_options, episode_plan
from flows.training.rollout_flow import train_on_rollouts
from flows.training.rollout_sources import Episodes, without_episode_limits
from tasks.datasets.load import LoadedDataset
from tasks.environments.base import EnvironmentFactory
from tasks.environments.spec import EnvironmentSpec
from tasks.plans import AgentPlan, EpisodePlan


@accept_aliases()
class ENVGRPO(GRPO):
    """Trains `model` in place on episodes that begin with the prompts of `dataset`. `samples_*` count episodes.

    `environment_factory`: an EnvironmentFactory (in-process), the spec of an importable one, or an AgentPlan: a program
    that plays the episodes by calling the policy (tasks.environments.agents). Sampling follows the model's view;
    `max_gen_len` bounds one answer. The other arguments are those of flows.training.options.EpisodeOptions: GRPO's, and
    the limits of an episode (tasks.plans.EpisodePlan). Their defaults are in flows.configs.environments.
    """

    stage = "env_grpo"
    options_type = EpisodeOptions
    algorithm_type = ENVGRPOAlgorithm
    regularisation_type = EpisodeRegularisation

    def __init__(
        self,
        dataset: list[StringThread] | LoadedDataset,
        model: TrainingModel,
        environment_factory: EnvironmentFactory | EnvironmentSpec | EpisodePlan | AgentPlan,
        *,
        max_num_grpo_steps: int | None = None,
        **options: Unpack[EpisodeOptions],
    ) -> None:
        check_episode_options(options)
        check_names(type(self).__name__, options, self.options_type.__annotations__)
        check_turn_options(options)
        self.episodes = episode_plan(environment_factory, options)
        shared = without_episode_limits(options)
        super().__init__(dataset, model, Episodes(self.episodes), max_num_grpo_steps=max_num_grpo_steps, **shared)


@checked_flow()
async def env_grpo(config: ENVGRPOConfig) -> dict[str, Any]:
    """Trains a model with GRPO on episodes with an environment, evaluates it before and after on held-out prompts,
    publishes it and reports.

    Args:
        config: what to train, on which prompts, in which environment.
    """
    return await train_on_rollouts(config, ENVGRPO)
