"""The live page of a training loop in Prefect: a progress bar, curves and sampled rollouts.

The page consists of three artifacts of the flow run. They are created once and then updated in place, so that a run of
any length leaves three rows in the database. Prefect's `create_…_artifact` functions would store a new version per
call, and its update function would send an event that contains the pictures. A thread does the work. It uses at most
MAX_CPU_SHARE of one core, and an unreachable server does not slow the run down.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, Protocol, Self
from uuid import UUID

import httpx
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL

from engine.specs.engine import EngineSpec, HttpEngineSpec
from flows.display.terminal import format_duration
from storage.chain.records import PolicyRef
from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore
from tasks.evaluation.validation_curve import Validation, read_validations
from tasks.reports.flow_run_page import run_markdown, sample_rows, thinned
from tasks.reports.metrics import StepMetrics
from tasks.reports.step_metrics import read_metrics
from tasks.reports.table_cells import table_cells

log = logging.getLogger(__name__)

UPDATE_INTERVAL_SECONDS = 5.0
"""Shortest time between two updates."""
MAX_CPU_SHARE = 0.02
"""Share of one core's time that updates may take. A page that is slow to draw is updated less often."""
FINAL_UPDATE_TIMEOUT = 15.0
"""Seconds that the end of a loop waits for the last update."""
MAX_STEPS = 4000
"""Largest number of steps in the curves. Of a longer run every second, every fourth, … step is shown."""


class Page(Protocol):
    """A place that shows artifacts."""

    def show(self, kind: str, key: str, data: Any, description: str) -> None:
        """Shows `data` under the key, and replaces what the key showed. `kind` is progress, markdown or table."""
        ...


class RunPage:
    """Keeps the page of a training loop up to date: enter it around the loop, and call `add_step` after each step.

    Does nothing outside a flow run or without a configured server.
    """

    def __init__(
        self,
        store: ObjectStore,
        policy: PolicyRef,
        *,
        total_steps: int | None,
        engine: EngineSpec,
        page: Page | None = None,
        links: Mapping[str, str] = MappingProxyType({}),
        every_seconds: float = UPDATE_INTERVAL_SECONDS,
    ) -> None:
        self._store, self._policy, self._total_steps = store, policy, total_steps
        self._links = {**links, **engine_links(engine)}
        self._page = page or flow_run_page()
        self._every_seconds = every_seconds
        # written by the loop, read by the thread
        self._lock = threading.Lock()
        self._steps: list[StepMetrics] = []
        self._validations: list[Validation] = []
        self._samples: tuple[int, ArtifactRef, ArtifactRef] | None = None
        self._seconds_left: float | None = None
        self._changed, self._stop = threading.Event(), threading.Event()
        self._failing = False
        # holds Prefect's settings
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._update_loop,), name="run-page", daemon=True)

    def add_step(
        self,
        metrics: StepMetrics,
        rollouts: list[ArtifactRef] | None = None,
        graded: list[ArtifactRef] | None = None,
        *,
        seconds_left: float | None = None,
    ) -> None:
        """Adds a finished step to the page. Returns at once. `seconds_left`: the remaining time, if it is known."""
        # without a page nothing reads the steps
        if self._page is None:
            return
        with self._lock:
            self._seconds_left = seconds_left
            self._steps.append(metrics)
            if len(self._steps) > MAX_STEPS:
                self._steps = thinned(self._steps, MAX_STEPS // 2)
            if rollouts and graded:
                self._samples = (metrics.step, rollouts[0], graded[0])
        self._changed.set()

    def add_validation(self, validation: Validation) -> None:
        """Adds a measurement on held-out rows to the page. Returns at once."""
        if self._page is None:
            return
        with self._lock:
            self._validations.append(validation)
        self._changed.set()

    def update(self) -> None:
        """Draws the page and sends it."""
        with self._lock:
            steps, samples, validations = list(self._steps), self._samples, list(self._validations)
        if not steps or self._page is None:
            return
        # the progress bar needs a known number of steps
        finished, headline = steps[-1].step + 1, self._headline(steps[-1])
        if self._total_steps:
            self._page.show("progress", self._key("progress"), 100.0 * finished / self._total_steps, headline)
        markdown = run_markdown(self._policy.run, steps, validations, links=self._links)
        self._page.show("markdown", self._key("training"), markdown, headline)
        # one shard of rollouts, with its grades
        if samples:
            step, rollouts, graded = samples
            rows = [table_cells(row) for row in sample_rows(self._store, rollouts, graded)]
            self._page.show("table", self._key("samples"), json.dumps(rows), f"Rollouts of step {step + 1}")

    def _update_loop(self) -> None:
        """The thread: updates the page after changes, until the loop has ended."""
        self._load_earlier_steps()
        while True:
            self._changed.wait()
            is_last = self._stop.is_set()
            self._changed.clear()
            cpu_before = time.thread_time()
            self._try(self.update)
            if is_last:
                return
            cpu_seconds = time.thread_time() - cpu_before
            self._stop.wait(max(self._every_seconds, cpu_seconds / MAX_CPU_SHARE))

    def _load_earlier_steps(self) -> None:
        """Adds the steps and validations that were committed before this process started."""
        policy = self._policy
        earlier_steps: list[StepMetrics] = []
        self._try(lambda: earlier_steps.extend(read_metrics(self._store, policy.run, policy.stage, steps=policy.step)))
        earlier: list[Validation] = []
        self._try(
            lambda: earlier.extend(read_validations(self._store, policy.run, policy.stage, last_step=policy.step))
        )
        with self._lock:
            self._steps = thinned([*earlier_steps, *self._steps], MAX_STEPS)
            self._validations = [*earlier, *self._validations]

    def _try(self, act: Callable[[], None]) -> None:
        """The error boundary of the page: logs the first error of a series, and lets the run continue."""
        try:
            act()
            self._failing = False
        except Exception as error:  # noqa: BLE001 - see above: a server, a store and a model's text are behind it
            if not self._failing:
                kind = type(error).__name__
                log.warning("the page of run %s is not up to date: %s: %s", self._policy.run, kind, error)
            self._failing = True

    def _headline(self, last: StepMetrics) -> str:
        """The progress in one line: step, number of steps, and remaining time."""
        finished = last.step + 1
        if self._total_steps is None:
            return f"step {finished}"
        if finished >= self._total_steps:
            return f"step {finished} of {self._total_steps}"
        headline = f"step {finished} of {self._total_steps}"
        if self._seconds_left is None:
            return headline
        return f"{headline}, about {format_duration(self._seconds_left)} left"

    def _key(self, kind: str) -> str:
        """The artifact's key. A flow with several stages or models has a page for each."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._changed.set()
        if self._page is not None:
            self._thread.join(FINAL_UPDATE_TIMEOUT)


async def show_finished_run(
    store: ObjectStore, policy: PolicyRef, *, engine: EngineSpec, links: Mapping[str, str], page: Page | None = None
) -> None:
    """Draws the page of the stage of `policy`, which is its last one, once more. `links` are added: caption -> URL,
    path or name."""
    running = RunPage(store, policy, total_steps=policy.step, engine=engine, links=links, page=page)

    def draw() -> None:
        with running:
            pass  # the end of the block draws the page

    # in a thread, because the update waits for the Prefect server
    await asyncio.to_thread(draw)


def engine_links(engine: EngineSpec) -> dict[str, str]:
    """Returns the links to an engine server: caption -> url. An embedded engine has none. A browser cannot send the
    token of a server that asks for one, so that has none either."""
    if not isinstance(engine, HttpEngineSpec) or os.environ.get(engine.token_env):
        return {}
    return {"metrics of the engine": f"{engine.url.rstrip('/')}/metrics"}


class FlowRunPage:
    """The page of a flow run in Prefect. Each key has one artifact, which all attempts of the flow run share."""

    def __init__(self, flow_run: UUID) -> None:
        self.flow_run = flow_run
        self._artifacts: dict[str, UUID] = {}

    def show(self, kind: str, key: str, data: Any, description: str) -> None:
        """Creates the artifact of the key, or replaces its data. Raises httpx.HTTPError."""
        with get_client(sync_client=True) as client:
            artifact_id = self._artifacts.get(key) or self._find(client, key)
            if artifact_id is None:
                artifact = ArtifactCreate(
                    key=key, type=kind, data=data, description=description, flow_run_id=self.flow_run
                )
                artifact_id = client.create_artifact(artifact).id
            else:
                self._change(client, artifact_id, {"data": data, "description": description})
            self._artifacts[key] = artifact_id

    def _find(self, client: SyncPrefectClient, key: str) -> UUID | None:
        """The artifact that an earlier attempt of the flow run created for the key, or None."""
        artifact_filter = ArtifactFilter(
            flow_run_id=ArtifactFilterFlowRunId(any_=[self.flow_run]), key=ArtifactFilterKey(any_=[key])
        )
        artifacts = client.read_artifacts(artifact_filter=artifact_filter)
        if not artifacts:
            return None
        return artifacts[0].id

    def _change(self, client: SyncPrefectClient, artifact_id: UUID, body: Mapping[str, Any]) -> None:
        # client.update_artifact would send an event with the data, and the server would keep every version for days
        try:
            client.request("PATCH", "/artifacts/{id}", json=dict(body), path_params={"id": artifact_id})
        except httpx.HTTPStatusError as error:
            # somebody deleted the artifact: the next call creates another one
            if error.response.status_code == httpx.codes.NOT_FOUND:
                self._artifacts.clear()
            raise


def flow_run_page() -> FlowRunPage | None:
    """Returns the page of the current flow run, or None outside a flow run or without a configured server."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or not PREFECT_API_URL.value():
        return None
    return FlowRunPage(context.flow_run.id)
