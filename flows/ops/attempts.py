"""A cap on attempts: what crashes is run again by itself, and something must end a run that always crashes."""

from __future__ import annotations

import os

from prefect.context import FlowRunContext

from flows.configs.overrides import ConfigError

MAX_ATTEMPTS_ENV = "OSTINATO_MAX_ATTEMPTS"
MAX_ATTEMPTS = 20


class TooManyAttempts(RuntimeError):
    """The flow run was started too often. It fails, and nothing starts a failed run by itself."""


def check_attempts(run: str) -> None:
    """Raises TooManyAttempts when the flow run that runs here has been started more often than it may."""
    context = FlowRunContext.get()
    count = context.flow_run.run_count if context and context.flow_run else 0
    limit = max_attempts()
    if count > limit:
        raise TooManyAttempts(
            f"this is attempt {count} of the flow run, and {limit} are allowed: run {run} keeps crashing. The logs of "
            f"the attempts before say why. What is committed is kept: when the cause is gone, start a new flow "
            f"run with config.run={run!r}, which goes on from there, or set {MAX_ATTEMPTS_ENV} higher for the worker"
        )


def max_attempts() -> int:
    """Raises ConfigError when the environment does not name a number."""
    text = os.environ.get(MAX_ATTEMPTS_ENV, str(MAX_ATTEMPTS))
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{MAX_ATTEMPTS_ENV}={text!r} is not a number of attempts; give 1 or more")
    return int(text)
