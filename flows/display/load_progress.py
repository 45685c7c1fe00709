"""Shows the progress of loading a dataset: a bar on a terminal, or a line of text every few seconds. And durations in
words. This module does not import Prefect, so that commands can use it."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from tasks.datasets.load import LoadProgress

LINE_SECONDS = 5.0
"""Seconds between two lines. A load that takes less prints none."""
MEASURED_FRACTION = 0.01
"""Share of the source after which the time left is shown."""


class LoadLines:
    """Gives a line about the load to `note` every LINE_SECONDS. An instance is the `on_progress` of one load."""

    def __init__(self, source: str, note: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._source, self._note, self._clock = source, note, clock
        self._started = self._last = clock()

    def __call__(self, progress: LoadProgress) -> None:
        now = self._clock()
        if now - self._last >= LINE_SECONDS:
            self._last = now
            self._note(f"loading {self._source}: {describe_load(progress, now - self._started)}")


class LoadBar:
    """A bar about the load on a terminal, within a `with` block. An instance is the `on_progress` of one load."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._started = clock, clock()
        text = TextColumn("{task.description}")
        self._bar = Progress(BarColumn(), text, console=console, transient=True)
        self._task = self._bar.add_task("", total=None)

    def __call__(self, progress: LoadProgress) -> None:
        text = describe_load(progress, self._clock() - self._started)
        total = None if progress.fraction is None else 1.0
        self._bar.update(self._task, total=total, completed=progress.fraction or 0.0, description=text)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


def describe_load(progress: LoadProgress, seconds: float) -> str:
    """The progress in words: `412,000 rows, 41 %, 12,300 rows/s, 48s left`."""
    parts = [f"{progress.rows:,} rows"]
    fraction = progress.fraction
    if fraction is not None:
        parts.append(f"{fraction:.0%}".replace("%", " %"))
    if seconds > 0:
        parts.append(f"{progress.rows / seconds:,.0f} rows/s")
    if fraction is not None and fraction >= MEASURED_FRACTION:
        parts.append(f"{format_duration(seconds * (1 - fraction) / fraction)} left")
    return ", ".join(parts)


def format_duration(seconds: float) -> str:
    """Formats a duration: 42s, 3m05s, 2h07m, 3d04h."""
    whole = max(0, round(seconds))
    for unit, size, lower, lower_size in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // lower_size:02d}{lower}"
    return f"{whole}s"
