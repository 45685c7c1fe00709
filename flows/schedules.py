"""Schedules by the name a config gives them."""

from __future__ import annotations

from collections.abc import Callable

from tasks.schedules import (
    ConstantScheduler,
    CosineScheduler,
    CosineSchedulerWithoutWarmup,
    LinearScheduler,
    Schedule,
)

SCHEDULES: dict[str, Callable[[float], Schedule]] = {
    "cosine": CosineScheduler,
    "cosine_without_warmup": CosineSchedulerWithoutWarmup,
    "linear": LinearScheduler,
    "constant": ConstantScheduler,
}
