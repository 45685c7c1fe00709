"""Reports the metrics of each committed step of a training loop, the results of its callbacks, and its progress."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Self

from engine.handles import TrainingModel
from engine.losses.spec import LossSpec
from flows.callbacks import Callback, Moment
from flows.configs.logging import LoggingConfig
from flows.display.artifacts import put_table
from flows.display.live_page import RunPage, flow_run_page
from flows.display.terminal import TerminalProgress
from flows.loggers import StageNotifier
from flows.training.rollout_collection import CollectedRollouts
from flows.training.watch import RunWatch
from storage.chain.records import Chain, CommitRecord, PolicyRef
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


class StepReporter:
    """Reports the steps of one stage to the store, the terminal, the flow run's page and the configured loggers.

    A context manager around the loop. It also watches for pauses and for stalled steps (flows.training.watch).
    """

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
        self.model, self.loss, self.reference = model, loss, reference
        self._resumed = policy.step > 0
        self.last_record: CommitRecord | None = None
        """The record of the last committed step of this stage; None before the first."""
        if self._resumed:
            self.last_record = self.chain.record(policy.step)
        log_work("start", policy=policy.uri, resumed_from=policy.step)
        logger.start(total_steps, policy.step)
        # everything that shows the steps, and the watch over their duration
        self.clock = StepClock()
        self.watch = RunWatch(policy.run, step=policy.step)
        self.page = RunPage(self.store, policy, total_steps=total_steps, engine=model.workspace.engine)
        self.notifier = notifier
        self._notify(policy.step)
        self.loggers = open_loggers(self.store, policy, logger.logging)

    def cursor(self) -> DataCursor:
        """The position in the dataset after the last committed step."""
        if self.last_record:
            return DataCursor.model_validate(self.last_record.cursor_out)
        return DataCursor()

    def record(self, policy: PolicyRef, collected: CollectedRollouts | None = None) -> None:
        """Measures the step that made `policy`, stores its metrics and shows them. `collected`: the rollouts that it
        trained on. Raises prefect.exceptions.Pause when a user has paused the flow run."""
        rollouts, graded = _refs(collected)
        record = self.chain.committed_record(policy.step)
        self.last_record = record
        # measure the step
        metrics = measure_step(
            self.store,
            record,
            rollouts,
            graded,
            total_steps=self.total_steps,
            seconds=self.clock.lap(),
        ).model_copy(update={"resumed": self._resumed})
        self._resumed = False
        # store the metrics before they are shown, so that nothing is shown that a crash could lose
        write_metrics(self.store, policy, metrics)
        self.logger.step(metrics)
        self.page.add_step(metrics, rollouts, graded)
        self.loggers.step(metrics)
        self._notify(policy.step)
        self.watch.stepped(policy.step - 1)

    async def call(self, callbacks: Sequence[Callback], collected: CollectedRollouts | None = None) -> None:
        """Calls the callbacks that are due at the current policy, also after a resume: what a callback commits is
        committed once. The time that they take is not counted as time of a step."""
        policy = await self.model.policy()
        rollouts, graded = _refs(collected)
        moment = Moment(
            self.model, policy, self.total_steps, self.loss, self.reference, tuple(rollouts), tuple(graded),
            show=self._show,
        )  # fmt: skip
        # call what is due, and show the measurements that were committed
        due = [callback for callback in callbacks if callback.cadence.due(policy.step, self.total_steps)]
        for callback in due:
            artifact = await callback.at(moment)
            if artifact is None:
                continue
            validation = validation_of(self.store, artifact)
            if validation is not None:
                self._show_validation(validation)
        # start the clock of the next step only now
        if due:
            self.clock.lap()

    async def _show(self, table: Table) -> None:
        """Shows a table in the terminal, and once per policy in each logger and in Prefect."""
        self.logger.note(table.text())
        self.loggers.table(table)
        run, stage = self.chain.run, self.chain.stage
        # a resumed run calls again; SentLog remembers which tables Prefect has
        if flow_run_page() is not None and SentLog(self.store, run, stage, "prefect").mark_table(table):
            key = re.sub(r"[^a-z0-9]+", "-", table.name.lower())
            await put_table(key, [dict(row) for row in table.rows], description=f"{stage} after {table.step} steps")

    def _notify(self, steps_done: int) -> None:
        """Reports the progress of the stage; a run without an end has none."""
        if self.notifier is not None and self.total_steps is not None:
            self.notifier.report_progress(min(steps_done, self.total_steps), self.total_steps)

    def _show_validation(self, validation: Validation) -> None:
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
        # in a thread, because the last update of the page waits for the Prefect server
        await asyncio.to_thread(self.page.__exit__, None, None, None)
        await asyncio.to_thread(self.loggers.close)
        # release the terminal last, so that the messages of the loggers are still shown
        self.logger.close()


def _refs(collected: CollectedRollouts | None) -> tuple[list[ArtifactRef], list[ArtifactRef]]:
    """The rollouts of a step and their grades; none for a step on a dataset."""
    if collected is None:
        return ([], [])
    return (collected.rollouts, collected.graded)


def open_loggers(store: ObjectStore, policy: PolicyRef, config: LoggingConfig) -> Loggers:
    """The loggers of the config, for the policy's stage. Raises LoggerMissing."""
    try:
        semantic = read_run(store, policy.run).semantic
    except ObjectNotFound:
        # a loop without a flow has no record of its run
        semantic = {}
    run = LoggedRun(
        project=config.project, name=config.experiment or policy.run.replace("/", "-"), run=policy.run,
        folder=config.folder, config=semantic,
    )  # fmt: skip
    return Loggers(store, policy, config.loggers, run)
