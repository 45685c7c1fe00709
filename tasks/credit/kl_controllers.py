"""KL controllers choose the coefficient of the KL penalty of each step. They hold no state: a coefficient follows from
the record of the step before, so a resumed run gets the same one."""

from __future__ import annotations

from typing import Literal, Protocol

from storage.chain.records import CommitRecord
from storage.serialization import Coefficient, Divisor, Frozen, Positive

STATE = "kl_beta"
"""Key of a step's coefficient in `StepRequest.controllers_in`."""


class KLController(Protocol):
    """Chooses the coefficient of the KL penalty of each step."""

    def next(self, record: CommitRecord | None, *, samples: int) -> float:
        """The coefficient of the step after `record`, or of the first step if `record` is None. `samples` is the number
        of completions per step."""
        ...

    def state(self, beta: float) -> dict[str, float]:
        """The value of `controllers_in` in the request of a step with the coefficient `beta`."""
        ...


class FixedKL(Frozen):
    """The coefficient is always `beta`."""

    kind: Literal["fixed"] = "fixed"
    beta: Coefficient

    def next(self, record: CommitRecord | None, *, samples: int) -> float:
        return self.beta

    def state(self, beta: float) -> dict[str, float]:
        """Empty: the loss of the request already contains the coefficient."""
        return {}


class AdaptiveKL(Frozen):
    """Raises the coefficient while the KL is above `target` and lowers it below (arXiv:1909.08593, section 2.2):
    beta' = beta (1 + clip(KL / target - 1, -0.2, 0.2) · min(1, samples / horizon)).

    The bound of samples / horizon is not in the paper, whose batches are smaller than its horizon. Without it, a step
    with more completions than 5 horizons could make the coefficient negative, which rewards divergence."""

    kind: Literal["adaptive"] = "adaptive"
    beta: Positive
    """Coefficient of the first step."""
    target: Divisor = 0.1
    """KL per token that the controller aims at, in nats."""
    horizon: Positive = 10_000
    """Number of completions over which the coefficient changes by at most a fifth. A step with more completions changes
    it by at most a fifth, too."""

    def next(self, record: CommitRecord | None, *, samples: int) -> float:
        if record is None:
            return self.beta
        beta = record.request.controllers_in.get(STATE, self.beta)
        kl = record.metrics.get("kl_mean")
        if kl is None:  # no sample of the step had a gradient, so no KL was measured
            return beta
        error = min(0.2, max(-0.2, kl / self.target - 1))
        return beta * (1 + error * min(1.0, samples / self.horizon))

    def state(self, beta: float) -> dict[str, float]:
        return {STATE: beta}
