"""Sends the metrics and tables of a stage to its loggers: first the stored steps that they miss, then each new step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from storage.chain.records import PolicyRef
from storage.store.objects import ObjectStore
from tasks.evaluation.validation_curve import Validation, read_validations
from tasks.loggers.base import LoggedRun, LoggerMissing, SentLog, Sink, figures_of
from tasks.loggers.environment import with_variables
from tasks.loggers.services import SINKS, LoggerName
from tasks.loggers.tables import Table
from tasks.reports.metrics import StepMetrics
from tasks.reports.step_metrics import read_metrics

log = logging.getLogger(__name__)
T = TypeVar("T")


class Loggers:
    """The loggers of one stage of a run. If a service fails, a warning is logged once, and the run continues."""

    def __init__(self, store: ObjectStore, policy: PolicyRef, names: Sequence[LoggerName], run: LoggedRun) -> None:
        """Raises LoggerMissing for a logger whose package is not installed."""
        self._stage, self._failed_names = policy.stage, set[str]()
        self._sinks: dict[str, tuple[Sink, SentLog]] = {}
        # Open each logger once.
        for name in dict.fromkeys(names):
            opened = self._try(name, lambda name=name: SINKS[name](with_variables(run, name)))  # type: ignore[misc]
            if opened is not None:
                self._sinks[name] = (opened, SentLog(store, policy.run, policy.stage, name))

        # Send what was stored before a restart.
        if self._sinks:
            for metrics in read_metrics(store, policy.run, policy.stage, steps=policy.step):
                self.step(metrics)
            for validation in read_validations(store, policy.run, policy.stage, last_step=policy.step):
                self.validation(validation)

    def step(self, metrics: StepMetrics) -> None:
        """Send the metrics of a step to the loggers that were not sent them."""
        # Mark first: after a crash in between, the step is missing in the service instead of being there twice.
        for name, (sink, sent_log) in self._sinks.items():
            if sent_log.mark_step(metrics.step + 1):
                self._send(name, sink, metrics.step + 1, figures_of(metrics))

    def validation(self, validation: Validation) -> None:
        """Send a validation to the loggers that were not sent it."""
        figures = {f"{validation.name}/{measure}": value for measure, value in validation.measures.items()}
        for name, (sink, sent_log) in self._sinks.items():
            if figures and sent_log.mark_validation(validation):
                self._send(name, sink, validation.step, figures)

    def table(self, table: Table) -> None:
        """Send a table to the loggers that were not sent a table of this name and step."""
        renamed = table.model_copy(update={"name": self._logged_name(table.name)})
        for name, (sink, sent_log) in self._sinks.items():
            if table.rows and sent_log.mark_table(table):
                self._try(name, lambda sink=sink: sink.show(renamed))  # type: ignore[misc]

    def close(self) -> None:
        for name, (sink, _) in self._sinks.items():
            self._try(name, sink.close)

    def _send(self, name: str, sink: Sink, step: int, figures: dict[str, float]) -> None:
        renamed = {self._logged_name(key): value for key, value in figures.items()}
        self._try(name, lambda: sink.log(step, renamed))

    def _logged_name(self, name: str) -> str:
        """The name in the services. Each stage counts its own steps, so all stages but the first have a prefix."""
        return name if self._stage.startswith("0-") else f"{self._stage}/{name}"

    def _try(self, name: str, act: Callable[[], T]) -> T | None:
        """Run `act`. All exceptions of a service or its package become one warning, except for a missing package."""
        try:
            return act()
        except LoggerMissing:
            raise
        except Exception as error:  # noqa: BLE001  the boundary to a service: the run must not depend on it
            if name not in self._failed_names:
                log.warning("the logger %s does not have all metrics: %s: %s", name, type(error).__name__, error)
            self._failed_names.add(name)
            return None
