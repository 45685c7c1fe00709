"""Several runs beside one another: their curves, what their configs differ in, and which is better how surely.

Everything is read from the store. Runs are judged by the evaluations of their last policies on held-out prompts, paired
by prompt; runs without one are printable, and not judged: rewards of training steps are no independent draws.
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
from storage.serialization import Frozen
from storage.store import key_patterns, keys
from storage.store.artifacts import find_artifact
from storage.store.objects import ObjectStore
from storage.store.tables import read_table
from tasks.evaluation.statistics import Mean, PairedDifference, mean_interval, paired_difference
from tasks.evaluation.validation_curve import reward_by_prompt
from tasks.reports.html_report import TEMPLATE as REPORT_TEMPLATE
from tasks.reports.html_report import Chart, printable
from tasks.reports.metrics import StepMetrics
from tasks.reports.plots import Series, curves_svg, series_style
from tasks.reports.step_metrics import read_metrics

TEMPLATE = Path(__file__).with_name("comparison.html.j2")
_EVALUATION = re.compile(r"(\d{6,})-([0-9a-f]{12})")
CURVES = {
    "reward_mean": "Reward",
    "kl_mean": "KL to the reference",
    "completion_length_mean": "Completion length",
    "loss": "Loss",
    "grad_norm": "Gradient norm",
    "entropy": "Entropy",
    "learning_rate": "Learning rate",
}
"""Field of StepMetrics -> title of its figure."""
LABELLED_KEYS, LABEL_LENGTH = 4, 24
"""Up to so many differing keys, with values of so many characters, name a run."""


class ComparedRun(Frozen):
    """One run as the comparison sees it."""

    run: str
    policy: str
    steps: tuple[StepMetrics, ...]
    config: dict[str, Any]
    """What decides the result, flat: dotted key -> value."""
    plan: str | None
    """Digest of the evaluation's plan; None: the last policy was not evaluated."""
    rewards: dict[str, float]
    """Held-out reward of the last policy by prompt id; prompts without a grade are left out."""

    @property
    def mean(self) -> Mean | None:
        return mean_interval(list(self.rewards.values())) if self.rewards else None


class Ranked(Frozen):
    """A run against the best one."""

    run: str
    mean: Mean | None
    difference: PairedDifference | None
    """This run less the best, on the prompts of both; None for the best itself, and where nothing can be paired."""
    verdict: str


def collect_runs(store: ObjectStore, runs: Sequence[str]) -> list[ComparedRun]:
    """The runs as they stand, in the order given. Raises ObjectNotFound for one without a chain, CorruptArtifact."""
    return [_collect(store, run) for run in runs]


def rank(runs: Sequence[ComparedRun]) -> list[Ranked]:
    """Best first; runs that were not evaluated last. The best is chosen by the figures that it is compared by, which
    flatters it: intervals are not widened for that."""
    judged = sorted((run for run in runs if run.rewards), key=lambda run: -fmean(run.rewards.values()))
    ranked = [_against(run, judged[0]) for run in judged]
    rest = (Ranked(run=run.run, mean=None, difference=None, verdict="not evaluated") for run in runs if not run.rewards)
    return [*ranked, *rest]


def config_differences(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """(dotted key, its value in each run) of the keys whose values are not all equal; absent values are "–"."""
    names = sorted({name for run in runs for name in run.config})
    rows = [(name, [_said(run.config[name]) if name in run.config else "–" for run in runs]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def render_comparison(title: str, runs: Sequence[ComparedRun], *, store_url: str = "") -> str:
    """The page as HTML text: no scripts, nothing from outside. Equal runs give equal text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["printable"] = printable
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    differences = config_differences(runs)
    return template.render(
        title=title,
        style=Markup(_style()),
        store=store_url,
        runs=[
            {"run": run.run, "policy": run.policy, "key": Markup(_key_svg(n)), "label": _label(differences, n)}
            for n, run in enumerate(runs)
        ],
        number={run.run: n for n, run in enumerate(runs)},
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
        semantic = {}  # a fork that did not run yet
    plan, rewards = _evaluation(store, run, head.stage, head.step)
    return ComparedRun(
        run=run,
        policy=head.uri,
        steps=tuple(read_metrics(store, run, head.stage, steps=head.step)),
        config=_flat(semantic),
        plan=plan,
        rewards=rewards,
    )


def _evaluation(store: ObjectStore, run: str, stage: str, step: int) -> tuple[str | None, dict[str, float]]:
    """(digest of the plan, reward by prompt) of the evaluation of that step; the first by name where there are more."""
    for info in store.list(f"{keys.stage_prefix(run, stage)}evaluations/"):
        owner = key_patterns.artifact_of_manifest(info.key)
        named = _EVALUATION.fullmatch(owner.rpartition("/")[2]) if owner else None
        if owner is None or named is None or int(named[1]) != step:
            continue
        ref = find_artifact(store, owner)
        if ref is None or ref.kind != "evaluation":
            continue
        rows = read_table(store, ref, ["prompt_id", "reward"]).to_pylist()
        rewards = reward_by_prompt(rows)
        return named[2], {prompt: reward for prompt, reward in rewards.items() if reward is not None}
    return None, {}


def _against(run: ComparedRun, best: ComparedRun) -> Ranked:
    if run is best:
        return Ranked(run=run.run, mean=run.mean, difference=None, verdict="the highest mean")
    both = [prompt for prompt in best.rewards if prompt in run.rewards]
    if not both:
        return Ranked(run=run.run, mean=run.mean, difference=None, verdict="evaluated on other prompts")
    difference = paired_difference([best.rewards[p] for p in both], [run.rewards[p] for p in both])
    verdict = "lower, beyond chance" if difference.clear and difference.difference < 0 else "within chance of the best"
    if difference.clear and difference.difference > 0:  # the prompts of both favour it
        verdict = "higher on the prompts of both"
    return Ranked(run=run.run, mean=run.mean, difference=difference, verdict=verdict)


def _charts(runs: Sequence[ComparedRun]) -> list[Chart]:
    charts = []
    for field, title in CURVES.items():
        series = [Series(run.run, [s.step for s in run.steps], [getattr(s, field) for s in run.steps]) for run in runs]
        if any(value is not None for one in series for value in one.values):
            charts.append(Chart(title, "", Markup(curves_svg(series, label=f"{title} by step"))))
    return charts


def _label(differences: Sequence[tuple[str, list[str]]], number: int) -> str:
    """What makes the run another one, where that is short: a run of a sweep is named by a digest."""
    if len(differences) > LABELLED_KEYS:
        return ""
    return ", ".join(f"{name}={values[number]}" for name, values in differences if len(values[number]) <= LABEL_LENGTH)


def _key_svg(number: int) -> str:
    """The stroke of a curve, for the legend."""
    colour, dash = series_style(number)
    dashes = {"-": "none", "--": "6 3", ":": "1.5 3", "-.": "6 3 1.5 3"}[dash]
    return (
        '<svg width="34" height="10" style="display:inline;width:34px" aria-hidden="true"><line x1="1" x2="33" y1="5" '
        f'y2="5" stroke="{escape(colour)}" stroke-width="2.5" stroke-dasharray="{dashes}"/></svg>'
    )


def _style() -> str:
    """The look of a run's report: one home of the style sheet."""
    page = REPORT_TEMPLATE.read_text(encoding="utf-8")
    return page[page.index("<style>") + len("<style>") : page.index("</style>")]


def _flat(value: dict[str, Any], at: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, inner in value.items():
        where = f"{at}.{name}" if at else name
        found |= _flat(inner, where) if isinstance(inner, dict) and inner else {where: inner}
    return found


def _said(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
