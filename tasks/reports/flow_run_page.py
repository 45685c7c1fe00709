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
from storage.store.tables import read_table
from tasks.evaluation.validation_curve import Validation, curves
from tasks.reports.html_report import text_for_page
from tasks.reports.metrics import ACTIVITIES, StepMetrics
from tasks.reports.plots import Panel, curves_png

CURVE_POINTS = 1000
SAMPLES_SHOWN = 8
PROMPT_SHOWN = 200
TEXT_SHOWN = 600
"""Characters of a completion, or of a grader's reason."""


def run_markdown(
    run: str,
    steps: Sequence[StepMetrics],
    validations: Sequence[Validation] = (),
    *,
    headline: str,
    links: Mapping[str, str],
) -> str:
    """The page of a run as Markdown.

    Args:
        steps: the metrics of the committed steps in order, at least one.
        headline: one line about the progress of the run.
        links: caption -> URL or path.
    """
    heldout = curves(validations)
    curve_names = ", ".join([*heldout, *_measures(steps)])
    picture = f"![{curve_names}]({curves_uri(steps, heldout)})"
    parts = [f"### Run `{run}`", headline, picture, _summary_table(steps, heldout), _time_table(steps)]
    if links:
        parts.append("\n".join(f"- {caption}: {_link(target)}" for caption, target in links.items()))
    return "\n\n".join(parts) + "\n"


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
    return "data:image/png;base64," + base64.b64encode(png).decode()


def thinned(steps: Sequence[StepMetrics], points: int) -> list[StepMetrics]:
    """At most `points` of the steps at even distances, including the first and the last."""
    if len(steps) <= points:
        return list(steps)
    return [steps[round(point * (len(steps) - 1) / (points - 1))] for point in range(points)]


def sample_rows(
    store: ObjectStore, step: int, rollouts: ArtifactRef, graded: ArtifactRef, *, count: int = SAMPLES_SHOWN
) -> list[dict[str, Any]]:
    """Table rows of `count` rollouts of one shard with their grades, at even distances."""
    if rollouts.kind == "trajectories":
        return _episode_rows(store, step, rollouts, count)
    rollout_table = read_table(store, rollouts, ["thread", "completion", "text", "stop_reason"])
    grade_table = read_table(store, graded, ["reward", "status", "reason"])
    # Convert only the chosen rows to Python objects: a shard may have thousands.
    chosen = _even_rows(rollout_table.num_rows, count)
    chosen_rollouts = rollout_table.take(chosen).to_pylist()
    chosen_grades = grade_table.take(chosen).to_pylist()
    pairs = zip(chosen_rollouts, chosen_grades, strict=True)
    return [sample_row(step, rollout, grade) for rollout, grade in pairs]


def _even_rows(total: int, count: int) -> list[int]:
    """Indices of at most `count` of `total` rows, at even distances."""
    count = min(count, total)
    return [number * total // count for number in range(count)]


def sample_row(step: int, rollout: Mapping[str, Any], grade: Mapping[str, Any]) -> dict[str, Any]:
    """The table row of a rollout and its grade. The prompt is the text of the turn that the model answered."""
    return {
        "step": step + 1,
        "prompt": text_for_page(StringThread.from_json(rollout["thread"]).last_content(), PROMPT_SHOWN),
        "completion": text_for_page(rollout["text"], TEXT_SHOWN),
        "grade": _grade(grade),
        "stopped by": rollout["stop_reason"],
    }


def _episode_rows(store: ObjectStore, step: int, trajectories: ArtifactRef, count: int) -> list[dict[str, Any]]:
    """Like `sample_rows` for episodes: a row shows the whole conversation of a segment instead of a completion."""
    table = read_table(store, trajectories, ["thread", "completion", "grades", "status", "reason", "ending"])
    table_rows = []
    for segment in table.take(_even_rows(table.num_rows, count)).to_pylist():
        turns = StringThread.from_json(segment["thread"]).turns
        conversation = "\n".join(f"{turn.role}: {turn.text}" for turn in turns)
        reward = math.fsum(segment["grades"])
        grade = {"status": segment["status"], "reason": segment["reason"], "reward": reward}
        table_rows.append(
            {
                "step": step + 1,
                "episode": text_for_page(conversation, 2 * TEXT_SHOWN),
                "grade": _grade(grade),
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


def _summary_table(steps: Sequence[StepMetrics], heldout: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """A Markdown table with the first, last, lowest and highest value of each curve."""
    curve_values: dict[str, list[float | None]] = {}
    for name, points in heldout.items():
        curve_values[name] = [value for _, value in points]
    lines = ["| | first | last | lowest | highest |", "|:--|--:|--:|--:|--:|"]
    for name, values in (curve_values | _measures(steps)).items():
        finite = [value for value in values if value is not None and math.isfinite(value)]
        if finite:
            cells = [f"{value:.4g}" for value in (finite[0], finite[-1], min(finite), max(finite))]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _time_table(steps: Sequence[StepMetrics]) -> str:
    """A Markdown table of the seconds that each activity takes: per step, as a share, and in the last step."""
    activity_seconds: dict[str, float] = {}
    for activity in ACTIVITIES:
        activity_seconds[activity] = sum(step.seconds.get(activity, 0.0) for step in steps)
    total = sum(activity_seconds.values())
    last = steps[-1].seconds
    lines = ["| where the time goes | per step | share | last step |", "|:--|--:|--:|--:|"]
    for activity, seconds in activity_seconds.items():
        share = seconds / total if total else 0.0
        lines.append(f"| {activity} | {seconds / len(steps):.3f} s | {share:.0%} | {last.get(activity, 0.0):.3f} s |")
    lines.append(f"| **together** | {total / len(steps):.3f} s | | {sum(last.values()):.3f} s |")
    return "\n".join(lines)


def _link(target: str) -> str:
    is_url = target.startswith(("http://", "https://"))
    return f"<{target}>" if is_url else f"`{target}`"
