"""Sends the metrics and tables of a stage to its loggers: first the stored steps that they miss, then each new step.

Each logger has a thread of its own, so that a service that is slow or away never holds the run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from storage.chain.records import PolicyRef
from storage.secrets import without_secrets
from storage.store.objects import ObjectStore
from tasks.evaluation.validation_curve import Validation, read_validations
from tasks.loggers.base import LoggedRun, SentLog, Sink, Table, figures_of
from tasks.loggers.services import SINKS, LoggerName, check_installed, with_variables
from tasks.reports.metrics import StepMetrics
from tasks.reports.step_metrics import read_metrics

log = logging.getLogger(__name__)

CONNECT_SECONDS = 30.0
"""Seconds that a service may take to connect before a warning says that it does not answer. It may connect later."""
FLUSH_SECONDS = 60.0
"""Seconds that the end of a stage waits for a connected service to take what it was not sent yet."""
MAX_WAITING = 1000
"""Steps, validations and tables that wait for a slow service. When there are more, it gets no later ones either: those
of the store are sent at the next start, and a gap between steps would never be filled."""

Item = Callable[[Sink, SentLog], None]
"""Sends one thing to a sink, unless the log says that it was sent before."""


class Loggers:
    """The loggers of one stage of a run. A service that fails or does not answer costs a warning per reason.

    No step waits for it. `flush` and `close` do, for at most `FLUSH_SECONDS`. What it misses stays in the store, and is
    sent when the run is resumed. That does not include tables.
    """

    def __init__(self, store: ObjectStore, policy: PolicyRef, names: Sequence[LoggerName], run: LoggedRun) -> None:
        """Raises LoggerMissing for a logger whose package is not installed."""
        self._stage = policy.stage
        unique_names = dict.fromkeys(names)
        for name in unique_names:
            check_installed(name)
        self._senders = [_Sender(store, policy, name, run) for name in unique_names]
        # First what was stored before a restart, each logger in its thread.
        for sender in self._senders:
            sender.put(lambda sink, sent_log: self._send_stored(store, policy, sink, sent_log))

    def step(self, metrics: StepMetrics) -> None:
        """Send the metrics of a step to the loggers that were not sent them."""
        self._put(lambda sink, sent_log: self._send_step(metrics, sink, sent_log))

    def validation(self, validation: Validation) -> None:
        """Send a validation to the loggers that were not sent it."""
        self._put(lambda sink, sent_log: self._send_validation(validation, sink, sent_log))

    def table(self, table: Table) -> None:
        """Send a table to the loggers that were not sent a table of this name and step."""
        renamed = table.model_copy(update={"name": self._logged_name(table.name)})

        def send(sink: Sink, sent_log: SentLog) -> None:
            if sent_log.mark_table(table):
                _send(lambda: sink.show(renamed), sent_log)

        if table.rows:
            self._put(send, is_table=True)

    def flush(self) -> None:
        """Wait until the loggers have taken what they were given, but no longer than the bounds above."""
        deadline = time.monotonic() + FLUSH_SECONDS
        for sender in self._senders:
            sender.flush(deadline)

    def close(self) -> None:
        """Flush, and end the connections."""
        for sender in self._senders:
            sender.end()
        self.flush()
        for sender in self._senders:
            sender.warn_of_tables()

    def _put(self, item: Item, *, is_table: bool = False) -> None:
        for sender in self._senders:
            sender.put(item, is_table=is_table)

    def _send_stored(self, store: ObjectStore, policy: PolicyRef, sink: Sink, sent_log: SentLog) -> None:
        # only the steps that the logger was not sent before the restart
        for metrics in read_metrics(store, policy.run, policy.stage, first=sent_log.steps, steps=policy.step):
            self._send_step(metrics, sink, sent_log)
        for validation in read_validations(store, policy.run, policy.stage, last_step=policy.step):
            self._send_validation(validation, sink, sent_log)

    def _send_step(self, metrics: StepMetrics, sink: Sink, sent_log: SentLog) -> None:
        # Mark first: after a crash in between, the step is missing in the service instead of being there twice.
        if sent_log.mark_step(metrics.step + 1):
            figures = self._renamed(figures_of(metrics))
            _send(lambda: sink.log(metrics.step + 1, figures), sent_log)

    def _send_validation(self, validation: Validation, sink: Sink, sent_log: SentLog) -> None:
        figures = self._renamed({f"{validation.name}/{name}": value for name, value in validation.measures.items()})
        if figures and sent_log.mark_validation(validation):
            _send(lambda: sink.log(validation.step, figures), sent_log)

    def _renamed(self, figures: dict[str, float]) -> dict[str, float]:
        return {self._logged_name(name): value for name, value in figures.items()}

    def _logged_name(self, name: str) -> str:
        """The name in the services. Each stage counts its own steps, so all stages but the first have a prefix."""
        return name if self._stage.startswith("0-") else f"{self._stage}/{name}"


def _send(act: Callable[[], None], sent_log: SentLog) -> None:
    """Send an item that was marked. If that fails, take the mark back."""
    try:
        act()
    except Exception:
        sent_log.take_back()
        raise


class _Sender:
    """Connects to one service and sends items to it, in a thread. It ends at the first failure, so that the service has
    a prefix of the steps, as the record in the store says."""

    def __init__(self, store: ObjectStore, policy: PolicyRef, name: LoggerName, run: LoggedRun) -> None:
        self._name = name
        self._open = lambda: SINKS[name](with_variables(run, name))
        self._sent_log = lambda: SentLog(store, policy.run, policy.stage, name)
        self._items: SimpleQueue[tuple[Item | threading.Event | None, bool]] = SimpleQueue()
        """What waits for the service, and whether it is a table."""
        self._is_too_slow, self._missed_tables = False, 0
        self._connected, self._ended = threading.Event(), threading.Event()
        self._began, self._warned = time.monotonic(), set[str]()
        self._timer = threading.Timer(CONNECT_SECONDS, self._warn_if_not_connected)
        # Daemon threads: a service that does not answer must not keep the process alive.
        self._timer.daemon = True
        self._timer.start()
        threading.Thread(target=self._run, name=f"logger-{name}", daemon=True).start()

    def put(self, item: Item, *, is_table: bool = False) -> None:
        """Hand an item over, unless the sender has ended or too many items wait."""
        if not self._is_too_slow and not self._ended.is_set() and self._items.qsize() >= MAX_WAITING:
            self._is_too_slow = True
            self._warn(f"it is too slow: {MAX_WAITING} items wait for it")
        if self._is_too_slow or self._ended.is_set():
            self._missed_tables += is_table
        else:
            self._items.put((item, is_table))

    def end(self) -> None:
        """End the connection after the items so far."""
        self._items.put((None, False))

    def warn_of_tables(self) -> None:
        """Log how many tables the service was not given."""
        if self._ended.is_set():
            while not self._items.empty():
                self._missed_tables += self._items.get()[1]
        if self._missed_tables:
            log.warning("the logger %s misses %d tables, which are not sent later", self._name, self._missed_tables)

    def flush(self, deadline: float) -> None:
        """Wait for the items so far: while it connects until `CONNECT_SECONDS` have passed, then until the deadline."""
        self._connected.wait(max(0.0, self._began + CONNECT_SECONDS - time.monotonic()))
        if not self._connected.is_set():
            self._warn_if_not_connected()
        if not self._connected.is_set() or self._ended.is_set():
            return
        reached = threading.Event()
        self._items.put((reached, False))
        while not (reached.is_set() or self._ended.wait(0.01)):
            if time.monotonic() > deadline:
                self._warn(f"it did not take the rest within {FLUSH_SECONDS:g} s")
                return

    def _run(self) -> None:
        try:
            sink, sent_log = self._open(), self._sent_log()
            self._connected.set()
            self._timer.cancel()
            while (item := self._items.get()[0]) is not None:
                if isinstance(item, threading.Event):
                    item.set()
                else:
                    item(sink, sent_log)
            sink.close()
        except Exception as error:  # noqa: BLE001  the boundary to a service: the run must not depend on it
            self._timer.cancel()
            # the address of a tracker comes from the environment, and may hold a password
            self._warn(without_secrets(f"{type(error).__name__}: {error}"))
        finally:
            self._ended.set()
            self._connected.set()

    def _warn_if_not_connected(self) -> None:
        self._warn(f"it has not connected within {CONNECT_SECONDS:g} s")

    def _warn(self, reason: str) -> None:
        if reason in self._warned:
            return
        self._warned.add(reason)
        log.warning(
            "the logger %s does not have all metrics: %s; the run goes on, and sends the rest when it is resumed",
            self._name, reason,
        )  # fmt: skip
