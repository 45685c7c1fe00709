"""Reports when a call waits for an engine, so that a time limit on the call can leave those waits out.

A wait is the time in the engine's queue and the time of its computation. An engine serves many callers, so this time
says nothing about the caller. The time limit of a grader uses this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol


class WaitListener(Protocol):
    """Its methods are called in the thread that waits when a wait for an engine begins and when it ends.

    Waits of one call may overlap."""

    def begin(self) -> None: ...

    def end(self) -> None: ...


_LISTENER: ContextVar[WaitListener | None] = ContextVar("engine_wait_listener", default=None)


@contextmanager
def report_waits_to(listener: WaitListener) -> Iterator[None]:
    """Tasks that are created within the block report their waits for an engine to `listener`, also after the block."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


@contextmanager
def waiting_for_engine() -> Iterator[None]:
    """Reports the block as a wait for an engine, if there is a listener."""
    # Most calls have no time limit, and so no listener.
    listener = _LISTENER.get()
    if listener is None:
        yield
        return
    listener.begin()
    try:
        yield
    finally:
        listener.end()
