"""Estimates the remaining time of a training loop from measured durations: steps, checkpoints and evaluations.

The duration of a step does not contain the time that the loop spent on checkpoints and callbacks. Each of those is
measured by itself, and its mean is multiplied by how often it is still to come. A kind that was not measured yet counts
as nothing.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

STEPS_AVERAGED = 10
"""Number of recent steps whose mean duration counts."""


class TimeLeft:
    """The remaining time of one loop. `measure` surrounds everything that is not a step; `finish_step` ends a step."""

    def __init__(
        self,
        total_steps: int | None,
        planned: Mapping[str, Sequence[int]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`planned`: for each kind of work besides the steps, the numbers of finished steps after which it is due,
        ascending."""
        self._total_steps, self.planned, self._clock = total_steps, planned, clock
        self._durations: dict[str, list[float]] = {}
        self._steps: deque[float] = deque(maxlen=STEPS_AVERAGED)
        self._step_started = clock()
        self._other_seconds = 0.0

    @contextmanager
    def measure(self, kind: str) -> Iterator[None]:
        """Measures work of a kind, which does not count as time of a step. Calls must not be nested."""
        started = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - started
            self._other_seconds += seconds
            self.record(kind, seconds)

    def record(self, kind: str, seconds: float) -> None:
        """Records the duration of one piece of work of this kind."""
        self._durations.setdefault(kind, []).append(seconds)

    def finish_step(self) -> None:
        """Ends a step. Its duration is the time since the last call, less the other work measured meanwhile."""
        now = self._clock()
        self._steps.append(max(0.0, now - self._step_started - self._other_seconds))
        self._step_started, self._other_seconds = now, 0.0

    @property
    def mean_step_seconds(self) -> float:
        """Mean duration of the latest steps."""
        return statistics.fmean(self._steps)

    def remaining_seconds(self, steps_done: int) -> float | None:
        """Returns the remaining seconds after `steps_done` steps. Work due after exactly `steps_done` steps
        counts as not yet done. None: unknown, as in a run without an end."""
        if self._total_steps is None or not self._steps:
            return None
        seconds = self.mean_step_seconds * max(0, self._total_steps - steps_done)
        for kind, due in self.planned.items():
            if kind in self._durations:
                seconds += statistics.fmean(self._durations[kind]) * (len(due) - bisect_left(due, steps_done))
        return seconds
