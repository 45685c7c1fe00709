"""The flow around a training class on rollouts: its arguments from the config, and the order of evaluating, training,
publishing and reporting."""

from __future__ import annotations

from typing import Any

from engine.handles import Model
from flows.callbacks import Cadence
from flows.configs.common import GRPOAlgorithm, GRPOConfig
from flows.configs.distill import TEACHER, DistillConfig
from flows.configs.environments import ENVGRPOConfig
from flows.configs.ppo import ValuedConfig
from flows.display.terminal import TerminalProgress
from flows.runs.session import RunSession, open_run
from flows.training.checkpointing import CheckpointSchedule
from flows.training.finish import publish_and_report
from flows.training.held_out import HeldoutEvaluator
from flows.training.rollout_loop import RolloutLoop
from flows.training.rollout_sources import source_of_config
from storage.registry.models import registered_key


async def train_on_rollouts(config: GRPOConfig | ENVGRPOConfig, kind: type[RolloutLoop]) -> dict[str, Any]:
    """The flow of a training class on rollouts: opens the run, trains, evaluates on held-out prompts before, during
    and after it, publishes and reports. Returns the result of the run."""
    logger = TerminalProgress()
    async with open_run(config, logger) as session:
        if session.result is not None:
            return session.result
        # the training class, with its value model or its teacher if it has one
        arguments: dict[str, Any] = {}
        if isinstance(config, ValuedConfig):
            arguments |= await value_arguments(config, session)
        if isinstance(config, DistillConfig):
            arguments |= await teacher_arguments(config, session)
        trainer = kind(**arguments, **await rollout_arguments(config, session, logger))
        heldout = HeldoutEvaluator.of_config(session.workspace, config, session.base, trainer.source)
        trainer.callbacks += heldout.callbacks(Cadence.of(config.evaluation))
        # training
        start = await trainer.open()
        policy = await trainer.run()
        # these return what the loop has committed; a resumed run begins after the first one
        before = await heldout.evaluate(start) if config.evaluation.before else None
        after = await heldout.evaluate(policy)
        return await publish_and_report(
            session, logger, config.model, policy,
            before=before, after=after, further=heldout.result(before, after) | trainer.ending_entry,
            samples_shown=config.evaluation.samples_shown,
        )  # fmt: skip


async def rollout_arguments(
    config: GRPOConfig | ENVGRPOConfig, session: RunSession, logger: TerminalProgress
) -> dict[str, Any]:
    """The arguments of a training class on rollouts, except for a value model. Spawns the model."""
    source = source_of_config(config)
    builder = Model(registered_key(session.base)).to_builder(session).training(config.model.trainable)
    model = await builder.spawn_train(config.model.name)
    # loss_norm="constant" divides by the longest rollout, unless the config gives a number
    divisor = config.regularisation.norm_constant or config.longest_rollout
    return {
        # inputs
        **source.arguments(),
        "dataset": session.data,
        "model": model.with_sampling(config.sampling),
        "logger": logger,
        # training
        "optimizer": config.optimizer,
        "checkpoints": CheckpointSchedule(config.checkpoints),
        "data_seed": config.seed,
        # sampling, loss and batches
        "max_prompt_tokens": config.data.max_prompt_tokens,
        "truncation": config.data.truncation,
        "algorithm": config.algorithm,
        "regularisation": config.regularisation,
        "norm_constant": norm_constant(config.algorithm, divisor),
        "rules": config.batch_rules,
    }


async def value_arguments(config: ValuedConfig, session: RunSession) -> dict[str, Any]:
    """The arguments of a training class for its value model. Spawns the value model."""
    value = config.value_model
    builder = Model(value.key or registered_key(session.base)).to_builder(session)
    builder = builder.training(value.trainable).into_scoring_model()
    return {
        "value_model": await builder.spawn_train(value.name, init_seed=config.seed),
        "value_optimizer": value.optimizer_over(config.optimizer),
        "credit": config.credit,
    }


async def teacher_arguments(config: DistillConfig, session: RunSession) -> dict[str, Any]:
    """The arguments of a distillation for its teachers. Spawns each teacher once."""
    keys = config.teacher.teacher_keys
    names = [TEACHER] if len(keys) == 1 else [f"{TEACHER}-{number}" for number in range(len(keys))]
    teachers = {}
    for key, name in zip(keys, names, strict=True):
        teachers[key] = await Model(key).to_builder(session).spawn_inference(name)
    by_value = {value: teachers[key] for value, key in config.teacher.by_value.items()}
    return {
        "teacher": by_value or teachers[keys[0]],
        "teacher_column": config.teacher.column,
        "on_policy": config.data.on_policy,
    }


def norm_constant(algorithm: GRPOAlgorithm, tokens: float) -> float | None:
    """The number of tokens that loss_norm="constant" divides by, or None for another norm."""
    if algorithm.loss_norm != "constant":
        return None
    return float(tokens)
