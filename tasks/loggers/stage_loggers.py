"""Sends what the store has of a stage to its loggers: the steps before a restart that they miss, then each new one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from storage.chain.records import PolicyRef
from storage.store.objects import ObjectStore
from tasks.evaluation.validation_curve import Validation, read_validations
from tasks.loggers.base import LoggedRun, LoggerMissing, SentLog, Sink, figures_of
from tasks.loggers.services import SINKS, LoggerName
from tasks.loggers.tables import Table
from tasks.reports.metrics import StepMetrics
from tasks.reports.step_metrics import read_metrics

log = logging.getLogger(__name__)
T = TypeVar("T")


class Loggers:
    """Open for one stage of a run. A service that fails is said once, and the run goes on."""

    def __init__(self, store: ObjectStore, policy: PolicyRef, names: Sequence[LoggerName], run: LoggedRun) -> None:
        """Raises LoggerMissing for a logger whose package is not installed."""
        self._stage, self._failed = policy.stage, set[str]()
        self._sinks: dict[str, tuple[Sink, SentLog]] = {}
        for name in dict.fromkeys(names):
            opened = self._try(name, lambda name=name: SINKS[name](run))  # type: ignore[misc]
            if opened is not None:
                self._sinks[name] = (opened, SentLog(store, policy.run, policy.stage, name))
        if self._sinks:
            for metrics in read_metrics(store, policy.run, policy.stage, steps=policy.step):
                self.step(metrics)
            for validation in read_validations(store, policy.run, policy.stage, steps=policy.step):
                self.validation(validation)

    def step(self, metrics: StepMetrics) -> None:
        """A step whose metrics are stored. One that a logger has is not sent to it again."""
        for name, (sink, once) in self._sinks.items():
            if once.take_step(metrics.step + 1):
                self._send(name, sink, metrics.step + 1, figures_of(metrics))

    def validation(self, validation: Validation) -> None:
        figures = {f"{validation.name}/{measure}": value for measure, value in validation.measures.items()}
        for name, (sink, once) in self._sinks.items():
            if figures and once.take_validation(validation):
                self._send(name, sink, validation.step, figures)

    def table(self, table: Table) -> None:
        """Once per name and step."""
        later = not self._stage.startswith("0-")
        named = table.model_copy(update={"name": f"{self._stage}/{table.name}"}) if later else table
        for name, (sink, once) in self._sinks.items():
            if table.rows and once.take_table(table):
                self._try(name, lambda sink=sink: sink.show(named))  # type: ignore[misc]

    def close(self) -> None:
        for name, (sink, _) in self._sinks.items():
            self._try(name, sink.close)

    def _send(self, name: str, sink: Sink, step: int, figures: dict[str, float]) -> None:
        later = not self._stage.startswith("0-")  # a further stage counts its steps anew: its figures have its name
        named = {f"{self._stage}/{key}": value for key, value in figures.items()} if later else figures
        self._try(name, lambda: sink.log(step, named))

    def _try(self, name: str, act: Callable[[], T]) -> T | None:
        """The boundary: a service, a network and another's package are behind it. A missing package is an error."""
        try:
            return act()
        except LoggerMissing:
            raise
        except Exception as error:  # noqa: BLE001 - see above
            if name not in self._failed:
                log.warning("the logger %s does not have all figures: %s: %s", name, type(error).__name__, error)
            self._failed.add(name)
            return None
