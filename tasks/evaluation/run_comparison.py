"""Compares several runs: their curves, the differences of their configs, and a ranking with confidence intervals.

All data comes from the store. Runs are ranked by the evaluations of their last policies on held-out prompts, paired by
prompt. A run without such an evaluation is shown but not ranked, because the rewards of training steps are not
independent samples.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from storage.chain.run_record import read_run
from storage.errors import ObjectNotFound
from storage.inspect.lineage import last_policy_of_run
from storage.serialization import Frozen, flatten
from storage.store.artifacts import find_artifact
from storage.store.objects import ObjectStore
from storage.store.tables import read_table
from tasks.evaluation.statistics import Mean, PairedDifference, mean_interval, paired_difference
from tasks.evaluation.validation_curve import evaluation_keys, reward_by_prompt
from tasks.reports.html_report import TEMPLATE as REPORT_TEMPLATE
from tasks.reports.html_report import Chart, text_for_page
from tasks.reports.metrics import StepMetrics
from tasks.reports.plots import Series, curves_svg, series_style
from tasks.reports.step_metrics import read_metrics

TEMPLATE = Path(__file__).with_name("comparison.html.j2")
_TABLE_NAME = re.compile(r"(\d{6,})-([0-9a-f]{12})")
"""Last part of the key of an evaluation table: the policy's step and the digest of the plan."""
CURVES = {
    "reward_mean": "Reward",
    "kl_mean": "KL to the reference",
    "teacher_kl": "KL to the teacher",
    "divergence": "Divergence from the teacher",
    "completion_length_mean": "Completion length",
    "loss": "Loss",
    "grad_norm": "Gradient norm",
    "entropy": "Entropy",
    "learning_rate": "Learning rate",
}
"""Field of StepMetrics -> title of its figure."""
MAX_LABEL_KEYS = 4
"""Runs whose configs differ in more keys than this get no label."""
MAX_LABEL_VALUE = 24
"""Values with more characters than this are left out of a run's label."""


class ComparedRun(Frozen):
    """The data of one run in a comparison."""

    run: str
    policy: str
    steps: tuple[StepMetrics, ...]
    config: dict[str, Any]
    """Dotted key -> value, of the part of the config that affects the result."""
    plan: str | None
    """Digest of the evaluation's plan; None if the last policy was not evaluated."""
    rewards: dict[str, float]
    """Held-out reward of the last policy by prompt id. Prompts without a grade are left out."""

    @property
    def mean(self) -> Mean | None:
        return mean_interval(list(self.rewards.values())) if self.rewards else None


class Ranked(Frozen):
    """The rank of a run: its mean, and its difference to the best run."""

    run: str
    mean: Mean | None
    difference: PairedDifference | None
    """Reward of this run minus reward of the best run, over the prompts of both. None for the best run itself, and if
    the runs have no prompt in common."""
    verdict: str


def collect_runs(store: ObjectStore, runs: Sequence[str]) -> list[ComparedRun]:
    """The data of the runs, in the same order. Raises ObjectNotFound for a run without a chain, CorruptArtifact."""
    return [_collect(store, run) for run in runs]


def rank(runs: Sequence[ComparedRun]) -> list[Ranked]:
    """The best run first; runs that were not evaluated last. The best run is chosen by the same rewards by which it is
    compared, so its lead is overestimated; the intervals are not widened for that."""
    evaluated = [run for run in runs if run.rewards]
    evaluated.sort(key=lambda run: -fmean(run.rewards.values()))
    ranking = [_compare_with_best(run, evaluated[0]) for run in evaluated]
    for run in runs:
        if not run.rewards:
            ranking.append(Ranked(run=run.run, mean=None, difference=None, verdict="not evaluated"))
    return ranking


def config_differences(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """(dotted key, its value in each run) of the keys whose values are not all equal. The value of a run that does not
    have the key is "–"."""
    names: set[str] = set()
    for run in runs:
        names |= run.config.keys()
    differences = []
    for name in sorted(names):
        values = [_text(run.config[name]) if name in run.config else "–" for run in runs]
        if len(set(values)) > 1:
            differences.append((name, values))
    return differences


def render_comparison(title: str, runs: Sequence[ComparedRun], *, store_url: str = "") -> str:
    """The page as HTML, without scripts or external references. Equal runs give equal text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["text_for_page"] = text_for_page
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    differences = config_differences(runs)
    legend = []
    for number, run in enumerate(runs):
        key = Markup(_key_svg(number))
        legend.append({"run": run.run, "policy": run.policy, "key": key, "label": _label(differences, number)})
    return template.render(
        title=title,
        style=Markup(_style()),
        store=store_url,
        runs=legend,
        number={run.run: number for number, run in enumerate(runs)},
        ranked=rank(runs),
        charts=_charts(runs),
        differences=differences,
        plans=len({run.plan for run in runs if run.plan is not None}),
    )


def _collect(store: ObjectStore, run: str) -> ComparedRun:
    head = last_policy_of_run(store, run)
    try:
        semantic = read_run(store, run).semantic
    except ObjectNotFound:
        semantic = {}  # a fork has no run record before it runs
    plan, rewards = _evaluation(store, run, head.stage, head.step)
    return ComparedRun(
        run=run,
        policy=head.uri,
        steps=tuple(read_metrics(store, run, head.stage, steps=head.step)),
        config=flatten(semantic),
        plan=plan,
        rewards=rewards,
    )


def _evaluation(store: ObjectStore, run: str, stage: str, step: int) -> tuple[str | None, dict[str, float]]:
    """(digest of the plan, reward by prompt) of the evaluation at `step`, or (None, {}) if there is none. If there are
    several, the first one by name."""
    for key in evaluation_keys(store, run, stage):
        name = _TABLE_NAME.fullmatch(key.rpartition("/")[2])
        if name is None or int(name[1]) != step:
            continue
        # Validations of the loss have names of the same form, but no rewards.
        ref = find_artifact(store, key)
        if ref is None or ref.kind != "evaluation":
            continue
        rewards = reward_by_prompt(read_table(store, ref, ["prompt_id", "reward"]).to_pylist())
        return name[2], {prompt: reward for prompt, reward in rewards.items() if reward is not None}
    return None, {}


def _compare_with_best(run: ComparedRun, best: ComparedRun) -> Ranked:
    if run is best:
        return Ranked(run=run.run, mean=run.mean, difference=None, verdict="the highest mean")
    common = [prompt for prompt in best.rewards if prompt in run.rewards]
    if not common:
        return Ranked(run=run.run, mean=run.mean, difference=None, verdict="evaluated on other prompts")
    best_rewards = [best.rewards[prompt] for prompt in common]
    run_rewards = [run.rewards[prompt] for prompt in common]
    difference = paired_difference(best_rewards, run_rewards)
    if not difference.clear:
        verdict = "within chance of the best"
    elif difference.difference < 0:
        verdict = "lower, beyond chance"
    else:
        # The best run has the higher mean over its own prompts, and yet not over the prompts of both.
        verdict = "higher on the prompts of both"
    return Ranked(run=run.run, mean=run.mean, difference=difference, verdict=verdict)


def _charts(runs: Sequence[ComparedRun]) -> list[Chart]:
    """A chart per measure that at least one run has."""
    charts = []
    for field, title in CURVES.items():
        series = []
        has_values = False
        for run in runs:
            values = [getattr(metrics, field) for metrics in run.steps]
            series.append(Series(run.run, [metrics.step for metrics in run.steps], values))
            has_values = has_values or any(value is not None for value in values)
        if has_values:
            charts.append(Chart(title, "", Markup(curves_svg(series, label=f"{title} by step"))))
    return charts


def _label(differences: Sequence[tuple[str, list[str]]], number: int) -> str:
    """The values of run `number` that differ between the runs, if they are short. The name of a run of a sweep is a
    digest, which does not show them."""
    if len(differences) > MAX_LABEL_KEYS:
        return ""
    parts = []
    for name, values in differences:
        if len(values[number]) <= MAX_LABEL_VALUE:
            parts.append(f"{name}={values[number]}")
    return ", ".join(parts)


def _key_svg(number: int) -> str:
    """A short line in the style of curve `number`, for the legend."""
    colour, dash = series_style(number)
    dashes = {"-": "none", "--": "6 3", ":": "1.5 3", "-.": "6 3 1.5 3"}[dash]
    return (
        '<svg width="34" height="10" style="display:inline;width:34px" aria-hidden="true"><line x1="1" x2="33" y1="5" '
        f'y2="5" stroke="{escape(colour)}" stroke-width="2.5" stroke-dasharray="{dashes}"/></svg>'
    )


def _style() -> str:
    """The style sheet of a run's report, which this page uses, too."""
    page = REPORT_TEMPLATE.read_text(encoding="utf-8")
    return page[page.index("<style>") + len("<style>") : page.index("</style>")]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
