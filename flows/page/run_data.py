"""What the page shows of a run: its record in the store, and its flow run in Prefect if this server has it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowFilter, FlowFilterName
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import PrefectException

from flows.catalogue import TRAININGS
from flows.display.load_progress import format_duration
from flows.ops.run_names import expected_run_key
from flows.page.shared import Page, PageError
from flows.training.step_reporter import STEPS_AVERAGED
from storage.chain.leases import flow_run_of_lease
from storage.chain.listing import EVALUATED, has_objects, is_auxiliary
from storage.inspect.run_details import RunSummary, summarize_run
from storage.store.index import run_entries
from storage.store.keys import is_run, with_short_digest
from storage.store.objects import ObjectInfo
from tasks.evaluation.model_comparison import StoredEvaluation, stored_evaluation
from tasks.evaluation.validation_curve import Validation, curves, read_validations
from tasks.reports.flow_run_page import heldout_rows
from tasks.reports.metrics import StepMetrics
from tasks.reports.step_metrics import read_metrics, trainer_gpus

READERS = 16
"""Runs that are read at the same time for the list."""
FLOW_RUNS_SHOWN = 200
"""Newest flow runs that the list looks at."""
RUNS_CACHED = 8
"""Runs whose metrics are kept in memory, so that an open page reads only new steps."""
PREFECT_ERRORS = (PrefectException, httpx.HTTPError)


@dataclass(frozen=True)
class RunView:
    """A run, a flow run that has not opened its run yet, or both."""

    key: str
    """Key of the run in the store."""
    flow: str
    """Kinds of the stages, or the name of the flow."""
    summary: RunSummary | None
    """None: the run is not in the store yet."""
    steps: tuple[StepMetrics, ...] = ()
    """Metrics of the last stage: all steps on the run's page, and the last ones in the list."""
    heldout: tuple[Validation, ...] = ()
    devices: int = 0
    """GPUs of the trainer. 0: it trains on the CPU, or no step is committed."""
    flow_run: FlowRun | None = None
    evaluation: StoredEvaluation | None = None
    """The result of a finished evaluation."""

    @property
    def path(self) -> str:
        """Address of its page."""
        return f"/runs/{self.key if self.summary or self.flow_run is None else self.flow_run.id}"

    @property
    def state(self) -> str:
        """Prefect's name of the state, or else that of the store."""
        if self.flow_run is not None and self.flow_run.state is not None:
            return self.flow_run.state.name or "Unknown"
        return self.summary.state.capitalize() if self.summary else "Unknown"

    @property
    def is_active(self) -> bool:
        """Whether the page changes by itself."""
        if self.flow_run is not None and self.flow_run.state is not None:
            return not self.flow_run.state.is_final()
        return self.summary is not None and self.summary.state == "running?"

    @property
    def can_cancel(self) -> bool:
        state = self.flow_run.state if self.flow_run else None
        return state is not None and not (state.is_final() or state.is_cancelling())

    @property
    def can_retry(self) -> bool:
        """A flow run without a deployment has no worker that could start it again."""
        state = self.flow_run.state if self.flow_run else None
        can_start = self.flow_run is not None and self.flow_run.deployment_id is not None
        return can_start and state is not None and state.is_final() and not state.is_completed()

    @property
    def done(self) -> int:
        return self.summary.head_step if self.summary else 0

    @property
    def total(self) -> int | None:
        return self.steps[-1].total_steps if self.steps else None

    @property
    def time_left(self) -> str:
        """The rest of the steps at the mean duration of the last ones. Empty if it is not known."""
        if not (self.is_active and self.steps and self.total):
            return ""
        last = self.steps[-STEPS_AVERAGED:]
        mean = sum(sum(step.seconds.values()) for step in last) / len(last)
        return format_duration(mean * max(0, self.total - self.done))

    @property
    def cost(self) -> str:
        """How long it has run, as Prefect counts it, or else in its steps; and the hours of the trainer's GPUs."""
        seconds = self.flow_run.estimated_run_time.total_seconds() if self.flow_run else 0.0
        if not seconds and self.steps:
            # the list has only the last steps
            seconds = sum(sum(step.seconds.values()) for step in self.steps) * self.done / len(self.steps)
        if not seconds:
            return ""
        hours = f", {self.devices * seconds / 3600:.2f} GPU hours" if self.devices else ""
        return format_duration(seconds) + hours

    @cached_property
    def heldout_rows(self) -> list[tuple[str, str, str, str, str]]:
        return heldout_rows(curves(self.heldout))

    @property
    def results(self) -> list[str]:
        """The measures on held-out rows, or the scores of an evaluation, in words."""
        lines = [f"{name}: {before} → {latest}" for name, before, latest, *_ in self.heldout_rows]
        for score in self.evaluation.comparison.scores if self.evaluation else ():
            mean = score.why_no_mean or f"{score.mean:.3f}"
            lines.append(f"{score.dataset}, {score.grader}: {with_short_digest(score.model)} {mean}")
        return lines


class RunReader:
    """Reads runs for the page. Its methods may be called from several threads."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self._lock = threading.Lock()
        self._steps: OrderedDict[tuple[str, str], tuple[StepMetrics, ...]] = OrderedDict()
        self._flow_names: dict[UUID, str] = {}

    def newest(self, count: int) -> tuple[list[RunView], str]:
        """Returns the newest runs and the flow runs that have no run yet, and what Prefect did not answer, in words."""
        store = self.page.store
        entries = {run: entry for run, entry in run_entries(store).items() if not is_auxiliary(run)}
        names = sorted(entries, key=lambda run: entries[run].modified, reverse=True)[:count]
        flow_runs: dict[str, FlowRun] = {}
        problem = ""
        try:
            with self.page.prefect() as client:
                flow_runs = {str(flow_run.id): flow_run for flow_run in self._flow_runs(client)}
        except PREFECT_ERRORS as error:
            problem = f"Prefect at {self.page.settings.server} does not answer ({type(error).__name__})."

        def read(run: str) -> RunView:
            return self._view(run, flow_runs.get(flow_run_of_lease(store, run)), entries[run], STEPS_AVERAGED)

        with ThreadPoolExecutor(READERS) as pool:
            views = list(pool.map(read, names))
        waiting, shown = [], {view.flow_run.id for view in views if view.flow_run}
        for flow_run in flow_runs.values():
            flow = self._flow_names[flow_run.flow_id]
            key = expected_run_key(flow, flow_run)
            # the key of an evaluation depends on its inputs, so that a completed one may be any run of the list
            is_old = flow == EVALUATED and flow_run.state is not None and flow_run.state.is_completed()
            if key not in entries and flow_run.id not in shown and not is_old:
                waiting.append(RunView(key, flow, None, flow_run=flow_run))
        return [*waiting[:count], *views], problem

    def read(self, name: str, *, steps: bool = True) -> RunView:
        """Returns the run with this key, or of the flow run with this id. Raises PageError if there is neither."""
        store = self.page.store
        flow_run = None
        if not (is_run(name) and has_objects(store, name)):
            flow_run, key = self._by_id(name)
            if not has_objects(store, key):
                return RunView(key, self._flow_names[flow_run.flow_id], None, flow_run=flow_run)
            name = key
        entry = run_entries(store, name).get(name)
        return self._view(name, flow_run or self._of_lease(name), entry, None if steps else 0)

    def _view(self, run: str, flow_run: FlowRun | None, entry: ObjectInfo | None, last: int | None) -> RunView:
        """`entry`: that of the run in the index. `last`: how many of the last steps are read; None: all."""
        store, summary = self.page.store, summarize_run(self.page.store, run)
        stage, head = (summary.stages[-1] if summary.stages else ""), summary.head_step
        if last is None:
            steps = self._all_steps(run, stage, head)
        else:
            steps = tuple(read_metrics(store, run, stage, first=max(0, head - last), steps=head))
        heldout = tuple(read_validations(store, run, stage)) if stage else ()
        evaluation = stored_evaluation(store, run, entry) if entry and not stage else None
        devices = trainer_gpus(store, run, head)
        return RunView(run, summary.kind, summary, steps, heldout, devices, flow_run, evaluation)

    def _flow_runs(self, client: SyncPrefectClient) -> list[FlowRun]:
        """The newest flow runs of trainings and evaluations."""
        flows = FlowFilter(name=FlowFilterName(any_=[*TRAININGS, EVALUATED]))
        for flow in client.read_flows(flow_filter=flows):
            self._flow_names[flow.id] = flow.name
        newest_first = FlowRunSort.EXPECTED_START_TIME_DESC
        return client.read_flow_runs(flow_filter=flows, sort=newest_first, limit=FLOW_RUNS_SHOWN)

    def _by_id(self, name: str) -> tuple[FlowRun, str]:
        """The flow run with this id and the key of its run. Raises PageError."""
        try:
            id = UUID(name)
        except ValueError:
            what = f"There is no run {name!r} in {self.page.store.url}."
            raise PageError(what, "Choose one under Runs.", 404) from None
        with self.page.prefect() as client:
            flow_run = client.read_flow_run(id)
            if flow_run.flow_id not in self._flow_names:
                self._flow_names[flow_run.flow_id] = client.read_flow(flow_run.flow_id).name
        return flow_run, expected_run_key(self._flow_names[flow_run.flow_id], flow_run)

    def _of_lease(self, run: str) -> FlowRun | None:
        """The flow run that holds the lease of the run, or held it last. None: this server does not have it."""
        id = flow_run_of_lease(self.page.store, run)
        if not id:
            return None
        try:
            with self.page.prefect() as client:
                return client.read_flow_run(UUID(id))
        except PREFECT_ERRORS:
            return None  # it has no such flow run, or does not answer, which the list says

    def _all_steps(self, run: str, stage: str, head: int) -> tuple[StepMetrics, ...]:
        """The metrics of all steps. Steps that were read before are not read again, but for the last ones, whose
        metrics may have been written after their commit."""
        with self._lock:
            known = self._steps.pop((run, stage), ())[:-2]
        known = known if len(known) <= head else ()
        first = known[-1].step + 1 if known else 0
        steps = (*known, *read_metrics(self.page.store, run, stage, first=first, steps=head))
        with self._lock:
            self._steps[run, stage] = steps
            while len(self._steps) > RUNS_CACHED:
                self._steps.popitem(last=False)
        return steps
