"""PPO (arXiv:1707.06347) on episodes with an environment (ENVPPO): as flows.ppo, over batches of whole episodes. The
loop is PPO's; the flow around it is `env_ppo`.

Advantages (GAE, arXiv:1506.02438) run over the policy's own tokens of an episode, in order; the environment's tokens
are skipped. A turn's grade is on the turn's last token, and -beta (l - q) on each. Where the history of an episode is
rewritten, credit flows on: see tasks.batches.rl.credited.

    ostinato run env_ppo --config examples/env_ppo.yaml
"""

from __future__ import annotations

from typing import Any, Unpack

from engine.handles import TrainingModel
from engine.text.threads import StringThread
from flows.configs.environments import ENVPPOAlgorithm, ENVPPOConfig, ENVPPORegularisation
from flows.ppo import PPO
from flows.runs.checked_flow import checked_flow
from flows.training.arguments import PPO_ALIASES, accept_aliases
from flows.training.options import EpisodePPOOptions, check_episode_options, check_names, episode_plan
from flows.training.rollout_flow import train_on_rollouts
from flows.training.rollout_sources import Episodes, without_episode_limits
from tasks.datasets.load import LoadedDataset
from tasks.environments.base import EnvironmentFactory
from tasks.environments.spec import EnvironmentSpec
from tasks.plans import AgentPlan, EpisodePlan


@accept_aliases(also=PPO_ALIASES)
class ENVPPO(PPO):
    """Trains `model` and `value_model` in place on episodes that begin with the prompts of `dataset`. `samples_*` count
    episodes.

    `environment_factory` and the limits of an episode are ENVGRPO's arguments, the others are PPO's; all of them are in
    flows.training.options.EpisodePPOOptions.
    """

    stage = "env_ppo"
    options_type = EpisodePPOOptions
    algorithm_type = ENVPPOAlgorithm
    regularisation_type = ENVPPORegularisation  # type: ignore[assignment]  # its kl_in is of episodes

    def __init__(
        self,
        dataset: list[StringThread] | LoadedDataset,
        model: TrainingModel,
        value_model: TrainingModel,
        environment_factory: EnvironmentFactory | EnvironmentSpec | EpisodePlan | AgentPlan,
        *,
        max_num_ppo_steps: int | None = None,
        **options: Unpack[EpisodePPOOptions],
    ) -> None:
        check_episode_options(options)
        check_names(type(self).__name__, options, self.options_type.__annotations__)
        self.episodes = episode_plan(environment_factory, options)
        source, shared = Episodes(self.episodes), without_episode_limits(options)
        super().__init__(dataset, model, value_model, source, max_num_ppo_steps=max_num_ppo_steps, **shared)


@checked_flow()
async def env_ppo(config: ENVPPOConfig) -> dict[str, Any]:
    """Trains a model with PPO and a value model on episodes with an environment, evaluates it before and after on
    held-out prompts, publishes it and reports.

    Args:
        config: what to train, on which prompts, in which environment.
    """
    return await train_on_rollouts(config, ENVPPO)
