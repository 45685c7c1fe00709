"""Reports the metrics of each committed step of a training loop, the results of its callbacks, its progress, and the
time that is left."""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self

from engine.handles import TrainingModel
from engine.losses.spec import LossSpec
from flows.callbacks import Callback, HeldoutEvaluation, Moment, training_name, when
from flows.configs.validation import LoggingConfig
from flows.display.live_page import RunPage, flow_run_page
from flows.display.run_log import put_table
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
from tasks.datasets.load import LoadedPart
from tasks.datasets.order import DataCursor
from tasks.evaluation.validation_curve import Validation, describe_size, read_validations, validation_of
from tasks.loggers.base import LoggedRun, SentLog, Table
from tasks.loggers.stage_loggers import Loggers
from tasks.reports.advice import Advisor
from tasks.reports.clock import Lap, StepClock
from tasks.reports.metrics import StepMetrics
from tasks.reports.step_metrics import measure_step, read_metrics, write_metrics
from tasks.reports.table_cells import table_cells

EVALUATION = "evaluation"
"""The kind of work under which evaluations on held-out prompts are measured."""

STEPS_AVERAGED = 10
"""Number of recent steps whose mean duration counts."""


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
        time_left: TimeLeft | None = None,
    ) -> None:
        self.time_left = time_left or TimeLeft(total_steps, {})
        self.store = model.workspace.open_store()
        self.chain = Chain.of(self.store, policy)
        self.logger, self.total_steps = logger, total_steps
        self.model, self.loss, self.reference = model, loss, reference
        self.parts: Sequence[LoadedPart] = ()
        """The parts of the mixture that the steps take their rows from. Empty for a single dataset."""
        self._resumed = policy.step > 0
        self.last_record: CommitRecord | None = None
        """The record of the last committed step of this stage; None before the first."""
        self.tokens_sampled = 0
        """Number of tokens that were sampled for the last step."""
        if self._resumed:
            self.last_record = self.chain.record(policy.step)
        log_work("start", policy=policy.uri, resumed_from=policy.step)
        logger.start(total_steps, policy.step)
        # everything that shows the steps, and the watch over their duration
        self.clock = StepClock()
        first = read_metrics(self.store, policy.run, policy.stage, steps=1) if self._resumed else []
        self.advisor = Advisor(first[0] if first else None)
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

    async def record(self, policy: PolicyRef, collected: CollectedRollouts | None = None) -> CommitRecord:
        """Measures the step that made `policy`, stores its metrics and shows them. Returns its commit record.
        `collected`: the rollouts that it trained on. Raises prefect.exceptions.Pause when a user has paused the flow
        run."""
        rollouts, graded = _refs(collected)
        # in a thread, because the measurement takes several requests for each shard of the step
        record, metrics = await asyncio.to_thread(self._measure, policy, rollouts, graded, self.clock.lap())
        self.last_record, self._resumed = record, False
        self.tokens_sampled = metrics.completion_tokens if rollouts else 0
        self.time_left.finish_step()
        seconds_left = self.time_left.remaining_seconds(policy.step)
        self.logger.step(metrics, seconds_left=seconds_left)
        for line in metrics.skipped_lines():
            self.logger.note(line)
        for sentence in self.advisor.step(metrics):
            self.logger.note(f"advice: {sentence}")
        self.page.add_step(metrics, rollouts, graded, seconds_left=seconds_left)
        self.loggers.step(metrics)
        self._notify(policy.step)
        self.watch.stepped(policy.step - 1)
        return record

    def _measure(
        self, policy: PolicyRef, rollouts: list[ArtifactRef], graded: list[ArtifactRef], lap: Lap
    ) -> tuple[CommitRecord, StepMetrics]:
        """Returns the record and the metrics of the step that made `policy`, and stores the metrics: nothing is shown
        that a crash could lose."""
        record = self.chain.committed_record(policy.step)
        metrics = measure_step(
            self.store, record, rollouts, graded, total_steps=self.total_steps, lap=lap, parts=self.parts
        ).model_copy(update={"resumed": self._resumed})
        write_metrics(self.store, policy, metrics)
        return record, metrics

    async def call(
        self, callbacks: Sequence[Callback], collected: CollectedRollouts | None = None, *, total_steps: int | None
    ) -> list[Validation]:
        """Calls the callbacks that are due at the current policy, also after a resume: what a callback commits is
        committed once. The time that they take is not counted as time of a step. Returns the measurements.
        `total_steps`: the number of steps after which the run ends, as far as it is known."""
        policy = await self.model.policy()
        rollouts, graded = _refs(collected)
        moment = Moment(
            self.model, policy, total_steps, self.loss, self.reference, tuple(rollouts), tuple(graded),
            show=self._show, note=self.logger.note,
        )  # fmt: skip
        # call what is due, and show the measurements that were committed
        due = [
            (callback, kind_of_work(number, callback))
            for number, callback in enumerate(callbacks)
            if callback.cadence.due(policy.step, total_steps)
        ]
        measurements = []
        for callback, kind in due:
            with self.time_left.measure(kind):
                artifact = await callback.at(moment)
            if artifact is None:
                continue
            validation = validation_of(self.store, artifact)
            if validation is not None:
                measurements.append(validation)
                self._show_validation(validation, policy, artifact)
        # start the clock of the next step only now
        if due:
            self.clock.lap()
        return measurements

    async def _show(self, table: Table) -> None:
        """Shows a table in the terminal, and once per policy in each logger and in Prefect."""
        self.logger.note(table.text())
        self.loggers.table(table)
        run, stage = self.chain.run, self.chain.stage
        # a resumed run calls again; SentLog remembers which tables Prefect has
        if flow_run_page() is not None and SentLog(self.store, run, stage, "prefect").mark_table(table):
            key = re.sub(r"[^a-z0-9]+", "-", table.name.lower())
            rows = [table_cells(row) for row in table.rows]
            await put_table(key, rows, description=f"{stage} after {table.step} steps")

    def _notify(self, steps_done: int) -> None:
        """Reports the progress of the stage; a run without an end has none."""
        if self.notifier is not None and self.total_steps is not None:
            self.notifier.report_progress(min(steps_done, self.total_steps), self.total_steps)

    def _show_validation(self, validation: Validation, policy: PolicyRef, artifact: ArtifactRef) -> None:
        """Shows a measurement in the log, on the page and in the loggers. The log also has the change since the
        measurement before training."""
        figures = []
        before = self._measures_before(validation)
        for measure, value in validation.measures.items():
            figures.append(f"{measure} {value:.4f}")
            if measure in before:
                figures[-1] += f" ({value - before[measure]:+.4f} since before {training_name(policy)})"
        time, size = when(policy, self.total_steps), describe_size(self.store, artifact)
        self.logger.note(f"{validation.name} {time}, {size}: {'  '.join(figures) or 'no result'}")
        self.page.add_validation(validation)
        self.loggers.validation(validation)

    def _measures_before(self, validation: Validation) -> dict[str, float]:
        """The measures of the same evaluation before training. Empty if there are none, or if this is it."""
        if validation.step == 0:
            return {}
        earlier = read_validations(self.store, self.chain.run, self.chain.stage, last_step=0)
        return next((first.measures for first in earlier if first.name == validation.name), {})

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


def kind_of_work(number: int, callback: Callback) -> str:
    """The kind under which the duration of a callback is measured. `number`: its place in the list of callbacks."""
    if isinstance(callback, HeldoutEvaluation):
        return EVALUATION
    return f"callback {number}"


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
    return Loggers(store, policy, config.trackers(), run)


class TimeLeft:
    """The remaining time of one loop. `measure` surrounds everything that is not a step; `finish_step` ends a step."""

    def __init__(
        self,
        total_steps: int | None,
        planned: Mapping[str, Sequence[int]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`planned`: for each kind of work besides the steps, the numbers of finished steps after which it is due,
        ascending."""
        self._total_steps, self.planned, self._clock = total_steps, planned, clock
        self._durations: dict[str, list[float]] = {}
        self._steps: deque[float] = deque(maxlen=STEPS_AVERAGED)
        self._step_started = clock()
        self._other_seconds = 0.0

    @contextmanager
    def measure(self, kind: str) -> Iterator[None]:
        """Measures work of a kind, which does not count as time of a step. Calls must not be nested."""
        started = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - started
            self._other_seconds += seconds
            self.record(kind, seconds)

    def record(self, kind: str, seconds: float) -> None:
        """Records the duration of one piece of work of this kind."""
        self._durations.setdefault(kind, []).append(seconds)

    def finish_step(self) -> None:
        """Ends a step. Its duration is the time since the last call, less the other work measured meanwhile."""
        now = self._clock()
        self._steps.append(max(0.0, now - self._step_started - self._other_seconds))
        self._step_started, self._other_seconds = now, 0.0

    @property
    def mean_step_seconds(self) -> float:
        """Mean duration of the latest steps."""
        return statistics.fmean(self._steps)

    def remaining_seconds(self, steps_done: int) -> float | None:
        """Returns the remaining seconds after `steps_done` steps. Work due after exactly `steps_done` steps
        counts as not yet done. None: unknown, as in a run without an end."""
        if self._total_steps is None or not self._steps:
            return None
        seconds = self.mean_step_seconds * max(0, self._total_steps - steps_done)
        for kind, due in self.planned.items():
            if kind in self._durations:
                seconds += statistics.fmean(self._durations[kind]) * (len(due) - bisect_left(due, steps_done))
        return seconds
