"""What the page of a running flow shows: curves and figures as Markdown, sampled rollouts as a table.

The page lives in Prefect's database, so it is small whatever the run: pictures are PNG of a fixed size, at most
`CURVE_POINTS` steps are drawn, texts are cut.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from engine.text.threads import StringThread
from storage.store.artifacts import ArtifactRef
from storage.store.objects import ObjectStore
from storage.store.tables import read_table
from tasks.evaluation.validation_curve import Validation, curves
from tasks.reports.html_report import shown
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
    """The page of a run after `steps`, 1 or more in order. `headline`: one line on how far it is; `links`: caption ->
    url or path."""
    heldout = curves(validations)
    picture = f"![{', '.join([*heldout, *_measures(steps)])}]({curves_uri(steps, heldout)})"
    parts = [f"### Run `{run}`", headline, picture, _figures(steps, heldout), _time_table(steps)]
    shown = [f"- {caption}: {_link(where)}" for caption, where in links.items()]
    if shown:
        parts.append("\n".join(shown))
    return "\n\n".join(parts) + "\n"


def curves_uri(
    steps: Sequence[StepMetrics], heldout: Mapping[str, Sequence[tuple[int, float]]] = MappingProxyType({})
) -> str:
    """The curves as a `data:` URI: Prefect's page needs no other server to show it, and no internet."""
    drawn = thinned(steps, CURVE_POINTS)
    measures = _measures(drawn)
    spread = [step.reward_std for step in drawn]
    panels = [
        Panel(name, [value for _, value in points], steps=[step - 1 for step, _ in points])
        for name, points in heldout.items()
    ] + [
        Panel(name, values, spread if name == "reward" and any(spread) else None) for name, values in measures.items()
    ]
    png = curves_png([step.step for step in drawn], panels, resumed=[step.step for step in drawn if step.resumed])
    return "data:image/png;base64," + base64.b64encode(png).decode()


def thinned(steps: Sequence[StepMetrics], points: int) -> list[StepMetrics]:
    """At most `points` of the steps, evenly chosen, the first and the last among them."""
    if len(steps) <= points:
        return list(steps)
    return [steps[round(at * (len(steps) - 1) / (points - 1))] for at in range(points)]


def sample_rows(
    store: ObjectStore, step: int, rollouts: ArtifactRef, graded: ArtifactRef, *, count: int = SAMPLES_SHOWN
) -> list[dict[str, Any]]:
    """Rollouts of one shard with their grades, `count` of them evenly chosen, for a table artifact."""
    if rollouts.kind == "trajectories":
        return _episode_rows(store, step, rollouts, count)
    drawn = read_table(store, rollouts, ["thread", "completion", "text", "stop_reason"])
    grades = read_table(store, graded, ["reward", "status", "reason"])
    count = min(count, drawn.num_rows)
    chosen = [at * drawn.num_rows // count for at in range(count)]
    rows = zip(drawn.take(chosen).to_pylist(), grades.take(chosen).to_pylist(), strict=True)
    return [sample_row(step, one, grade) for one, grade in rows]


def sample_row(step: int, drawn: Mapping[str, Any], grade: Mapping[str, Any]) -> dict[str, Any]:
    """One rollout and its grade, as read from their tables. The prompt is the text of the turn that was answered."""
    return {
        "step": step + 1,
        "prompt": shown(StringThread.from_json(drawn["thread"]).last_content(), PROMPT_SHOWN),
        "completion": shown(drawn["text"], TEXT_SHOWN),
        "grade": _grade(grade),
        "stopped by": drawn["stop_reason"],
    }


def _episode_rows(store: ObjectStore, step: int, trajectories: ArtifactRef, count: int) -> list[dict[str, Any]]:
    """As `sample_rows`, of episodes: the whole conversation of a segment in place of a completion."""
    table = read_table(store, trajectories, ["thread", "completion", "grades", "status", "reason", "ending"])
    count = min(count, table.num_rows)
    rows = table.take([at * table.num_rows // count for at in range(count)]).to_pylist()
    found = []
    for row in rows:
        turns = StringThread.from_json(row["thread"]).turns
        said = "\n".join(f"{turn.role}: {turn.text}" for turn in turns)
        grade = {"status": row["status"], "reason": row["reason"], "reward": math.fsum(row["grades"])}
        said = shown(said, 2 * TEXT_SHOWN)
        found.append({"step": step + 1, "episode": said, "grade": _grade(grade), "ended by": row["ending"]})
    return found


def _grade(grade: Mapping[str, Any]) -> float | str:
    if grade["status"] == "ok":
        return round(grade["reward"], 4)
    return f"{grade['status']}: {shown(grade['reason'] or '', TEXT_SHOWN)}"


def _measures(steps: Sequence[StepMetrics]) -> dict[str, list[float | None]]:
    """The curves of what the run has, by name."""
    sampled = any(step.reward_mean is not None for step in steps)
    measures: dict[str, list[float | None]] = {
        "reward": [step.reward_mean for step in steps],
        "pairs told apart": [step.pair_accuracy for step in steps],
        "margin of the pairs": [step.pair_margin for step in steps],
        "KL to the reference": [step.kl_mean for step in steps],
        "completion length": [step.completion_length_mean if sampled else None for step in steps],
        "loss": [step.loss for step in steps],
    }
    if not sampled:
        measures["gradient norm"] = [step.grad_norm for step in steps]
    return {name: values for name, values in measures.items() if any(value is not None for value in values)}


def _figures(steps: Sequence[StepMetrics], heldout: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """First, last, lowest and highest of each curve."""
    lines = ["| | first | last | lowest | highest |", "|:--|--:|--:|--:|--:|"]
    measured: dict[str, list[float | None]] = {name: [value for _, value in at] for name, at in heldout.items()}
    for name, values in (measured | _measures(steps)).items():
        known = [value for value in values if value is not None and math.isfinite(value)]
        if known:
            cells = [f"{value:.4g}" for value in (known[0], known[-1], min(known), max(known))]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _time_table(steps: Sequence[StepMetrics]) -> str:
    """Where the time goes: seconds per step and shares, of all steps shown and of the last one."""
    totals = {name: sum(step.seconds.get(name, 0.0) for step in steps) for name in ACTIVITIES}
    whole, last = sum(totals.values()), steps[-1].seconds
    lines = ["| where the time goes | per step | share | last step |", "|:--|--:|--:|--:|"]
    for name, seconds in totals.items():
        share = seconds / whole if whole else 0.0
        lines.append(f"| {name} | {seconds / len(steps):.3f} s | {share:.0%} | {last.get(name, 0.0):.3f} s |")
    lines.append(f"| **together** | {whole / len(steps):.3f} s | | {sum(last.values()):.3f} s |")
    return "\n".join(lines)


def _link(where: str) -> str:
    return f"<{where}>" if where.startswith(("http://", "https://")) else f"`{where}`"
