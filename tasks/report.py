"""Writes the report of a run as one HTML page in the store, and a link to it in Prefect."""

from __future__ import annotations

from typing import Any

import httpx
from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact

from engine.http.report_links import report_url
from engine.workspace import Workspace
from storage.chain.records import PolicyRef
from storage.store import keys
from storage.store.artifacts import ArtifactRef
from tasks.reports.html_report import render_report
from tasks.reports.report_data import collect_report
from tasks.task_runs import durable_task


@durable_task("report", "report")
def write_report(
    workspace: Workspace,
    policy: PolicyRef,
    before: ArtifactRef | None,
    after: ArtifactRef | None,
    facts: dict[str, Any],
    samples_shown: int = 10,
) -> str:
    """Writes the run's report and returns its location: a path for a local store, otherwise a URL."""
    store = workspace.open_store()
    data = collect_report(store, policy, before, after, facts=facts, samples_shown=samples_shown)
    key = keys.report(workspace.run)
    store.put(key, render_report(data).encode())
    location = store.address(key)

    # The run is complete without a link in Prefect, so an error of the engine or of Prefect does not fail it.
    try:
        link = report_url(workspace.engine, store, workspace.run)
        markdown = f"Run `{workspace.run}`: the report is at `{location}`."
        if link:
            markdown = f"[The report of run `{workspace.run}`]({link}), kept at `{location}`."
        create_markdown_artifact(key="report", markdown=markdown, description="The HTML report of the run")
    except httpx.HTTPError as error:
        get_run_logger().warning("no link in Prefect to the report at %s: %s", location, error)
    return location
