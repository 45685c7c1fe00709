"""Training on the rows of a dataset, epoch after epoch: the loop that SFT, DPO and RewardModelling share. Each of them
says what a batch of rows is, and which loss is minimised.
"""

from __future__ import annotations

from typing import Any

from engine.handles import Model, TrainingModel
from engine.losses.spec import LossSpec
from flows.callbacks import Cadence, Callback, ValidationLoss
from flows.configs.common import TrainingConfig
from flows.display.terminal import TerminalProgress
from flows.runs.session import RunSession, default_model_name, finish_run
from flows.training.arguments import whole_number
from flows.training.base import Trainer
from flows.training.checkpointing import CheckpointSchedule, Uploads
from flows.training.journal import Journal, optimizer_at, steps
from flows.training.optimizer import optimizer_arguments
from storage.chain.records import PolicyRef, StepRequest
from storage.registry.models import registered_key
from storage.store.artifacts import ArtifactRef
from tasks.batches.truncation import ANY_LENGTH, Cut, LengthPlan
from tasks.datasets.load import LoadedDataset
from tasks.datasets.order import take
from tasks.datasets.spec import DatasetUse
from tasks.load import load_prompts
from tasks.publish import publish_model
from tasks.report import write_report
from tasks.train import take_gradient_step


class Supervised(Trainer):
    """Trains `model` in place. `await X(...).run()` resumes where the run stands. The other arguments are those of
    `Trainer`."""

    loss: LossSpec

    def __init__(
        self,
        model: TrainingModel,
        *,
        samples_per_batch: int,
        epochs: int | None = None,
        max_steps: int | None = None,
        max_tokens: int | None = None,
        truncation: Cut = "error",
        **options: Any,
    ) -> None:
        """`max_tokens`: of a conversation (None: the model's context, and the max_batch_size that it was spawned with).
        A longer one is an error, or dropped and counted (`truncation="drop"`)."""
        if epochs is not None and max_steps is not None:
            raise ValueError(f"both epochs={epochs} and max_steps={max_steps} were given; give one of them")
        super().__init__(model, **options)
        self.epochs = whole_number("epochs", epochs) or 1
        self.max_steps = whole_number("max_steps", max_steps)
        self.samples_per_batch = whole_number("samples_per_batch", samples_per_batch)
        self.lengths = LengthPlan(max_tokens=max_tokens, truncation=truncation)

    async def run(self) -> PolicyRef:
        """The loop. Every line's result is committed before the next begins; a crash costs at most one line."""
        workspace = self.model.workspace
        start = await self.open()
        policy = await self.model.policy()
        data = self._load()
        size = min(self.samples_per_batch, data.rows)
        total_steps = self.max_steps or -(-self.epochs * data.rows // size)
        async with (
            Uploads(workspace, retention=self.checkpoints.retention) as uploads,
            Journal(
                self.model, policy, self.logger, total_steps=total_steps,
                loss=self.loss, reference=self._reference(start), notifier=self.notifier,
            ) as journal,
        ):
            cursor = journal.cursor()
            if due := self.checkpoints.missed(policy.step, total_steps, model=self.model.name):
                await uploads.start(policy, name=due.named)
            await journal.call(self.callbacks)
            for step in steps(policy.step, total_steps):
                rows, cursor_out = take(cursor, size, rows=data.rows, seed=self.data_seed)
                batch = await self._prepare(policy, data.ref, rows, step)
                request = StepRequest(
                    parent=policy,
                    batch=batch,
                    reference=self._reference(start),
                    loss=self.loss.model_dump(),
                    optimizer=optimizer_at(step, total_steps, lr=self.schedule, **self.optimizer),
                    cursor_in=cursor.model_dump(),
                    cursor_out=cursor_out.model_dump(),
                    nan_policy=self.nan_policy,
                )
                policy, cursor = await take_gradient_step(workspace, request, step=step), cursor_out
                self.model.set_policy(policy)
                journal.record(policy)
                await journal.call(self.callbacks)
                if due := self.checkpoints.due(step, total_steps, model=self.model.name):
                    await uploads.start(policy, name=due.named)
            await uploads.start(policy)
        return policy

    async def _prepare(self, policy: PolicyRef, dataset: ArtifactRef, rows: list[int], step: int) -> ArtifactRef:
        """The step's batch of these rows."""
        raise NotImplementedError

    def _load(self) -> LoadedDataset:
        """What it trains on, in the store."""
        raise NotImplementedError

    def _reference(self, start: PolicyRef) -> PolicyRef | None:
        """The policy that the loss compares with, for one that does."""
        return None


async def supervised_arguments(
    config: TrainingConfig, session: RunSession, logger: TerminalProgress, *, scoring: bool = False
) -> dict[str, Any]:
    """What such a class is made with, from a config with `algorithm` and `optimizer`; `scoring`: a scalar model."""
    algorithm = config.algorithm
    builder = Model(registered_key(session.base)).to_builder(session).training(config.model.trainable)
    if scoring:
        builder = builder.into_scoring_model()
    return {
        "callbacks": _validation(config, session),
        "dataset": session.data,
        "model": await builder.spawn_train(config.model.name),
        "logger": logger,
        **optimizer_arguments(config.optimizer),
        "checkpoints": CheckpointSchedule(config.checkpoints),
        "data_seed": config.seed,
        "max_steps": algorithm.steps,
        **algorithm.model_dump(exclude={"steps"}),
    }


def _validation(config: TrainingConfig, session: RunSession) -> list[Callback]:
    """The loss on the held-out rows that the config names, if it does."""
    heldout, validation = getattr(config.data, "heldout", None), getattr(config, "validation", None)
    if heldout is None or validation is None:
        return []
    use: DatasetUse = "preference" if session.data.ref.kind == "pairs" else getattr(config.data, "use", "completion")
    lengths = getattr(config.algorithm, "lengths", ANY_LENGTH)
    return [ValidationLoss(load_prompts(session.workspace, heldout, use), Cadence.of(validation), lengths)]


async def train_on_dataset(config: TrainingConfig, session: RunSession, trainer: Supervised) -> dict[str, Any]:
    """Trains, publishes and reports: what the flows of all these classes do."""
    workspace = session.workspace
    policy = await trainer.run()
    published = await publish_model(workspace, policy, config.model.publish_as or default_model_name(session.run))
    result = {"run": session.run, "policy": policy.uri, "model": registered_key(published)}
    report = write_report(workspace, policy, None, None, result)
    return finish_run(session, result | {"report": report})
