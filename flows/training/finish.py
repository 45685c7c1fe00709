"""The end of a run of a training flow or a recipe: publishes the model, writes the report and stores the result."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

from engine.http.curl import curl_line
from engine.http.report_links import report_url
from engine.specs.engine import HttpEngineSpec
from engine.workspace import Workspace
from flows.configs.common import CheckpointConfig, TrainingConfig
from flows.configs.inputs import ModelConfig, default_model_name
from flows.display.live_page import show_finished_run
from flows.display.terminal import TerminalProgress
from flows.ops.state import TOKEN_ENV, TOKEN_FILE_ENV
from flows.runs.session import RunSession, finish_run, write_result
from flows.training.idle_steps import has_learnt
from storage.chain.listing import run_chains
from storage.chain.records import PolicyRef
from storage.chain.retention import drop_final_checkpoint
from storage.errors import StorageError
from storage.inspect.run_details import published_models
from storage.registry.models import registered_key
from storage.store import keys
from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore
from tasks.report import first_and_last_evaluation, trained_policy, write_report
from tasks.reports.step_metrics import read_metrics
from tasks.train import publish_model

log = logging.getLogger(__name__)


async def publish_and_report(
    session: RunSession,
    logger: TerminalProgress,
    model: ModelConfig,
    policy: PolicyRef,
    *,
    before: ArtifactRef | None = None,
    after: ArtifactRef | None = None,
    further: dict[str, Any] | None = None,
    samples_shown: int = 10,
) -> dict[str, Any]:
    """Publishes the last policy of a run and writes the report. Both are lines in the log and links on the run's page.
    Returns the result of the run, which is stored. Its `model` is None if no step of the run taught the model
    anything: such a model is only published with `model.publish_unchanged`.

    Args:
        before: the held-out evaluation before training, or None.
        after: the same evaluation of `policy`, or None.
        further: what else is part of the result: differences between evaluations, and an early ending.
        samples_shown: number of prompts of each evaluation that the report shows with their completions.
    """
    workspace = session.workspace
    store = workspace.open_store()
    # publish the model
    published: str | None = None
    if model.publish_unchanged or await asyncio.to_thread(has_learnt, store, policy):
        name = model.publish_as or default_model_name(session.run)
        logger.note(f"publishing the model as {name} …")
        published = registered_key(await publish_model(workspace, policy, name, model.publish_dtype))
        logger.note(f"published {published}")
    else:
        logger.note(
            "no step of the run taught the model anything, so nothing is published; model.publish_unchanged=true would "
            "publish the model that training started from"
        )
    # write the report
    result = (further or {}) | {"run": session.run, "policy": policy.uri, "model": published}
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
    final = await asyncio.to_thread(finish_run, session, result | {"report": report})
    await asyncio.to_thread(drop_quick_checkpoints, store, session.run, session.config.checkpoints)
    if published is not None:
        config = session.config
        is_scorer = isinstance(config, TrainingConfig) and config.has_scalar_head
        say_where(workspace, published, logger, is_scorer=is_scorer)
    return final


async def finish_recipe(workspace: Workspace, result: dict[str, Any], logger: TerminalProgress) -> dict[str, Any]:
    """Writes the report of a recipe that has trained a policy, says where its models are, and stores its result.
    Returns the result that is stored."""
    store = workspace.open_store()
    policy = await asyncio.to_thread(trained_policy, store, workspace.run)
    if policy is not None:
        before, after = await asyncio.to_thread(first_and_last_evaluation, store, policy)
        report = await asyncio.to_thread(write_report, workspace, policy, before, after, result)
        result = result | {"report": report}
        logger.note(f"report: {await asyncio.to_thread(report_url, workspace.engine, store, workspace.run) or report}")
    final = await asyncio.to_thread(write_result, workspace, result)
    # the checkpoints stay: a recipe has no checkpoint settings but those of its loops, which may keep them all
    for published in await asyncio.to_thread(published_models, store, workspace.run):
        say_where(workspace, published.model, logger)
    return final


def drop_quick_checkpoints(store: ObjectStore, run: str, config: CheckpointConfig) -> None:
    """Deletes the last checkpoints of a finished run whose gradient steps are quickly redone. An error is logged only,
    because the run is finished."""
    try:
        seconds = redo_seconds(store, run)
        if seconds is None or seconds > config.max_redo_seconds or config.max_redo_seconds == 0:
            return
        for chain in run_chains(store, run):
            drop_final_checkpoint(store, chain.policy(0), config.retention)
    except (StorageError, ValueError) as error:
        log.warning("the last checkpoint of run %s stays: %s", run, error)


def redo_seconds(store: ObjectStore, run: str) -> float | None:
    """Seconds that the gradient steps of a run took, of all its models. Steps whose metrics a crash left out count like
    the others. None if the metrics of more than half of the steps are not in the store."""
    lengths: dict[str, int] = {}
    for chain in run_chains(store, run):
        lengths[chain.stage] = max(lengths.get(chain.stage, 0), chain.head().step)
    seconds = 0.0
    for stage, length in lengths.items():
        steps = read_metrics(store, run, stage, steps=length)
        if 2 * len(steps) < length:
            return None
        if steps:
            seconds += sum(step.seconds.get("train", 0.0) for step in steps) * length / len(steps)
    return seconds


def say_where(workspace: Workspace, model: str, logger: TerminalProgress, *, is_scorer: bool = False) -> None:
    """Notes where the files of a registered model are and, unless it gives scores, how it is served and called."""
    store = workspace.open_store()
    name, _, version = model.partition("@")
    logger.note(f"model {model}: {store.address(keys.model_version(name, version))}")
    if is_scorer:
        return
    address, token_env, token_file = "http://127.0.0.1:8777", "", ""
    spec = workspace.engine
    if isinstance(spec, HttpEngineSpec):
        address = spec.url
        if os.environ.get(spec.token_env):
            token_env = spec.token_env
            token_file = os.environ.get(TOKEN_FILE_ENV, "") if token_env == TOKEN_ENV else ""
    else:
        logger.note(f"to serve it: ostinato engine serve --storage {store.url}")
    logger.note(f"to call it: {curl_line(address, model, token_file=token_file, token_env=token_env)}")
