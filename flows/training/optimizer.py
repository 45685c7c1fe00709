"""Schedules and the optimizer by what a config says of them."""

from __future__ import annotations

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

SCHEDULES: dict[ScheduleName, type[Schedule]] = {
    "cosine": CosineScheduler,
    "cosine_without_warmup": CosineSchedulerWithoutWarmup,
    "linear": LinearScheduler,
    "constant": ConstantScheduler,
    "wsd": WSDScheduler,
    "inverse_sqrt": InverseSqrtScheduler,
}


def schedule_of(optimizer: OptimizerConfig, *, lr: float | None = None) -> Schedule:
    """The schedule of the rate, up to `lr` (default: the optimizer's)."""
    options: dict[str, Any] = {
        name: value
        for name in ("warmup_steps", "warmup_ratio", "min_lr_ratio", "decay_ratio")
        if (value := getattr(optimizer, name)) is not None
    }
    if optimizer.cycles > 1:
        options["cycles"] = optimizer.cycles
    make: Any = SCHEDULES[optimizer.schedule]
    schedule: Schedule = make(lr or optimizer.lr, **options)
    return schedule


def optimizer_arguments(optimizer: OptimizerConfig) -> dict[str, Any]:
    """What a training class is told of its optimizer."""
    decay: float | Schedule = optimizer.weight_decay
    if optimizer.weight_decay_schedule != "constant":
        assert optimizer.weight_decay_end is not None  # the config saw to it
        decay = Ramp(optimizer.weight_decay, optimizer.weight_decay_end, optimizer.weight_decay_schedule)
    return {
        "lr_scheduler": schedule_of(optimizer),
        "weight_decay": decay,
        "betas": (optimizer.beta1, optimizer.beta2),
        "eps": optimizer.eps,
        "max_grad_norm": optimizer.max_grad_norm,
        "skip_nan_gradients": optimizer.skip_nan_gradients,
    }
