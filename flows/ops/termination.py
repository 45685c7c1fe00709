"""SIGTERM stays SIGTERM.

Prefect raises it as TerminationSignal wherever the main thread is. While Prefect creates a task run, its own handling
of it fails, and what arrives is `ValueError: Task run is not set`: the flow run would be Failed, for good, instead of
Crashed and due again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prefect.exceptions import TerminationSignal


@contextmanager
def reraise_termination() -> Iterator[None]:
    """Raises TerminationSignal for an error that came of one; any other as it is."""
    try:
        yield
    except Exception as error:
        if (signal := _behind(error)) is not None:
            raise TerminationSignal(signal=signal.signal) from error
        raise


def _behind(error: BaseException) -> TerminationSignal | None:
    """The signal in whose handling the error was raised."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        if isinstance(at, TerminationSignal):
            return at
        seen.add(id(at))
        at = at.__cause__ or at.__context__
    return None
