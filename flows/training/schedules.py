"""Schedules of the learning rate and of the weight decay: functions of the step, without state, so a resume has nothing
to restore.

`at(step, total)` is exact for 0-based `step` of `total`: the training classes use it, and a hand-written loop that
knows its length can too. A warm-up of W steps gives lr (k + 1) / W at step k < W, so that no step has a rate of 0; the
shape then has the other steps to itself. W is `warmup_steps`, or max(1, round(warmup_ratio x total)), or 0.

Calling a schedule with a progress in [0, 1], which is k / total before step k, is the continuous form for loops that do
not know their length. Its warm-up is that of a run of 100 steps: lr (100 progress + 1) / W, at most lr, with W of 100
steps. With the default warm-up of a tenth the first step has lr / 10.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

WARMUP_RATIO = 0.1
FINAL_RATIO = 0.1
STEPS_OF_PROGRESS = 100
"""Steps of the run whose warm-up the continuous form has."""


class Schedule(Protocol):
    def at(self, step: int, total: int) -> float:
        """The rate of 0-based `step` of `total`."""
        ...

    def __call__(self, progress: float) -> float:
        """The rate at a progress in [0, 1]."""
        ...


def is_endless(schedule: Schedule) -> bool:
    """Whether its rates do not depend on the length of the run, so that a run without one can have it."""
    return bool(getattr(schedule, "endless", False))


def is_fixed(schedule: Schedule, weight_decay: float | Schedule) -> bool:
    """Whether neither the rate nor the weight decay depends on the length of the run."""
    return is_endless(schedule) and (isinstance(weight_decay, float | int) or is_endless(weight_decay))


@dataclass(frozen=True)
class _Warmed:
    """A warm-up, then a shape: `_after` at an integer, `_share` in the continuous form. Both in units of `lr`'s."""

    lr: float
    warmup_ratio: float = 0.0
    """Share of the run."""
    warmup_steps: int | None = None
    """Instead of warmup_ratio."""

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_ratio <= 1:
            raise ValueError(f"warmup_ratio={self.warmup_ratio}, expected a share of the run between 0 and 1")
        if self.warmup_steps is not None and self.warmup_steps < 0:
            raise ValueError(f"warmup_steps={self.warmup_steps}, expected 0 or more")

    def warmup(self, total: int) -> int:
        """Steps that warm up."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return max(1, round(self.warmup_ratio * total)) if self.warmup_ratio else 0

    def at(self, step: int, total: int) -> float:
        _check_step(step, total)
        warmup = self.warmup(total)
        if step < warmup:
            return self.lr * (step + 1) / warmup
        return self._after(step - warmup, total - warmup, warmup)

    def __call__(self, progress: float) -> float:
        _check_progress(progress)
        if self.warmup_steps:
            raise ValueError(
                f"a warm-up of {self.warmup_steps} steps is no share of a run; ask at(step, total), or give "
                "warmup_ratio"
            )
        ratio = 0.0 if self.warmup_steps == 0 else self.warmup_ratio
        if progress < ratio:
            return self.lr * min(1.0, (progress * STEPS_OF_PROGRESS + 1) / self.warmup(STEPS_OF_PROGRESS))
        return self._share(progress, ratio)

    def _after(self, step: int, total: int, warmup: int) -> float:
        """The rate of 0-based `step` of the `total` steps after the warm-up."""
        raise NotImplementedError

    def _share(self, progress: float, ratio: float) -> float:
        """The rate at a progress of the whole run, `ratio` of which was the warm-up."""
        raise NotImplementedError


def _rest(progress: float, ratio: float) -> float:
    """Progress since the warm-up, in [0, 1]."""
    return (progress - ratio) / (1 - ratio) if ratio < 1 else 0.0


def _check_floor(min_lr_ratio: float) -> None:
    if not 0 <= min_lr_ratio <= 1:
        raise ValueError(f"min_lr_ratio={min_lr_ratio}, expected a share of the rate between 0 and 1")


@dataclass(frozen=True)
class CosineScheduler(_Warmed):
    """Linear warm-up over a tenth of the run, then a cosine to a tenth of `lr`; or `cycles` of them, each from `lr`
    (warm restarts, arXiv:1608.03983).

    The first step of N has lr / W, where W = max(1, round(N / 10)) steps warm up. Called with a progress, the schedule
    takes N to be 100: `CosineScheduler(lr)(0.0)` is lr / 10.
    """

    warmup_ratio: float = WARMUP_RATIO
    min_lr_ratio: float = FINAL_RATIO
    cycles: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_floor(self.min_lr_ratio)
        if self.cycles < 1:
            raise ValueError(f"cycles={self.cycles}, expected 1 or more")

    def _after(self, step: int, total: int, warmup: int) -> float:
        cycle = step * self.cycles // total
        first, end = (-(-border * total // self.cycles) for border in (cycle, cycle + 1))
        return self._cosine((step - first) / max(1, end - first - 1))

    def _share(self, progress: float, ratio: float) -> float:
        done = _rest(progress, ratio) * self.cycles
        return self._cosine(done - min(int(done), self.cycles - 1))

    def _cosine(self, q: float) -> float:
        """From lr at q = 0 down to its lowest at q = 1."""
        low = self.min_lr_ratio
        return low * self.lr + (1 - low) * self.lr * (1 + math.cos(math.pi * q)) / 2


@dataclass(frozen=True)
class CosineSchedulerWithoutWarmup(CosineScheduler):
    """A cosine from `lr` to a tenth of it."""

    warmup_ratio: float = 0.0


@dataclass(frozen=True)
class LinearScheduler(_Warmed):
    """A straight line from `lr` to `min_lr_ratio` of it, reached after the last step."""

    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_floor(self.min_lr_ratio)

    def _after(self, step: int, total: int, warmup: int) -> float:
        return self._line(step / total)

    def _share(self, progress: float, ratio: float) -> float:
        return self._line(_rest(progress, ratio))

    def _line(self, q: float) -> float:
        return self.lr * (1 - (1 - self.min_lr_ratio) * q)


@dataclass(frozen=True)
class ConstantScheduler(_Warmed):
    """`lr`, always; after the warm-up, where there is one."""

    @property
    def endless(self) -> bool:
        return self.warmup_steps is not None or not self.warmup_ratio

    def _after(self, step: int, total: int, warmup: int) -> float:
        return self.lr

    def _share(self, progress: float, ratio: float) -> float:
        return self.lr


@dataclass(frozen=True)
class WSDScheduler(_Warmed):
    """Warm-up, stable, decay (arXiv:2404.06395): `lr` from the warm-up to the last `decay_ratio` of the run, and then a
    straight line that is at `min_lr_ratio` of it in the last step. Where the two would meet, the decay is shorter."""

    warmup_ratio: float = WARMUP_RATIO
    min_lr_ratio: float = FINAL_RATIO
    decay_ratio: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_floor(self.min_lr_ratio)
        if not 0 < self.decay_ratio <= 1:
            raise ValueError(f"decay_ratio={self.decay_ratio}, expected a share of the run above 0, at most 1")

    def _after(self, step: int, total: int, warmup: int) -> float:
        decay = min(max(1, round(self.decay_ratio * (total + warmup))), total)
        if total == 1 and not warmup:
            return self.lr  # a run of one step
        return self._line((step - (total - decay) + 1) / decay)

    def _share(self, progress: float, ratio: float) -> float:
        decay = min(self.decay_ratio, 1 - ratio)
        return self._line((progress - (1 - decay)) / decay if decay else 0.0)

    def _line(self, q: float) -> float:
        return self.lr * (1 - (1 - self.min_lr_ratio) * max(0.0, q))


@dataclass(frozen=True)
class InverseSqrtScheduler(_Warmed):
    """Warm-up over W steps, then lr sqrt(W / (k + 1)) at step k (arXiv:1706.03762), never below `min_lr_ratio` of `lr`.
    With `warmup_steps` it fits a run without an end."""

    warmup_ratio: float = WARMUP_RATIO
    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_floor(self.min_lr_ratio)
        if not (self.warmup_ratio if self.warmup_steps is None else self.warmup_steps):
            raise ValueError("the inverse square root falls from the end of the warm-up, and there is none; give one")

    @property
    def endless(self) -> bool:
        return self.warmup_steps is not None

    def _after(self, step: int, total: int, warmup: int) -> float:
        return self._root(warmup / (warmup + step + 1))

    def _share(self, progress: float, ratio: float) -> float:
        return self._root(ratio / progress)

    def _root(self, share: float) -> float:
        return self.lr * max(self.min_lr_ratio, math.sqrt(share))


@dataclass(frozen=True)
class Ramp:
    """From `start` in the first step to `end` in the last: a schedule of the weight decay. `linear`, or `cosine`, which
    begins and ends slowly. A run of one step has `start`."""

    start: float
    end: float
    shape: Literal["linear", "cosine"] = "linear"

    def at(self, step: int, total: int) -> float:
        _check_step(step, total)
        return self._between(step / max(1, total - 1))

    def __call__(self, progress: float) -> float:
        _check_progress(progress)
        return self._between(progress)

    def _between(self, q: float) -> float:
        way = q if self.shape == "linear" else (1 - math.cos(math.pi * q)) / 2
        return self.start + (self.end - self.start) * way


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
