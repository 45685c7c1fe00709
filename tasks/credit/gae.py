"""Advantages and returns token by token (GAE, arXiv:1506.02438), over many sequences laid one after the other.

Axes: N sequence · T token of all sequences
"""

from __future__ import annotations

import numpy as np


def discounted(rewards_T: np.ndarray, lengths_N: np.ndarray, factor: float) -> np.ndarray:
    """(T,) float64: each token's reward and `factor` times what comes after it in its sequence."""
    found_T = np.array(rewards_T, dtype=np.float64)
    ends_N = np.cumsum(lengths_N)
    starts_N = ends_N - lengths_N
    for back in range(2, int(lengths_N.max(initial=0)) + 1):  # all sequences at once, from their last tokens
        at_N = (ends_N - back)[ends_N - back >= starts_N]
        found_T[at_N] += factor * found_T[at_N + 1]
    return found_T


def advantages_and_returns(
    rewards_T: np.ndarray, values_T: np.ndarray, lengths_N: np.ndarray, *, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """(A, discounted sum of the rewards), both (T,) float64. With d_t = r_t + gamma V_{t+1} - V_t, and V past the end
    of a sequence 0: A_t = d_t + gamma lam A_{t+1}."""
    values_T = np.asarray(values_T, dtype=np.float64)
    next_T = np.append(values_T[1:], 0.0)
    next_T[np.cumsum(lengths_N) - 1] = 0.0
    deltas_T = rewards_T + gamma * next_T - values_T
    return discounted(deltas_T, lengths_N, gamma * lam), discounted(rewards_T, lengths_N, gamma)
