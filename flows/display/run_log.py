"""The log of a flow run in Prefect: one line per step, and of the tasks only warnings and errors."""

from __future__ import annotations

import logging
import os
from functools import cache

from prefect.context import FlowRunContext
from prefect.logging.handlers import APILogHandler
from prefect.settings import PREFECT_API_URL

TASK_LEVEL = "PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL"
"""Prefect's environment variable for the log level of tasks. If it is not set, we use WARNING: a step has four tasks,
and their lines would hide the line of the step."""


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


def silence_task_logs() -> None:
    """Hides the line "Finished in state Completed()" of every task, unless TASK_LEVEL is set."""
    if TASK_LEVEL not in os.environ:
        logging.getLogger("prefect.task_runs").setLevel(logging.WARNING)
