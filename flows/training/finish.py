"""The end of a training flow: publishes the model, writes the report and stores the result of the run."""

from __future__ import annotations

import asyncio
from typing import Any

from engine.http.report_links import report_url
from flows.configs.common import ModelConfig
from flows.display.live_page import show_finished_run
from flows.display.terminal import TerminalProgress
from flows.runs.session import RunSession, default_model_name, finish_run
from flows.training.idle_steps import has_learnt
from storage.chain.records import PolicyRef
from storage.registry.models import registered_key
from storage.store.artifacts import ArtifactRef
from tasks.report import write_report
from tasks.train import publish_model


async def publish_and_report(
    session: RunSession,
    logger: TerminalProgress,
    model: ModelConfig,
    policy: PolicyRef,
    *,
    before: ArtifactRef | None = None,
    after: ArtifactRef | None = None,
    differences: dict[str, Any] | None = None,
    samples_shown: int = 10,
) -> dict[str, Any]:
    """Publishes the last policy of a run and writes the report. Both are lines in the log and links on the run's page.
    Returns the result of the run, which is stored. Its `model` is None if no step of the run taught the model
    anything: such a model is only published with `model.publish_unchanged`.

    Args:
        before: the held-out evaluation before training, or None.
        after: the same evaluation of `policy`, or None.
        differences: the differences between evaluations, which are part of the result.
        samples_shown: number of prompts of each evaluation that the report shows with their completions.
    """
    workspace = session.workspace
    store = workspace.open_store()
    # publish the model
    published: str | None = None
    if model.publish_unchanged or await asyncio.to_thread(has_learnt, store, policy):
        name = model.publish_as or default_model_name(session.run)
        logger.note(f"publishing the model as {name} …")
        published = registered_key(await publish_model(workspace, policy, name))
        logger.note(f"published {published}")
    else:
        logger.note(
            "no step of the run taught the model anything, so nothing is published; model.publish_unchanged=true would "
            "publish the model that training started from"
        )
    # write the report
    result = (differences or {}) | {"run": session.run, "policy": policy.uri, "model": published}
    report = await asyncio.to_thread(
        write_report, workspace, policy, before, after, result, samples_shown=samples_shown
    )
    address = await asyncio.to_thread(report_url, workspace.engine, store, session.run) or report
    logger.note(f"report: {address}")
    # show both on the page
    links = {"report": address}
    if published is not None:
        links["published model"] = published
    await show_finished_run(store, policy, engine=workspace.engine, links=links)
    return await asyncio.to_thread(finish_run, session, result | {"report": report})
