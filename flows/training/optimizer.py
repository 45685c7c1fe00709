"""The optimizer of the training classes: AdamW with schedules of its learning rate and weight decay. Also translates
the names of a config into schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flows.configs.optimizer import OptimizerConfig, ScheduleName
from flows.training.schedules import (
    ConstantScheduler,
    ConstantWithWarmupScheduler,
    CosineScheduler,
    CosineSchedulerWithoutWarmup,
    InverseSqrtScheduler,
    LinearScheduler,
    Ramp,
    Schedule,
    WSDScheduler,
)
from storage.chain.records import OptimizerSpec

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
    """The settings of AdamW besides the learning rate."""

    weight_decay: float | Schedule
    max_grad_norm: float
    betas: tuple[float, float]
    """The decay rates of the first and of the second moment."""
    eps: float

    @classmethod
    def of(cls, config: OptimizerConfig) -> AdamW:
        """The settings of a config."""
        decay: float | Schedule = config.weight_decay
        if config.weight_decay_schedule != "constant":
            # OptimizerConfig refuses a schedule without an end
            assert config.weight_decay_end is not None
            decay = Ramp(config.weight_decay, config.weight_decay_end, config.weight_decay_schedule)
        return cls(decay, config.max_grad_norm, (config.beta1, config.beta2), config.eps)

    def at(self, step: int, total_steps: int | None, lr: Schedule) -> OptimizerSpec:
        """The optimizer of a 0-based step of `total_steps`; None: of a run without an end."""
        decay = self.weight_decay
        if not isinstance(decay, float | int):
            decay = rate_at(decay, step, total_steps)
        beta1, beta2 = self.betas
        return OptimizerSpec(
            lr=rate_at(lr, step, total_steps), weight_decay=decay, beta1=beta1, beta2=beta2, eps=self.eps,
            max_grad_norm=self.max_grad_norm,
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
