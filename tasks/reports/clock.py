"""Divides the time of a step among activities. A flow run has one clock, which the tasks of its process share."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from tasks.reports.metrics import ACTIVITIES

Span = tuple[float, float]
"""(begin, end) in seconds since the step began."""
SHORTEST_PAUSE = 0.005


class Lap(NamedTuple):
    """The time of one step, by activity."""

    seconds: dict[str, float]
    """Seconds of each activity. They add up to the wall time: activities that are open together share it."""
    spans: dict[str, list[Span]]
    """When each activity was open, alone or with others."""

    @property
    def wall_seconds(self) -> float:
        """The duration of the step."""
        return sum(self.seconds.values())

    def idle(self, activity: str) -> float | None:
        """Share of the wall time in which the activity was not open. None for a lap without duration."""
        wall = self.wall_seconds
        return 1 - sum(end - begin for begin, end in self.spans.get(activity, [])) / wall if wall else None

    def merged_spans(self, activity: str) -> tuple[Span, ...]:
        """The spans of an activity, at most some hundred: pauses below `SHORTEST_PAUSE` of the wall time are left
        out."""
        shortest = SHORTEST_PAUSE * self.wall_seconds
        merged: list[Span] = []
        for begin, end in self.spans.get(activity, []):
            if merged and begin - merged[-1][1] < shortest:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((begin, end))
        return tuple(merged)


NO_TIME = Lap({}, {})


class StepClock:
    """Divides the wall time of each step among activities. Time without an open activity counts as orchestration.

    Tasks run concurrently. While several activities are open, the time is divided equally among them. Several tasks in
    the same activity count once. The activities therefore add up to the wall time.
    """

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._spans: defaultdict[str, list[Span]] = defaultdict(list)
        self._open_tasks: Counter[str] = Counter()
        self._last_change = time.perf_counter()
        self._lap_begin = self._last_change
        # Tasks that are started from now on inherit the variable, and with it this clock.
        _clock.set(self)

    def begin(self, activity: str) -> None:
        self._advance()
        self._open_tasks[activity] += 1

    def end(self, activity: str) -> None:
        self._advance()
        self._open_tasks[activity] -= 1

    def lap(self) -> Lap:
        """The time since the last lap."""
        # An activity that is still open is divided here. Its rest counts in the next lap.
        self._advance()
        lap = Lap(
            {activity: self._seconds[activity] for activity in ACTIVITIES},
            {activity: self._spans[activity] for activity in ACTIVITIES},
        )
        self._seconds.clear()
        self._spans.clear()
        self._lap_begin = self._last_change
        return lap

    def _advance(self) -> None:
        """Divides the time since the last change among the activities that were open."""
        now = time.perf_counter()
        open_activities = [activity for activity, tasks in self._open_tasks.items() if tasks > 0]
        if not open_activities:
            open_activities = ["orchestration"]
        # Equal parts: the activities of a step must add up to its wall time.
        begin, end = self._last_change - self._lap_begin, now - self._lap_begin
        for activity in open_activities:
            self._seconds[activity] += (end - begin) / len(open_activities)
            spans = self._spans[activity]
            if spans and spans[-1][1] == begin:  # it was open before, too
                spans[-1] = (spans[-1][0], end)
            elif end > begin:
                spans.append((begin, end))
        self._last_change = now


_clock: ContextVar[StepClock | None] = ContextVar("ostinato_clock", default=None)


@contextmanager
def timed(activity: str) -> Iterator[None]:
    """Counts the wall time of the block as `activity`. Without a clock it only runs the block."""
    clock = _clock.get()
    if clock is None:
        yield
        return
    clock.begin(activity)
    try:
        yield
    finally:
        clock.end(activity)
