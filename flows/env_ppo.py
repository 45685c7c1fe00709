"""PPO (arXiv:1707.06347) on episodes with an environment (ENVPPO). The loop is PPO's: a step of the policy and one of
the value model over one committed batch, which comes from whole episodes.

Advantages (GAE, arXiv:1506.02438) run over the tokens that the policy said in an episode, in order; what the
environment says is skipped. A turn's grade is on the turn's last token, and -beta (l - q) on each. Where the history of
an episode is rewritten, credit flows on: see tasks.batches.episode_values.

    ostinato run env_ppo --config examples/env_ppo.yaml
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from engine.handles import TrainingModel
from engine.text.threads import StringThread
from flows.configs.env_ppo import ENVPPOConfig
from flows.display.terminal import TerminalProgress
from flows.env_grpo import InEnvironment, env_arguments, train_in_environment
from flows.ops.hooks import ON_END
from flows.ppo import PPO, value_arguments
from flows.runs.session import open_run
from flows.training.collection import Collected
from storage.chain.records import PolicyRef
from storage.store.artifacts import ArtifactRef
from tasks.batches.rl import BatchPlan
from tasks.datasets.load import LoadedDataset
from tasks.environments.base import EnvironmentFactory
from tasks.environments.spec import EnvironmentSpec
from tasks.prepare import prepare_ppo_episode_batch


class ENVPPO(InEnvironment, PPO):
    """Trains `model` and `value_model` in place on episodes that begin with the prompts of `dataset`. `samples_*` count
    episodes. The limits of an episode are ENVGRPO's arguments, the others PPO's.
    """

    stage = "env_ppo"

    def __init__(
        self,
        dataset: list[StringThread] | LoadedDataset,
        model: TrainingModel,
        value_model: TrainingModel,
        environment_factory: EnvironmentFactory | EnvironmentSpec,
        **options: Any,
    ) -> None:
        super().__init__(dataset, model, environment_factory, value_model=value_model, **options)

    async def _prepare_ppo_batch(
        self, policy: PolicyRef, value: PolicyRef, found: Collected, plan: BatchPlan, step: int
    ) -> ArtifactRef:
        """The step's batch: an advantage and a return at every token that the policy said."""
        return await prepare_ppo_episode_batch(
            self.model.workspace, policy, found.rollouts, plan, self._value_plan(value), step=step
        )


@flow(name="env_ppo", flow_run_name="{config.title}", **ON_END)
async def env_ppo(config: ENVPPOConfig) -> dict[str, Any]:
    """Trains a model with PPO and a value model on episodes with an environment, evaluates it before and after on
    held-out prompts, publishes it and reports.

    Args:
        config: what to train, on which prompts, in which environment.
    """
    logger = TerminalProgress()
    async with open_run("env_ppo", config, logger, use="prompt") as session:
        if session.result is not None:
            return session.result
        arguments = await value_arguments(config, session) | await env_arguments(config, session, logger)
        trainer = ENVPPO(**arguments, max_num_ppo_steps=config.algorithm.steps)
        return await train_in_environment(config, session, trainer)
