"""Penalties on rewards, and the advantage estimators that need a whole batch. Computed with numpy in float64.

Axes: N completion of a step · T token of all completions, one after the other
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from pydantic import Field

from engine.losses.kl import KLEstimator
from storage.serialization import Frozen
from tasks.credit.gae import discounted

EPSILON = 1e-8


class RewardKL(Frozen):
    """A KL penalty that is subtracted from the reward of each token, instead of added to the loss."""

    beta: float = Field(gt=0)
    """Coefficient of the penalty."""
    estimator: KLEstimator = "k1"


class Overlong(Frozen):
    """The soft penalty of answers that are almost as long as the limit (DAPO, arXiv:2503.14476, equation 13)."""

    limit: int = Field(ge=1)
    """Tokens of the longest answer: sampling.max_new_tokens."""
    buffer: int = Field(ge=1)
    """Number of tokens before `limit` over which the penalty grows from 0 to `penalty`."""
    penalty: float = Field(1.0, gt=0)

    def of(self, lengths_N: np.ndarray) -> np.ndarray:
        """(N,): the penalty of answers with these numbers of tokens, to be subtracted from their rewards."""
        excess_N = np.asarray(lengths_N, dtype=np.float64) - (self.limit - self.buffer)
        return self.penalty * np.clip(excess_N / self.buffer, 0.0, 1.0)


def _k3(gap_T: np.ndarray) -> np.ndarray:
    return np.exp(-gap_T) + gap_T - 1


KL_OF_GAP: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "k1": lambda gap_T: gap_T,
    "abs": np.abs,
    "k2": lambda gap_T: gap_T**2 / 2,
    "k3": _k3,
}
"""Estimator -> the KL per token as a function of the gap d = logprob - reference logprob. The same formulas as in
engine.losses.kl, on arrays instead of tensors; a test compares both."""


def whiten(values_T: np.ndarray) -> np.ndarray:
    """(x - mean) / sqrt(population variance + 1e-8); equal values give exactly 0."""
    if len(values_T) == 0 or (values_T == values_T[0]).all():
        return np.zeros_like(values_T)
    return (values_T - values_T.mean()) / np.sqrt(values_T.var() + EPSILON)


def reinforce_plus_plus(
    rewards_N: np.ndarray, penalties_T: np.ndarray, lengths_N: np.ndarray, *, gamma: float = 1.0
) -> np.ndarray:
    """(T,): the return of each token, discounted by `gamma` per token and whitened over all tokens of the batch
    (REINFORCE++, arXiv:2501.03262). The reward of a token is minus its penalty, plus the completion's reward on its
    last token."""
    rewards_T = -np.asarray(penalties_T, dtype=np.float64)
    rewards_T[np.cumsum(lengths_N) - 1] += rewards_N
    return whiten(discounted(rewards_T, lengths_N, gamma))


def subtract_group_mean(rewards_N: np.ndarray, prompts_N: np.ndarray) -> np.ndarray:
    """(N,): each reward minus the mean reward of its prompt. Whitened over all tokens of the batch, this is the
    baseline variant of REINFORCE++."""
    _, group_N = np.unique(prompts_N, return_inverse=True)
    means = np.bincount(group_N, weights=rewards_N) / np.bincount(group_N)
    return rewards_N - means[group_N]


BATCH_ESTIMATORS = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Estimators that need the whole batch at once, in the memory of the process that prepares it."""
