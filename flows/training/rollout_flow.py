"""Shared parts of the flows that train on rollouts: the arguments of a training class, and the order of evaluating,
training, publishing and reporting."""

from __future__ import annotations

from typing import Any

from engine.handles import Model
from flows.callbacks import Cadence
from flows.configs.common import GRPOAlgorithm, GRPOConfig
from flows.configs.env_ppo import ENVPPOConfig
from flows.configs.environments import ENVGRPOConfig
from flows.configs.ppo import PPOConfig
from flows.display.terminal import TerminalProgress
from flows.runs.session import RunSession
from flows.training.checkpointing import CheckpointSchedule
from flows.training.finish import publish_and_report
from flows.training.held_out import HeldoutEvaluator
from flows.training.optimizer import optimizer_arguments
from flows.training.rollout_loop import RolloutLoop
from storage.registry.models import registered_key
from tasks.environments.spec import environment_spec
from tasks.graders.spec import grader_spec
from tasks.sampling.episodes import EpisodePlan
from tasks.sampling.grading import Grading


async def reward_arguments(config: GRPOConfig, session: RunSession, logger: TerminalProgress) -> dict[str, Any]:
    """The arguments of a training class on graded completions, except for the number of steps. Spawns the model."""
    grader = config.grader
    limits = grader.model_dump(exclude={"path", "arguments", "workers"})
    return {
        "grader": Grading(grader=grader_spec(grader.path, grader.arguments, workers=grader.workers), **limits),
        **await _rollout_arguments(config, session, logger, longest=config.sampling.max_new_tokens),
    }


async def episode_arguments(config: ENVGRPOConfig, session: RunSession, logger: TerminalProgress) -> dict[str, Any]:
    """The arguments of a training class in environments, except for the number of steps. Spawns the model."""
    environment = config.environment
    # every turn may have a completion of the maximum length
    longest = config.sampling.max_new_tokens * environment.max_turns
    return {
        "environment_factory": environment_spec(environment.path, environment.arguments),
        **environment.model_dump(exclude={"path", "arguments"}),
        **await _rollout_arguments(config, session, logger, longest=longest),
    }


async def value_arguments(config: PPOConfig | ENVPPOConfig, session: RunSession) -> dict[str, Any]:
    """The arguments of a training class for its value model. Spawns the value model."""
    value = config.value_model
    optimizer = optimizer_arguments(value.optimizer_over(config.optimizer))
    builder = Model(value.key or registered_key(session.base)).to_builder(session)
    builder = builder.training(value.trainable).into_scoring_model()
    return {
        "value_model": await builder.spawn_train(value.name, init_seed=config.seed),
        "value_lr_scheduler": optimizer["lr_scheduler"],
        **{f"value_{name}": optimizer[name] for name in ("weight_decay", "betas", "eps", "max_grad_norm")},
        **config.credit.model_dump(),
    }


async def _rollout_arguments(
    config: GRPOConfig | ENVGRPOConfig, session: RunSession, logger: TerminalProgress, *, longest: int
) -> dict[str, Any]:
    """The arguments of every training class on rollouts. `longest` is the maximum length of a rollout in tokens."""
    builder = Model(registered_key(session.base)).to_builder(session).training(config.model.trainable)
    model = await builder.spawn_train(config.model.name)
    # loss_norm="constant" divides by the longest rollout, unless the config gives a number
    divisor = config.regularisation.norm_constant or longest
    return {
        # inputs
        "dataset": session.data,
        "model": model.with_sampling(config.sampling),
        "logger": logger,
        # training
        **optimizer_arguments(config.optimizer),
        "checkpoints": CheckpointSchedule(config.checkpoints),
        "data_seed": config.seed,
        # sampling, loss and batches
        "max_prompt_tokens": config.data.max_prompt_tokens,
        "truncation": config.data.truncation,
        **config.algorithm.model_dump(exclude={"steps"}),
        **config.regularisation.model_dump(),
        "norm_constant": norm_constant(config.algorithm, divisor),
        **config.rules.model_dump(),
    }


def norm_constant(algorithm: GRPOAlgorithm, tokens: float) -> float | None:
    """The number of tokens that loss_norm="constant" divides by, or None for another norm."""
    if algorithm.loss_norm != "constant":
        return None
    return float(tokens)


async def train_on_rewards(
    config: GRPOConfig, session: RunSession, trainer: RolloutLoop, grading: Grading
) -> dict[str, Any]:
    """Runs a training class on graded completions, with its held-out evaluations. Returns the result of the run."""
    heldout = HeldoutEvaluator.of_completions(session.workspace, config, session.base, grading)
    return await _train_and_report(config, session, trainer, heldout)


async def train_on_episodes(
    config: ENVGRPOConfig, session: RunSession, trainer: RolloutLoop, episodes: EpisodePlan
) -> dict[str, Any]:
    """Runs a training class in environments, with its held-out evaluations. Returns the result of the run."""
    heldout = HeldoutEvaluator.of_episodes(session.workspace, config, session.base, episodes)
    return await _train_and_report(config, session, trainer, heldout)


async def _train_and_report(
    config: GRPOConfig | ENVGRPOConfig, session: RunSession, trainer: RolloutLoop, heldout: HeldoutEvaluator
) -> dict[str, Any]:
    """Trains, with the evaluations before, during and after it, publishes and reports. Returns the result of the
    run."""
    trainer.callbacks += heldout.callbacks(Cadence.of(config.evaluation))
    start = await trainer.open()
    policy = await trainer.run()
    # these return what the loop has committed; a resumed run begins after the first one
    before = await heldout.evaluate(start) if config.evaluation.before else None
    after = await heldout.evaluate(policy)
    return await publish_and_report(
        session, trainer.logger, config.model, policy,
        before=before, after=after, differences=heldout.result(before, after),
        samples_shown=config.evaluation.samples_shown,
    )  # fmt: skip
