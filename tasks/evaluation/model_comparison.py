"""Plain code behind the compare task: per-prompt rewards of several models, their means, and how sure differences are.

A prompt's reward is the mean over its graded completions; prompts, not completions, are what intervals count, since
completions of one prompt are not independent draws of the task.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import fmean
from typing import Any

from storage.serialization import Frozen
from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore
from storage.store.tables import read_table
from tasks.evaluation.statistics import PairedDifference, mean_interval, paired_difference


class Cell(Frozen):
    """Where one model's completions on one dataset are, and one grader's grades of them."""

    model: str
    """name@version"""
    dataset: str
    grader: str
    rollouts: tuple[ArtifactRef, ...]
    graded: tuple[ArtifactRef, ...]


class Score(Frozen):
    """One model on one dataset by one grader: the mean over prompts and its 95 % interval."""

    model: str
    dataset: str
    grader: str
    mean: float | None
    """None when not one completion could be graded."""
    low: float | None
    high: float | None
    prompts: int
    """With a grade."""
    completions: int
    masked: int
    """Completions without a grade."""


class Difference(Frozen):
    """`second` less `first`, over the prompts that both have a grade for."""

    dataset: str
    grader: str
    first: str
    second: str
    paired: PairedDifference | None
    """`before` is the first model, `after` the second. None: no prompt has a grade of both."""

    @property
    def cell(self) -> str:
        return f"{self.dataset}/{self.grader}"

    @property
    def verdict(self) -> str:
        if self.paired is None:
            return "no prompt in common"
        if not self.paired.clear:
            return "within chance"
        return "higher, beyond chance" if self.paired.difference > 0 else "lower, beyond chance"


class Comparison(Frozen):
    """What an evaluation found."""

    scores: tuple[Score, ...]
    differences: tuple[Difference, ...]
    """Every pair of models, in the order they were given."""

    def between(self, first: str, second: str) -> list[Difference]:
        return [d for d in self.differences if (d.first, d.second) == (first, second)]


def prompt_rows(store: ObjectStore, cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """One row per model, dataset, grader and prompt: a `comparison` table."""
    rows: list[dict[str, Any]] = []
    for cell in cells:
        rewards: dict[tuple[int, str], list[float | None]] = defaultdict(list)
        for ref in cell.graded:
            for grade in read_table(store, ref, ["prompt_index", "prompt_id", "reward"]).to_pylist():
                rewards[grade["prompt_index"], grade["prompt_id"]].append(grade["reward"])
        names = {"model": cell.model, "dataset": cell.dataset, "grader": cell.grader}
        for (index, prompt), given in rewards.items():
            known = [reward for reward in given if reward is not None]
            rows.append(
                names
                | {
                    "prompt_index": index,
                    "prompt_id": prompt,
                    "reward": fmean(known) if known else None,
                    "graded": len(known),
                    "completions": len(given),
                }
            )
    return rows


def compare(rows: Sequence[dict[str, Any]]) -> Comparison:
    """Scores and paired differences of the rows of a `comparison` table; models in the order of their first row."""
    by_cell: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        by_cell[row["dataset"], row["grader"]][row["model"]].append(row)
    scores, differences = [], []
    for (dataset, grader), models in by_cell.items():
        scores += [_score(model, dataset, grader, own) for model, own in models.items()]
        known = {
            model: {row["prompt_id"]: row["reward"] for row in own if row["reward"] is not None}
            for model, own in models.items()
        }
        for first, second in combinations(models, 2):
            both = [prompt for prompt in known[first] if prompt in known[second]]
            early, late = ([known[model][prompt] for prompt in both] for model in (first, second))
            paired = paired_difference(early, late) if both else None
            names = {"dataset": dataset, "grader": grader, "first": first, "second": second}
            differences.append(Difference(**names, paired=paired))
    return Comparison(scores=tuple(scores), differences=tuple(differences))


def _score(model: str, dataset: str, grader: str, rows: Sequence[dict[str, Any]]) -> Score:
    known = [row["reward"] for row in rows if row["reward"] is not None]
    mean = mean_interval(known) if known else None
    completions = sum(row["completions"] for row in rows)
    return Score(
        model=model,
        dataset=dataset,
        grader=grader,
        mean=mean.mean if mean else None,
        low=mean.low if mean else None,
        high=mean.high if mean else None,
        prompts=len(known),
        completions=completions,
        masked=completions - sum(row["graded"] for row in rows),
    )


def score_table(comparison: Comparison) -> list[dict[str, Any]]:
    """One line per score, for a table artifact."""
    return [
        {
            "dataset": score.dataset,
            "grader": score.grader,
            "model": score.model,
            "mean": None if score.mean is None else round(score.mean, 4),
            "95 % interval": _interval(score.low, score.high),
            "prompts": score.prompts,
            "completions": score.completions,
            "without a grade": score.masked,
        }
        for score in comparison.scores
    ]


def comparison_markdown(comparison: Comparison) -> str:
    """Two tables: what each model scores, and how any two differ on the same prompts."""
    lines = ["| dataset | grader | model | mean | 95 % interval | prompts |", "|-|-|-|-:|-|-:|"]
    for row in score_table(comparison):
        mean = "–" if row["mean"] is None else f"{row['mean']:.3f}"
        cells = (row["dataset"], row["grader"], f"`{row['model']}`", mean, row["95 % interval"], row["prompts"])
        lines.append(_line(cells))
    if comparison.differences:
        lines += ["", "| dataset | grader | from | to | change | 95 % interval | prompts | |", "|-|-|-|-|-:|-|-:|-|"]
    for d in comparison.differences:
        change = "–" if d.paired is None else f"{d.paired.difference:+.3f}"
        interval = "–" if d.paired is None else _interval(d.paired.low, d.paired.high, sign="+")
        n = d.paired.n if d.paired else 0
        lines.append(_line((d.dataset, d.grader, f"`{d.first}`", f"`{d.second}`", change, interval, n, d.verdict)))
    if comparison.differences:
        lines += ["", "Changes are means over the prompts that both models have a grade for (paired t interval)."]
    return "\n".join(lines) + "\n"


def comparison_sentences(comparison: Comparison) -> str:
    """A sentence per difference, for where a table is too wide."""
    return "\n".join(f"- {_sentence(d)}" for d in comparison.differences) + "\n"


def _sentence(d: Difference) -> str:
    """The means are of the prompts that both models have a grade for."""
    cell = f"**{d.dataset}**, graded by **{d.grader}**"
    if d.paired is None:
        return f"{cell}: `{d.first}` and `{d.second}` have {d.verdict}."
    models = f"`{d.first}` {d.paired.before_mean:.3f}, `{d.second}` {d.paired.after_mean:.3f}"
    interval = _interval(d.paired.low, d.paired.high, sign="+")
    change = f"change {d.paired.difference:+.3f} (95 % interval {interval})"
    return f"{cell}: {models}, {change} on {d.paired.n} prompts: {d.verdict}."


def _line(cells: Iterable[Any]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _interval(low: float | None, high: float | None, sign: str = "") -> str:
    return "–" if low is None or high is None else f"{low:{sign}.3f} to {high:{sign}.3f}"
