"""Beside a running loop: does a person want it paused, and does it still move?

Both are asked in a thread, since a loop that waits for an engine cannot ask, and one that waits for a Prefect server
that is away would not train.
"""

from __future__ import annotations

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

from flows.runs.events import emit_run_stalled

log = logging.getLogger(__name__)

POLL_SECONDS = 5.0
STEPS_REMEMBERED = 50
STALLED_FACTOR = 10.0
"""A step that takes so many times what steps usually take has stalled …"""
STALLED_SECONDS = 600.0
"""… but none does before this. A first step, with loading, may take as long as it likes up to the factor of it."""


class RunWatch:
    """Enter it around the loop; call `stepped` after each step.

    `pause` is what is asked for the state in which a person put the flow run: None while it should go on.
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
        self._ask, self._clock, self._poll = paused or paused_state, clock, poll_seconds
        self._pause: State | None = None
        self._told = False
        self._last = clock()
        self._seconds: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._stop = threading.Event()
        context = contextvars.copy_context()  # Prefect finds its settings and the flow run in it
        self._thread = threading.Thread(target=context.run, args=(self._watch,), name="run-watch", daemon=True)

    def stepped(self, step: int) -> None:
        """Step `step`, 0-based, has ended. Raises prefect.exceptions.Pause when a person wants the run to pause: its
        flow then ends, the engine is free, and a resumed flow run goes on from here."""
        now = self._clock()
        self._seconds.append(now - self._last)
        self._last, self.step, self._told = now, step + 1, False
        if self._pause is not None:
            raise Pause(state=self._pause)

    def look(self) -> None:
        """One look: asks for the state, and tells of a stall once."""
        self._pause = self._ask()
        silent = self._clock() - self._last
        usual = statistics.median(self._seconds) if self._seconds else None
        if not self._told and silent > max(STALLED_SECONDS, STALLED_FACTOR * (usual or 0.0)):
            self._told = True
            log.warning("run %s: step %d has not ended for %.0f s", self.run, self.step + 1, silent)
            emit_run_stalled(self.run, step=self.step, silent_seconds=silent, usual_seconds=usual)

    def _watch(self) -> None:
        while not self._stop.wait(self._poll):
            self.look()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(timeout=1.0)


def paused_state() -> State | None:
    """The state of the flow run that runs here, when a person has paused or suspended it; None also where no flow runs
    and while the server is away."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return None
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(context.flow_run.id).state
    except (httpx.HTTPError, PrefectHTTPStatusError) as error:
        log.debug("the state of the flow run is not known: %s", error)
        return None
    return state if state is not None and state.type == StateType.PAUSED else None


def say_left() -> None:
    """An event of the flow run, sent when it is left to wait: else the last heartbeat, sent after it was paused, would
    let it pass for one that fell silent."""
    context = FlowRunContext.get()
    if context is not None and context.flow_run is not None:
        resource = {"prefect.resource.id": f"prefect.flow-run.{context.flow_run.id}"}
        emit_event(event="prefect.flow-run.left", resource=resource)
