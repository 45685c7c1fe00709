"""Limits the attempts of a flow run. Crashed runs restart automatically, so a run that always crashes must be ended."""

from __future__ import annotations

import os

from prefect.context import FlowRunContext

from flows.configs.overrides import ConfigError

MAX_ATTEMPTS_ENV = "OSTINATO_MAX_ATTEMPTS"
MAX_ATTEMPTS = 20


class TooManyAttempts(RuntimeError):
    """The flow run was started too often. It fails, and failed runs are not restarted automatically."""


def check_attempts(run: str) -> None:
    """Raises TooManyAttempts if the current flow run has been started more often than the limit allows."""
    # Prefect counts the attempts of a flow run, across processes and machines
    context = FlowRunContext.get()
    attempt = context.flow_run.run_count if context and context.flow_run else 0
    limit = max_attempts()
    if attempt > limit:
        raise TooManyAttempts(
            f"this is attempt {attempt} of the flow run, and {limit} are allowed: run {run} keeps crashing. The logs "
            "of the earlier attempts say why. Committed steps are kept: when the cause is fixed, start a new flow run "
            f"with config.run={run!r}, which continues after them, or set {MAX_ATTEMPTS_ENV} higher for the worker"
        )


def max_attempts() -> int:
    """Returns the limit from the environment, or the default. Raises ConfigError if it is not a positive number."""
    text = os.environ.get(MAX_ATTEMPTS_ENV, str(MAX_ATTEMPTS))
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{MAX_ATTEMPTS_ENV}={text!r} is not a number of attempts; give 1 or more")
    return int(text)
