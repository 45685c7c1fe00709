"""Keeps a SIGTERM recognisable when Prefect turns it into another error.

Prefect raises SIGTERM as TerminationSignal at the current position of the main thread. If that is inside the creation
of a task run, Prefect's handling of the signal fails with `ValueError: Task run is not set`. The flow run would then
become Failed, which is final, instead of Crashed, which is rescheduled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prefect.exceptions import TerminationSignal


@contextmanager
def reraise_termination() -> Iterator[None]:
    """Raises TerminationSignal for an error that was raised while one was handled. Other errors pass unchanged."""
    try:
        yield
    except Exception as error:
        if (signal := _termination_behind(error)) is not None:
            raise TerminationSignal(signal=signal.signal) from error
        raise


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
