"""The page of a running loop in Prefect: a progress bar, curves, sampled rollouts, updated while it runs.

They are three artifacts of the flow run, made once and then changed in place, so that a run of any length leaves three
rows; Prefect's own `create_…_artifact` would leave a version per call, and its update an event with the pictures in it.
All of it is done in a thread: it never takes longer than SHARE of the time, and a server that is away costs nothing.
"""

from __future__ import annotations

import contextvars
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self
from uuid import UUID

import httpx
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL

from engine.http.report_links import report_url
from engine.specs.engine import EngineSpec, HttpEngineSpec
from flows.display.terminal import format_duration
from storage.chain.records import PolicyRef
from storage.store import keys
from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore
from tasks.evaluation.validation_curve import Validation, read_validations
from tasks.reports.flow_run_page import run_markdown, sample_rows, thinned
from tasks.reports.metrics import StepMetrics
from tasks.reports.step_metrics import read_metrics

log = logging.getLogger(__name__)

UPDATE_INTERVAL_SECONDS = 5.0
"""Between two updates at least."""
SHARE = 0.02
"""Of one core's time that updates may take: a page that is dear to draw is drawn less often."""
FINAL_UPDATE_TIMEOUT = 15.0
"""How long the end of a loop waits for its last update."""
MAX_STEPS = 4000
"""Steps behind the curves; of a longer run every second, fourth, … one."""


class Page(Protocol):
    """Where a page is shown."""

    def show(self, kind: str, key: str, data: Any, description: str) -> None:
        """Shows `data` of a `kind` ("progress", "markdown", "table") under the key, in place of what it showed."""
        ...


class RunPage:
    """Enter it around a loop; call `add_step` after each step. Without a flow run or a server it does nothing."""

    def __init__(
        self,
        store: ObjectStore,
        policy: PolicyRef,
        *,
        total_steps: int | None,
        engine: EngineSpec,
        page: Page | None = None,
        every_seconds: float = UPDATE_INTERVAL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._policy, self._total = store, policy, total_steps
        self._links = page_links(store, policy.run, engine)
        self._page, self._every, self._clock = page or flow_run_page(), every_seconds, clock
        self._started, self._first = clock(), policy.step
        self._lock = threading.Lock()
        self._steps: list[StepMetrics] = []
        self._validations: list[Validation] = []
        self._samples: tuple[int, ArtifactRef, ArtifactRef] | None = None
        self._changed, self._stop = threading.Event(), threading.Event()
        self._away = False
        context = contextvars.copy_context()  # Prefect finds its settings in it
        self._thread = threading.Thread(target=context.run, args=(self._keep_up,), name="run-page", daemon=True)

    def add_step(
        self, metrics: StepMetrics, rollouts: list[ArtifactRef] | None = None, graded: list[ArtifactRef] | None = None
    ) -> None:
        """A step has ended. Returns at once."""
        with self._lock:
            self._steps.append(metrics)
            if len(self._steps) > MAX_STEPS:
                self._steps = thinned(self._steps, MAX_STEPS // 2)
            if rollouts and graded:
                self._samples = (metrics.step, rollouts[0], graded[0])
        self._changed.set()

    def add_validation(self, validation: Validation) -> None:
        """Something was measured on held-out rows. Returns at once."""
        with self._lock:
            self._validations.append(validation)
        self._changed.set()

    def update(self) -> None:
        """Shows how the run stands."""
        with self._lock:
            steps, samples, validations = list(self._steps), self._samples, list(self._validations)
        if not steps or self._page is None:
            return
        done, headline = steps[-1].step + 1, self._headline(steps[-1])
        if self._total:
            self._page.show("progress", self._key("progress"), 100.0 * done / self._total, headline)
        page = run_markdown(self._policy.run, steps, validations, headline=headline, links=self._links)
        self._page.show("markdown", self._key("training"), page, headline)
        if samples:
            step, rollouts, graded = samples
            rows = sample_rows(self._store, step, rollouts, graded)
            self._page.show("table", self._key("samples"), json.dumps(rows), f"Rollouts of step {step + 1}")

    def _keep_up(self) -> None:
        self._remember()
        while True:
            self._changed.wait()
            last = self._stop.is_set()
            self._changed.clear()
            began = time.thread_time()
            self._try(self.update)
            if last:
                return
            self._stop.wait(max(self._every, (time.thread_time() - began) / SHARE))

    def _remember(self) -> None:
        """The steps before a restart belong to the curves."""
        earlier: list[StepMetrics] = []
        policy = self._policy
        self._try(lambda: earlier.extend(read_metrics(self._store, policy.run, policy.stage, steps=policy.step)))
        measured: list[Validation] = []
        self._try(lambda: measured.extend(read_validations(self._store, policy.run, policy.stage, steps=policy.step)))
        with self._lock:
            self._steps = thinned([*earlier, *self._steps], MAX_STEPS)
            self._validations = [*measured, *self._validations]

    def _try(self, act: Callable[[], None]) -> None:
        """The boundary: whatever a page fails of is said once, and the run goes on."""
        try:
            act()
            self._away = False
        except Exception as error:  # noqa: BLE001 - see above: a server, a store and a model's text are behind it
            if not self._away:
                kind = type(error).__name__
                log.warning("the page of run %s is not up to date: %s: %s", self._policy.run, kind, error)
            self._away = True

    def _headline(self, last: StepMetrics) -> str:
        done = last.step + 1
        if self._total is None:
            return f"step {done}"
        pace = (self._clock() - self._started) / max(1, done - self._first)
        left = "" if done >= self._total else f", about {format_duration(pace * (self._total - done))} left"
        return f"step {done} of {self._total}{left}"

    def _key(self, kind: str) -> str:
        """A flow with several stages, or several models, has a page for each."""
        parts = [kind]
        if self._policy.model != "policy":
            parts.append(self._policy.model)
        if not self._policy.stage.startswith("0-"):
            parts.append(self._policy.stage)
        return re.sub(r"[^a-z0-9-]+", "-", "-".join(parts).lower())

    def __enter__(self) -> Self:
        if self._page is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._changed.set()
        if self._page is not None:
            self._thread.join(FINAL_UPDATE_TIMEOUT)


def page_links(store: ObjectStore, run: str, engine: EngineSpec) -> dict[str, str]:
    """Where to look further: caption -> url or path."""
    links = {"report, once the run has ended": report_url(engine, store, run) or store.address(keys.report(run))}
    if isinstance(engine, HttpEngineSpec):
        links["metrics of the engine"] = f"{engine.url.rstrip('/')}/metrics"
    return links


class FlowRunPage:
    """The page of a flow run: one artifact per key, made when it is first shown, by whichever attempt."""

    def __init__(self, flow_run: UUID) -> None:
        self.flow_run = flow_run
        self._known: dict[str, UUID] = {}

    def show(self, kind: str, key: str, data: Any, description: str) -> None:
        """Raises httpx.HTTPError when the server does not take it."""
        with get_client(sync_client=True) as client:
            artifact = self._known.get(key) or self._find(client, key)
            if artifact is None:
                made = ArtifactCreate(key=key, type=kind, data=data, description=description, flow_run_id=self.flow_run)
                artifact = client.create_artifact(made).id
            else:
                self._change(client, artifact, {"data": data, "description": description})
            self._known[key] = artifact

    def _find(self, client: SyncPrefectClient, key: str) -> UUID | None:
        mine = ArtifactFilter(
            flow_run_id=ArtifactFilterFlowRunId(any_=[self.flow_run]), key=ArtifactFilterKey(any_=[key])
        )
        found = client.read_artifacts(artifact_filter=mine)
        return found[0].id if found else None

    def _change(self, client: SyncPrefectClient, artifact: UUID, body: Mapping[str, Any]) -> None:
        # not client.update_artifact: its event would carry the data, and the server keep every version of it for days
        try:
            client.request("PATCH", "/artifacts/{id}", json=dict(body), path_params={"id": artifact})
        except httpx.HTTPStatusError as error:
            if error.response.status_code == httpx.codes.NOT_FOUND:  # a person deleted it: the next time makes another
                self._known.clear()
            raise


def flow_run_page() -> FlowRunPage | None:
    """The page of the flow run that runs here; None where none does, or without a server that would keep it."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or not PREFECT_API_URL.value():
        return None
    return FlowRunPage(context.flow_run.id)
