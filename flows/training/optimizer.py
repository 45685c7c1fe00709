"""The optimizer of a training class: AdamW with schedules of its learning rate and weight decay, and how a config names
them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flows.configs.optimizer import OptimizerConfig, ScheduleName
from flows.training.schedules import (
    ConstantScheduler,
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
    """The value of a schedule at a 0-based step. The schedule of a run without an end does not depend on its length, so
    any length will do."""
    return schedule.at(step, total_steps if total_steps is not None else step + 1)


def schedule_of(optimizer: OptimizerConfig, *, lr: float | None = None) -> Schedule:
    """The schedule of the learning rate that a config names. `lr` is its highest rate; None: the config's."""
    options: dict[str, Any] = {}
    for name in ("warmup_steps", "warmup_ratio", "min_lr_ratio", "decay_ratio"):
        value = getattr(optimizer, name)
        if value is not None:
            options[name] = value
    if optimizer.cycles > 1:
        options["cycles"] = optimizer.cycles
    make: Any = SCHEDULES[optimizer.schedule]
    schedule: Schedule = make(lr or optimizer.lr, **options)
    return schedule


def optimizer_arguments(optimizer: OptimizerConfig) -> dict[str, Any]:
    """The options of a training class that an optimizer's config gives."""
    decay: float | Schedule = optimizer.weight_decay
    if optimizer.weight_decay_schedule != "constant":
        assert optimizer.weight_decay_end is not None  # the config is refused otherwise
        decay = Ramp(optimizer.weight_decay, optimizer.weight_decay_end, optimizer.weight_decay_schedule)
    return {
        "lr_scheduler": schedule_of(optimizer),
        "weight_decay": decay,
        "betas": (optimizer.beta1, optimizer.beta2),
        "eps": optimizer.eps,
        "max_grad_norm": optimizer.max_grad_norm,
        "skip_nan_gradients": optimizer.skip_nan_gradients,
    }
