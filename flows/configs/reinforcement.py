"""Groups of the configs of reinforcement learning that most runs leave alone."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from engine.losses.policy_gradient import GRPOSpec, PolicyLoss
from flows.configs.defaults import default_of
from storage.chain.records import OldLogprobs
from storage.number_types import Coefficient, Divisor, Positive
from storage.serialization import Frozen
from tasks.credit.kl_controllers import AdaptiveKL
from tasks.credit.rewards import Overlong

KLPlace = Literal["loss", "reward"]
KLControl = Literal["fixed", "adaptive"]
RefillEnd = Literal["short", "fail"]


class BatchRules(Frozen):
    """Which completions a step trains on, and from which policy they come."""

    dynamic_sampling: bool = False
    """Leave out prompts whose completions all have the same reward, and draw others instead (DAPO,
    arXiv:2503.14476)."""
    max_refill_rounds: int = Field(4, ge=0)
    """Draws after the first, at most, with dynamic_sampling."""
    refill_end: RefillEnd = "short"
    """When these do not fill the batch: train what there is, or fail."""
    max_staleness: int = Field(0, ge=0)
    """Completions come from the policy of so many steps before, so that they are sampled while other steps train."""
    mask_truncated: bool = False
    """Leave completions that were cut at max_new_tokens out of the loss."""
    overlong_buffer: int | None = Field(None, ge=1)
    """Over the last so many of max_new_tokens, a penalty on the length grows from 0 to overlong_penalty."""
    overlong_penalty: Positive = default_of(Overlong, "penalty")
    """What the longest completions lose of their reward."""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        refill = _changed(self, "max_refill_rounds", "refill_end")
        if refill and not self.dynamic_sampling:
            raise ValueError(f"{refill} act only with dynamic_sampling=true; set it, or leave them out")
        if _changed(self, "overlong_penalty") and self.overlong_buffer is None:
            raise ValueError("overlong_penalty acts only with overlong_buffer; give it in tokens, or leave both out")
        return self


class Regularisation(Frozen):
    """What the policy's loss has besides the clipped ratio."""

    policy_loss: PolicyLoss = "clip"
    """clip: the clipped ratio. cispo: the ratio, clipped and held constant, times the log-probability
    (arXiv:2506.13585)."""
    entropy_coef: Coefficient = default_of(GRPOSpec, "entropy_coef")
    """Entropy times this is taken off the loss."""
    importance_cap: Positive | None = None
    """Weigh the loss by the ratio of the trainer's and the sampler's probability, at most this (truncated importance
    weights)."""
    norm_constant: Divisor | None = None
    """Of loss_norm=constant: the tokens per completion to divide by. None: sampling.max_new_tokens."""
    kl_in: KLPlace = "loss"
    """Where the KL term stands: in the loss, or taken off the reward."""
    kl_importance: bool = default_of(GRPOSpec, "kl_importance")
    """Multiply the loss's KL term by the ratio of new and old probability: with k3, its gradient is then that of the
    KL divergence without bias (arXiv:2512.02556)."""
    kl_controller: KLControl = "fixed"
    """adaptive: kl_beta follows kl_target (arXiv:1909.08593)."""
    kl_target: Divisor = default_of(AdaptiveKL, "target")
    """Nats per token."""
    kl_horizon: Positive = default_of(AdaptiveKL, "horizon")
    """Completions over which kl_beta may change by a fifth."""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        adaptive = _changed(self, "kl_target", "kl_horizon")
        if adaptive and self.kl_controller != "adaptive":
            raise ValueError(f"{adaptive} act only with kl_controller='adaptive'; set it, or leave them out")
        if self.kl_importance and self.kl_in != "loss":
            raise ValueError(f"kl_importance acts only with kl_in='loss', and that is {self.kl_in!r}; leave it out")
        return self

    def check_kl(self, kl_beta: float) -> None:
        """Raises ValueError for a weight on a term that is not there."""
        if self.kl_importance and kl_beta == 0:
            raise ValueError("regularisation.kl_importance acts only with algorithm.kl_beta above 0; leave it out")

    def check(self, loss_norm: str, kl_beta: float, old_logprobs: OldLogprobs) -> None:
        """Raises ValueError for what has no effect beside the algorithm's own settings."""
        self.check_norm(loss_norm)
        self.check_kl(kl_beta)
        check_importance(self.importance_cap, old_logprobs)

    def check_norm(self, loss_norm: str) -> None:
        """Raises ValueError for a constant that the norm does not divide by."""
        if self.norm_constant is not None and loss_norm != "constant":
            raise ValueError(
                f"regularisation.norm_constant={self.norm_constant} acts only with algorithm.loss_norm='constant', and "
                f"that is {loss_norm!r}; set it, or leave the constant out"
            )


def check_importance(cap: float | None, old_logprobs: OldLogprobs) -> None:
    """Raises ValueError for a cap on weights that are all 1."""
    if cap is not None and old_logprobs == "sampler":
        raise ValueError(
            f"importance_cap={cap} has no effect with old_logprobs='sampler': it bounds the ratio of the trainer's and "
            "the sampler's probability, and then both are the sampler's; leave it out, or use old_logprobs='trainer'"
        )


def _changed(group: Frozen, *names: str) -> list[str]:
    """Those that differ from their defaults. A form, and a config written down whole, give every default: that a key
    was given says nothing."""
    fields = type(group).model_fields
    return sorted(name for name in names if getattr(group, name) != fields[name].default)
