"""The common parts of loggers: the names of metrics, and a record of what each logger was sent.

A run may be resumed by another process, and most services cannot be asked what they have. So the store keeps one object
per logger with the steps that it was sent, written *before* they are sent. A crash between writing and sending loses
the metrics of that step in the service, and nothing in the run. If the service refuses them or does not answer, the
record is taken back, and the process that resumes the run sends them.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from types import ModuleType
from typing import Protocol

from storage.errors import ObjectNotFound
from storage.serialization import Frozen
from storage.store import keys
from storage.store.objects import ObjectStore
from tasks.evaluation.validation_curve import Validation
from tasks.reports.metrics import StepMetrics

Cell = str | int | float | None


class Table(Frozen):
    """Rows with the same columns, measured at one step of a stage."""

    name: str
    """Name of the table. Tables of a stage with the same name show the same thing at different steps."""
    step: int
    """Number of steps of the stage before the table was made."""
    rows: tuple[dict[str, Cell], ...]

    @property
    def columns(self) -> list[str]:
        return list(self.rows[0]) if self.rows else []

    @property
    def cells(self) -> list[list[Cell]]:
        return [[row[column] for column in self.columns] for row in self.rows]

    def markdown(self) -> str:
        """The table in Markdown. Line breaks and bars inside a cell are escaped."""
        # Markdown needs the separator line to recognise a table.
        lines = [self.columns, ["---"] * len(self.columns)]
        for row in self.cells:
            lines.append([_markdown_cell(cell) for cell in row])
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)

    def text(self) -> str:
        """The table for a terminal: one line of `column value` pairs per row."""
        lines = [f"{self.name} after {self.step} steps"]
        for row in self.rows:
            pairs = [f"{name} {_text_cell(cell)}" for name, cell in row.items()]
            lines.append("  " + "  ".join(pairs))
        return "\n".join(lines)


def _markdown_cell(cell: Cell) -> str:
    return "" if cell is None else str(cell).replace("|", r"\|").replace("\n", "<br>")


def _text_cell(cell: Cell) -> str:
    return repr(cell) if isinstance(cell, str) else str(cell)


class LoggerMissing(ImportError):
    """The package of a logger is not installed."""


class LoggedRun(Frozen):
    """The names and settings of a run for its loggers."""

    project: str = ""
    """Name of the project. Empty: the service's environment variable, else "ostinato"."""
    name: str
    """Name of the experiment. By default the run's key."""
    run: str
    """The run's key. It is the same after a resume, so that a service continues the same run."""
    folder: str = ""
    """Folder on this machine for the files of loggers. Empty: the service's environment variable, else
    "ostinato-logs"."""
    config: dict[str, object] = {}
    """The config of the run."""


class Sink(Protocol):
    """An open logger."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Send named numbers. `step` counts from 1; 0 stands for measurements before the first step."""
        ...

    def show(self, table: Table) -> None:
        """Send a table, in the form that the service has for tables."""
        ...

    def close(self) -> None: ...


def imported(module: str, *, logger: str, package: str) -> ModuleType:
    """Import a module of a logger's package. Raises LoggerMissing, which says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        # swanlab is in no extra: it needs protobuf < 7
        extra = "" if logger == "swanlab" else " (the extra 'loggers' has it)"
        raise LoggerMissing(
            f"the logger {logger!r} needs the package {package!r}, which is not installed here; "
            f"'pip install {package}'{extra}, or leave {logger!r} out"
        ) from error


NOT_LOGGED = {"step", "total_steps", "seconds", "resumed"}
"""Fields of StepMetrics that are not logged as train/name."""


def figures_of(metrics: StepMetrics) -> dict[str, float]:
    """The finite metrics of a step, as "group/name"."""
    figures: dict[str, float] = {}
    # A curve has no place for None or NaN.
    for name, value in metrics.model_dump(exclude=NOT_LOGGED).items():
        if isinstance(value, int | float) and math.isfinite(value):
            figures[f"train/{name}"] = value
    for source, mean in metrics.by_source.items():
        figures[f"reward/{source}"] = mean
    for part, mean in metrics.reward_parts.items():
        figures[f"reward_part/{part}"] = mean
    for part, drawn in metrics.by_part.items():
        figures[f"data/{part}/rows"] = drawn.rows
        figures[f"data/{part}/epoch"] = drawn.epoch
    for name, value in metrics.seconds.items():
        figures[f"seconds/{name}"] = value
    return figures


class SentItems(Frozen):
    """The items that a logger was sent in one stage, as stored."""

    steps: int = 0
    """Number of committed steps, from the first one on."""
    validations: tuple[str, ...] = ()
    """Validations as "step name"."""
    tables: tuple[str, ...] = ()
    """Tables as "step name"."""


class SentLog:
    """Records in the store what a logger was sent in one stage, so that nothing is sent twice."""

    def __init__(self, store: ObjectStore, run: str, stage: str, logger: str) -> None:
        self._store, self._key = store, keys.logger_progress(run, stage, logger)
        # A stage that was never logged has no record.
        try:
            self._sent = SentItems.model_validate_json(store.get(self._key))
        except ObjectNotFound:
            self._sent = SentItems()
        self._before = self._sent
        """The record before the last change."""

    @property
    def steps(self) -> int:
        """Number of steps that were sent."""
        return self._sent.steps

    def mark_step(self, steps_done: int) -> bool:
        """Record a step as sent. Returns False if it was recorded before."""
        if steps_done <= self._sent.steps:
            return False
        return self._write({"steps": steps_done})

    def mark_validation(self, validation: Validation) -> bool:
        """Record a validation as sent. Returns False if it was recorded before."""
        name = f"{validation.step} {validation.name}"
        if name in self._sent.validations:
            return False
        return self._write({"validations": (*self._sent.validations, name)})

    def mark_table(self, table: Table) -> bool:
        """Record a table as sent. Returns False if it was recorded before."""
        name = f"{table.step} {table.name}"
        if name in self._sent.tables:
            return False
        return self._write({"tables": (*self._sent.tables, name)})

    def take_back(self) -> None:
        """Forget the last item that was recorded, because it could not be sent."""
        self._write(dict(self._before))

    def _write(self, changes: Mapping[str, object]) -> bool:
        # Store first: if that fails, nothing is sent, and the item can be marked again.
        sent = self._sent.model_copy(update=dict(changes))
        self._store.put(self._key, sent.model_dump_json().encode())
        self._before, self._sent = self._sent, sent
        return True
