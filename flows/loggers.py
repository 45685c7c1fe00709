"""Where the numbers and the progress of a recipe go: a terminal, and the log of the flow run that runs here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flows.progress import TerminalProgress
from flows.run_log import say


class StdoutLogger(TerminalProgress):
    """A logger for training classes, which may also be called with the numbers of a hand-written step."""

    def __call__(self, numbers: Mapping[str, Any]) -> None:
        """One line of `name value` pairs, in their order."""
        self.note("  ".join(f"{name} {_shown(value)}" for name, value in numbers.items()))


def get_prod_logger(ctx: object = None) -> StdoutLogger:
    """The logger of deployed recipes: as StdoutLogger; in a flow its lines also stand in the flow run's log. `ctx` is
    taken as in the documents: the flow run is found without it."""
    return StdoutLogger()


class StageNotifier:
    """Says how far a stage of a job is."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.progress = 0.0

    def report_progress(self, done: float, total: float = 1.0) -> None:
        """`done` of `total`, whatever they count. Raises ValueError for a share outside 0 to 1."""
        if not total > 0 or not 0 <= done <= total:
            raise ValueError(f"{done} of {total} was reported of {self.name!r}; expected a share between 0 and 1")
        self.progress = done / total
        say(f"{self.name}: {100 * self.progress:.0f} %")


class JobNotifier:
    """Names the stages of a job."""

    def __init__(self, job: str = "") -> None:
        self.id = job
        """The run's key."""

    def stage_notifier(self, name: str) -> StageNotifier:
        return StageNotifier(name)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
