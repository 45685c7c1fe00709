"""Plans how to divide GPUs between trainer and samplers, and which lag hides what, from the measured steps of a run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from flows.cli.output import add_rows, table
from flows.configs.overrides import ConfigError
from storage.inspect.lineage import last_policy_of_run
from storage.store.objects import ObjectStore
from tasks.reports.metrics import LANES, StepMetrics
from tasks.reports.step_metrics import read_metrics

STEPS = 20
"""Newest steps whose medians are taken."""
LAGS = (0, 1, 2, 4)
"""Values of `rules.max_staleness` that are compared."""
WORTH = 0.05
"""A larger lag is proposed only if it saves this share of a step: stale tokens cost learning."""
ASSUMPTION = (
    "Assumes that sampling and training speed up in proportion to their GPUs, and that a step takes the longer of the "
    "two, or the sum of all parts divided by max_staleness + 1. Without max_staleness, time in which a run sampled and "
    "graded counts half for each."
)


@dataclass(frozen=True)
class LaneSeconds:
    """Seconds in which a step is sampled, graded and trained, and the GPUs that do it."""

    sample: float
    grade: float
    train: float
    train_gpus: int
    sample_gpus: int

    def divided(self, train_gpus: int) -> LaneSeconds:
        """The same GPUs, `train_gpus` of which train."""
        sample_gpus = self.train_gpus + self.sample_gpus - train_gpus
        return replace(
            self,
            sample=self.sample * self.sample_gpus / sample_gpus,
            train=self.train * self.train_gpus / train_gpus,
            train_gpus=train_gpus,
            sample_gpus=sample_gpus,
        )

    def step_seconds(self, lag: int) -> float:
        """Seconds per step with `rules.max_staleness` of `lag`. Then lag + 1 steps are under way at a time, each in one
        part after the other."""
        return max(self.sample, self.train, (self.sample + self.grade + self.train) / (lag + 1))


def measured_lanes(store: ObjectStore, run: str, *, train_gpus: int, sample_gpus: int) -> LaneSeconds:
    """The medians of a run's newest steps. Raises ConfigError if it has no step that sampled."""
    head = last_policy_of_run(store, run)
    steps = read_metrics(store, run, head.stage, steps=head.step, first=max(0, head.step - STEPS))
    sampled = [step for step in steps if _seconds(step, "rollout") and not step.resumed]
    if not sampled:
        raise ConfigError(
            f"run {run} has no measured step that sampled (its newest policy is of step {head.step}); give a run of a "
            "recipe that samples, with a finished step"
        )
    medians = {lane: statistics.median(_seconds(step, lane) for step in sampled) for lane in LANES}
    return LaneSeconds(medians["rollout"], medians["grade"], medians["train"], train_gpus, sample_gpus)


def _seconds(step: StepMetrics, lane: str) -> float:
    if step.lanes is None:  # a step without max_staleness
        return step.seconds.get(lane, 0.0)
    return sum(end - begin for begin, end in step.lanes.get(lane, ()))


def divisions(lanes: LaneSeconds, width: int) -> list[LaneSeconds]:
    """Every division of the GPUs between trainer and samplers. `width`: GPUs of one sampler."""
    gpus = lanes.train_gpus + lanes.sample_gpus
    return [lanes.divided(gpus - sampling) for sampling in range(width, gpus, width)]


def best(lanes: LaneSeconds, width: int) -> tuple[LaneSeconds, int]:
    """The fastest division, and the smallest lag that is about as fast as larger ones."""
    fastest = min(divisions(lanes, width), key=lambda division: division.step_seconds(LAGS[-1]))
    bound = fastest.step_seconds(LAGS[-1]) / (1 - WORTH)
    lag = next(lag for lag in LAGS if fastest.step_seconds(lag) <= bound)
    return min(divisions(lanes, width), key=lambda division: division.step_seconds(lag)), lag


def lane_table(lanes: LaneSeconds, width: int) -> Any:
    """Seconds per step for each division and lag."""
    headings = [f"max_staleness={lag}>" for lag in LAGS]
    rows = [
        [f"{division.train_gpus} + {division.sample_gpus}", *(f"{division.step_seconds(lag):.1f}" for lag in LAGS)]
        for division in divisions(lanes, width)
    ]
    return add_rows(table("seconds per step", "GPUs of the trainer + of samplers", *headings), rows)


def lane_lines(run: str, lanes: LaneSeconds, width: int) -> Iterator[str]:
    """What was measured, and what is proposed."""
    yield (
        f"run {run}, medians of its newest steps: sampled for {lanes.sample:.1f} s, graded for {lanes.grade:.1f} s, "
        f"trained for {lanes.train:.1f} s; {lanes.train_gpus} GPUs train and {lanes.sample_gpus} sample"
    )
    division, lag = best(lanes, width)
    yield (
        f"fastest: {division.train_gpus} GPUs train and {division.sample_gpus} sample with rules.max_staleness={lag}, "
        f"{division.step_seconds(lag):.1f} s a step; as it is, with max_staleness=0: {lanes.step_seconds(0):.1f} s"
    )
    yield ASSUMPTION


def lane_document(lanes: LaneSeconds, width: int) -> dict[str, Any]:
    """The same as a JSON document."""
    division, lag = best(lanes, width)
    seconds = [
        {
            "train_gpus": each.train_gpus, "sample_gpus": each.sample_gpus,
            "step_seconds": {str(lag): each.step_seconds(lag) for lag in LAGS},
        }
        for each in divisions(lanes, width)
    ]  # fmt: skip
    proposal = {"train_gpus": division.train_gpus, "sample_gpus": division.sample_gpus, "max_staleness": lag}
    measured = {"sample": lanes.sample, "grade": lanes.grade, "train": lanes.train}
    return {"measured_seconds": measured, "divisions": seconds, "proposal": proposal}
