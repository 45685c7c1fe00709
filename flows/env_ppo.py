"""PPO (arXiv:1707.06347) on episodes with an environment (ENVPPO): as flows.ppo, over batches of whole episodes. The
loop is `ENVPPO.run`; the flow around it is `env_ppo`.

Advantages (GAE, arXiv:1506.02438) run over the policy's own tokens of an episode, in order; the environment's tokens
are skipped. A turn's grade is on the turn's last token, and -beta (l - q) on each. Where the history of an episode is
rewritten, credit flows on: see tasks.batches.episode_values.

    ostinato run env_ppo --config examples/env_ppo.yaml
"""

from __future__ import annotations

from typing import Any, Unpack

from engine.handles import TrainingModel
from engine.text.threads import StringThread
from flows.configs.env_ppo import ENVPPOAlgorithm, ENVPPOConfig, ENVPPORegularisation
from flows.display.terminal import TerminalProgress
from flows.ops.run_names import flow_run_title
from flows.runs.checked_flow import checked_flow
from flows.runs.session import open_run
from flows.training.aliases import PPO_ALIASES, accept_aliases
from flows.training.critic import Critic, check_ppo_options
from flows.training.options import EpisodePPOOptions, check_episode_options, episode_plan
from flows.training.rollout_collection import RolloutsAndGrades
from flows.training.rollout_flow import episode_arguments, train_on_episodes, value_arguments
from flows.training.rollout_loop import RolloutLoop
from flows.training.shards import play_shards
from flows.training.training_steps import training_steps
from storage.chain.records import PolicyRef
from tasks.datasets.load import LoadedDataset
from tasks.environments.base import EnvironmentFactory
from tasks.environments.spec import EnvironmentSpec
from tasks.prepare import prepare_ppo_episode_batch
from tasks.sampling.completions import PromptShard
from tasks.train import take_gradient_step, take_value_step


@accept_aliases(also=PPO_ALIASES)
class ENVPPO(RolloutLoop):
    """Trains `model` and `value_model` in place on episodes that begin with the prompts of `dataset`. `samples_*` count
    episodes.

    `environment_factory` and the limits of an episode are ENVGRPO's arguments, the others are PPO's; all of them are in
    flows.training.options.EpisodePPOOptions.
    """

    stage = "env_ppo"
    length = "max_num_ppo_steps"
    options_type = EpisodePPOOptions
    prompts_are_rows = False  # the environment writes the prompt
    algorithm_type = ENVPPOAlgorithm
    regularisation_type = ENVPPORegularisation

    def __init__(
        self,
        dataset: list[StringThread] | LoadedDataset,
        model: TrainingModel,
        value_model: TrainingModel,
        environment_factory: EnvironmentFactory | EnvironmentSpec,
        *,
        max_num_ppo_steps: int | None = None,
        **options: Unpack[EpisodePPOOptions],
    ) -> None:
        check_episode_options(options)
        check_ppo_options(model, value_model, options)
        super().__init__(dataset, model, options, max_steps=max_num_ppo_steps, lr=options.get("lr_policy"))
        self.episodes = episode_plan(environment_factory, options)
        self.critic = Critic(value_model, options, self.optimizer)
        if self.critic.follows_progress:
            self.end_with_the_data()

    async def run(self) -> PolicyRef:
        """The loop. The result of each line is committed before the next line begins, so a crash repeats one line."""
        workspace, critic = self.model.workspace, self.critic
        # begin or resume the stage of both models
        start = await self.open()
        await critic.open(start, self.model.chain_of(start), restarted=self.restart_from is not None)
        data = self.load_dataset()
        order = self.prepare_order(data)
        total_steps = self.count_steps(order)
        value_only_steps = critic.value_only_steps(total_steps)

        async def play(policy: PolicyRef, shards: list[PromptShard], step: int) -> RolloutsAndGrades:
            sampling = self.model.sampling
            episodes = await play_shards(workspace, policy, shards, sampling, self.episodes, step=step)
            # the table of episodes has the grades of their turns
            return episodes, episodes

        async with (
            training_steps(self, total_steps, further_models=[critic.model], data=data) as steps,
            self.lookahead(data, order, steps, play) as lookahead,
        ):
            async for step in steps:
                policy, value = step.policies
                # episodes: calls play, with max_staleness for later steps as well
                collected = await lookahead.rollouts_for(policy)
                # the batch: advantages, and the log-probabilities that are needed before the step
                kl_beta = self.next_kl_beta(steps)
                plan = self.batch_plan(start, kl_beta)
                batch = await prepare_ppo_episode_batch(
                    workspace, policy, collected.rollouts, plan, critic.plan(value), step=step.index
                )
                # both models take a step on the batch
                request = self.policy_request(
                    policy, batch, plan, collected,
                    kl_beta=kl_beta, total_steps=total_steps, value_only_steps=value_only_steps,
                )  # fmt: skip
                policy = await take_gradient_step(workspace, request, step=step.index)
                request = self.value_request(critic, value, batch, collected, total_steps=total_steps)
                value = await take_value_step(critic.model.workspace, request, step=step.index)
                step.complete(policy, value, collected=collected)
        return steps.policy


@checked_flow(name="env_ppo", flow_run_name=flow_run_title)
async def env_ppo(config: ENVPPOConfig) -> dict[str, Any]:
    """Trains a model with PPO and a value model on episodes with an environment, evaluates it before and after on
    held-out prompts, publishes it and reports.

    Args:
        config: what to train, on which prompts, in which environment.
    """
    logger = TerminalProgress()
    async with open_run(config, logger) as session:
        if session.result is not None:
            return session.result
        arguments = await value_arguments(config, session) | await episode_arguments(config, session, logger)
        trainer = ENVPPO(**arguments, max_num_ppo_steps=config.algorithm.steps)
        return await train_on_episodes(config, session, trainer, trainer.episodes)
