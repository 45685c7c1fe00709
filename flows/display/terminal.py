"""What a person watches on a terminal: one line per step, or a live bar and table where there is one. In a flow, the
lines also stand in the log of the flow run."""

import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from flows.configs.logging import LoggingConfig
from flows.display.run_log import log_line, silence_task_logs
from tasks.reports.metrics import ACTIVITIES, StepMetrics

ROWS_SHOWN = 8
"""Steps in the live table; older ones are in the report."""
STEPS_AVERAGED = 10
"""Steps behind the ETA: enough to smooth, few enough to follow a run that slows down."""


class TerminalProgress:
    """Shows steps as they finish. Create, `start`, then `step` for each, and `close`; also a context manager.

    Prints to `console` (default: standard output). Without a terminal there is nothing to redraw: each step is one
    plain line, fit for a log file.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        logging: LoggingConfig | None = None,
    ) -> None:
        self.logging = logging or LoggingConfig()
        """Where else the figures are sent."""
        self._console = console or Console(highlight=False)
        self._clock = clock
        silence_task_logs()
        self._total: int | None = None
        self._finished_at: deque[float] = deque(maxlen=STEPS_AVERAGED + 1)
        self._rows: deque[StepMetrics] = deque(maxlen=ROWS_SHOWN)
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[eta]}"), expand=True
        )
        self._task: TaskID | None = None
        self._live: Live | None = None

    def start(self, total_steps: int | None, first_step: int = 0) -> None:
        """Begin at the 0-based `first_step`, more than 0 for a resumed run; `total_steps` None means open-ended."""
        self.close()
        self._total = total_steps
        self._rows.clear()
        self._finished_at.clear()
        self._finished_at.append(self._clock())
        if total_steps is not None and first_step >= total_steps:
            self.note(f"resuming: all {total_steps} steps are committed")
        elif first_step:
            self.note(f"resuming: {first_step} steps are committed, next is step {_number(first_step, total_steps)}")
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._task = self._bar.add_task(
                f"step {_number(first_step - 1, total_steps)}", total=total_steps, completed=first_step, eta=""
            )
            self._live = Live(self._view(), console=self._console, refresh_per_second=4)
            self._live.start()

    def step(self, metrics: StepMetrics) -> None:
        """Show one finished step."""
        if not self._finished_at:
            self.start(metrics.total_steps, metrics.step)
        self._finished_at.append(self._clock())
        eta = self._eta(metrics.step + 1)
        line = step_line(metrics, total_steps=self._total, eta_seconds=eta)
        log_line(line)
        if self._live is None or self._task is None:
            self._print(line)
            return
        self._rows.append(metrics)
        self._bar.update(
            self._task,
            completed=metrics.step + 1,
            description=f"step {_number(metrics.step, self._total)}",
            eta="" if eta is None else f"{format_duration(eta)} left",
        )
        self._live.update(self._view(), refresh=True)

    def note(self, text: str) -> None:
        """Print a line of plain text, above the live view where there is one."""
        log_line(text)
        self._print(text)

    def close(self) -> None:
        """Leave the last view on the screen and give the terminal back. Safe to call twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None

    def __enter__(self) -> "TerminalProgress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _print(self, text: str) -> None:
        # Text, not str: markup in a file name or a model's words must not be obeyed.
        self._console.print(Text(text), soft_wrap=True)

    def _eta(self, steps_done: int) -> float | None:
        if self._total is None or len(self._finished_at) < 2:
            return None
        pace = (self._finished_at[-1] - self._finished_at[0]) / (len(self._finished_at) - 1)
        return pace * max(0, self._total - steps_done)

    def _view(self) -> Group:
        return Group(_table(list(self._rows)), self._bar) if self._rows else Group(self._bar)


def step_line(metrics: StepMetrics, *, total_steps: int | None = None, eta_seconds: float | None = None) -> str:
    """One finished step as one plain line. What the algorithm does not have (no reward in SFT) is left out."""
    parts = [f"step {_number(metrics.step, total_steps if total_steps is not None else metrics.total_steps)}"]
    parts += [f"{name} {text}" for name, text in _cells(metrics).items()]
    parts.append(_split(metrics))
    if eta_seconds is not None:
        parts.append(f"{format_duration(eta_seconds)} left")
    if metrics.resumed:
        parts.append("resumed")
    return "  ".join(part for part in parts if part)


def format_duration(seconds: float) -> str:
    """Whole seconds as a person says them: 42s, 3m05s, 2h07m, 3d04h."""
    whole = max(0, round(seconds))
    for unit, size, lower, lower_size in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // lower_size:02d}{lower}"
    return f"{whole}s"


def _number(step: int, total_steps: int | None) -> str:
    return f"{step + 1}" if total_steps is None else f"{step + 1}/{total_steps}"


def _cells(metrics: StepMetrics) -> dict[str, str]:
    cells: dict[str, str] = {}
    if metrics.reward_mean is not None:
        cells["reward"] = f"{metrics.reward_mean:.3f}"
    cells["loss"] = f"{metrics.loss:.4f}"
    if metrics.pair_accuracy is not None:
        cells["accuracy"] = f"{metrics.pair_accuracy:.2f}"
    if metrics.pair_margin is not None:
        cells["margin"] = f"{metrics.pair_margin:.3f}"
    if metrics.kl_mean is not None:
        cells["kl"] = f"{metrics.kl_mean:.4f}"
    if metrics.completion_length_mean is not None and metrics.reward_mean is not None:
        cells["length"] = f"{metrics.completion_length_mean:.0f}"
    counted = {"masked": metrics.masked, "dropped": metrics.dropped, "skipped": metrics.skipped_updates}
    cells |= {name: str(count) for name, count in counted.items() if count}
    cells["tok/s"] = f"{metrics.tokens_per_second:,.0f}"
    return cells


def _split(metrics: StepMetrics) -> str:
    total = sum(metrics.seconds.values())
    if total <= 0:
        return ""
    shares = ((name, metrics.seconds.get(name, 0.0) / total) for name in ACTIVITIES)
    return f"{total:.1f}s (" + ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.005) + ")"


def _table(rows: list[StepMetrics]) -> Table:
    columns = list(dict.fromkeys(name for row in rows for name in _cells(row)))
    table = Table(box=None, expand=True, header_style="dim", pad_edge=False)
    table.add_column("step", justify="right")
    for name in columns:
        table.add_column(name, justify="right")
    table.add_column("time", ratio=1, no_wrap=True, overflow="ellipsis")
    for row in rows:
        cells = _cells(row)
        mark = "↻ " if row.resumed else ""
        table.add_row(f"{mark}{row.step + 1}", *(cells.get(name, "") for name in columns), _split(row))
    return table
