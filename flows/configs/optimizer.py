"""Configs of the optimizer: AdamW, and how its rate and its decay change over a run."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from flows.configs.defaults import default_of
from storage.chain.records import OptimizerSpec
from storage.number_types import MAX_RATE, Divisor, Rate
from storage.serialization import Frozen

ScheduleName = Literal["cosine", "cosine_without_warmup", "linear", "constant", "wsd", "inverse_sqrt"]


class OptimizerConfig(Frozen):
    """AdamW and its schedule."""

    lr: float = Field(7.5e-7, gt=0, le=MAX_RATE)
    """The highest of the schedule."""
    schedule: ScheduleName = "cosine"
    """cosine: warm-up over a tenth of the run, then down to a tenth of the rate. linear: down to 0. wsd: warm-up, then
    the rate, then over the last tenth down to a tenth of it. inverse_sqrt: warm-up, then as 1 / √step."""
    warmup_steps: int | None = Field(None, ge=0)
    """Steps over which the rate rises to lr. None: as the schedule says, or warmup_ratio."""
    warmup_ratio: float | None = Field(None, ge=0, le=1)
    """The same as a share of the run."""
    min_lr_ratio: float | None = Field(None, ge=0, le=1)
    """The lowest rate, as a share of lr. None: as the schedule says."""
    cycles: int = Field(1, ge=1)
    """Of the cosine: so many of them one after the other, each from lr (warm restarts, arXiv:1608.03983)."""
    decay_ratio: float | None = Field(None, gt=0, le=1)
    """Of wsd: the last share of the run, in which the rate falls. None: a tenth."""
    weight_decay: Rate = default_of(OptimizerSpec, "weight_decay")
    """Decoupled (AdamW): each update also shrinks the weights by rate x this."""
    weight_decay_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How weight_decay becomes weight_decay_end over the run."""
    weight_decay_end: Rate | None = None
    """The weight decay of the last step, for a schedule that is not constant."""
    beta1: float = Field(default_of(OptimizerSpec, "beta1"), ge=0, lt=1)
    """Share that the mean of the gradients keeps per update."""
    beta2: float = Field(default_of(OptimizerSpec, "beta2"), ge=0, lt=1)
    """Share that the mean of their squares keeps per update."""
    eps: Divisor = default_of(OptimizerSpec, "eps")
    """Added to the root of that mean, which divides."""
    max_grad_norm: float = Field(default_of(OptimizerSpec, "max_grad_norm"), gt=0, allow_inf_nan=False)
    """A longer gradient is scaled down to this L2 norm."""
    skip_nan_gradients: bool = False
    """Leave an update with a non-finite gradient out (counted) instead of failing the step."""

    @model_validator(mode="after")
    def _fits_the_schedule(self) -> Self:
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError(
                f"both warmup_steps={self.warmup_steps} and warmup_ratio={self.warmup_ratio} were given; give one of "
                "them"
            )
        warmup = self.warmup_ratio if self.warmup_steps is None else self.warmup_steps
        if self.schedule == "cosine_without_warmup" and warmup:
            raise ValueError("schedule='cosine_without_warmup' has no warm-up, and one was given; use 'cosine'")
        if self.schedule == "inverse_sqrt" and warmup == 0:
            raise ValueError("schedule='inverse_sqrt' falls from the end of its warm-up; give one above 0")
        if self.schedule == "constant" and self.min_lr_ratio is not None:
            raise ValueError(f"schedule='constant' never falls, and min_lr_ratio={self.min_lr_ratio}; leave it out")
        if self.cycles > 1 and not self.schedule.startswith("cosine"):
            raise ValueError(f"cycles={self.cycles} are of cosines, and schedule={self.schedule!r}; use 'cosine'")
        if self.decay_ratio is not None and self.schedule != "wsd":
            raise ValueError(f"decay_ratio={self.decay_ratio} is of wsd, and schedule={self.schedule!r}; use 'wsd'")
        if (self.weight_decay_schedule == "constant") != (self.weight_decay_end is None):
            raise ValueError(
                f"weight_decay_schedule={self.weight_decay_schedule!r} and weight_decay_end={self.weight_decay_end}; "
                "give an end to a schedule that is not constant, and to no other"
            )
        return self

    @property
    def endless(self) -> bool:
        """Whether it asks for no length of the run."""
        by_steps = self.schedule == "constant" and not self.warmup_ratio
        falling = self.schedule == "inverse_sqrt" and self.warmup_steps is not None
        return (by_steps or falling) and self.weight_decay_schedule == "constant"


class SFTOptimizer(OptimizerConfig):
    """AdamW and its schedule."""

    lr: float = Field(1e-5, gt=0, le=MAX_RATE)
    """The highest of the schedule."""
