"""Loggers and progress notifiers of recipes. They write to the terminal, and to the log and the page of the flow
run."""

from __future__ import annotations

import contextvars
import logging
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx

from flows.configs.validation import LoggingConfig
from flows.display.live_page import UPDATE_INTERVAL_SECONDS, Page, flow_run_page
from flows.display.run_log import log_line
from flows.display.terminal import TerminalProgress

log = logging.getLogger(__name__)


class StdoutLogger(TerminalProgress):
    """A logger for training classes, which may also be called with the numbers of a hand-written step."""

    def __call__(self, numbers: Mapping[str, Any]) -> None:
        """One line of `name value` pairs, in their order."""
        self.note("  ".join(f"{name} {_shown(value)}" for name, value in numbers.items()))


def get_prod_logger(ctx: object = None) -> StdoutLogger:
    """The logger of deployed recipes: a StdoutLogger that also sends the steps of training classes to every service
    that this process's environment configures: W&B, MLflow, TensorBoard, SwanLab.

    tasks.loggers.stage_loggers lists the variables, such as WANDB_PROJECT and MLFLOW_TRACKING_URI. A resumed run sends
    no step twice. The numbers of a hand-written step go to the terminal and the flow run's log only. `ctx` is accepted
    because published recipes pass it, and is not used: a training class knows its run. Raises LoggerMissing if a
    service is configured whose package is not installed.
    """
    return StdoutLogger(logging=LoggingConfig(loggers=LoggingConfig().trackers()))


class StageNotifier:
    """Reports the progress of a stage: a line in the flow run's log at every new percent, and a progress bar with the
    stage's name on the flow run's page. Without a flow run or a server it only stores the progress.

    Training classes accept one as `stage_notifier` and report after each step. The bar is updated in a thread, at most
    every few seconds and at the end, so that an unreachable server does not slow training down.
    """

    def __init__(self, name: str, *, page: Page | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.progress = 0.0
        """Fraction of the stage that is done."""
        self._page, self._clock = page, clock
        self._said: int | None = None
        self._shown_at: float | None = None
        # the executor starts its thread with the first update
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="stage-notifier")
        self._under_way: Future[None] | None = None

    def report_progress(self, done: float, total: float = 1.0) -> None:
        """Reports that `done` of `total` units are done. Raises ValueError for a fraction outside 0 to 1."""
        if not total > 0 or not 0 <= done <= total:
            raise ValueError(f"{done} of {total} was reported of {self.name!r}; expected a share between 0 and 1")
        self.progress = done / total
        # one line per new percent
        if self._said != (percent := int(100 * self.progress)):
            self._said = percent
            log_line(f"{self.name}: {100 * self.progress:.0f} %")
        self._draw()

    def settle(self) -> None:
        """Waits until the bar shows the last update that was sent."""
        if self._under_way is not None:
            self._under_way.result()

    def _draw(self) -> None:
        page = self._page or flow_run_page()
        # the last update is always sent, others at most every few seconds
        ended = self.progress == 1
        early = self._shown_at is not None and self._clock() - self._shown_at < UPDATE_INTERVAL_SECONDS
        busy = self._under_way is not None and not self._under_way.done()
        if page is None or ((early or busy) and not ended):
            return
        self._page, self._shown_at = page, self._clock()
        # Prefect reads its settings from context variables, which the thread does not have
        context = contextvars.copy_context()
        self._under_way = self._sender.submit(context.run, self._show, page, 100 * self.progress)

    def _show(self, page: Page, percent: float) -> None:
        try:
            page.show("progress", self._key, percent, self.name)
        except httpx.HTTPError as error:
            log.warning("the progress of %s is not in Prefect: %s", self.name, error)

    @property
    def _key(self) -> str:
        """The key of the bar's artifact: lower case with hyphens."""
        return re.sub(r"[^a-z0-9]+", "-", f"stage {self.name}".lower()).strip("-")


class JobNotifier:
    """Makes the notifiers of a job's stages."""

    def __init__(self, job: str = "") -> None:
        self.id = job
        """The run's key."""

    def stage_notifier(self, name: str) -> StageNotifier:
        """A notifier of the stage `name`."""
        return StageNotifier(name)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
