"""Tells who limits the time of a call how long the call waits for an engine: in its queue, and while it computes.

An engine serves many callers, so the time until it answers says nothing about the one who asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol


class Waits(Protocol):
    """Is told of each wait for an engine, in the event loop. Waits of one call may overlap."""

    def begin(self) -> None: ...

    def end(self) -> None: ...


_WAITS: ContextVar[Waits | None] = ContextVar("engine_waits", default=None)


@contextmanager
def waits_told_to(waits: Waits) -> Iterator[None]:
    """Tasks that are created inside tell `waits` when they wait for an engine."""
    token = _WAITS.set(waits)
    try:
        yield
    finally:
        _WAITS.reset(token)


@contextmanager
def waiting_for_engine() -> Iterator[None]:
    """Around a handle's wait for its engine."""
    waits = _WAITS.get()
    if waits is None:
        yield
        return
    waits.begin()
    try:
        yield
    finally:
        waits.end()
