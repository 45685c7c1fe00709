"""What a person reads under Logs of a flow run: a line per step, and of tasks only what went wrong."""

from __future__ import annotations

import logging
import os
from functools import cache

from prefect.context import FlowRunContext
from prefect.logging.handlers import APILogHandler
from prefect.settings import PREFECT_API_URL

TASK_LEVEL = "PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL"
"""Prefect's own variable. Unset: WARNING, since four tasks a step that end well would bury the steps."""


def log_line(text: str) -> None:
    """One line at INFO in the log of the flow run that runs here. Sent in the background; a server that is away costs
    nothing. Without a flow run or a server it does nothing."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or not PREFECT_API_URL.value():
        return
    _logger().info(text, extra={"flow_run_id": str(context.flow_run.id)})


@cache
def _logger() -> logging.Logger:
    """To the server only: the terminal has shown the line already."""
    logger = logging.getLogger("ostinato.steps")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(APILogHandler())
    return logger


def silence_task_logs() -> None:
    """Leaves "Finished in state Completed()" of every task out, unless the environment asks for it."""
    if TASK_LEVEL not in os.environ:
        logging.getLogger("prefect.task_runs").setLevel(logging.WARNING)
