"""What a training process measures: the CPU time until a model is saved, and the models that are to be evaluated."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Point:
    """A model of the run, and what it had cost."""

    samples: int
    """Completions, conversations, pairs or labelled answers so far."""
    folder: Path
    cpu_seconds: float
    sampled_tokens: int = 0


def cpu_seconds() -> float:
    """User and system time of this process and of its child processes that have ended, since it started."""
    seconds = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        seconds += usage.ru_utime + usage.ru_stime
    return seconds


class CPUMeter:
    """The CPU seconds of this process since its start, without those of paused blocks. A block that saves a model to be
    evaluated is paused, because a run without this bench does not save it."""

    def __init__(self) -> None:
        self._paused_seconds = 0.0

    def read(self) -> float:
        return cpu_seconds() - self._paused_seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        before = cpu_seconds()
        try:
            yield
        finally:
            self._paused_seconds += cpu_seconds() - before
