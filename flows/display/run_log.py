"""What a flow run shows in Prefect: its log, with one line per step and of the tasks only warnings and errors, and its
artifacts."""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import Any

import httpx
from prefect.artifacts import acreate_markdown_artifact, acreate_table_artifact
from prefect.context import FlowRunContext
from prefect.logging.handlers import APILogHandler
from prefect.settings import PREFECT_API_URL

TASK_LEVEL = "PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL"
"""Prefect's environment variable for the log level of tasks. If it is not set, we use WARNING: a step has four tasks,
and their lines would hide the line of the step."""

ENDED_WITH_FLOW = (
    "Execution was cancelled by the runtime environment",
    "Execution was aborted by a termination signal",
    "Execution was aborted by an interrupt signal",
)
"""Prefect's reasons for the end of a task that ended with its flow run. The log of the flow run says why that ended."""

log = logging.getLogger(__name__)


def log_line(text: str) -> None:
    """Adds a line at level INFO to the log of the current flow run, without waiting for the server.

    Does nothing outside a flow run or without a configured server.
    """
    # APILogHandler sends from a thread of its own
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or not PREFECT_API_URL.value():
        return
    _logger().info(text, extra={"flow_run_id": str(context.flow_run.id)})


@cache
def _logger() -> logging.Logger:
    """A logger that writes to the server only, because the terminal shows these lines already."""
    logger = logging.getLogger("ostinato.steps")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(APILogHandler())
    return logger


def log_engine_outages() -> None:
    """Adds what the engine's client logs about an engine that does not answer to the log of the current flow run."""
    logger = logging.getLogger("engine.http.transport")
    # the setting PREFECT_LOGGING_EXTRA_LOGGERS may have added such a handler to the logger `engine`
    handlers = logger.handlers + logging.getLogger("engine").handlers
    if not any(isinstance(handler, APILogHandler) for handler in handlers):
        logger.addHandler(APILogHandler())


def silence_task_logs() -> None:
    """Hides the line "Finished in state Completed()" of every task, unless TASK_LEVEL is set.

    Also hides that a task ended because its flow run was cancelled or interrupted, which Prefect calls a crash."""
    logger = logging.getLogger("prefect.task_runs")
    if TASK_LEVEL not in os.environ:
        logger.setLevel(logging.WARNING)
    # adding the same filter again changes nothing
    logger.addFilter(_is_no_end_of_the_flow)


def _is_no_end_of_the_flow(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not any(reason in message for reason in ENDED_WITH_FLOW)


async def put_markdown(key: str, markdown: str, *, description: str = "") -> None:
    """Shows Markdown on the page of the flow run. `key` has lower-case letters, digits and hyphens."""
    try:
        await acreate_markdown_artifact(key=key, markdown=markdown, description=description or None)
    except httpx.HTTPError as error:
        log.warning("the Markdown artifact %s was not created in Prefect: %s", key, error)


async def put_table(key: str, rows: list[dict[str, Any]], *, description: str = "") -> None:
    """Shows a table on the page of the flow run, with one dict per row."""
    try:
        await acreate_table_artifact(key=key, table=rows, description=description or None)
    except httpx.HTTPError as error:
        log.warning("the table artifact %s was not created in Prefect: %s", key, error)
