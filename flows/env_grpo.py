"""GRPO on episodes with an environment (ENVGRPO). The loop is GRPO's; a batch comes from whole episodes.

A group are the episodes of one prompt. The grades of all their turns are normalised together, and a turn's advantage is
the sum of its episode's normalised grades at and after it (the outcome and process supervision of arXiv:2402.03300,
section 4.1, over turns). Only what the policy said is trained.

    ostinato run env_grpo --config examples/env_grpo.yaml
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from prefect import flow

from engine.handles import Model, TrainingModel
from engine.text.threads import StringThread
from flows.configs.environments import ENVGRPOConfig
from flows.configs.reinforcement import BatchRules
from flows.display.terminal import TerminalProgress
from flows.grpo import GRPO, longest, train_and_report
from flows.ops.hooks import ON_END
from flows.runs.session import RunSession, open_run
from flows.training.checkpointing import CheckpointSchedule
from flows.training.env_held_out import HeldoutEpisodes
from flows.training.optimizer import optimizer_arguments
from storage.chain.records import PolicyRef
from storage.registry.models import registered_key
from storage.store.artifacts import ArtifactRef
from tasks.batches.rl import BatchPlan
from tasks.credit.advantages import ESTIMATORS
from tasks.datasets.load import LoadedDataset
from tasks.environments.base import EnvironmentFactory
from tasks.environments.spec import EnvironmentSpec, environment_spec, in_process_spec
from tasks.prepare import prepare_trajectories
from tasks.rollout import play_episodes
from tasks.sampling.completions import PromptShard
from tasks.sampling.episodes import EpisodePlan


class InEnvironment(GRPO):
    """What the training classes in environments have in common: a step's material is whole episodes, graded as they are
    played. It stands before the class whose loop it feeds: `class ENVPPO(InEnvironment, PPO)`."""

    def __init__(  # noqa: PLR0913  the limits of an episode are arguments of their own
        self,
        dataset: list[StringThread] | LoadedDataset,
        model: TrainingModel,
        environment_factory: EnvironmentFactory | EnvironmentSpec,
        *,
        max_turns: int = 8,
        max_tokens: int | None = None,
        episode_seconds: float | None = None,
        reaction_seconds: float = 60.0,
        concurrency: int = 64,
        max_masked_fraction: float = 0.2,
        kl_beta: float = 0.1,
        **options: Any,
    ) -> None:
        """`environment_factory`: an EnvironmentFactory (in-process), or the spec of an importable one.

        `max_tokens` is of one segment, `episode_seconds` and `reaction_seconds` are the environment's own time; see
        tasks.sampling.episodes.EpisodePlan."""
        _check_options(options)
        super().__init__(dataset, model, grader=None, kl_beta=kl_beta, **options)
        if isinstance(environment_factory, EnvironmentFactory):
            environment_factory = in_process_spec(environment_factory)
        self.episodes = EpisodePlan(
            environment=environment_factory,
            max_turns=max_turns,
            max_tokens=max_tokens,
            episode_seconds=episode_seconds,
            reaction_seconds=reaction_seconds,
            concurrency=concurrency,
            max_masked_fraction=max_masked_fraction,
        )

    async def _sample(
        self, policy: PolicyRef, shards: list[PromptShard], step: int
    ) -> tuple[list[ArtifactRef], list[ArtifactRef]]:
        """A step's episodes, shard by shard; their table has the grades too."""
        workspace, sampling = self.model.workspace, self.model.sampling
        played = await asyncio.gather(
            *(play_episodes(workspace, policy, shard, sampling, self.episodes, step=step) for shard in shards)
        )
        return played, played


class ENVGRPO(InEnvironment):
    """Trains `model` in place on episodes that begin with the prompts of `dataset`. `samples_*` count episodes.

    `environment_factory`: an EnvironmentFactory (in-process), or the spec of an importable one. Sampling follows the
    model's view; `max_gen_len` bounds one answer. The other arguments are GRPO's.
    """

    stage = "env_grpo"
    per_trajectory = False
    """Whether every token of a trajectory has the advantage of its one grade."""

    def __init__(
        self,
        dataset: list[StringThread] | LoadedDataset,
        model: TrainingModel,
        environment_factory: EnvironmentFactory | EnvironmentSpec,
        **options: Any,
    ) -> None:
        _check_has_turns(options)
        super().__init__(dataset, model, environment_factory, **options)

    async def _prepare(
        self, policy: PolicyRef, rollouts: list[ArtifactRef], graded: list[ArtifactRef], plan: BatchPlan, step: int
    ) -> ArtifactRef:
        """The step's batch: an advantage per turn, old and reference logprobs."""
        return await prepare_trajectories(
            self.model.workspace, policy, rollouts, plan, per_trajectory=self.per_trajectory, step=step
        )


NOT_OF_EPISODES = ("dynamic_sampling", "mask_truncated", "overlong_buffer", "overlong_penalty",
                   "max_refill_rounds", "refill_end")  # fmt: skip
"""GRPO's rules about single answers."""


def _check_options(options: Mapping[str, Any]) -> None:
    """Raises ValueError for what GRPO does with single answers, and would not be done here."""
    fields = BatchRules.model_fields
    if given := [name for name in NOT_OF_EPISODES if name in options and options[name] != fields[name].default]:
        raise ValueError(f"{given} act on single answers, and an episode has several; leave them out")
    if "grader" in options:
        raise ValueError("the environment grades the turns of an episode; leave the grader out")


def _check_has_turns(options: Mapping[str, Any]) -> None:
    """Raises ValueError for what has no meaning where an advantage is of a turn."""
    if options.get("kl_in", "loss") != "loss":
        raise ValueError(f"kl_in={options['kl_in']!r}: in environments the KL term is in the loss; leave it out")
    estimator = options.get("advantage_estimator", "group")
    if estimator not in ESTIMATORS:
        raise ValueError(
            f"advantage_estimator={estimator!r} has no advantage per turn; take one of {', '.join(ESTIMATORS)}"
        )


@flow(name="env_grpo", flow_run_name="{config.title}", **ON_END)
async def env_grpo(config: ENVGRPOConfig) -> dict[str, Any]:
    """Trains a model with GRPO on episodes with an environment, evaluates it before and after on held-out prompts,
    publishes it and reports.

    Args:
        config: what to train, on which prompts, in which environment.
    """
    logger = TerminalProgress()
    async with open_run("env_grpo", config, logger, use="prompt") as session:
        if session.result is not None:
            return session.result
        trainer = ENVGRPO(**await env_arguments(config, session, logger), max_num_grpo_steps=config.algorithm.steps)
        return await train_in_environment(config, session, trainer)


async def env_arguments(config: ENVGRPOConfig, session: RunSession, logger: TerminalProgress) -> dict[str, Any]:
    """What a training class in environments is made with, but for the number of steps."""
    algorithm, environment = config.algorithm, config.environment
    episode_tokens = config.sampling.max_new_tokens * environment.max_turns
    builder = Model(registered_key(session.base)).to_builder(session).training(config.model.trainable)
    model = await builder.spawn_train(config.model.name)
    return {
        "dataset": session.data,
        "model": model.with_sampling(config.sampling),
        "environment_factory": environment_spec(environment.path, environment.arguments),
        **environment.model_dump(exclude={"path", "arguments"}),
        "logger": logger,
        **optimizer_arguments(config.optimizer),
        "checkpoints": CheckpointSchedule(config.checkpoints),
        "data_seed": config.seed,
        "max_prompt_tokens": config.data.max_prompt_tokens,
        "truncation": config.data.truncation,
        **algorithm.model_dump(exclude={"steps"}),
        **config.regularisation.model_dump(),
        "norm_constant": longest(config.regularisation.norm_constant or episode_tokens, algorithm),
        **config.rules.model_dump(),
    }


async def train_in_environment(config: ENVGRPOConfig, session: RunSession, trainer: InEnvironment) -> dict[str, Any]:
    """What the flows of all classes in environments do."""
    heldout = HeldoutEpisodes.load_episodes(session.workspace, config, session.base, trainer.episodes)
    return await train_and_report(config, session, trainer, heldout)
