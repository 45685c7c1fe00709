"""Decides how a flow run ends that is cancelled, gets SIGTERM, or was started too often.

- A flow run of a worker that a person cancels: Prefect makes it Cancelled. Its log says how many steps are committed.
  The state keeps Prefect's message: setting one afterwards could overwrite the state of a Retry.
- A flow run of a worker that gets SIGTERM for another reason: Prefect makes it Crashed, and it is rescheduled.
- A flow run from a terminal that gets Ctrl-C or SIGTERM: it becomes Cancelled here. Prefect would make it Crashed.
- Crashed runs restart automatically, so a run that always crashes fails after a number of attempts.

Prefect raises SIGTERM as TerminationSignal at the current position of the main thread. If that is inside the creation
of a task run, Prefect's handling of the signal fails with `ValueError: Task run is not set`. The flow run would then
become Failed, which is final, so the signal is raised again in place of such an error.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal
from uuid import UUID

import httpx
from prefect import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import FlowRunContext
from prefect.exceptions import Abort, PrefectHTTPStatusError, TerminationSignal
from prefect.states import Cancelled, Cancelling

from engine.workspace import Workspace
from flows.configs.overrides import ConfigError
from flows.display.run_log import log_line
from flows.ops.deployment_settings import is_deployed
from flows.ops.processes import FLOW_RUN_ENV
from storage.chain.listing import committed_steps
from storage.errors import StorageError
from storage.store.objects import ObjectStore

log = logging.getLogger(__name__)

NEXT_ACTION = {"deployed": "Retry", "terminal": "The same command"}
"""What continues a cancelled run, by where it was started."""

MAX_ATTEMPTS_ENV = "OSTINATO_MAX_ATTEMPTS"
MAX_ATTEMPTS = 20


class FlowRunCancelled(Abort):
    """The flow run from a terminal was interrupted. Its state is Cancelled already, and Prefect keeps it."""

    def __init__(self, state: State) -> None:
        super().__init__(state.message)
        self.state = state


@dataclass
class RunEnding:
    """What the end of a flow run needs to know. The flow sets it when it knows."""

    workspace: Workspace | None = None
    """The run whose committed steps the message counts. None: the flow trains in child runs only, or not at all."""


@contextmanager
def reraise_termination() -> Iterator[RunEnding]:
    """Ends the flow run within the block as the module describes. Errors that are no termination pass unchanged.

    Raises:
        TerminationSignal: for SIGTERM, and for an error that was raised while one was handled.
        FlowRunCancelled: for a Ctrl-C in a terminal, which asyncio turns into the cancellation of the flow's task.
    """
    ending = RunEnding()
    try:
        yield ending
    except Exception as error:
        if (signal := _termination_behind(error)) is not None:
            _end(ending)
            raise TerminationSignal(signal=signal.signal) from error
        raise
    except TerminationSignal:
        _end(ending)
        raise
    except (asyncio.CancelledError, FlowRunCancelled) as error:
        state = _end(ending)
        if state is not None and state.is_final():
            raise FlowRunCancelled(state) from error
        raise


def cancellation_message(store: ObjectStore, run: str, started: Literal["deployed", "terminal"]) -> str:
    """Returns the message of a cancelled run: how many steps are committed, and how the run continues."""
    steps = sum(committed_steps(store, run).values())
    if steps == 0:
        return f"cancelled; no step is committed. {NEXT_ACTION[started]} begins the run again"
    count = "1 step is" if steps == 1 else f"{steps} steps are"
    return f"cancelled; {count} committed. {NEXT_ACTION[started]} continues after them"


def _end(ending: RunEnding) -> State | None:
    """Gives the current flow run the state of a cancelled run. Returns None if it is left to Prefect."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return None
    if not is_deployed():
        return _end_as_cancelled(context.flow_run, _message(ending, deployed=False))
    worker_run = os.environ.get(FLOW_RUN_ENV, str(context.flow_run.id))
    if not _is_being_cancelled(UUID(worker_run)):
        return None
    # the runner sets the final state, and child runs, which have no runner, are set by Prefect
    state: State = Cancelling(message=_message(ending, deployed=True))
    log_line(str(state.message))
    context.flow_run.state = state
    return state


def _end_as_cancelled(flow_run: FlowRun, message: str) -> State:
    log_line(message)
    state: State = Cancelled(message=message)
    try:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(flow_run.id, state, force=True)
    except (httpx.HTTPError, PrefectHTTPStatusError) as error:
        log.warning("the Prefect server was not told that the flow run is cancelled: %s", error)
    # Prefect does not report a crash of a flow run whose state is final
    flow_run.state = state
    return state


def _message(ending: RunEnding, *, deployed: bool) -> str:
    if ending.workspace is None:
        return "cancelled; what is committed is kept"
    try:
        store = ending.workspace.open_store()
        return cancellation_message(store, ending.workspace.run, "deployed" if deployed else "terminal")
    except StorageError as error:
        return f"cancelled; the store does not say how many steps are committed: {error}"


def _is_being_cancelled(flow_run: UUID) -> bool:
    """Whether a person has cancelled the flow run of this process. False if the server does not answer."""
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(flow_run).state
    except (httpx.HTTPError, PrefectHTTPStatusError) as error:
        log.warning("the state of the flow run is not known: %s", error)
        return False
    return state is not None and (state.is_cancelling() or state.is_cancelled())


def _termination_behind(error: BaseException) -> TerminationSignal | None:
    """The TerminationSignal among the causes and contexts of an error, or None."""
    visited: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in visited:
        if isinstance(current, TerminationSignal):
            return current
        visited.add(id(current))
        current = current.__cause__ or current.__context__
    return None


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
