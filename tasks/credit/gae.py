"""Computes advantages and returns per token (GAE, arXiv:1506.02438) for many sequences in one flat array.

Axes: N sequence · T token of all sequences
"""

from __future__ import annotations

import numpy as np


def discounted(rewards_T: np.ndarray, lengths_N: np.ndarray, factor: float) -> np.ndarray:
    """(T,): G_t = r_t + factor G_{t+1} within each sequence, where G past the end of a sequence is 0. It is computed in
    the type of the rewards."""
    sums_T = np.array(rewards_T)
    ends_N = np.cumsum(lengths_N)
    starts_N = ends_N - lengths_N
    # Step backwards through all sequences at once: first the last token but one of each, then the one before it.
    for distance in range(2, int(lengths_N.max(initial=0)) + 1):
        tokens_N = ends_N - distance
        tokens_N = tokens_N[tokens_N >= starts_N]
        sums_T[tokens_N] += factor * sums_T[tokens_N + 1]
    return sums_T


def advantages_and_returns(
    rewards_T: np.ndarray, values_T: np.ndarray, lengths_N: np.ndarray, *, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """(advantages A, discounted sums of the rewards), both (T,) float64.

    A_t = d_t + gamma lam A_{t+1},  d_t = r_t + gamma V_{t+1} - V_t,  where A and V past the end of a sequence are 0.
    """
    values_T = np.asarray(values_T, dtype=np.float64)
    next_T = np.append(values_T[1:], 0.0)
    next_T[np.cumsum(lengths_N) - 1] = 0.0
    deltas_T = rewards_T + gamma * next_T - values_T
    return discounted(deltas_T, lengths_N, gamma * lam), discounted(rewards_T, lengths_N, gamma)
