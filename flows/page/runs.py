"""The section Runs: the list of runs, and the page of a run with its curves, samples, lineage, files and log."""

from __future__ import annotations

import base64
from typing import Any, get_args
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.client.schemas.objects import Log
from prefect.client.schemas.sorting import LogSort
from pydantic import ValidationError
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse

from engine.http.app import POLICY as REPORT_POLICY
from engine.validation_messages import describe_errors
from flows.page.run_actions import RunActions
from flows.page.run_data import RunReader, RunView
from flows.page.security import Form
from flows.page.shared import Page, PageError
from flows.runs.recorded_config import RecordedConfig, read_config
from storage.errors import ObjectNotFound, StorageError
from storage.inspect.lineage import lineage_of
from storage.inspect.run_details import describe_run
from storage.inspect.step_samples import SampleFilter, SampleOrder, newest_sampled_step, step_samples
from storage.serialization import canonical_text, flatten
from storage.store import keys
from tasks.reports.advice import advice
from tasks.reports.flow_run_page import CURVE_POINTS, thinned
from tasks.reports.html_report import all_charts
from tasks.reports.table_cells import sample_prompt

RUNS_SHOWN = 30
"""Runs of the list at first; a link shows twice as many."""
SAMPLES_SHOWN = 20
"""Samples of one page of them."""
AS_TABLES = ("scores", "differences", "samples", "harness")
"""Parts of an evaluation's result that its page has as tables."""
LOG_LINES = 200
"""Newest lines of the log that are shown."""


def router(page: Page) -> APIRouter:
    """Returns the routes of the section."""
    router = APIRouter()
    reader = RunReader(page)
    actions = RunActions(page, reader)
    router.add_event_handler("shutdown", actions.close)

    @router.get("/runs")
    def list_runs(request: Request, count: int = RUNS_SHOWN) -> Response:
        views, problem = reader.newest(min(max(1, count), 1000))
        return page.render(request, "runs.html", views=views, problem=problem, count=count)

    @router.get("/runs/{name:path}")
    def show_run(request: Request, name: str) -> Response:
        view = reader.read(name)
        if view.summary and name != view.key:
            return RedirectResponse(view.path)  # the flow run has its run by now
        return page.render(request, "run.html", recorded=_recorded(page, view), **_live_values(view, actions))

    @router.get("/run-parts/live/{name:path}")
    def live(request: Request, name: str, seen: str = "") -> Response:
        values = _live_values(reader.read(name), actions)
        response = page.render(request, "run_live.html", **values)
        if seen != values["phase"]:
            response.headers["HX-Refresh"] = "true"  # the other parts of the page change, too
        return response

    @router.get("/run-parts/curves/{name:path}")
    def curves(request: Request, name: str, step: int = -1) -> Response:
        view = reader.read(name)
        if view.done == step:
            return Response(status_code=204)
        return page.render(request, "run_curves.html", view=view, charts=_charts(view))

    @router.get("/run-parts/samples/{name:path}")
    def samples(request: Request, name: str) -> Response:
        return page.render(request, "run_samples.html", **_samples_values(page, name, dict(request.query_params)))

    @router.get("/run-parts/origin/{name:path}")
    def origin(request: Request, name: str) -> Response:
        return page.render(request, "run_origin.html", **_origin_values(page, name))

    @router.get("/run-parts/log/{name:path}")
    def log(request: Request, name: str) -> Response:
        return page.render(request, "run_log.html", lines=_log_lines(page, reader.read(name, steps=False)))

    @router.get("/run-parts/config/{name:path}")
    def config(name: str) -> Response:
        return PlainTextResponse(read_config(page.store, name).text)

    @router.get("/run-parts/report/{name:path}")
    def report(name: str) -> Response:
        text = page.store.get(keys.report(name)).decode()
        return HTMLResponse(text, headers={"Content-Security-Policy": REPORT_POLICY})

    @router.post("/run-actions/{action}/{name:path}")
    def act(request: Request, action: str, name: str) -> Response:
        return RedirectResponse(_act(actions, request.state.form, action, name), status_code=303)

    return router


def _recorded(page: Page, view: RunView) -> RecordedConfig | None:
    """The config of a run. None: it cannot be read, as that of a comparison, which has none."""
    try:
        return read_config(page.store, view.key) if view.summary else None
    except StorageError:
        return None


def _charts(view: RunView) -> list[tuple[str, str, str]]:
    """(title, note, figure as a data URL) of each curve."""
    charts = all_charts(thinned(view.steps, CURVE_POINTS), view.heldout)
    prefix = "data:image/svg+xml;base64,"
    return [(chart.title, chart.note, prefix + base64.b64encode(chart.svg.encode()).decode()) for chart in charts]


def _log_lines(page: Page, view: RunView) -> list[Log] | None:
    """The last lines of Prefect's log, oldest first. None without a flow run."""
    if view.flow_run is None:
        return None
    log_filter = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[view.flow_run.id]))
    with page.prefect() as client:
        return client.read_logs(log_filter, limit=LOG_LINES, sort=LogSort.TIMESTAMP_DESC)[::-1]


def _act(actions: RunActions, form: Form, action: str, name: str) -> str:
    """Does what a button says. Returns the address of the page to show then."""
    match action:
        case "cancel":
            actions.cancel(name, form.get("seen"))
        case "retry":
            actions.retry(name, form.get("seen"))
        case "verify":
            actions.verify(name, whole=form.get("extent") == "whole")
        case "fork":
            new, step = form.get("run"), form.get("step")
            if not step.isdecimal() or not keys.is_run(new):
                what = f"Given step {step!r} and the key {new!r} of the new run."
                raise PageError(what, "Give a step of the run, or 0, and a key of letters, digits, - and _.")
            actions.fork(name, new, int(step), form.get("stage"))
            # the form has the config of the fork, which may be changed before it goes on
            return f"/start?copy={quote(new)}&fork=1"
        case _:
            raise PageError(f"A run has no action {action!r}.", "Use the buttons of its page.", 404)
    return f"/runs/{quote(name)}"


def _live_values(view: RunView, actions: RunActions) -> dict[str, Any]:
    """What the part that is polled shows."""
    verification, last = actions.verification(view.key), view.steps[-1] if view.steps else None
    return {
        "view": view, "phase": f"{view.summary is not None}-{view.is_active}-{view.done > 0}", "last": last,
        "advice": advice(view.steps[0], view.steps) if view.steps else [],
        "rewards": sorted(last.by_source.items()) if last else [],
        "parts": sorted(last.by_part.items()) if last else [],
        "verification": verification, "polls": view.is_active or verification == [],
    }  # fmt: skip


def _samples_values(page: Page, run: str, query: dict[str, str]) -> dict[str, Any]:
    """The samples of a step that pass the filter. An empty field filters nothing. Raises PageError."""
    chosen = {name: text for name, text in query.items() if text.strip() and name in SampleFilter.model_fields}
    try:
        stage, newest = newest_sampled_step(page.store, run, query.get("stage", ""))
    except ObjectNotFound:
        return {"run": run, "rows": None}
    step, first = (int(query[name]) if query.get(name, "").isdecimal() else 0 for name in ("step", "from"))
    try:
        samples = list(step_samples(page.store, run, stage, step or newest))
        passing = SampleFilter.model_validate(chosen).apply(samples)
    except ObjectNotFound as error:
        raise PageError(str(error), f"Give a step from 1 to {newest}.", 404) from error
    except ValidationError as error:
        raise PageError(f"The filter is not valid: {describe_errors(error.errors())}.", "Give numbers.") from error
    rows = [(sample, sample_prompt(sample)) for sample in passing[first : first + SAMPLES_SHOWN]]
    return {
        "run": run, "rows": rows, "stage": stage, "step": step or newest, "count": len(passing), "all": len(samples),
        "first": first, "query": query, "orders": get_args(SampleOrder), "shown": SAMPLES_SHOWN,
        "statuses": sorted({sample.status for sample in samples}),
    }  # fmt: skip


def _origin_values(page: Page, run: str) -> dict[str, Any]:
    """Lineage, files, models and the settings of a run."""
    store, details = page.store, describe_run(page.store, run)
    lineage = lineage_of(store, run).facts() if details.chains else {}
    report = keys.report(run)
    files = {"run record": store.address(keys.run_json(run))}
    if store.exists(report):
        files["report"] = store.address(report)
    for chain in details.chains:
        checkpoints = ", ".join(map(str, chain.checkpoints)) or "none"
        files[f"checkpoints of {chain.stage}/{chain.model}"] = f"after steps {checkpoints}"
    result = flatten(details.result or {})
    return {
        "run": run, "details": details, "lineage": lineage, "files": files, "has_report": "report" in files,
        "result": {name: _text(value, digits=4) for name, value in result.items() if name not in AS_TABLES},
        "settings": {name: _text(value) for name, value in flatten(details.semantic).items()},
    }  # fmt: skip


def _text(value: Any, digits: int = 16) -> str:
    """The value as a text, or as JSON."""
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    return value if isinstance(value, str) else canonical_text(value)
