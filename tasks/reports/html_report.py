"""The report of a run: one HTML file without scripts or outside references, readable offline and years later."""

import json
import math
import re
from collections.abc import Sequence
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
from tasks.reports.metrics import EvaluationSummary, SampleRollout, StepMetrics
from tasks.reports.plots import Interval, curve_svg, intervals_svg, time_split_svg

TEXT_SHOWN = 4000
"""Characters of a prompt or completion; what is cut is said."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
TEMPLATE = Path(__file__).with_name("report.html.j2")


class ReportData(Frozen):
    """Everything the report shows. What is empty is left out of the page."""

    title: str
    """What ran, for people: "GRPO on chain_sum"."""
    run: str
    """The run's key."""
    steps: tuple[StepMetrics, ...] = ()
    validations: tuple[Validation, ...] = ()
    """What was measured on held-out rows on the way."""
    before: tuple[EvaluationSummary, ...] = ()
    """Held-out evaluations of the starting policy."""
    after: tuple[EvaluationSummary, ...] = ()
    """The same evaluations, by name, of the latest policy."""
    samples_before: tuple[SampleRollout, ...] = ()
    samples_after: tuple[SampleRollout, ...] = ()
    """In the order of `samples_before`: the two are shown side by side."""
    facts: dict[str, JsonValue] = {}
    """Config, policy refs, where the artifacts are. A value that is a mapping becomes a group of its own."""

    @model_validator(mode="after")
    def _pairs_fit(self) -> "ReportData":
        for early, late in _paired(self.before, self.after):
            if early and late and len(early.rewards) != len(late.rewards):
                raise ValueError(
                    f"evaluation {early.name!r} has {len(early.rewards)} prompts before and {len(late.rewards)} after; "
                    "evaluate both policies on the same prompts"
                )
        return self


class Chart(NamedTuple):
    """One figure of the page."""

    title: str
    note: str
    svg: Markup


def render_report(data: ReportData) -> str:
    """The page as HTML text. Equal data gives equal text; everything that came from a model or a user is escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["shown"] = shown
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    comparisons = [_comparison(early, late) for early, late in _paired(data.before, data.after)]
    return template.render(
        data=data,
        tiles=_tiles(data, comparisons),
        charts=[*_validation_charts(data.validations), *_charts(data.steps)],
        time_split=_time_split(data.steps),
        intervals=_intervals(data),
        comparisons=comparisons,
        samples=list(zip_longest(data.samples_before, data.samples_after)),
        groups=_fact_groups(data.facts),
        resumed=[step.step + 1 for step in data.steps if step.resumed],
        masked=sum(step.masked for step in data.steps),
    )


def shown(text: str, limit: int = TEXT_SHOWN) -> str:
    """A model's text fit for a page: cut to `limit` characters, what UTF-8 and HTML cannot carry made visible."""
    cut = len(text) - limit
    if cut > 0:
        text = f"{text[:limit]} … ({cut:,} more characters)"
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def _validation_charts(validations: Sequence[Validation]) -> list[Chart]:
    """A curve per measure, from the policy that the run began with, at 0, on; of one measurement there is none."""
    charts = []
    for title, points in curves(validations).items():
        if len(points) > 1:
            steps, values = [step - 1 for step, _ in points], [value for _, value in points]
            svg = curve_svg(steps, values, label=f"{title} by step")
            charts.append(Chart(title.capitalize(), "", Markup(svg)))
    return charts


def _charts(steps: Sequence[StepMetrics]) -> list[Chart]:
    """The curves of what the run has; a curve without a single value is left out."""
    sampled = any(step.reward_mean is not None for step in steps)
    length = [step.completion_length_mean if sampled else None for step in steps]
    spread = [step.reward_std for step in steps]
    curves: list[tuple[str, str, list[float | None]]] = [
        ("Reward", "mean over graded completions" + ("; band: ± 1 standard deviation" if any(spread) else ""),
         [step.reward_mean for step in steps]),
        ("Pairs told apart", "share of each step's, before it", [step.pair_accuracy for step in steps]),
        ("Margin of the pairs", "mean", [step.pair_margin for step in steps]),
        ("KL to the reference", "mean per token, nats", [step.kl_mean for step in steps]),
        ("Completion length", "mean, tokens", length),
        ("Loss", "", [step.loss for step in steps]),
        ("Gradient norm", "L2, before clipping", [step.grad_norm for step in steps]),
        ("Learning rate", "", [step.learning_rate for step in steps]),
        ("Entropy", "mean per token, nats", [step.entropy for step in steps]),
        ("Sampler and trainer apart", "mean |difference of log-probability| per token, nats",
         [step.logprob_gap for step in steps]),
    ]  # fmt: skip
    sources = sorted({source for step in steps for source in step.by_source})
    curves += [(f"Reward: {one}", "its data source", [step.by_source.get(one) for step in steps]) for one in sources]
    resumed = [step.step for step in steps if step.resumed]
    charts = []
    for title, note, values in curves:
        if all(value is None for value in values):
            continue
        broken = sum(value is not None and not math.isfinite(value) for value in values)
        if broken:
            note = "; ".join(filter(None, (note, f"not finite in {broken} of {len(values)} steps")))
        svg = curve_svg(
            [step.step for step in steps],
            values,
            label=f"{title} by step",
            spread=spread if title == "Reward" and any(spread) else None,
            resumed=resumed,
        )
        charts.append(Chart(title, note, Markup(svg)))
    return charts


def _time_split(steps: Sequence[StepMetrics]) -> Chart | None:
    if not any(step.seconds for step in steps):
        return None
    svg = time_split_svg(
        [step.step for step in steps],
        [step.seconds for step in steps],
        label="Seconds per step by activity",
        resumed=[step.step for step in steps if step.resumed],
    )
    return Chart("Where the time went", "seconds per step", Markup(svg))


def _intervals(data: ReportData) -> Chart | None:
    if not data.before and not data.after:
        return None
    rows = []
    pairs = _paired(data.before, data.after)
    for early, late in pairs:
        for word, evaluation in (("before", early), ("after", late)):
            if evaluation is not None:
                name = f"{shown(evaluation.name)}, {word}" if len(pairs) > 1 else word
                rows.append(Interval(name, evaluation.mean, evaluation.low, evaluation.high, highlight=word == "after"))
    svg = intervals_svg(rows, label="Held-out means with 95 % intervals")
    return Chart("Held-out evaluation", "mean of each policy with its 95 % interval", Markup(svg))


def _paired(
    before: Sequence[EvaluationSummary], after: Sequence[EvaluationSummary]
) -> list[tuple[EvaluationSummary | None, EvaluationSummary | None]]:
    early, late = {item.name: item for item in before}, {item.name: item for item in after}
    return [(early.get(name), late.get(name)) for name in dict.fromkeys([*early, *late])]


class Comparison(NamedTuple):
    """One line of the table: an evaluation before and after, and what changed over the prompts graded in both."""

    name: str
    before: EvaluationSummary | None
    after: EvaluationSummary | None
    difference: PairedDifference | None
    better: int
    worse: int
    verdict: str


def _comparison(before: EvaluationSummary | None, after: EvaluationSummary | None) -> Comparison:
    name = (before or after).name  # type: ignore[union-attr]
    if before is None or after is None:
        return Comparison(name, before, after, None, 0, 0, "one side only")
    pairs = [(b, a) for b, a in zip(before.rewards, after.rewards, strict=True) if b is not None and a is not None]
    if not pairs:
        return Comparison(name, before, after, None, 0, 0, "no prompt was graded in both")
    difference = paired_difference([early for early, _ in pairs], [late for _, late in pairs])
    if not difference.clear:
        verdict = "within chance: the interval holds 0"
    else:
        verdict = "higher, beyond chance" if difference.difference > 0 else "lower, beyond chance"
    better, worse = sum(late > early for early, late in pairs), sum(late < early for early, late in pairs)
    return Comparison(name, before, after, difference, better, worse, verdict)


def _tiles(data: ReportData, comparisons: Sequence[Comparison]) -> list[tuple[str, str, str]]:
    """(caption, figure, small print) of the numbers at the top."""
    tiles = []
    for item in comparisons[:1]:
        if (change := item.difference) is not None:
            tiles.append((item.name, f"{change.before_mean:.3f} → {change.after_mean:.3f}", str(change)))
    if data.steps:
        last, tokens = data.steps[-1], sum(step.completion_tokens for step in data.steps)
        seconds = sum(sum(step.seconds.values()) for step in data.steps)
        rewards = [step.reward_mean for step in data.steps if step.reward_mean is not None]
        if rewards:
            tiles.append(("training reward", f"{rewards[0]:.3f} → {rewards[-1]:.3f}", "first and last step"))
        tiles.append(("steps", f"{last.step + 1}", f"of {last.total_steps}" if last.total_steps else ""))
        completions = sum(step.completions for step in data.steps)
        tiles.append(("tokens", f"{tokens:,}", f"{completions:,} completions" if completions else ""))
        speed = f"{median(step.tokens_per_second for step in data.steps):,.0f} tokens/s in the median step"
        tiles.append(("time in steps", _duration(seconds), speed))
    return tiles


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60:02d} min" if hours else f"{rest // 60} min {rest % 60:02d} s"


def _fact_groups(facts: dict[str, JsonValue]) -> list[tuple[str, list[tuple[str, str]]]]:
    """(heading, rows of dotted key and text); plain values come first, under no heading."""
    plain = [(key, _fact(value)) for key, value in facts.items() if not isinstance(value, dict)]
    groups = [(key, _flat(value)) for key, value in facts.items() if isinstance(value, dict)]
    return [*([("", plain)] if plain else []), *groups]


def _flat(value: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows = []
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            rows += _flat(inner, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", _fact(inner)))
    return rows


def _fact(value: JsonValue) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
