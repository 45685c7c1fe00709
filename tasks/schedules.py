"""Learning-rate schedules: functions of the step, without state, so a resume has nothing to restore.

`at(step, total)` is exact for 0-based `step` of `total`; calling a schedule with a progress in [0, 1] is the
continuous form for hand-written loops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

WARMUP_RATIO = 0.1
FINAL_RATIO = 0.1


class Schedule(Protocol):
    def at(self, step: int, total: int) -> float:
        """The rate of 0-based `step` of `total`."""
        ...

    def __call__(self, progress: float) -> float:
        """The rate at a progress in [0, 1]."""
        ...


def _cosine(lr: float, q: float) -> float:
    """From lr at q = 0 to lr/10 at q = 1."""
    return FINAL_RATIO * lr + (1 - FINAL_RATIO) * lr * (1 + math.cos(math.pi * q)) / 2


@dataclass(frozen=True)
class CosineScheduler:
    """Linear warm-up over a tenth of the run, then a cosine to a tenth of `lr`."""

    lr: float

    def at(self, step: int, total: int) -> float:
        _check_step(step, total)
        warmup = max(1, round(WARMUP_RATIO * total))
        if step < warmup:
            return self.lr * (step + 1) / warmup
        return _cosine(self.lr, (step - warmup) / max(1, total - 1 - warmup))

    def __call__(self, progress: float) -> float:
        _check_progress(progress)
        if progress < WARMUP_RATIO:
            return self.lr * progress / WARMUP_RATIO
        return _cosine(self.lr, (progress - WARMUP_RATIO) / (1 - WARMUP_RATIO))


@dataclass(frozen=True)
class CosineSchedulerWithoutWarmup:
    """A cosine from `lr` to a tenth of it."""

    lr: float

    def at(self, step: int, total: int) -> float:
        _check_step(step, total)
        return _cosine(self.lr, step / max(1, total - 1))

    def __call__(self, progress: float) -> float:
        _check_progress(progress)
        return _cosine(self.lr, progress)


@dataclass(frozen=True)
class LinearScheduler:
    """A straight line from `lr` to 0 after the last step."""

    lr: float

    def at(self, step: int, total: int) -> float:
        _check_step(step, total)
        return self.lr * (1 - step / total)

    def __call__(self, progress: float) -> float:
        _check_progress(progress)
        return self.lr * (1 - progress)


@dataclass(frozen=True)
class ConstantScheduler:
    """`lr`, always."""

    lr: float

    def at(self, step: int, total: int) -> float:
        _check_step(step, total)
        return self.lr

    def __call__(self, progress: float) -> float:
        _check_progress(progress)
        return self.lr


@dataclass(frozen=True)
class CombinedSchedule:
    """One schedule, then another, each over its own part of the run as if that part were a run of its own."""

    first: Schedule
    second: Schedule
    switch_at: float = 0.5
    """Share of the run that is the first's; at least one step of each, when there are two."""

    def __post_init__(self) -> None:
        if not 0 < self.switch_at < 1:
            raise ValueError(f"switch_at={self.switch_at}, expected a share of the run between 0 and 1, such as 0.5")

    def at(self, step: int, total: int) -> float:
        _check_step(step, total)
        border = min(max(1, round(self.switch_at * total)), max(1, total - 1))
        return self.first.at(step, border) if step < border else self.second.at(step - border, total - border)

    def __call__(self, progress: float) -> float:
        _check_progress(progress)
        if progress < self.switch_at:
            return self.first(progress / self.switch_at)
        return self.second((progress - self.switch_at) / (1 - self.switch_at))


def _check_step(step: int, total: int) -> None:
    if not 0 <= step < total:
        raise ValueError(f"step {step} of {total}: expected a 0-based step below the total; ask for steps of the run")


def _check_progress(progress: float) -> None:
    if not 0 <= progress <= 1:
        raise ValueError(f"progress is {progress}, expected a share of the run between 0 and 1")
