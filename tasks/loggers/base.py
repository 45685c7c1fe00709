"""What all loggers have in common: a name for each figure, and a memory of the steps that were logged.

A run is resumed by another process, and a service cannot be asked what it has: the steps that a logger has taken are
noted in the run's store, one object per logger, *before* they are sent. Each step is thus logged at most once; a crash
between the note and the sending loses the figures of that step in the service, and nothing in the run.
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
from tasks.loggers.tables import Table
from tasks.reports.metrics import StepMetrics


class LoggerMissing(ImportError):
    """A logger's package is not installed."""


class LoggedRun(Frozen):
    """What a logger calls the run."""

    project: str
    name: str
    """Of the experiment: the run's key, unless the config says otherwise."""
    run: str
    """The run's key: the same after a resume, so that a service goes on with the run it knows."""
    folder: str
    """Where a logger may keep files on this machine."""
    config: dict[str, object] = {}


class Sink(Protocol):
    """One logger, open."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """`step` is 1-based, 0 for what was measured before the first."""
        ...

    def show(self, table: Table) -> None:
        """As the service shows tables."""
        ...

    def close(self) -> None: ...


def imported(module: str, *, logger: str, package: str) -> ModuleType:
    """The module. Raises LoggerMissing, saying what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        extra = " (the extra `loggers` has it)" if logger == "tensorboard" else ""
        raise LoggerMissing(
            f"the logger {logger!r} needs the package {package!r}, which is not installed here; "
            f"`pip install {package}`{extra}, or leave {logger!r} out"
        ) from error


NO_FIGURES = {"step", "total_steps", "seconds", "resumed"}


def figures_of(metrics: StepMetrics) -> dict[str, float]:
    """The step's finite figures, "group/name"."""
    found = {
        f"train/{name}": value
        for name, value in metrics.model_dump(exclude=NO_FIGURES).items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
    found |= {f"reward/{source}": mean for source, mean in metrics.by_source.items()}
    found |= {f"seconds/{name}": value for name, value in metrics.seconds.items()}
    return found


class SentItems(Frozen):
    """What a logger was sent."""

    steps: int = 0
    """Committed steps from the first on."""
    validations: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()


class SentLog:
    """What a logger of a stage was sent, kept in the store."""

    def __init__(self, store: ObjectStore, run: str, stage: str, logger: str) -> None:
        self._store, self._key = store, keys.logger_progress(run, stage, logger)
        try:
            self._logged = SentItems.model_validate_json(store.get(self._key))
        except ObjectNotFound:
            self._logged = SentItems()

    @property
    def steps(self) -> int:
        """Steps that were sent."""
        return self._logged.steps

    def take_step(self, steps_done: int) -> bool:
        """Whether this step was not sent yet; it then counts as sent."""
        if steps_done <= self._logged.steps:
            return False
        self._write(self._logged.model_copy(update={"steps": steps_done}))
        return True

    def take_validation(self, validation: Validation) -> bool:
        """The same of a measurement."""
        name = f"{validation.step} {validation.name}"
        if name in self._logged.validations:
            return False
        self._write(self._logged.model_copy(update={"validations": (*self._logged.validations, name)}))
        return True

    def take_table(self, table: Table) -> bool:
        """The same of a table."""
        name = f"{table.step} {table.name}"
        if name in self._logged.tables:
            return False
        self._write(self._logged.model_copy(update={"tables": (*self._logged.tables, name)}))
        return True

    def _write(self, logged: SentItems) -> None:
        self._store.put(self._key, logged.model_dump_json().encode())
        self._logged = logged
