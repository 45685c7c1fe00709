"""KL controllers: the coefficient of the KL penalty from step to step. Functions of what the chain recorded."""

from __future__ import annotations

from typing import Literal, Protocol

from storage.chain.records import CommitRecord
from storage.number_types import Coefficient, Divisor, Positive
from storage.serialization import Frozen

STATE = "kl_beta"
"""The name under which a step's coefficient stands in `StepRequest.controllers_in`."""


class KLController(Protocol):
    """The coefficient of each step."""

    def next(self, record: CommitRecord | None, *, samples: int) -> float:
        """That of the step after `record`; None: of the first."""
        ...

    def state(self, beta: float) -> dict[str, float]:
        """What enters the step's request as `controllers_in`."""
        ...


class FixedKL(Frozen):
    """Always `beta`."""

    kind: Literal["fixed"] = "fixed"
    beta: Coefficient

    def next(self, record: CommitRecord | None, *, samples: int) -> float:
        return self.beta

    def state(self, beta: float) -> dict[str, float]:
        """What enters a request: nothing, since it is in the loss."""
        return {}


class AdaptiveKL(Frozen):
    """Raises the coefficient while the KL is above `target` and lowers it below (arXiv:1909.08593, section 2.2):
    beta' = beta (1 + clip(KL / target - 1, -0.2, 0.2) · samples / horizon)."""

    kind: Literal["adaptive"] = "adaptive"
    beta: Positive
    """Of the first step."""
    target: Divisor = 0.1
    """Nats per token."""
    horizon: Positive = 10_000
    """Completions over which the coefficient may grow by a fifth."""

    def next(self, record: CommitRecord | None, *, samples: int) -> float:
        if record is None:
            return self.beta
        before, kl = record.request.controllers_in.get(STATE, self.beta), record.metrics.get("kl_mean")
        if kl is None:  # every sample of the step was without gradient
            return before
        error = min(0.2, max(-0.2, kl / self.target - 1))
        return before * (1 + error * samples / self.horizon)

    def state(self, beta: float) -> dict[str, float]:
        return {STATE: beta}
