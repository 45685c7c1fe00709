"""Shared parts of the flows `sft`, `dpo` and `reward_model`: the arguments of a training class, and the order of
training, publishing and reporting."""

from __future__ import annotations

from typing import Any

from engine.handles import Model
from flows.callbacks import Cadence, Callback, ValidationLoss
from flows.configs.common import SupervisedConfig
from flows.display.terminal import TerminalProgress
from flows.runs.session import RunSession, open_run
from flows.training.checkpointing import CheckpointSchedule
from flows.training.finish import publish_and_report
from flows.training.supervised_loop import SupervisedLoop
from storage.registry.models import registered_key
from tasks.load import load_prompts


async def supervised_arguments(
    config: SupervisedConfig, session: RunSession, logger: TerminalProgress
) -> dict[str, Any]:
    """The arguments of a training class on a dataset. Spawns the model."""
    builder = Model(registered_key(session.base)).to_builder(session).training(config.model.trainable)
    if config.has_scalar_head:
        builder = builder.into_scoring_model()
    return {
        "callbacks": _validation_callbacks(config, session),
        "dataset": session.data,
        "model": await builder.spawn_train(config.model.name),
        "logger": logger,
        "optimizer": config.optimizer,
        "algorithm": config.algorithm,
        "rules": config.rules,
        "checkpoints": CheckpointSchedule(config.checkpoints),
        "data_seed": config.seed,
    }


def _validation_callbacks(config: SupervisedConfig, session: RunSession) -> list[Callback]:
    """The callback for the loss on held-out rows. Empty if the config has no held-out rows."""
    if config.data.heldout is None:
        return []
    heldout = load_prompts(session.workspace, config.data.heldout, config.data.heldout_use)
    return [ValidationLoss(heldout, Cadence.of(config.validation), config.algorithm.lengths)]


async def train_on_dataset(config: SupervisedConfig, kind: type[SupervisedLoop]) -> dict[str, Any]:
    """The flow of a training class on a dataset: opens the run, trains, publishes and reports. Returns the result of
    the run."""
    logger = TerminalProgress()
    async with open_run(config, logger) as session:
        if session.result is not None:
            return session.result
        policy = await kind(**await supervised_arguments(config, session, logger)).run()
        return await publish_and_report(session, logger, config.model, policy)
