"""Writes docs/results.md and the figures from the lines in results/*.jsonl. It trains and evaluates nothing."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from bench.learning.tasks import GYM, SEEDS, SUMS_TASKS, TASKS, Task
from tasks.evaluation.statistics import t_quantile
from tasks.reports.plots import series_style

FOLDER = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[2] / "docs" / "results.md"
SIDES = {"ours": "Ostinato", "trl": "TRL"}
COMPARISON = "sums"
"""The name of the figure of docs/algorithms.md."""

Line = dict[str, Any]


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.jsonl"


def read(name: str) -> list[Line]:
    """The lines of one file of results; none if nothing was measured."""
    path = path_of(name)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@dataclass(frozen=True)
class Interval:
    """A mean of scores over seeds with the ends of its 95 % interval, Student's t. One value has no interval."""

    mean: float
    half: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        if len(values) == 1:
            return cls(values[0], None)
        error = statistics.stdev(values) / math.sqrt(len(values))
        return cls(statistics.fmean(values), t_quantile(len(values) - 1) * error)

    def __str__(self) -> str:
        if self.half is None:
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"

    @property
    def low(self) -> float:
        """The lower end. Scores are within 0 and 1."""
        return max(0.0, self.mean - (self.half or 0))

    @property
    def high(self) -> float:
        return min(1.0, self.mean + (self.half or 0))


@dataclass(frozen=True)
class Curve:
    """The runs of one side of a task, over their seeds."""

    task: Task
    side: str
    lines: list[Line]
    """The result of each seed."""

    def column(self, name: str, number: int) -> list[float]:
        """One value of the point with this number, per seed."""
        return [line["points"][number][name] for line in self.lines]

    @property
    def points(self) -> range:
        return range(len(self.lines[0]["points"]))

    def score(self, number: int) -> Interval:
        return Interval.of(self.column("score", number))

    def mean(self, name: str, number: int) -> float:
        return statistics.fmean(self.column(name, number))


def curve_of(task: Task, side: str, lines: Iterable[Line]) -> Curve | None:
    """The newest result of each seed with the settings that the task has today. None: there is none."""
    by_seed: dict[int, Line] = {}
    for line in lines:
        if (line["task"], line["side"]) == (task.name, side) and line["settings"] == task.settings:
            by_seed[line["seed"]] = line
    return Curve(task, side, [by_seed[seed] for seed in sorted(by_seed)]) if by_seed else None


# -- tables --------------------------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def rates_table(rates: Sequence[Line]) -> str:
    rows = []
    for line in rates:
        answers = line["prompts"] * line["answers"]
        rows.append([
            f"`{line['dataset']}`", f"`{json.dumps(line['config'])}`", line["answer_from"].replace("_", " "),
            f"{line['greedy']:.3f} ({line['prompts']})", f"{line['sampled']:.3f} ({answers})",
        ])  # fmt: skip
    return table(["dataset", "config", "answer", "greedy (answers)", "temperature 1 (answers)"], rows)


def coverage_table(lines: Sequence[Line]) -> str:
    """How many seeds of each side are measured."""
    rows = []
    for task in TASKS.values():
        cells = [f"`{task.name}`", f"`{task.training}`"]
        for side in SIDES:
            curve = curve_of(task, side, lines)
            count = f"{len(curve.lines) if curve else 0} of {len(SEEDS)}"
            cells.append(count if side in task.sides else "none")
        rows.append(cells)
    return table(["task", "training", *(f"seeds of {name}" for name in SIDES.values())], rows)


def section(task: Task, lines: Sequence[Line]) -> str:
    """The part of the page about one task."""
    curves = [curve for side in SIDES if (curve := curve_of(task, side, lines)) is not None]
    unit = {"sft": "conversations", "dpo": "pairs", "kto": "labelled answers"}.get(task.training, "completions")
    what = "rounds" if task.training == "rft" else "steps"
    text = (
        f"`{task.training}` on {task.rows}. A held-out score is the share of {task.measures}. "
        f"{task.steps} {what} of {task.samples} {unit}, learning rate {task.lr:g}"
    )
    if task.training == "grpo":
        text += f", {task.completions} completions per prompt"
    text += "."
    if task.name.replace("-", "_") in GYM:
        text += f" The most frequent held-out answer alone would score {most_frequent(task):.3f}."
    text = f"## {task.name}\n\n{fill(text, 120)}\n\n"
    if not curves:
        return text + "Not measured yet.\n"
    base = base_score(task, lines)
    before = "-" if base is None else f"{base:.3f}"
    header = ["side", "seeds", "before"]
    header += [f"{curves[0].lines[0]['points'][n]['samples']} {unit}" for n in curves[0].points]
    header += ["sampled tokens", "CPU-s", "CPU-hours"]
    rows = []
    for curve in curves:
        last = curve.points[-1]
        tokens, cpu = curve.mean("sampled_tokens", last), curve.mean("cpu_seconds", last)
        scores = [str(curve.score(number)) for number in curve.points]
        seeds = f"{len(curve.lines)} of {len(SEEDS)}"
        rows.append([SIDES[curve.side], seeds, before, *scores, f"{tokens:,.0f}", f"{cpu:.0f}", f"{cpu / 3600:.3f}"])
    heldout = curves[0].lines[0]["heldout_rows"]
    text += table(header, rows) + f"\n{heldout} held-out rows. "
    text += f"![{task.name}](../bench/learning/results/{task.name}.svg)\n"
    return text


def most_frequent(task: Task) -> float:
    """The share of held-out rows whose answer is the most frequent one: what a constant answer would score."""
    answers = Counter(row["metadata"]["answer"] for row in task.data().heldout)
    return max(answers.values()) / answers.total()


def comparison_table(lines: Sequence[Line]) -> str:
    """The last point of our side of the trainings on the demo's sums."""
    rows = []
    for task in SUMS_TASKS:
        curve = curve_of(task, "ours", lines)
        if curve is not None:
            last = curve.points[-1]
            rows.append([
                LABELS[task.name], f"{len(curve.lines)} of {len(SEEDS)}", str(curve.score(last)),
                f"{curve.mean('samples', last):.0f}", f"{curve.mean('sampled_tokens', last):,.0f}",
                f"{curve.mean('cpu_seconds', last):.0f}",
            ])  # fmt: skip
    return table(["training", "seeds", "held-out score", "completions", "sampled tokens", "CPU-s"], rows)


LABELS = {
    "sums-grpo": "GRPO", "sums-pools": "GRPO, `order: pools`", "sums-rft": "RFT", "sums-distill": "distillation",
}  # fmt: skip


# -- figures -------------------------------------------------------------------------------------------------------


def draw(name: str, curves: Sequence[tuple[str, Curve]], before: float | None, work: str) -> None:
    """Draws held-out scores over `work` (samples or sampled_tokens) and over CPU seconds, as means with the band of
    their interval."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, column in zip(panels, (work, "cpu_seconds"), strict=True):
        for number, (label, curve) in enumerate(curves):
            colour = series_style(number)[0]
            xs = [curve.mean(column, point) for point in curve.points]
            scores = [curve.score(point) for point in curve.points]
            means = [score.mean for score in scores]
            if before is not None:
                xs, means = [0.0, *xs], [before, *means]
            axes.plot(xs, means, color=colour, marker="o", markersize=3, label=f"{label} ({len(curve.lines)} seeds)")
            if scores[0].half is not None:
                lows = [score.low for score in scores]
                highs = [score.high for score in scores]
                axes.fill_between(xs[-len(lows) :], lows, highs, color=colour, alpha=0.15, linewidth=0)
        axes.set_xlabel(column.replace("_", " ").replace("cpu", "CPU"))
        axes.set_ylim(0, 1)
    panels[0].set_ylabel("held-out score")
    panels[0].legend(fontsize=8)
    # the same lines make the same file
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})


def draw_all(lines: Sequence[Line]) -> None:
    for task in TASKS.values():
        curves = [(SIDES[side], curve) for side in SIDES if (curve := curve_of(task, side, lines)) is not None]
        if curves:
            work = "sampled_tokens" if task.samples_completions else "samples"
            draw(task.name, curves, base_score(task, lines), work)
    sums = [(LABELS[t.name], curve) for t in SUMS_TASKS if (curve := curve_of(t, "ours", lines)) is not None]
    if sums:
        draw(COMPARISON, sums, base_score(SUMS_TASKS[0], lines), "sampled_tokens")


def base_score(task: Task, lines: Sequence[Line]) -> float | None:
    """The score before training. The trainings on the demo's sums share one. None: it is not measured."""
    base = curve_of(SUMS_TASKS[0] if task in SUMS_TASKS else task, "base", lines)
    return None if base is None else base.score(0).mean


# -- the page ------------------------------------------------------------------------------------------------------

INTRODUCTION = """# Results

`python -m bench.learning report` writes this page from the lines in `bench/learning/results/`. Each line is one run of
`python -m bench.learning run`; nothing here is entered by hand, and runs that were not made are named below.

The model is SmolLM2-135M-Instruct. Ostinato and TRL train on the same rows with the same number of samples, optimizer,
schedule (warm-up over a tenth, then a cosine) and sampler settings, in bfloat16 with float32 master weights, on one
thread each. One evaluator measures the models of both: greedy answers to held-out prompts, graded by the task's grader.
The score before training is that of the same model for all seeds. Intervals are 95 %, Student's t over the seeds; a
score of one seed has none, and differences between single seeds may be chance: a score on about 100 held-out rows has a
standard error of up to 0.05 from the choice of the rows alone. CPU seconds are user and system time of the process and
its children from its start, without the saving of the models that are evaluated, and without the evaluation. Ostinato
runs here without a Prefect server, which adds about 0.03 s to a step ([bench/README.md](../bench/README.md)). The
machine has two cores and other work, which CPU seconds do not count.

What differs by definition is in [bench/parity](../bench/parity/README.md). In addition, TRL's distillation compares the
whole distributions of student and teacher at each token, ours the log-probabilities of the sampled token.
"""
COVERAGE = """## What is measured

"0 of 3" are runs that are planned and not made; `python -m bench.learning run --missing` makes them. "None" is not
planned: TRL has no pools of prompts and no rounds of rejection sampling, and its GRPOTrainer refuses tools with a chat
template that it does not know, such as that of this model.
"""
SUMS = """## The trainings on the demo's sums

From the same model, on the same prompts. The teacher of the distillation is the last model of sums-grpo with seed 0;
its own training is not counted. The distillation samples one completion per prompt, as TRL's does, and the others
eight, which share the computation of their prompt. The rate and the batches of RFT were changed once, after a run at
1e-5 with batches of 16 ended at 0.250; no other setting was tuned.
"""
RATES = """## Base pass rates

Share of right answers of the model without training, on datasets of reasoning-gym at their easiest settings, with at
most 24 new tokens (`python -m bench.learning rates`). GRPO learns from prompts that are solved at times, so three of
the datasets with rates between 0.05 and 0.6 at temperature 1 are trained on: `chain_sum`, `gcd` and `products`.
"""
GPU_DAY = """## For a machine with GPUs

`ostinato run grpo --config examples/gsm8k.yaml` and `ostinato run grpo --config examples/math.yaml` are GRPO on GSM8K
and MATH. The first lines of both files name published scores, with their sources, to compare with. They were not run.
"""


def page(lines: Sequence[Line], rates: Sequence[Line]) -> str:
    """The text of docs/results.md."""
    parts = [INTRODUCTION, COVERAGE, coverage_table(lines), RATES, rates_table(rates), SUMS, comparison_table(lines)]
    parts += [f"![Trainings on the demo's sums](../bench/learning/results/{COMPARISON}.svg)\n"]
    parts += [section(task, lines) for task in TASKS.values()]
    return "\n".join([*parts, GPU_DAY])


def write() -> None:
    """Writes the page and the figures."""
    lines = read("runs")
    PAGE.write_text(page(lines, read("rates")))
    draw_all(lines)
