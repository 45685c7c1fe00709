"""What every loop keeps besides its algorithm: the place to go on from, the clock, the metrics."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, Self

from engine.handles import TrainingModel
from engine.losses.spec import LossSpec
from flows.callbacks import Callback, Moment
from flows.configs.logging import LoggingConfig
from flows.display.artifacts import put_table
from flows.display.live_page import RunPage, flow_run_page
from flows.display.terminal import TerminalProgress
from flows.loggers import StageNotifier
from flows.training.schedules import Schedule
from flows.training.watch import RunWatch
from storage.chain.records import Chain, CommitRecord, OptimizerSpec, PolicyRef
from storage.chain.run_record import read_run
from storage.errors import ObjectNotFound
from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore
from storage.worklog import log_work
from tasks.datasets.order import DataCursor
from tasks.evaluation.validation_curve import Validation, validation_of
from tasks.loggers.base import LoggedRun, SentLog
from tasks.loggers.stage_loggers import Loggers
from tasks.loggers.tables import Table
from tasks.reports.clock import StepClock
from tasks.reports.step_metrics import measure_step, write_metrics


class Journal:
    """The record of a running loop: one line of metrics per committed step."""

    def __init__(
        self,
        model: TrainingModel,
        policy: PolicyRef,
        logger: TerminalProgress,
        *,
        total_steps: int | None,
        loss: LossSpec | None = None,
        reference: PolicyRef | None = None,
        notifier: StageNotifier | None = None,
    ) -> None:
        self.store = model.workspace.open_store()
        self.chain = Chain.of(self.store, policy)
        self.logger, self.total_steps = logger, total_steps
        self._resumed = policy.step > 0
        self.last: CommitRecord | None = self.chain.record(policy.step) if policy.step else None
        """Of the last committed step of this stage."""
        log_work("start", policy=policy.uri, resumed_from=policy.step)
        logger.start(total_steps, policy.step)
        self.clock = StepClock()
        self.watch = RunWatch(policy.run, step=policy.step)
        self.page = RunPage(self.store, policy, total_steps=total_steps, engine=model.workspace.engine)
        self.model, self.loss, self.reference = model, loss, reference
        self.notifier = notifier
        self._notify(policy.step)
        self.loggers = open_loggers(self.store, policy, logger.logging)

    def cursor(self) -> DataCursor:
        """Where the data stands after the last committed step."""
        return DataCursor.model_validate(self.last.cursor_out) if self.last else DataCursor()

    def record(
        self, policy: PolicyRef, rollouts: list[ArtifactRef] | None = None, graded: list[ArtifactRef] | None = None
    ) -> None:
        """Measures the step that made `policy`, stores its metrics and shows them. Raises prefect.exceptions.Pause when
        a person wants the run to wait."""
        record = self.chain.committed_record(policy.step)
        self.last = record
        metrics = measure_step(
            self.store,
            record,
            rollouts or [],
            graded or [],
            total_steps=self.total_steps,
            seconds=self.clock.lap(),
        ).model_copy(update={"resumed": self._resumed})
        self._resumed = False
        write_metrics(self.store, policy, metrics)
        self.logger.step(metrics)
        self.page.add_step(metrics, rollouts, graded)
        self.loggers.step(metrics)
        self._notify(policy.step)
        self.watch.stepped(policy.step - 1)

    async def call(
        self, callbacks: Sequence[Callback], rollouts: list[ArtifactRef] | None = None,
        graded: list[ArtifactRef] | None = None,
    ) -> None:  # fmt: skip
        """Those of the callbacks that are due at the policy where the loop stands, also of a step that was committed
        before a crash: each is done once, whoever asks. Their time is no step's."""
        policy = await self.model.policy()
        made = (self.loss, self.reference, tuple(rollouts or ()), tuple(graded or ()))
        moment = Moment(self.model, policy, self.total_steps, *made, show=self._show)
        due = [one for one in callbacks if one.cadence.due(policy.step, self.total_steps)]
        for callback in due:
            found = await callback.at(moment)
            said = None if found is None else validation_of(self.store, found)
            if said is not None:
                self._validated(said)
        if due:
            self.clock.lap()

    async def _show(self, table: Table) -> None:
        """Once per moment in each logger and in Prefect; on the terminal of whoever asks."""
        self.logger.note(table.text())
        self.loggers.table(table)
        stage = self.chain.run, self.chain.stage
        if flow_run_page() is not None and SentLog(self.store, *stage, "prefect").take_table(table):
            key = re.sub(r"[^a-z0-9]+", "-", table.name.lower())
            await put_table(key, [dict(row) for row in table.rows], description=f"{stage[1]} after {table.step} steps")

    def _notify(self, steps_done: int) -> None:
        """A run without an end has no share that is done."""
        if self.notifier is not None and self.total_steps is not None:
            self.notifier.report_progress(min(steps_done, self.total_steps), self.total_steps)

    def _validated(self, validation: Validation) -> None:
        figures = "  ".join(f"{measure} {value:.4f}" for measure, value in validation.measures.items())
        self.logger.note(f"{validation.name} after {validation.step} steps: {figures or 'nothing'}")
        self.page.add_validation(validation)
        self.loggers.validation(validation)

    async def __aenter__(self) -> Self:
        self.watch.__enter__()
        self.page.__enter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.watch.__exit__(None, None, None)
        await asyncio.to_thread(self.page.__exit__, None, None, None)  # its last update takes a moment
        await asyncio.to_thread(self.loggers.close)
        self.logger.close()  # however the loop ends, the terminal is given back


def open_loggers(store: ObjectStore, policy: PolicyRef, config: LoggingConfig) -> Loggers:
    """Those of the config, for the policy's stage. Raises LoggerMissing."""
    try:
        semantic = read_run(store, policy.run).semantic
    except ObjectNotFound:
        semantic = {}  # a loop without a flow
    run = LoggedRun(
        project=config.project, name=config.experiment or policy.run.replace("/", "-"), run=policy.run,
        folder=config.folder, config=semantic,
    )  # fmt: skip
    return Loggers(store, policy, config.loggers, run)


def steps(first: int, total_steps: int | None) -> Iterator[int]:
    """first, first + 1, … up to the run's length; endless without one."""
    return iter(count(first)) if total_steps is None else iter(range(first, total_steps))


def rate(schedule: Schedule, step: int, total_steps: int | None) -> float:
    """What the schedule has at a 0-based step. Of a run without an end, it does not depend on the length."""
    return schedule.at(step, total_steps if total_steps is not None else step + 1)


def optimizer_at(
    step: int, total_steps: int | None, *, lr: Schedule, weight_decay: float | Schedule, **fixed: float
) -> OptimizerSpec:
    """The optimizer of a 0-based step."""
    decay = weight_decay if isinstance(weight_decay, float | int) else rate(weight_decay, step, total_steps)
    return OptimizerSpec(lr=rate(lr, step, total_steps), weight_decay=decay, **fixed)


def adamw(
    weight_decay: float | Schedule, max_grad_norm: float, betas: tuple[float, float], eps: float
) -> dict[str, Any]:
    """What `optimizer_at` is told besides the rate."""
    return {
        "weight_decay": weight_decay, "max_grad_norm": max_grad_norm, "beta1": betas[0], "beta2": betas[1], "eps": eps
    }  # fmt: skip
