"""Draws curves as inline SVG for the HTML report, or as PNG for Prefect's page. Equal numbers give equal bytes.

Steps are labelled from 1. The SVG functions return one `<svg>` element without scripts or external references.
"""

import io
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, ScalarFormatter

from tasks.reports.metrics import LANES, StepMetrics

BLUE, INK, GREY, GRID, AMBER = "#1f5f8b", "#26323b", "#7a858c", "#e6e4de", "#c27c0e"
ACTIVITY_COLOURS = {
    "rollout": "#1f5f8b",
    "grade": "#5fa8a0",
    "train": "#c8553d",
    "sync": "#e0a458",
    "storage": "#8a7090",
    "orchestration": "#b9bfc3",
}
STEPS_OF_LANES = 20
"""Steps of a lane chart. With more, the spans would be too narrow to see."""
SMOOTH_FROM = 40
"""Curves of at least this many steps get a second line: the moving mean over a twentieth of the steps."""

_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "ostinato",  # without it element ids are random
    "svg.fonttype": "none",  # text stays text: small, and in the page's font
    "font.size": 9.0,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "path.simplify": True,
}
_drawing = threading.Lock()  # matplotlib's settings are global to the process


def curve_svg(
    steps: Sequence[int],
    values: Sequence[float | None],
    *,
    label: str,
    spread: Sequence[float | None] | None = None,
    resumed: Sequence[int] = (),
) -> str:
    """One curve with a value per step.

    Args:
        values: None, NaN and infinity leave a gap.
        spread: half the height of a band around the curve, such as a standard deviation.
        resumed: 0-based steps with a vertical line before them.
    """

    return _svg(lambda axes: _curve(axes, steps, values, spread, resumed), label=label, size=(5.0, 2.3))


def _curve(
    axes: Axes,
    steps: Sequence[int],
    values: Sequence[float | None],
    spread: Sequence[float | None] | None,
    resumed: Sequence[int],
) -> None:
    xs = [step + 1 for step in steps]
    ys = [_finite(value) for value in values]
    # Draw the band behind the curve.
    if spread is not None:
        half_heights = [_finite(value) for value in spread]
        low = [y - half for y, half in zip(ys, half_heights, strict=True)]
        high = [y + half for y, half in zip(ys, half_heights, strict=True)]
        axes.fill_between(xs, low, high, color=BLUE, alpha=0.12, linewidth=0)
    # Draw the curve: with dots if it is short, pale under its moving mean if it is long.
    marker = "o" if len(xs) <= 30 else None
    if len(xs) >= SMOOTH_FROM:
        axes.plot(xs, ys, color=BLUE, linewidth=0.8, alpha=0.4, marker=marker, ms=3)
        axes.plot(xs, _moving_mean(ys, len(ys) // 40), color=BLUE, linewidth=1.8)
    else:
        axes.plot(xs, ys, color=BLUE, linewidth=1.6, alpha=1, marker=marker, ms=3)
    _mark_resumed(axes, resumed)
    _step_axis(axes, xs)


class Panel(NamedTuple):
    """One curve of a picture with several. The fields are the arguments of `curve_svg`."""

    title: str
    values: Sequence[float | None]
    spread: Sequence[float | None] | None = None
    steps: Sequence[int] | None = None
    """The steps of the values, if they differ from those of the other panels."""


def curves_png(steps: Sequence[int], panels: Sequence[Panel], *, resumed: Sequence[int] = ()) -> bytes:
    """The panels as a PNG, two per row, on a white background that is legible on a dark page, too."""
    rows = math.ceil(len(panels) / 2)

    def draw(figure: Figure) -> None:
        for place, panel in enumerate(panels, start=1):
            axes = figure.add_subplot(rows, 2, place)
            _plain_frame(axes)
            axes.set_title(_verbatim(panel.title), loc="left", fontsize=9.5, color=INK)
            _curve(axes, steps if panel.steps is None else panel.steps, panel.values, panel.spread, resumed)

    return _png((10.0, 0.2 + 2.2 * rows), draw)


def time_split_svg(
    steps: Sequence[int],
    seconds: Sequence[Mapping[str, float]],
    *,
    label: str,
    resumed: Sequence[int] = (),
) -> str:
    """Seconds per step, stacked by activity. Each step is a column, so that a slow step stands out."""

    def draw(axes: Axes) -> None:
        # Draw one area per activity, whose points are the two edges of each column. A bar per step and activity would
        # make the SVG of a long run very large.
        edges = []
        for step in steps:
            edges += [step + 0.5, step + 1.5]
        bottom = [0.0] * len(edges)
        for activity, colour in ACTIVITY_COLOURS.items():
            heights = []
            for step_seconds in seconds:
                heights += [_at_least_zero(step_seconds.get(activity, 0.0))] * 2
            top = [low + height for low, height in zip(bottom, heights, strict=True)]
            axes.fill_between(edges, bottom, top, color=colour, linewidth=0, label=activity)
            bottom = top
        axes.set_ylim(bottom=0)
        axes.set_ylabel("seconds")
        _mark_resumed(axes, resumed)
        _step_axis(axes, [step + 1 for step in steps])
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1.0), ncols=6, frameon=False, handlelength=1, handleheight=1,
            columnspacing=1.4, borderaxespad=0.2,
        )  # fmt: skip

    return _svg(draw, label=label, size=(10.2, 2.7))


class LaneChart(NamedTuple):
    """When the trainer, the samplers and the graders worked in a few steps."""

    steps: Sequence[int]
    lanes: Sequence[Mapping[str, Sequence[tuple[float, float]]]]
    """Of each step, the (begin, end) of the spans of each activity, in seconds since the step began."""
    seconds: Sequence[float]
    """The duration of each step."""

    def svg(self, *, label: str) -> str:
        return _svg(self._draw, label=label, size=(10.2, 2.2))

    def png(self) -> bytes:
        return _png((10.0, 2.2), lambda figure: self._draw(figure.add_subplot()))

    def _draw(self, axes: Axes) -> None:
        begins = [sum(self.seconds[:number]) for number in range(len(self.steps) + 1)]
        for height, activity in enumerate(LANES):
            bars = []
            for begin, lanes in zip(begins, self.lanes, strict=False):
                bars += [(begin + start, end - start) for start, end in lanes.get(activity, ())]
            axes.broken_barh(bars, (height - 0.35, 0.7), facecolor=ACTIVITY_COLOURS[activity], linewidth=0)
        for step, begin in zip(self.steps, begins, strict=False):
            axes.axvline(begin, color=GREY, linewidth=0.6)
            axes.text(begin, len(LANES) - 0.55, f" {step + 1}", color=GREY, fontsize=8, va="bottom")
        axes.grid(visible=False)
        axes.set_yticks(range(len(LANES)), list(LANES.values()))
        axes.set_ylim(-0.5, len(LANES) - 0.5)
        axes.set_xlim(0, begins[-1])
        axes.set_xlabel("seconds")


def lane_chart(steps: Sequence[StepMetrics]) -> LaneChart | None:
    """The chart of the last steps; None without max_staleness."""
    drawn = [(step, step.lanes) for step in steps[-STEPS_OF_LANES:] if step.lanes is not None]
    if not drawn:
        return None
    seconds = [sum(step.seconds.values()) for step, _ in drawn]
    return LaneChart([step.step for step, _ in drawn], [lanes for _, lanes in drawn], seconds)


class Series(NamedTuple):
    """One of several curves in a figure."""

    name: str
    steps: Sequence[int]
    values: Sequence[float | None]


SERIES_COLOURS = ("#1f5f8b", "#c8553d", "#5fa8a0", "#e0a458", "#8a7090", "#4c9f50", "#b04a78", "#6b7a8f")
SERIES_DASHES = ("-", "--", ":", "-.")


def series_style(number: int) -> tuple[str, str]:
    """(colour, dash) of the n-th curve. They repeat only after every colour was used with every dash."""
    return SERIES_COLOURS[number % len(SERIES_COLOURS)], SERIES_DASHES[number // len(SERIES_COLOURS) % 4]


def curves_svg(series: Sequence[Series], *, label: str) -> str:
    """Several curves in one figure. A long curve is drawn as its moving mean over a twentieth of its steps. The figure
    has no legend; the n-th curve has the style `series_style(n)`."""

    def draw(axes: Axes) -> None:
        all_xs: list[int] = []
        for number, curve in enumerate(series):
            colour, dash = series_style(number)
            xs = [step + 1 for step in curve.steps]
            ys = [_finite(value) for value in curve.values]
            # Several noisy curves in one figure cannot be told apart, so a long one is drawn smooth only.
            if len(ys) >= SMOOTH_FROM:
                ys = _moving_mean(ys, len(ys) // 40)
            marker = "o" if len(ys) <= 30 and len(series) <= 4 else None
            axes.plot(xs, ys, color=colour, linestyle=dash, linewidth=1.5, marker=marker, ms=3)
            all_xs += xs
        _step_axis(axes, all_xs)

    return _svg(draw, label=label, size=(5.0, 2.6))


class Interval(NamedTuple):
    """A mean with its confidence interval; low and high are None if the mean is of a single value."""

    name: str
    mean: float
    low: float | None
    high: float | None
    highlight: bool


def intervals_svg(rows: Sequence[Interval], *, label: str) -> str:
    """Means with their intervals, one per line, on a common axis."""

    def draw(axes: Axes) -> None:
        for line, row in enumerate(rows):
            colour = BLUE if row.highlight else GREY
            if row.low is not None and row.high is not None:
                axes.plot([row.low, row.high], [line, line], color=colour, linewidth=2.4, alpha=0.55)
            axes.plot([row.mean], [line], color=colour, marker="o", ms=7)
        # The first row is at the top.
        axes.set_yticks(range(len(rows)), [_verbatim(row.name) for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", color=GRID, linewidth=0.8)
        axes.spines["left"].set_visible(False)
        axes.margins(x=0.08)

    return _svg(draw, label=label, size=(10.2, 0.7 + 0.32 * len(rows)))


def _svg(draw: Callable[[Axes], None], *, label: str, size: tuple[float, float]) -> str:
    with _drawing, matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        _plain_frame(axes)
        draw(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    # Leave out the XML declaration, which must not stand inside HTML, and add a label for screen readers.
    text = buffer.getvalue()
    return f'<svg role="img" aria-label="{escape(label)}"' + text[text.index("<svg") + len("<svg") :]


def _png(size: tuple[float, float], draw: Callable[[Figure], None]) -> bytes:
    # Without the lock, two threads would mix the settings of matplotlib, which are global to the process.
    with _drawing, matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained", facecolor="white")
        draw(figure)
        # Without the name of the software in the metadata, the bytes do not depend on matplotlib's version number.
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=100, metadata={"Software": None})
    return buffer.getvalue()


def _plain_frame(axes: Axes) -> None:
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _step_axis(axes: Axes, xs: Sequence[int]) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))
    if xs:
        axes.set_xlim(min(xs) - 0.6, max(xs) + 0.6)
    # Numbers below 1e-3 and from 1e4 on get a common power of ten, which keeps the labels short.
    formatter = ScalarFormatter(useMathText=False)
    formatter.set_powerlimits((-3, 4))
    axes.yaxis.set_major_formatter(formatter)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))


def _mark_resumed(axes: Axes, resumed: Sequence[int]) -> None:
    for step in resumed:
        axes.axvline(step + 0.5, color=AMBER, linewidth=1, linestyle=(0, (3, 2)))


def _verbatim(text: str) -> str:
    # matplotlib parses text between dollars as mathematics and may raise an error.
    return text.replace("$", r"\$")


def _moving_mean(values: Sequence[float], reach: int) -> list[float]:
    """Mean over `reach` values on either side of each value. Near the ends the window is shorter, but symmetric, so
    that a trend is not bent."""
    means = []
    for centre in range(len(values)):
        half_width = min(reach, centre, len(values) - 1 - centre)
        window = values[centre - half_width : centre + half_width + 1]
        finite = [value for value in window if math.isfinite(value)]
        means.append(sum(finite) / len(finite) if finite else math.nan)
    return means


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else math.nan


def _at_least_zero(value: float) -> float:
    return value if math.isfinite(value) and value > 0 else 0.0
