"""GRPO on episodes with an environment (ENVGRPO). The loop is `ENVGRPO.run`; the flow around it is `env_grpo`.

A group is the episodes of one prompt. The grades of all their turns are normalised together, and a turn's advantage is
the sum of its episode's normalised grades at and after it (the outcome and process supervision of arXiv:2402.03300,
section 4.1, over turns). Only the policy's own tokens are trained.

    ostinato run env_grpo --config examples/env_grpo.yaml
"""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

from engine.handles import TrainingModel
from engine.text.threads import StringThread
from flows.configs.environments import ENVGRPOAlgorithm, ENVGRPOConfig, EpisodeRegularisation
from flows.display.terminal import TerminalProgress
from flows.ops.run_names import flow_run_title
from flows.runs.checked_flow import checked_flow
from flows.runs.session import open_run
from flows.training.aliases import accept_aliases
from flows.training.options import EpisodeOptions, check_episode_options, check_turn_options, episode_plan
from flows.training.rollout_collection import RolloutsAndGrades
from flows.training.rollout_flow import episode_arguments, train_on_episodes
from flows.training.rollout_loop import RolloutLoop
from flows.training.shards import play_shards
from flows.training.training_steps import training_steps
from storage.chain.records import PolicyRef
from tasks.datasets.load import LoadedDataset
from tasks.environments.base import EnvironmentFactory
from tasks.environments.spec import EnvironmentSpec
from tasks.prepare import prepare_trajectories
from tasks.sampling.completions import PromptShard
from tasks.train import take_gradient_step


@accept_aliases()
class ENVGRPO(RolloutLoop):
    """Trains `model` in place on episodes that begin with the prompts of `dataset`. `samples_*` count episodes.

    `environment_factory`: an EnvironmentFactory (in-process), or the spec of an importable one. Sampling follows the
    model's view; `max_gen_len` bounds one answer. The other arguments are those of
    flows.training.options.EpisodeOptions: GRPO's, and the limits of an episode (tasks.sampling.episodes.EpisodePlan).
    Their defaults are in flows.configs.environments.
    """

    stage = "env_grpo"
    length = "max_num_grpo_steps"
    options_type = EpisodeOptions
    prompts_are_rows = False  # the environment writes the prompt
    algorithm_type = ENVGRPOAlgorithm
    regularisation_type = EpisodeRegularisation
    per_trajectory: ClassVar[bool] = False
    """Whether every token of a trajectory has the advantage of its one grade."""

    def __init__(
        self,
        dataset: list[StringThread] | LoadedDataset,
        model: TrainingModel,
        environment_factory: EnvironmentFactory | EnvironmentSpec,
        *,
        max_num_grpo_steps: int | None = None,
        **options: Unpack[EpisodeOptions],
    ) -> None:
        check_episode_options(options)
        check_turn_options(options)
        super().__init__(dataset, model, options, max_steps=max_num_grpo_steps, lr=options.get("lr"))
        self.episodes = episode_plan(environment_factory, options)

    async def run(self) -> PolicyRef:
        """The loop. The result of each line is committed before the next line begins, so a crash repeats one line."""
        workspace = self.model.workspace
        # begin or resume the stage
        start = await self.open()
        data = self.load_dataset()
        order = self.prepare_order(data)
        total_steps = self.count_steps(order)

        async def play(policy: PolicyRef, shards: list[PromptShard], step: int) -> RolloutsAndGrades:
            sampling = self.model.sampling
            episodes = await play_shards(workspace, policy, shards, sampling, self.episodes, step=step)
            # the table of episodes has the grades of their turns
            return episodes, episodes

        async with (
            training_steps(self, total_steps, data=data) as steps,
            self.lookahead(data, order, steps, play) as lookahead,
        ):
            async for step in steps:
                # episodes: calls play, with max_staleness for later steps as well
                collected = await lookahead.rollouts_for(step.policy)
                # the batch: advantages, and the log-probabilities that are needed before the step
                kl_beta = self.next_kl_beta(steps)
                plan = self.batch_plan(start, kl_beta)
                batch = await prepare_trajectories(
                    workspace, step.policy, collected.rollouts, plan,
                    per_trajectory=self.per_trajectory, step=step.index,
                )  # fmt: skip
                # the gradient step
                request = self.policy_request(
                    step.policy, batch, plan, collected, kl_beta=kl_beta, total_steps=total_steps
                )
                policy = await take_gradient_step(workspace, request, step=step.index)
                step.complete(policy, collected=collected)
        return steps.policy


@checked_flow(name="env_grpo", flow_run_name=flow_run_title)
async def env_grpo(config: ENVGRPOConfig) -> dict[str, Any]:
    """Trains a model with GRPO on episodes with an environment, evaluates it before and after on held-out prompts,
    publishes it and reports.

    Args:
        config: what to train, on which prompts, in which environment.
    """
    logger = TerminalProgress()
    async with open_run(config, logger) as session:
        if session.result is not None:
            return session.result
        arguments = await episode_arguments(config, session, logger)
        trainer = ENVGRPO(**arguments, max_num_grpo_steps=config.algorithm.steps)
        return await train_on_episodes(config, session, trainer, trainer.episodes)
