"""Progress on the terminal: a live bar and table, or one plain line per step where the output is not a terminal.

In a flow run, the lines are also added to its log in Prefect.
"""

from __future__ import annotations

import math
from collections import deque
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from flows.configs.validation import LoggingConfig
from flows.display.load_progress import format_duration
from flows.display.run_log import log_engine_outages, log_line, silence_task_logs
from tasks.reports.metrics import ACTIVITIES, StepMetrics

ROWS_SHOWN = 8
"""Number of steps in the live table. The report shows all of them."""


class TerminalProgress:
    """Shows steps as they finish. Call `start`, then `step` for each step, and `close`, or use it as a context manager.

    Prints to `console`, by default standard output. If that is not a terminal, each step is one plain line, which suits
    a log file.
    """

    def __init__(self, console: Console | None = None, *, logging: LoggingConfig | None = None) -> None:
        self.logging = logging or LoggingConfig(loggers=())
        """The trackers that also get the metrics."""
        self._console = console or Console(highlight=False)
        silence_task_logs()
        log_engine_outages()
        self._total: int | None = None
        self._started = False
        self._rows: deque[StepMetrics] = deque(maxlen=ROWS_SHOWN)
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[eta]}"), expand=True
        )
        self._task: TaskID | None = None
        self._live: Live | None = None

    def start(self, total_steps: int | None, first_step: int = 0) -> None:
        """Starts the display at the 0-based `first_step`, which is above 0 for a resumed run.

        `total_steps` is None for a run without an end.
        """
        self.close()
        self._total = total_steps
        self._rows.clear()
        self._started = True
        # tell where a resumed run continues
        if total_steps is not None and first_step >= total_steps:
            self.note(f"resuming: all {total_steps} steps are committed")
        elif first_step:
            self.note(f"resuming after step {first_step}: next is step {_number(first_step, total_steps)}")
        # the live view needs a terminal that can be redrawn
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            number = _number(max(0, first_step - 1), total_steps)
            description = f"step {number}" if first_step else f"before step {number}"
            self._task = self._bar.add_task(description, total=total_steps, completed=first_step, eta="")
            self._live = Live(self._view(), console=self._console, refresh_per_second=4)
            self._live.start()

    def step(self, metrics: StepMetrics, *, seconds_left: float | None = None) -> None:
        """Shows one finished step. `seconds_left`: the remaining time of the loop, if it is known."""
        if not self._started:
            self.start(metrics.total_steps, metrics.step)
        line = step_line(metrics, total_steps=self._total, eta_seconds=seconds_left)
        log_line(line)
        if self._live is None or self._task is None:
            self._print(line)
            return
        # otherwise update the table and the bar
        self._rows.append(metrics)
        self._bar.update(
            self._task,
            completed=metrics.step + 1,
            description=f"step {_number(metrics.step, self._total)}",
            eta="" if seconds_left is None else f"{format_duration(seconds_left)} left",
        )
        self._live.update(self._view(), refresh=True)

    def note(self, text: str) -> None:
        """Prints a line of plain text, above the live view if there is one."""
        log_line(text)
        self._print(text)

    def close(self) -> None:
        """Ends the live view and leaves its last state on the screen. May be called more than once."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None

    def __enter__(self) -> TerminalProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _print(self, text: str) -> None:
        # Text instead of str: rich must not interpret markup in file names and model outputs
        self._console.print(Text(text), soft_wrap=True)

    def _view(self) -> Group:
        if self._rows:
            return Group(_table(list(self._rows)), self._bar)
        return Group(self._bar)


def step_line(metrics: StepMetrics, *, total_steps: int | None = None, eta_seconds: float | None = None) -> str:
    """Formats a finished step as one line. Metrics that the algorithm does not have are omitted."""
    total = metrics.total_steps if total_steps is None else total_steps
    parts = [f"step {_number(metrics.step, total)}"]
    parts += [f"{name} {text}" for name, text in _cells(metrics).items()]
    parts.append(_seconds_by_activity(metrics))
    if eta_seconds is not None:
        parts.append(f"{format_duration(eta_seconds)} left")
    if metrics.resumed:
        parts.append("resumed")
    return "  ".join(part for part in parts if part)


def _number(step: int, total_steps: int | None) -> str:
    if total_steps is None:
        return f"{step + 1}"
    return f"{step + 1}/{total_steps}"


def _cells(metrics: StepMetrics) -> dict[str, str]:
    """The metrics of a step as text, by column name."""
    # only metrics that the algorithm has
    cells: dict[str, str] = {}
    if metrics.reward_mean is not None:
        cells["reward"] = f"{metrics.reward_mean:.3f}"
    # PPO's first steps train only the value model: the policy then has no loss
    if not math.isnan(metrics.loss) or metrics.skipped_updates:
        cells["loss"] = f"{metrics.loss:.4f}"
    if metrics.pair_accuracy is not None:
        cells["accuracy"] = f"{metrics.pair_accuracy:.2f}"
    if metrics.pair_margin is not None:
        cells["margin"] = f"{metrics.pair_margin:.3f}"
    if metrics.kl_mean is not None:
        cells["kl"] = f"{metrics.kl_mean:.4f}"
    if metrics.teacher_kl is not None:
        cells["to teacher"] = f"{metrics.teacher_kl:.4f}"
    if metrics.divergence is not None:
        cells["to teacher"] = f"{metrics.divergence:.4f}"
    if metrics.completion_length_mean is not None and metrics.reward_mean is not None:
        cells["length"] = f"{metrics.completion_length_mean:.0f}"
    # counts are shown only if they are not zero
    counted = {"masked": metrics.masked, "dropped": metrics.dropped, "skipped": metrics.skipped_updates}
    cells |= {name: str(count) for name, count in counted.items() if count}
    if metrics.skipped:
        cells["skipped"] = "no grades"
    cells["tok/s"] = f"{metrics.tokens_per_second:,.0f}"
    return cells


def _seconds_by_activity(metrics: StepMetrics) -> str:
    """The duration of a step, and the share of each activity that rounds to at least 1 %."""
    total = sum(metrics.seconds.values())
    if total <= 0:
        return ""
    shares = {name: metrics.seconds.get(name, 0.0) / total for name in ACTIVITIES}
    parts = [f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005]
    return f"{total:.1f}s ({', '.join(parts)})"


def _table(rows: list[StepMetrics]) -> Table:
    # a dict keeps the order in which the metrics appear
    columns: dict[str, None] = {}
    for row in rows:
        columns.update(dict.fromkeys(_cells(row)))
    # a resumed step is marked with an arrow
    table = Table(box=None, expand=True, header_style="dim", pad_edge=False)
    table.add_column("step", justify="right")
    for name in columns:
        table.add_column(name, justify="right")
    table.add_column("time", ratio=1, no_wrap=True, overflow="ellipsis")
    for row in rows:
        cells = _cells(row)
        mark = "↻ " if row.resumed else ""
        table.add_row(f"{mark}{row.step + 1}", *(cells.get(name, "") for name in columns), _seconds_by_activity(row))
    return table
