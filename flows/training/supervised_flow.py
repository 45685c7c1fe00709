"""Shared parts of the flows `sft`, `dpo` and `reward_model`: the arguments of a training class, and the order of
training, publishing and reporting."""

from __future__ import annotations

from typing import Any

from engine.handles import Model
from flows.callbacks import Cadence, Callback, ValidationLoss
from flows.configs.common import TrainingConfig
from flows.display.terminal import TerminalProgress
from flows.runs.session import RunSession
from flows.training.checkpointing import CheckpointSchedule
from flows.training.finish import publish_and_report
from flows.training.optimizer import optimizer_arguments
from flows.training.supervised_loop import SupervisedLoop
from storage.registry.models import registered_key
from tasks.batches.truncation import ANY_LENGTH
from tasks.datasets.spec import DatasetUse
from tasks.load import load_prompts


async def supervised_arguments(
    config: TrainingConfig, session: RunSession, logger: TerminalProgress, *, scoring: bool = False
) -> dict[str, Any]:
    """The arguments of a training class on a dataset. Spawns the model, with a scalar head if `scoring`."""
    algorithm = config.algorithm
    builder = Model(registered_key(session.base)).to_builder(session).training(config.model.trainable)
    if scoring:
        builder = builder.into_scoring_model()
    return {
        "callbacks": _validation_callbacks(config, session),
        "dataset": session.data,
        "model": await builder.spawn_train(config.model.name),
        "logger": logger,
        **optimizer_arguments(config.optimizer),
        "checkpoints": CheckpointSchedule(config.checkpoints),
        "data_seed": config.seed,
        **config.rules.model_dump(),
        "max_steps": algorithm.steps,
        **algorithm.model_dump(exclude={"steps"}),
    }


def _validation_callbacks(config: TrainingConfig, session: RunSession) -> list[Callback]:
    """The callback for the loss on held-out rows. Empty if the config has no held-out rows."""
    heldout, validation = getattr(config.data, "heldout", None), getattr(config, "validation", None)
    if heldout is None or validation is None:
        return []
    # the held-out rows are used like the training rows
    use: DatasetUse = getattr(config.data, "use", "completion")
    if session.data.ref.kind == "pairs":
        use = "preference"
    lengths = getattr(config.algorithm, "lengths", ANY_LENGTH)
    return [ValidationLoss(load_prompts(session.workspace, heldout, use), Cadence.of(validation), lengths)]


async def train_on_dataset(config: TrainingConfig, session: RunSession, trainer: SupervisedLoop) -> dict[str, Any]:
    """Trains, publishes and reports. Returns the result of the run."""
    policy = await trainer.run()
    return await publish_and_report(session, trainer.logger, config.model, policy)
