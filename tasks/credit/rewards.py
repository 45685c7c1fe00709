"""What happens to rewards before they become advantages, and advantages over a whole batch. numpy, float64.

Axes: N completion of a step · T token of all completions, one after the other
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from pydantic import Field

from engine.losses.kl import KLEstimator
from storage.serialization import Frozen

EPSILON = 1e-8


class RewardKL(Frozen):
    """A KL penalty taken off the reward, token by token, instead of added to the loss."""

    beta: float = Field(gt=0)
    estimator: KLEstimator = "k1"


class Overlong(Frozen):
    """The soft penalty of answers that come near the longest (DAPO, arXiv:2503.14476, equation 13)."""

    limit: int = Field(ge=1)
    """Tokens of the longest answer: sampling.max_new_tokens."""
    buffer: int = Field(ge=1)
    """The penalty grows from 0 to `penalty` over the last so many tokens."""
    penalty: float = Field(1.0, gt=0)

    def of(self, lengths_N: np.ndarray) -> np.ndarray:
        """What is taken off the reward of an answer of so many tokens."""
        over_N = np.asarray(lengths_N, dtype=np.float64) - (self.limit - self.buffer)
        return self.penalty * np.clip(over_N / self.buffer, 0.0, 1.0)


def _k3(gap_T: np.ndarray) -> np.ndarray:
    return np.exp(-gap_T) + gap_T - 1


KL_OF_GAP: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "k1": lambda gap_T: gap_T,
    "abs": np.abs,
    "k2": lambda gap_T: gap_T**2 / 2,
    "k3": _k3,
}
"""By the gap d = l - q: what engine.losses.kl says of tensors, of plain numbers; a test holds one against the other."""


def whiten(values_T: np.ndarray) -> np.ndarray:
    """(x - mean) / sqrt(population variance + 1e-8); equal values give exactly 0."""
    if len(values_T) == 0 or (values_T == values_T[0]).all():
        return np.zeros_like(values_T)
    return (values_T - values_T.mean()) / np.sqrt(values_T.var() + EPSILON)


def reinforce_plus_plus(rewards_N: np.ndarray, penalties_T: np.ndarray, lengths_N: np.ndarray) -> np.ndarray:
    """(T,): the return of each token, the reward on the last token and `penalties_T` off each, undiscounted, whitened
    over all tokens of the batch (REINFORCE++, arXiv:2501.03262)."""
    ends_N = np.cumsum(lengths_N)
    rewards_T = -np.asarray(penalties_T, dtype=np.float64)
    rewards_T[ends_N - 1] += rewards_N
    totals_T = np.cumsum(rewards_T)
    before_N = np.concatenate([[0.0], totals_T])[ends_N - lengths_N]
    own_T = totals_T - np.repeat(before_N, lengths_N)  # within the completion, the token included
    whole_T = np.repeat(totals_T[ends_N - 1] - before_N, lengths_N)
    return whiten(whole_T - own_T + rewards_T)


def less_group_mean(rewards_N: np.ndarray, prompts_N: np.ndarray) -> np.ndarray:
    """(N,): each reward less the mean of its prompt's. Whitened over all tokens of the batch, it is the baseline
    variant of REINFORCE++."""
    _, codes_N = np.unique(prompts_N, return_inverse=True)
    means = np.bincount(codes_N, weights=rewards_N) / np.bincount(codes_N)
    return rewards_N - means[codes_N]


BATCH_ESTIMATORS = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Advantages that need the whole batch at once, in the coordinator's memory."""
