"""Configs of the optimizer: AdamW or Muon, and the schedules of its learning rate and weight decay."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from storage.chain.records import OptimizerKind, OptimizerSpec
from storage.serialization import MAX_RATE, Divisor, Frozen, Rate, default_of

ScheduleName = Literal[
    "cosine", "cosine_without_warmup", "linear", "constant", "constant_with_warmup", "wsd", "inverse_sqrt"
]


class OptimizerConfig(Frozen):
    """The optimizer, AdamW or Muon, and the schedules of its learning rate and weight decay."""

    kind: OptimizerKind = Field("adamw", exclude_if=lambda kind: kind == "adamw")
    """Optimizer. adamw: AdamW. muon: Muon for the hidden matrices, and AdamW for embeddings, heads, norms and biases.
    The updates of Muon are scaled to the size of AdamW's, so that both have the same learning rate and weight decay
    (arXiv:2502.16982). adamw_8bit: AdamW of bitsandbytes, whose two moments take 2 bytes per weight instead of 8
    (arXiv:2110.02861). It needs the torch trainer."""
    lr: float = Field(7.5e-7, gt=0, le=MAX_RATE)
    """Highest learning rate of the schedule."""
    schedule: ScheduleName = "cosine"
    """Shape of the learning rate over the run. cosine: warm-up over a tenth of the run, then a cosine down to a tenth
    of lr. cosine_without_warmup: the same without the warm-up. linear: down to 0. constant: lr throughout.
    constant_with_warmup: lr after a warm-up that begins at 0, as Hugging Face's of this name. wsd: warm-up, then lr,
    then over the last tenth of the run down to a tenth of lr. inverse_sqrt: warm-up, then proportional to 1 / √step."""
    warmup_steps: int | None = Field(None, ge=0)
    """Steps over which the learning rate rises to lr. None: the default of the schedule, or warmup_ratio."""
    warmup_ratio: float | None = Field(None, ge=0, le=1)
    """Fraction of the run over which the learning rate rises to lr (instead of warmup_steps)."""
    min_lr_ratio: float | None = Field(None, ge=0, le=1)
    """Lowest learning rate after the warm-up, as a fraction of lr. None: the default of the schedule."""
    cycles: int = Field(1, ge=1)
    """Number of cosines after one another, each starting from lr (warm restarts, arXiv:1608.03983). Cosine schedules
    only."""
    decay_ratio: float | None = Field(None, gt=0, le=1)
    """Last fraction of the run, in which the learning rate of the wsd schedule falls. None: a tenth."""
    weight_decay: Rate = default_of(OptimizerSpec, "weight_decay")
    """Decoupled weight decay of AdamW: each update also shrinks the weights by the learning rate times this."""
    weight_decay_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape in which the weight decay changes over the run, from weight_decay to weight_decay_end. constant: it does
    not change."""
    weight_decay_end: Rate | None = None
    """Weight decay of the last step. Required by a weight_decay_schedule that is not constant."""
    beta1: float = Field(default_of(OptimizerSpec, "beta1"), ge=0, lt=1)
    """Exponential decay rate of AdamW's first moment (beta1)."""
    beta2: float = Field(default_of(OptimizerSpec, "beta2"), ge=0, lt=1)
    """Exponential decay rate of AdamW's second moment (beta2)."""
    eps: Divisor = default_of(OptimizerSpec, "eps")
    """Epsilon of AdamW: it is added to the root of the second moment, by which the update is divided."""
    max_grad_norm: float = Field(default_of(OptimizerSpec, "max_grad_norm"), gt=0, allow_inf_nan=False)
    """Largest L2 norm of the gradient of an update. A larger gradient is scaled down to it."""
    skip_nan_gradients: bool = False
    """Skip and count an update whose gradient is not finite, instead of failing the step."""

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
        if self.schedule.startswith("constant") and self.min_lr_ratio is not None:
            raise ValueError(
                f"schedule={self.schedule!r} never falls, and min_lr_ratio={self.min_lr_ratio}; leave it out"
            )
        if self.cycles > 1 and not self.schedule.startswith("cosine"):
            raise ValueError(f"cycles={self.cycles} needs a cosine, and schedule={self.schedule!r}; use 'cosine'")
        if self.decay_ratio is not None and self.schedule != "wsd":
            raise ValueError(f"decay_ratio={self.decay_ratio} needs wsd, and schedule={self.schedule!r}; use 'wsd'")
        if (self.weight_decay_schedule == "constant") != (self.weight_decay_end is None):
            raise ValueError(
                f"weight_decay_schedule={self.weight_decay_schedule!r} and weight_decay_end={self.weight_decay_end}; "
                "give an end to a schedule that is not constant, and to no other"
            )
        return self

    @property
    def endless(self) -> bool:
        """Whether nothing depends on the length of the run, so that the run may have no end."""
        by_steps = self.schedule.startswith("constant") and not self.warmup_ratio
        falling = self.schedule == "inverse_sqrt" and self.warmup_steps is not None
        return (by_steps or falling) and self.weight_decay_schedule == "constant"


class SFTOptimizer(OptimizerConfig):
    """The optimizer of supervised fine-tuning, AdamW or Muon, with the schedules of its rate and weight decay."""

    lr: float = Field(1e-5, gt=0, le=MAX_RATE)
    """Highest learning rate of the schedule."""
