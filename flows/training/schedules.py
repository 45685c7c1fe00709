"""The optimizer, and schedules of its learning rate and weight decay. They are functions of the step and have no
state, so a resumed run has nothing to restore.

`at(step, total)` returns the value of a step of a run with `total` steps. Steps count from 0. The training classes
use it, and a hand-written loop that knows its length can use it too. A warm-up of W steps gives lr (k + 1) / W at step
k < W, so that no step has a rate of 0. The shape of the schedule covers the steps after the warm-up. W is
`warmup_steps` if it is given, else max(1, round(warmup_ratio x total)), or 0 if warmup_ratio is 0.

`schedule(progress)` is for loops that do not know their length. The progress is in [0, 1]. Before step k it is
k / total. A schedule with `warmup_steps` above 0 raises ValueError in this form. The warm-up is that of a run of 100
steps: min(lr, lr (100 progress + 1) / W), with W for 100 steps. With the default warm-up of a tenth the first step has
lr / 10.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from flows.configs.optimizer import OptimizerConfig, ScheduleName
from storage.chain.records import OptimizerKind, OptimizerSpec

WARMUP_RATIO = 0.1
"""Default warmup_ratio of CosineScheduler, WSDScheduler and InverseSqrtScheduler."""
FINAL_RATIO = 0.1
"""Default min_lr_ratio of CosineScheduler and WSDScheduler."""
STEPS_OF_PROGRESS = 100
"""Assumed number of steps of a run in `schedule(progress)`."""


class Schedule(Protocol):
    """A value for each step of a run. A schedule whose values do not depend on the length of the run has an attribute
    `endless` that is True."""

    def at(self, step: int, total: int) -> float:
        """The value in 0-based `step` of `total`."""
        ...

    def __call__(self, progress: float) -> float:
        """The value at a progress in [0, 1]."""
        ...


def is_endless(schedule: Schedule) -> bool:
    """Whether the schedule fits a run without an end: its values do not depend on the length of the run."""
    return bool(getattr(schedule, "endless", False))


def are_endless(learning_rate: Schedule, weight_decay: float | Schedule) -> bool:
    """Whether neither the rate nor the weight decay depends on the length of the run."""
    if isinstance(weight_decay, float | int):
        return is_endless(learning_rate)
    return is_endless(learning_rate) and is_endless(weight_decay)


@dataclass(frozen=True)
class _WarmupSchedule:
    """The base of schedules with a linear warm-up. A subclass gives the rate after it, for steps and for a progress."""

    lr: float
    """The highest rate."""
    warmup_ratio: float = 0.0
    """Length of the warm-up, as a share of the run."""
    warmup_steps: int | None = None
    """Length of the warm-up in steps. Replaces warmup_ratio."""

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_ratio <= 1:
            raise ValueError(f"warmup_ratio={self.warmup_ratio}, expected a share of the run between 0 and 1")
        if self.warmup_steps is not None and self.warmup_steps < 0:
            raise ValueError(f"warmup_steps={self.warmup_steps}, expected 0 or more")

    def warmup(self, total: int) -> int:
        """The number of warm-up steps in a run of `total` steps."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        if self.warmup_ratio == 0:
            return 0
        return max(1, round(self.warmup_ratio * total))

    def at(self, step: int, total: int) -> float:
        _check_step(step, total)
        warmup = self.warmup(total)
        if step < warmup:
            return self._warmup_rate(step, warmup)
        return self._step_rate(step - warmup, total - warmup, warmup)

    def __call__(self, progress: float) -> float:
        _check_progress(progress)
        if self.warmup_steps:
            raise ValueError(
                f"a warm-up of {self.warmup_steps} steps is no share of a run; ask at(step, total), or give "
                "warmup_ratio"
            )
        warmup_ratio = 0.0 if self.warmup_steps == 0 else self.warmup_ratio
        if progress < warmup_ratio:
            return min(self.lr, self._warmup_rate(progress * STEPS_OF_PROGRESS, self.warmup(STEPS_OF_PROGRESS)))
        return self._progress_rate(progress, warmup_ratio)

    def _warmup_rate(self, step: float, warmup: int) -> float:
        """The rate of a 0-based step of the `warmup` first ones."""
        return self.lr * (step + 1) / warmup

    def _step_rate(self, step: int, steps_after_warmup: int, warmup: int) -> float:
        """The rate of a step after the warm-up. `step` counts from 0 at the end of the warm-up."""
        raise NotImplementedError

    def _progress_rate(self, progress: float, warmup_ratio: float) -> float:
        """The rate at a progress of the whole run that is after the warm-up."""
        raise NotImplementedError


def _progress_after_warmup(progress: float, warmup_ratio: float) -> float:
    """The progress since the end of the warm-up, in [0, 1]."""
    # the whole run is the warm-up
    if warmup_ratio == 1:
        return 0.0
    return (progress - warmup_ratio) / (1 - warmup_ratio)


def _check_floor(min_lr_ratio: float) -> None:
    if not 0 <= min_lr_ratio <= 1:
        raise ValueError(f"min_lr_ratio={min_lr_ratio}, expected a share of the rate between 0 and 1")


@dataclass(frozen=True)
class CosineScheduler(_WarmupSchedule):
    """Linear warm-up over a tenth of the run, then a cosine to a tenth of `lr`. With `cycles` above 1, the run has
    that many cosines, one after the other, each from `lr` (warm restarts, arXiv:1608.03983).

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

    def _step_rate(self, step: int, steps_after_warmup: int, warmup: int) -> float:
        # Cycle c has the steps from ceil(c steps_after_warmup / cycles) to the next cycle. Its last step has the lowest
        # rate, unless it is the only one.
        cycle = step * self.cycles // steps_after_warmup
        first_step = math.ceil(cycle * steps_after_warmup / self.cycles)
        next_cycle = math.ceil((cycle + 1) * steps_after_warmup / self.cycles)
        return self._cosine((step - first_step) / max(1, next_cycle - first_step - 1))

    def _progress_rate(self, progress: float, warmup_ratio: float) -> float:
        cycles_done = _progress_after_warmup(progress, warmup_ratio) * self.cycles
        # at progress 1 the last cycle is complete, and no further one begins
        cycle = min(int(cycles_done), self.cycles - 1)
        return self._cosine(cycles_done - cycle)

    def _cosine(self, share_done: float) -> float:
        """The rate at `share_done` in [0, 1] of a cosine from `lr` to the lowest rate."""
        low_ratio = self.min_lr_ratio
        return low_ratio * self.lr + (1 - low_ratio) * self.lr * (1 + math.cos(math.pi * share_done)) / 2


@dataclass(frozen=True)
class CosineSchedulerWithoutWarmup(CosineScheduler):
    """A cosine from `lr` to a tenth of it."""

    warmup_ratio: float = 0.0


@dataclass(frozen=True)
class LinearScheduler(_WarmupSchedule):
    """A straight line from `lr` to `min_lr_ratio` of it. The last step is still above that value."""

    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_floor(self.min_lr_ratio)

    def _step_rate(self, step: int, steps_after_warmup: int, warmup: int) -> float:
        return self._line(step / steps_after_warmup)

    def _progress_rate(self, progress: float, warmup_ratio: float) -> float:
        return self._line(_progress_after_warmup(progress, warmup_ratio))

    def _line(self, share_done: float) -> float:
        return self.lr * (1 - (1 - self.min_lr_ratio) * share_done)


@dataclass(frozen=True)
class ConstantScheduler(_WarmupSchedule):
    """`lr` in every step after the warm-up, if there is one."""

    @property
    def endless(self) -> bool:
        return self.warmup_steps is not None or not self.warmup_ratio

    def _step_rate(self, step: int, steps_after_warmup: int, warmup: int) -> float:
        return self.lr

    def _progress_rate(self, progress: float, warmup_ratio: float) -> float:
        return self.lr


@dataclass(frozen=True)
class ConstantWithWarmupScheduler(ConstantScheduler):
    """`lr` in every step after a warm-up that begins at 0: step k of W has lr k / W, as in Hugging Face's
    get_constant_schedule_with_warmup. The first step therefore leaves the weights as they are."""

    def _warmup_rate(self, step: float, warmup: int) -> float:
        return self.lr * step / warmup


@dataclass(frozen=True)
class WSDScheduler(_WarmupSchedule):
    """Warm-up, stable, decay (arXiv:2404.06395).

    The rate stays `lr` after the warm-up. In the last part of the run, whose share is `decay_ratio`, it falls linearly
    to `min_lr_ratio` of `lr`, which the last step has. The decay is shorter if it would overlap with the warm-up.
    """

    warmup_ratio: float = WARMUP_RATIO
    min_lr_ratio: float = FINAL_RATIO
    decay_ratio: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_floor(self.min_lr_ratio)
        if not 0 < self.decay_ratio <= 1:
            raise ValueError(f"decay_ratio={self.decay_ratio}, expected a share of the run above 0, at most 1")

    def _step_rate(self, step: int, steps_after_warmup: int, warmup: int) -> float:
        # decay_ratio is a share of the whole run, including the warm-up
        decay_steps = min(max(1, round(self.decay_ratio * (steps_after_warmup + warmup))), steps_after_warmup)
        # a run of one step does not decay
        if steps_after_warmup == 1 and not warmup:
            return self.lr
        return self._line((step - (steps_after_warmup - decay_steps) + 1) / decay_steps)

    def _progress_rate(self, progress: float, warmup_ratio: float) -> float:
        decay_share = min(self.decay_ratio, 1 - warmup_ratio)
        # the whole run is the warm-up
        if decay_share == 0:
            return self.lr
        return self._line((progress - (1 - decay_share)) / decay_share)

    def _line(self, share_done: float) -> float:
        return self.lr * (1 - (1 - self.min_lr_ratio) * max(0.0, share_done))


@dataclass(frozen=True)
class InverseSqrtScheduler(_WarmupSchedule):
    """Warm-up over W steps, then lr sqrt(W / (k + 1)) at step k (arXiv:1706.03762), but at least `min_lr_ratio` of
    `lr`. With `warmup_steps` it fits a run without an end."""

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

    def _step_rate(self, step: int, steps_after_warmup: int, warmup: int) -> float:
        return self._root(warmup / (warmup + step + 1))

    def _progress_rate(self, progress: float, warmup_ratio: float) -> float:
        return self._root(warmup_ratio / progress)

    def _root(self, share: float) -> float:
        return self.lr * max(self.min_lr_ratio, math.sqrt(share))


@dataclass(frozen=True)
class Ramp:
    """A schedule of the weight decay, from `start` in the first step to `end` in the last.

    The shape `cosine` changes slowly at both ends. A run of one step has `start`.
    """

    start: float
    end: float
    shape: Literal["linear", "cosine"] = "linear"

    def at(self, step: int, total: int) -> float:
        _check_step(step, total)
        return self._between(step / max(1, total - 1))

    def __call__(self, progress: float) -> float:
        _check_progress(progress)
        return self._between(progress)

    def _between(self, share_done: float) -> float:
        share = share_done
        if self.shape == "cosine":
            share = (1 - math.cos(math.pi * share_done)) / 2
        return self.start + (self.end - self.start) * share


@dataclass(frozen=True)
class CombinedSchedule:
    """One schedule, then another. Each covers its part of the run as if that part were a whole run."""

    first: Schedule
    second: Schedule
    switch_at: float = 0.5
    """Share of the run with the first schedule. In a run of two steps or more, each schedule has at least one."""

    def __post_init__(self) -> None:
        if not 0 < self.switch_at < 1:
            raise ValueError(f"switch_at={self.switch_at}, expected a share of the run between 0 and 1, such as 0.5")

    def at(self, step: int, total: int) -> float:
        _check_step(step, total)
        switch_step = min(max(1, round(self.switch_at * total)), max(1, total - 1))
        if step < switch_step:
            return self.first.at(step, switch_step)
        return self.second.at(step - switch_step, total - switch_step)

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


SCHEDULES: dict[ScheduleName, type[Schedule]] = {
    "cosine": CosineScheduler,
    "cosine_without_warmup": CosineSchedulerWithoutWarmup,
    "linear": LinearScheduler,
    "constant": ConstantScheduler,
    "constant_with_warmup": ConstantWithWarmupScheduler,
    "wsd": WSDScheduler,
    "inverse_sqrt": InverseSqrtScheduler,
}


@dataclass(frozen=True)
class AdamW:
    """The settings of the optimizer besides the learning rate: of AdamW, or of Muon with AdamW."""

    weight_decay: float | Schedule
    max_grad_norm: float
    betas: tuple[float, float]
    """The decay rates of the first and of the second moment."""
    eps: float
    kind: OptimizerKind = "adamw"

    @classmethod
    def of(cls, config: OptimizerConfig) -> AdamW:
        """The settings of a config."""
        decay: float | Schedule = config.weight_decay
        if config.weight_decay_schedule != "constant":
            # OptimizerConfig refuses a schedule without an end
            assert config.weight_decay_end is not None
            decay = Ramp(config.weight_decay, config.weight_decay_end, config.weight_decay_schedule)
        betas = (config.beta1, config.beta2)
        return cls(decay, config.max_grad_norm, betas, config.eps, config.kind)

    def at(self, step: int, total_steps: int | None, lr: Schedule) -> OptimizerSpec:
        """The optimizer of a 0-based step of `total_steps`; None: of a run without an end."""
        decay = self.weight_decay
        if not isinstance(decay, float | int):
            decay = rate_at(decay, step, total_steps)
        beta1, beta2 = self.betas
        return OptimizerSpec(
            lr=rate_at(lr, step, total_steps), weight_decay=decay, beta1=beta1, beta2=beta2, eps=self.eps,
            max_grad_norm=self.max_grad_norm, kind=self.kind,
        )  # fmt: skip


def rate_at(schedule: Schedule, step: int, total_steps: int | None) -> float:
    """The value of a schedule at a 0-based step. The schedules of a run without an end do not depend on its length, so
    any length gives the same value."""
    if total_steps is None:
        total_steps = step + 1
    return schedule.at(step, total_steps)


def schedule_of(optimizer: OptimizerConfig, *, lr: float | None = None) -> Schedule:
    """The schedule of the learning rate that a config names. `lr` is its highest rate; None: the config's."""
    # only what the config sets; each schedule has its own defaults
    options: dict[str, Any] = {}
    for name in ("warmup_steps", "warmup_ratio", "min_lr_ratio", "decay_ratio"):
        value = getattr(optimizer, name)
        if value is not None:
            options[name] = value
    if optimizer.cycles > 1:
        options["cycles"] = optimizer.cycles
    # the classes have different options, so the constructor has no common type
    make: Any = SCHEDULES[optimizer.schedule]
    schedule: Schedule = make(optimizer.lr if lr is None else lr, **options)
    return schedule
