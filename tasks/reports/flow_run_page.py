"""Content of the page of a running flow in Prefect: curves and figures as Markdown, sampled rollouts as table rows.

The page is stored in Prefect's database, so its size is bounded: the picture is a PNG of fixed size, at most
`CURVE_POINTS` steps are drawn, and texts are truncated. `flows.display` sends it to Prefect.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from engine.text.threads import StringThread
from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore
from storage.store.tables import read_step_table
from tasks.evaluation.validation_curve import Validation, curves
from tasks.reports.advice import advice
from tasks.reports.html_report import text_for_page
from tasks.reports.metrics import ACTIVITIES, StepMetrics
from tasks.reports.plots import Panel, curves_png, lane_chart

CURVE_POINTS = 1000
SAMPLES_SHOWN = 8
PROMPT_SHOWN = 200
TEXT_SHOWN = 600
"""Characters of a completion, or of a grader's reason."""
SKIPPED_SHOWN = 10
"""Number of skipped updates that the page lists."""


def run_markdown(
    run: str,
    steps: Sequence[StepMetrics],
    validations: Sequence[Validation] = (),
    *,
    links: Mapping[str, str],
) -> str:
    """The page of a run as Markdown. Parts without content are left out.

    Args:
        steps: the metrics of the committed steps in order, at least one.
        validations: the measurements on held-out rows in order.
        links: caption -> URL or path.
    """
    heldout = curves(validations)
    # one point is no curve; the table has its value
    drawn = {name: points for name, points in heldout.items() if len(points) > 1}
    picture = f"![{', '.join([*drawn, *_measures(steps)])}]({curves_uri(steps, drawn)})"
    link_lines = [f"- {caption}: {_link(target)}" for caption, target in links.items()]
    parts = [
        f"### Run `{run}`",
        "\n".join(link_lines),
        _heldout_table(heldout),
        picture,
        _summary_table(steps),
        _advice_list(steps),
        _skipped_list(steps),
        _time_table(steps),
        _lane_picture(steps),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def curves_uri(
    steps: Sequence[StepMetrics], heldout: Mapping[str, Sequence[tuple[int, float]]] = MappingProxyType({})
) -> str:
    """The curves as a PNG in a `data:` URI, which Prefect's page shows without another server or the internet."""
    drawn_steps = thinned(steps, CURVE_POINTS)
    # A measurement of the policy after k steps is drawn at the last of them, step k - 1.
    panels = []
    for name, points in heldout.items():
        panels.append(Panel(name, [value for _, value in points], steps=[policy - 1 for policy, _ in points]))
    reward_stds = [step.reward_std for step in drawn_steps]
    for name, values in _measures(drawn_steps).items():
        has_band = name == "reward" and any(reward_stds)
        panels.append(Panel(name, values, reward_stds if has_band else None))
    resumed = [step.step for step in drawn_steps if step.resumed]
    png = curves_png([step.step for step in drawn_steps], panels, resumed=resumed)
    return _data_uri(png)


def _lane_picture(steps: Sequence[StepMetrics]) -> str:
    """When trainer, samplers and graders worked. Empty without max_staleness."""
    chart = lane_chart(steps)
    return f"![trainer, samplers and graders over time]({_data_uri(chart.png())})" if chart else ""


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def thinned(steps: Sequence[StepMetrics], points: int) -> list[StepMetrics]:
    """At most `points` of the steps at even distances, including the first and the last."""
    if len(steps) <= points:
        return list(steps)
    return [steps[round(point * (len(steps) - 1) / (points - 1))] for point in range(points)]


def sample_rows(
    store: ObjectStore, rollouts: ArtifactRef, graded: ArtifactRef, *, count: int = SAMPLES_SHOWN
) -> list[dict[str, Any]]:
    """Table rows of `count` rollouts of one shard with their grades, at even distances."""
    if graded == rollouts:  # graded by their environment
        return _episode_rows(store, rollouts, count)
    rollout_table = read_step_table(store, rollouts, ["thread", "completion", "text", "stop_reasons"])
    grade_table = read_step_table(store, graded, ["reward", "status", "reason"])
    # Convert only the chosen rows to Python objects: a shard may have thousands.
    chosen = _even_rows(rollout_table.num_rows, count)
    chosen_rollouts = rollout_table.take(chosen).to_pylist()
    chosen_grades = grade_table.take(chosen).to_pylist()
    pairs = zip(chosen_rollouts, chosen_grades, strict=True)
    return [sample_row(rollout, grade) for rollout, grade in pairs]


def _even_rows(total: int, count: int) -> list[int]:
    """Indices of at most `count` of `total` rows, at even distances."""
    count = min(count, total)
    return [number * total // count for number in range(count)]


def sample_row(rollout: Mapping[str, Any], grade: Mapping[str, Any]) -> dict[str, Any]:
    """The table row of a rollout and its grade. The prompt is the text of the turn that the model answered."""
    return {
        "grade": _grade(grade),
        "prompt": text_for_page(StringThread.from_json(rollout["thread"]).last_content(), PROMPT_SHOWN),
        "completion": text_for_page(rollout["text"], TEXT_SHOWN),
        "stopped by": rollout["stop_reasons"][-1],
    }


def _episode_rows(store: ObjectStore, rollouts: ArtifactRef, count: int) -> list[dict[str, Any]]:
    """Like `sample_rows` for episodes: a row shows the whole conversation of a segment instead of a completion."""
    table = read_step_table(store, rollouts, ["thread", "completion", "grades", "status", "reason", "ending"])
    table_rows = []
    for segment in table.take(_even_rows(table.num_rows, count)).to_pylist():
        turns = StringThread.from_json(segment["thread"]).turns
        conversation = "\n".join(f"{turn.role}: {turn.text_with_calls}" for turn in turns)
        reward = math.fsum(segment["grades"])
        grade = {"status": segment["status"], "reason": segment["reason"], "reward": reward}
        table_rows.append(
            {
                "grade": _grade(grade),
                "episode": text_for_page(conversation, 2 * TEXT_SHOWN),
                "ended by": segment["ending"],
            }
        )
    return table_rows


def _grade(grade: Mapping[str, Any]) -> float | str:
    """The reward, or the status and reason of a grade that has none."""
    if grade["status"] == "ok":
        return round(grade["reward"], 4)
    return f"{grade['status']}: {text_for_page(grade['reason'] or '', TEXT_SHOWN)}"


_MEASURES: dict[str, Callable[[StepMetrics], float | None]] = {
    "reward": lambda step: step.reward_mean,
    "pairs ranked correctly": lambda step: step.pair_accuracy,
    "margin of the pairs": lambda step: step.pair_margin,
    "KL to the reference": lambda step: step.kl_mean,
    "KL to the teacher": lambda step: step.teacher_kl,
    "divergence from the teacher": lambda step: step.divergence,
    "completion length": lambda step: step.completion_length_mean,
    "loss": lambda step: step.loss,
    "gradient norm": lambda step: step.grad_norm,
}
"""Curve name -> value of a step, in the order of the page."""


def _measures(steps: Sequence[StepMetrics]) -> dict[str, list[float | None]]:
    """Curve name -> value per step, for the measures that this run has."""
    # The picture has room for few curves: the completion length with rewards, the gradient norm without.
    has_rewards = any(step.reward_mean is not None for step in steps)
    omitted = "gradient norm" if has_rewards else "completion length"
    measures = {}
    for name, value_of in _MEASURES.items():
        values = [value_of(step) for step in steps]
        if name != omitted and any(value is not None for value in values):
            measures[name] = values
    return measures


def _heldout_table(heldout: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """A Markdown table with the value of each measure on held-out rows before training and the latest one. Empty
    without measurements."""
    lines = ["| held-out rows | before training | latest | after steps | change |", "|:--|--:|--:|--:|--:|"]
    lines += [f"| {' | '.join(cells)} |" for cells in heldout_rows(heldout)]
    return "\n".join(lines) if heldout else ""


def heldout_rows(heldout: Mapping[str, Sequence[tuple[int, float]]]) -> list[tuple[str, str, str, str, str]]:
    """(measure, value before training, latest value, steps before the latest, change) of each measure on held-out rows.
    A value that was not measured is a dash."""
    rows = []
    for name, points in heldout.items():
        (first_step, first), (last_step, last) = points[0], points[-1]
        before = _figure(first) if first_step == 0 else "–"
        latest, steps_done = (_figure(last), str(last_step)) if last_step else ("–", "–")
        change = _figure(last - first, sign="+") if first_step == 0 < last_step else "–"
        rows.append((name, before, latest, steps_done, change))
    return rows


def _figure(value: float, sign: str = "") -> str:
    """Three decimals, as in the report; three significant digits of a small number."""
    return format(value, f"{sign}.3f" if value == 0 or abs(value) >= 0.001 else f"{sign}.3g")


def _summary_table(steps: Sequence[StepMetrics]) -> str:
    """A Markdown table with the first, last, lowest and highest value of each measure of the steps."""
    lines = ["| training | first | last | lowest | highest |", "|:--|--:|--:|--:|--:|"]
    for name, values in _measures(steps).items():
        finite = [value for value in values if value is not None and math.isfinite(value)]
        if finite:
            cells = [f"{value:.4g}" for value in (finite[0], finite[-1], min(finite), max(finite))]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _advice_list(steps: Sequence[StepMetrics]) -> str:
    """A Markdown list of what to do about the last steps. Empty if nothing is to be done."""
    lines = [f"- {line}" for line in advice(steps[0], steps)]
    return "\n".join(["**advice**", "", *lines]) if lines else ""


def _skipped_list(steps: Sequence[StepMetrics]) -> str:
    """A Markdown list of the last updates that were skipped, and why. Empty if there are none."""
    lines = [line for step in steps for line in step.skipped_lines()]
    return "\n".join(["**skipped updates**", "", *(f"- {line}" for line in lines[-SKIPPED_SHOWN:])]) if lines else ""


def _time_table(steps: Sequence[StepMetrics]) -> str:
    """A Markdown table of the seconds that each activity takes: per step, as a share, and in the last step. Empty if
    no time was measured."""
    activity_seconds: dict[str, float] = {}
    for activity in ACTIVITIES:
        activity_seconds[activity] = sum(step.seconds.get(activity, 0.0) for step in steps)
    total = sum(activity_seconds.values())
    if not total:
        return ""
    last = steps[-1].seconds
    lines = ["| where the time goes | per step | share | last step |", "|:--|--:|--:|--:|"]
    for activity, seconds in activity_seconds.items():
        # an algorithm that does not sample has no rollouts and no grades
        if seconds:
            per_step, share = seconds / len(steps), seconds / total
            lines.append(f"| {activity} | {per_step:.3f} s | {share:.0%} | {last.get(activity, 0.0):.3f} s |")
    lines.append(f"| **together** | {total / len(steps):.3f} s | | {sum(last.values()):.3f} s |")
    return "\n".join(lines)


def _link(target: str) -> str:
    is_url = target.startswith(("http://", "https://"))
    return f"<{target}>" if is_url else f"`{target}`"
