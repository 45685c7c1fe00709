"""GSPO (arXiv:2507.18071) on episodes with an environment: one ratio, and one grade, per episode. The loop is
GRPO's.

An episode whose conversation was rewritten is several sequences. Each has a ratio of its own and the episode's
advantage.

    ostinato run env_gspo --config examples/env_gspo.yaml
"""

from __future__ import annotations

from typing import Any, Unpack

from engine.handles import TrainingModel
from engine.losses.policy_gradient import GSPOSpec
from engine.text.threads import StringThread
from flows.configs.environments import ENVGSPOAlgorithm, ENVGSPOConfig
from flows.env_grpo import ENVGRPO
from flows.runs.checked_flow import checked_flow
from flows.training.arguments import accept_aliases
from flows.training.options import EpisodeOptions
from flows.training.rollout_flow import train_on_rollouts
from tasks.datasets.load import LoadedDataset
from tasks.environments.base import EnvironmentFactory
from tasks.environments.spec import EnvironmentSpec
from tasks.plans import AgentPlan, EpisodePlan


@accept_aliases()
class ENVGSPO(ENVGRPO):
    """Trains `model` in place on episodes, as ENVGRPO does, with GSPO's loss; its other arguments are ENVGRPO's.

    Raises tasks.batches.columns.NotOneGrade when an episode does not have exactly one grade: grade the last turn, and
    grade in `on_limit` an episode that a limit ends.
    """

    stage = "env_gspo"
    length = "max_num_gspo_steps"
    algorithm_type = ENVGSPOAlgorithm
    policy_losses = {"clip": GSPOSpec}
    per_trajectory = True

    def __init__(
        self,
        dataset: list[StringThread] | LoadedDataset,
        model: TrainingModel,
        environment_factory: EnvironmentFactory | EnvironmentSpec | EpisodePlan | AgentPlan,
        *,
        max_num_gspo_steps: int | None = None,
        **options: Unpack[EpisodeOptions],
    ) -> None:
        super().__init__(dataset, model, environment_factory, max_num_grpo_steps=max_num_gspo_steps, **options)


@checked_flow()
async def env_gspo(config: ENVGSPOConfig) -> dict[str, Any]:
    """Trains a model with GSPO on episodes with an environment, evaluates it before and after on held-out prompts,
    publishes it and reports.

    Args:
        config: what to train, on which prompts, in which environment.
    """
    return await train_on_rollouts(config, ENVGSPO)
