"""Supervised fine-tuning as a chain of committed steps. The loop is `SFT.run`; the flow around it is `sft`.

The loss is the cross-entropy of the assistant turns, end-of-turn token included, as a mean over the tokens of the
whole batch.

    ostinato run sft --config examples/sft.yaml
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from engine.handles import Model, TrainingModel
from engine.losses.spec import CrossEntropySpec
from engine.text.threads import StringThread
from flows.checkpoints import CheckpointSchedule, Uploads
from flows.config import SFTConfig
from flows.loop import Journal, rate, steps
from flows.ops.hooks import ON_END
from flows.progress import TerminalProgress
from flows.schedules import SCHEDULES
from flows.session import default_model_name, finish_run, open_run
from storage.chain import NanPolicy, OptimizerSpec, PolicyRef, StepRequest
from storage.registry import registered_key
from tasks.datasets.load import LoadedDataset
from tasks.datasets.order import take
from tasks.datasets.spec import InlineDataset
from tasks.load import load_prompts
from tasks.prepare import prepare_completions
from tasks.publish import publish_model
from tasks.report import write_report
from tasks.schedules import CosineScheduler, Schedule
from tasks.train import take_gradient_step


class SFT:
    """Trains `model` in place on the assistant turns of `dataset`: threads, or a loaded completion dataset."""

    def __init__(
        self,
        dataset: list[StringThread] | LoadedDataset,
        model: TrainingModel,
        *,
        logger: TerminalProgress | None = None,
        lr: float = 1e-5,
        lr_scheduler: Schedule | None = None,
        samples_per_batch: int = 512,
        max_grad_norm: float = 1.0,
        epochs: int | None = None,
        max_steps: int | None = None,
        weight_decay: float = 0.0,
        skip_nan_gradients: bool = False,
        checkpoint_frequency: float | None = 0.2,
        checkpoint_every_steps: int | None = None,
        checkpoints: CheckpointSchedule | None = None,
        data_seed: int = 42,
    ) -> None:
        if epochs is not None and max_steps is not None:
            raise ValueError(f"both epochs={epochs} and max_steps={max_steps} were given; give one of them")
        self.dataset, self.model = dataset, model
        self.logger = logger or TerminalProgress()
        self.epochs, self.max_steps, self.samples_per_batch = epochs or 1, max_steps, samples_per_batch
        self.schedule = lr_scheduler or CosineScheduler(lr)
        self.optimizer = {"weight_decay": weight_decay, "max_grad_norm": max_grad_norm}
        self.nan_policy: NanPolicy = "skip" if skip_nan_gradients else "fail"
        self.checkpoints = checkpoints or CheckpointSchedule.every(checkpoint_frequency, checkpoint_every_steps)
        self.data_seed = data_seed

    async def run(self) -> PolicyRef:
        """The loop. Every line's result is committed before the next begins."""
        workspace = self.model.workspace
        await self.model.begin_stage("sft")
        policy = await self.model.policy()
        data = self._load()
        size = min(self.samples_per_batch, data.rows)
        total_steps = self.max_steps or -(-self.epochs * data.rows // size)
        async with (
            Uploads(workspace, retention=self.checkpoints.retention) as uploads,
            Journal(self.model, policy, self.logger, total_steps=total_steps) as journal,
        ):
            cursor = journal.cursor()
            if due := self.checkpoints.missed(policy.step, total_steps, model=self.model.name):
                await uploads.start(policy, name=due.named)
            for step in steps(policy.step, total_steps):
                rows, cursor_out = take(cursor, size, rows=data.rows, seed=self.data_seed)
                batch = await prepare_completions(workspace, policy, self.model.base, data.ref, rows, step=step)
                request = StepRequest(
                    parent=policy,
                    batch=batch,
                    loss=CrossEntropySpec().model_dump(),
                    optimizer=OptimizerSpec(lr=rate(self.schedule, step, total_steps), **self.optimizer),
                    cursor_in=cursor.model_dump(),
                    cursor_out=cursor_out.model_dump(),
                    nan_policy=self.nan_policy,
                )
                policy, cursor = await take_gradient_step(workspace, request, step=step), cursor_out
                self.model.stand_at(policy)
                journal.record(policy)
                if due := self.checkpoints.due(step, total_steps, model=self.model.name):
                    await uploads.start(policy, name=due.named)
            await uploads.start(policy)
        return policy

    def _load(self) -> LoadedDataset:
        if isinstance(self.dataset, LoadedDataset):
            return self.dataset
        return load_prompts(self.model.workspace, InlineDataset.of(self.dataset), "completion")


@flow(name="sft", flow_run_name="{config.title}", **ON_END)
async def sft(config: SFTConfig) -> dict[str, Any]:
    """Fine-tunes a model on conversations, publishes it and reports.

    Args:
        config: what to train, on what.
    """
    logger = TerminalProgress()
    async with open_run("sft", config, logger, use="completion") as session:
        if session.result is not None:
            return session.result
        workspace = session.workspace
        builder = Model(registered_key(session.base)).to_builder(session).training(config.model.trainable)
        model = await builder.spawn_train(config.model.name)
        algorithm, optimizer = config.algorithm, config.optimizer
        trainer = SFT(
            session.data,
            model,
            logger=logger,
            lr_scheduler=SCHEDULES[optimizer.schedule](optimizer.lr),
            samples_per_batch=algorithm.samples_per_batch,
            max_grad_norm=optimizer.max_grad_norm,
            epochs=algorithm.epochs,
            max_steps=algorithm.steps,
            weight_decay=optimizer.weight_decay,
            skip_nan_gradients=optimizer.skip_nan_gradients,
            checkpoints=CheckpointSchedule(config.checkpoints),
            data_seed=config.seed,
        )
        policy = await trainer.run()
        published = await publish_model(workspace, policy, config.model.publish_as or default_model_name(session.run))
        result = {"run": session.run, "policy": policy.uri, "model": registered_key(published)}
        report = write_report(workspace, policy, None, None, result)
        return finish_run(session, result | {"report": report})
