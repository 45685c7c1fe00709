"""Watches a training loop: detects that a person has paused the flow run, and that a step takes far too long.

A thread does both. The loop itself cannot, because it may be waiting for the engine, and must not wait for a Prefect
server that does not answer.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

import httpx
from prefect import get_client
from prefect.client.schemas.objects import State, StateType
from prefect.context import FlowRunContext
from prefect.events import emit_event
from prefect.exceptions import Pause, PrefectHTTPStatusError

from flows.ops.deployment_settings import is_deployed
from flows.runs.events import emit_run_stalled

log = logging.getLogger(__name__)

POLL_SECONDS = 5.0
"""Time between two requests for the state of the flow run."""
STEPS_REMEMBERED = 50
"""Number of steps whose durations give the usual duration of a step."""
STALLED_FACTOR = 10.0
"""A step has stalled when it takes this many times the median duration of the last steps …"""
STALLED_SECONDS = 600.0
"""… and at least this long. The first step is compared with this limit alone."""


class RunWatch:
    """A context manager around the loop, which calls `stepped` after each step.

    `paused` returns the paused state of the flow run, or None while the run should continue.
    """

    def __init__(
        self,
        run: str,
        *,
        step: int,
        paused: Callable[[], State | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self.run, self.step = run, step
        self._read_pause = paused or paused_state
        self._clock, self._poll_seconds = clock, poll_seconds
        self._pause: State | None = None
        self._stall_reported = False
        self._last_step_end = clock()
        self._durations: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._stop = threading.Event()
        # Prefect reads its settings and the flow run from context variables, which a new thread does not have
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._watch,), name="run-watch", daemon=True)

    def stepped(self, step: int) -> None:
        """Records the end of 0-based `step`. Raises prefect.exceptions.Pause if a person has paused the run, and
        asyncio.CancelledError if a person has cancelled a run from a terminal, which no worker ends.

        The flow then ends, which frees the engine. A resumed flow run continues with the next step.
        """
        now = self._clock()
        self._durations.append(now - self._last_step_end)
        self._last_step_end, self.step, self._stall_reported = now, step + 1, False
        if self._pause is None:
            return
        if self._pause.is_cancelling():
            raise asyncio.CancelledError(str(self._pause.message))
        raise Pause(state=self._pause)

    def check(self) -> None:
        """Reads the state of the flow run, and reports a stalled step once."""
        self._pause = self._read_pause()
        elapsed = self._clock() - self._last_step_end
        usual = statistics.median(self._durations) if self._durations else None
        limit = max(STALLED_SECONDS, STALLED_FACTOR * (usual or 0.0))
        if elapsed > limit and not self._stall_reported:
            self._stall_reported = True
            log.warning("run %s: step %d has not ended for %.0f s", self.run, self.step + 1, elapsed)
            emit_run_stalled(self.run, step=self.step + 1, silent_seconds=elapsed, usual_seconds=usual)

    def _watch(self) -> None:
        while not self._stop.wait(self._poll_seconds):
            self.check()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(timeout=1.0)


def paused_state() -> State | None:
    """The state of the current flow run if a person has paused or suspended it, or has cancelled it and it is not a
    worker's, else None.

    Returns None also if there is no flow run, or if the Prefect server does not answer.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return None
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(context.flow_run.id).state
    except (httpx.HTTPError, PrefectHTTPStatusError) as error:
        log.debug("the state of the flow run is not known: %s", error)
        return None
    if state is not None and (state.type == StateType.PAUSED or (state.is_cancelling() and not is_deployed())):
        return state
    return None


def announce_pause() -> None:
    """Sends an event of the flow run when its process ends because the run is paused.

    Without this event, the automation that detects missing heartbeats would mark the paused run as crashed: its last
    heartbeat may be later than the pause.
    """
    context = FlowRunContext.get()
    if context is not None and context.flow_run is not None:
        resource = {"prefect.resource.id": f"prefect.flow-run.{context.flow_run.id}"}
        emit_event(event="prefect.flow-run.left", resource=resource)
