"""Renders the report of a run as one HTML file without scripts or external references, so that it opens offline.

`tasks.report` collects the data from the store; `report.html.j2` is the template.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from pydantic import JsonValue, model_validator

from storage.serialization import Frozen
from tasks.evaluation.statistics import PairedDifference, paired_difference
from tasks.evaluation.validation_curve import Validation, curves
from tasks.reports.advice import advice
from tasks.reports.metrics import EvaluationSummary, SampleRollout, StepMetrics
from tasks.reports.plots import Interval, curve_svg, intervals_svg, lane_chart, time_split_svg

TEXT_SHOWN = 4000
"""Characters of a prompt or completion that are shown; a longer text ends with the number of missing characters."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
TEMPLATE = Path(__file__).with_name("report.html.j2")


class ReportData(Frozen):
    """The data of a report. Empty parts are left out of the page."""

    title: str
    """Title for readers, such as "GRPO on chain_sum"."""
    run: str
    """The run's key."""
    steps: tuple[StepMetrics, ...] = ()
    validations: tuple[Validation, ...] = ()
    """Measurements on held-out rows during training."""
    before: tuple[EvaluationSummary, ...] = ()
    """Held-out evaluations of the starting policy."""
    after: tuple[EvaluationSummary, ...] = ()
    """The same evaluations, by name, of the latest policy."""
    samples_before: tuple[SampleRollout, ...] = ()
    samples_after: tuple[SampleRollout, ...] = ()
    """The same prompts in the order of `samples_before`; both are shown side by side."""
    facts: dict[str, JsonValue] = {}
    """Config, policy references, locations of artifacts. A value that is a mapping becomes a group with a heading."""

    @model_validator(mode="after")
    def _pairs_fit(self) -> "ReportData":
        for early, late in _before_and_after(self.before, self.after):
            if early and late and len(early.rewards) != len(late.rewards):
                raise ValueError(
                    f"evaluation {early.name!r} has {len(early.rewards)} prompts before and {len(late.rewards)} after; "
                    "evaluate both policies on the same prompts"
                )
        return self


class Chart(NamedTuple):
    """A figure of the page with its title and a note."""

    title: str
    note: str
    svg: Markup


def render_report(data: ReportData) -> str:
    """The page as HTML. Equal data gives equal text, and all text of models and users is escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["text_for_page"] = text_for_page
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    comparisons = [_comparison(early, late) for early, late in _before_and_after(data.before, data.after)]
    return template.render(
        data=data,
        tiles=_tiles(data, comparisons),
        charts=[*_validation_charts(data.validations), *_training_charts(data.steps)],
        time_split=_time_split(data.steps),
        lanes=_lanes(data.steps),
        intervals=_interval_chart(data),
        comparisons=comparisons,
        samples=list(zip_longest(data.samples_before, data.samples_after)),
        groups=_fact_groups(data.facts),
        resumed=[step.step + 1 for step in data.steps if step.resumed],
        masked=sum(step.masked for step in data.steps),
        skipped=[line for step in data.steps for line in step.skipped_lines()],
        advice=advice(next(iter(data.steps), None), data.steps),
    )


def all_charts(steps: Sequence[StepMetrics], validations: Sequence[Validation]) -> list[Chart]:
    """Every chart of a run: measurements on held-out rows, training, the time of the steps, and who worked when."""
    charts = [*_validation_charts(validations), *_training_charts(steps)]
    return charts + [chart for chart in (_time_split(steps), _lanes(steps)) if chart is not None]


def text_for_page(text: str, limit: int = TEXT_SHOWN) -> str:
    """Truncates the text to `limit` characters and replaces characters that UTF-8 or HTML cannot represent."""
    missing = len(text) - limit
    if missing > 0:
        text = f"{text[:limit]} … ({missing:,} more characters)"
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def _validation_charts(validations: Sequence[Validation]) -> list[Chart]:
    """A chart per measure that was taken at least twice."""
    charts = []
    for title, points in curves(validations).items():
        if len(points) > 1:
            steps = [policy_number - 1 for policy_number, _ in points]  # policy k exists after step k - 1
            values = [value for _, value in points]
            svg = curve_svg(steps, values, label=f"{title} by step")
            charts.append(Chart(title.capitalize(), "", Markup(svg)))
    return charts


_REWARD, _LENGTH = "Reward", "Completion length"
_MEASURES: tuple[tuple[str, str, Callable[[StepMetrics], float | None]], ...] = (
    (_REWARD, "mean over graded completions", lambda step: step.reward_mean),
    ("Pairs ranked correctly", "share of the step's pairs", lambda step: step.pair_accuracy),
    ("Margin of the pairs", "mean", lambda step: step.pair_margin),
    ("KL to the reference", "mean per token, nats", lambda step: step.kl_mean),
    ("KL to the teacher", "mean per token, nats", lambda step: step.teacher_kl),
    ("Divergence from the teacher", "mean per token, nats", lambda step: step.divergence),
    (_LENGTH, "mean, tokens", lambda step: step.completion_length_mean),
    ("Loss", "", lambda step: step.loss),
    ("Gradient norm", "L2, before clipping", lambda step: step.grad_norm),
    ("Learning rate", "", lambda step: step.learning_rate),
    ("Entropy", "mean per token, nats", lambda step: step.entropy),
    ("Groups of equal rewards", "share of the groups", lambda step: step.equal_groups),
    ("Cut completions", "share that ended at max_new_tokens", lambda step: step.truncated),
    ("Turns", "answers per episode", lambda step: step.turns_mean),
    ("Segments", "sequences per episode of an agent", lambda step: step.segments_mean),
    ("Failed attempts", "per episode of an agent", lambda step: step.failed_attempts_mean),
    ("Clipped tokens", "share of the tokens", lambda step: step.clip_fraction),
    (
        "Gap between sampler and trainer",
        "mean |difference of log-probability| per token, nats",
        lambda step: step.logprob_gap,
    ),
    ("Lag of the policy that sampled", "mean per token, steps", lambda step: step.lag_mean),
    ("Idle sampler", "share of the step's time", lambda step: step.sampler_idle),
    ("Idle trainer", "share of the step's time", lambda step: step.trainer_idle),
    ("Masked tokens", "share of the tokens of the forward pass", lambda step: step.masked_token_fraction),
    ("Effective sample size", "share of the tokens of the forward pass", lambda step: step.effective_sample_size),
)
"""(title, note, value of a step) of each chart, in the order of the page."""


def _training_curves(steps: Sequence[StepMetrics]) -> list[tuple[str, str, list[float | None]]]:
    """(title, note, value per step) of each curve. A value is None if the step does not have the measure."""
    training_curves: list[tuple[str, str, list[float | None]]] = []
    for title, note, value_of in _MEASURES:
        training_curves.append((title, note, [value_of(step) for step in steps]))
    # One more curve of the reward for each data source, and for each part of the rewards.
    for field, note in (("by_source", "of this data source"), ("reward_parts", "this part of it, before its weight")):
        names: set[str] = set()
        for step in steps:
            names |= getattr(step, field).keys()
        for name in sorted(names):
            training_curves.append((f"Reward: {name}", note, [getattr(step, field).get(name) for step in steps]))
    return training_curves


def _training_charts(steps: Sequence[StepMetrics]) -> list[Chart]:
    """A chart per measure that has at least one value."""
    numbers = [step.step for step in steps]
    resumed = [step.step for step in steps if step.resumed]
    reward_stds = [step.reward_std for step in steps]
    has_rewards = any(step.reward_mean is not None for step in steps)
    charts = []
    for title, note, values in _training_curves(steps):
        if all(value is None for value in values):
            continue
        # A run without rewards trains on the completions of its dataset, so their length says nothing about the model.
        if title == _LENGTH and not has_rewards:
            continue
        notes = [note] if note else []
        spread = None
        if title == _REWARD and any(reward_stds):
            spread = reward_stds
            notes.append("band: ± 1 standard deviation")
        # A value that is not finite leaves a gap in the curve; the note explains the gap.
        not_finite = sum(value is not None and not math.isfinite(value) for value in values)
        if not_finite:
            notes.append(f"not finite in {not_finite} of {len(values)} steps")
        svg = curve_svg(numbers, values, label=f"{title} by step", spread=spread, resumed=resumed)
        charts.append(Chart(title, "; ".join(notes), Markup(svg)))
    return charts


def _time_split(steps: Sequence[StepMetrics]) -> Chart | None:
    """Seconds of each activity per step; None if no times were recorded."""
    if not any(step.seconds for step in steps):
        return None
    svg = time_split_svg(
        [step.step for step in steps],
        [step.seconds for step in steps],
        label="Seconds per step by activity",
        resumed=[step.step for step in steps if step.resumed],
    )
    return Chart("Where the time went", "seconds per step", Markup(svg))


def _lanes(steps: Sequence[StepMetrics]) -> Chart | None:
    chart = lane_chart(steps)
    if chart is None:
        return None
    note = f"the last {len(chart.steps)} steps; a line and a number where each begins"
    return Chart("Who worked when", note, Markup(chart.svg(label="Trainer, samplers and graders over time")))


def _interval_chart(data: ReportData) -> Chart | None:
    """The held-out means before and after with their confidence intervals; None without an evaluation."""
    if not data.before and not data.after:
        return None
    rows = []
    pairs = _before_and_after(data.before, data.after)
    for before, after in pairs:
        # The evaluation needs a name only if there are several.
        prefix = ""
        if len(pairs) > 1:
            prefix = text_for_page((before or after).name) + ", "  # type: ignore[union-attr]
        if before is not None:
            rows.append(Interval(f"{prefix}before", before.mean, before.low, before.high, highlight=False))
        if after is not None:
            rows.append(Interval(f"{prefix}after", after.mean, after.low, after.high, highlight=True))
    svg = intervals_svg(rows, label="Held-out means with 95 % intervals")
    return Chart("Held-out evaluation", "mean of each policy with its 95 % interval", Markup(svg))


def _before_and_after(
    before: Sequence[EvaluationSummary], after: Sequence[EvaluationSummary]
) -> list[tuple[EvaluationSummary | None, EvaluationSummary | None]]:
    """(before, after) of each evaluation by name; None on the side that does not have it."""
    before_by_name = {evaluation.name: evaluation for evaluation in before}
    after_by_name = {evaluation.name: evaluation for evaluation in after}
    names = dict.fromkeys([*before_by_name, *after_by_name])
    return [(before_by_name.get(name), after_by_name.get(name)) for name in names]


class Comparison(NamedTuple):
    """A row of the table: an evaluation before and after, and the change over the prompts that were graded in both."""

    name: str
    before: EvaluationSummary | None
    after: EvaluationSummary | None
    difference: PairedDifference | None
    better: int
    """Number of prompts with a higher reward after."""
    worse: int
    """Number of prompts with a lower reward after."""
    verdict: str


def _comparison(before: EvaluationSummary | None, after: EvaluationSummary | None) -> Comparison:
    name = (before or after).name  # type: ignore[union-attr]
    if before is None or after is None:
        return Comparison(name, before, after, None, 0, 0, "one side only")
    # Use only the prompts that have a grade in both, and count those whose reward changed.
    rewards_before, rewards_after = [], []
    better = worse = 0
    for reward_before, reward_after in zip(before.rewards, after.rewards, strict=True):
        if reward_before is not None and reward_after is not None:
            rewards_before.append(reward_before)
            rewards_after.append(reward_after)
            better += reward_after > reward_before
            worse += reward_after < reward_before
    if not rewards_before:
        return Comparison(name, before, after, None, 0, 0, "no prompt was graded in both")
    difference = paired_difference(rewards_before, rewards_after)
    if not difference.clear:
        verdict = "within chance: the interval contains 0"
    elif difference.difference > 0:
        verdict = "higher, beyond chance"
    else:
        verdict = "lower, beyond chance"
    return Comparison(name, before, after, difference, better, worse, verdict)


def _tiles(data: ReportData, comparisons: Sequence[Comparison]) -> list[tuple[str, str, str]]:
    """(caption, number, small print) of each tile at the top of the page."""
    tiles = []
    if comparisons and (change := comparisons[0].difference) is not None:
        tiles.append((comparisons[0].name, f"{change.before_mean:.3f} → {change.after_mean:.3f}", str(change)))
    # Reward, totals and speed of the training steps.
    if data.steps:
        rewards = [step.reward_mean for step in data.steps if step.reward_mean is not None]
        if rewards:
            tiles.append(("training reward", f"{rewards[0]:.3f} → {rewards[-1]:.3f}", "first and last step"))
        last = data.steps[-1]
        tiles.append(("steps", f"{last.step + 1}", f"of {last.total_steps}" if last.total_steps else ""))
        tokens = sum(step.completion_tokens for step in data.steps)
        completions = sum(step.completions for step in data.steps)
        seconds = sum(sum(step.seconds.values()) for step in data.steps)
        tiles.append(("tokens", f"{tokens:,}", f"{completions:,} completions" if completions else ""))
        speed = f"{median(step.tokens_per_second for step in data.steps):,.0f} tokens/s in the median step"
        tiles.append(("time in steps", _duration(seconds), speed))
    return tiles


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _fact_groups(facts: dict[str, JsonValue]) -> list[tuple[str, list[tuple[str, str]]]]:
    """(heading, rows of dotted key and text). Values that are not mappings come first, under an empty heading."""
    ungrouped = []
    groups = []
    for key, value in facts.items():
        if isinstance(value, dict):
            groups.append((key, _flatten(value)))
        else:
            ungrouped.append((key, _fact_text(value)))
    return [("", ungrouped), *groups] if ungrouped else groups


def _flatten(value: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """(dotted key, text) of every value in nested mappings."""
    rows = []
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            rows += _flatten(inner, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", _fact_text(inner)))
    return rows


def _fact_text(value: JsonValue) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
