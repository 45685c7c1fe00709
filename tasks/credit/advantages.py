"""Advantages of one prompt's group of completions: plain lists, before any padding exists.

A masked grade is None: it leaves the statistics, and gets None. Computed in float32, as the batch stores it.
Axes: G completion of one prompt
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Rewards = Sequence[float | None]
Advantages = list[float | None]

EPSILON = 1e-8
LARGEST_REWARD = 1e15
"""In size. float32 ends at 3.4e38, and a standard deviation sums the squares of the rewards of a group."""
REWARD_RANGE = (
    f"a number from {-LARGEST_REWARD:g} to {LARGEST_REWARD:g} (advantages are computed in float32, where squares of "
    "larger rewards overflow)"
)
"""For errors: what a reward is."""


def group(rewards_G: Rewards) -> Advantages:
    """(r - mean) / (population std + 1e-8)   (GRPO, arXiv:2402.03300). Equal rewards, or one valid: exactly 0."""
    return _over_valid(rewards_G, lambda valid: (valid - valid.mean()) / (valid.std() + np.float32(EPSILON)))


def group_sample_std(rewards_G: Rewards) -> Advantages:
    """As `group`, with the sample standard deviation (n - 1)."""
    return _over_valid(rewards_G, lambda valid: (valid - valid.mean()) / (valid.std(ddof=1) + np.float32(EPSILON)))


def centred(rewards_G: Rewards) -> Advantages:
    """r - mean   (Dr. GRPO, arXiv:2503.20783)."""
    return _over_valid(rewards_G, lambda valid: valid - valid.mean())


def leave_one_out(rewards_G: Rewards) -> Advantages:
    """r - mean of the others   (RLOO, arXiv:2402.14740)."""
    return _over_valid(rewards_G, lambda valid: (valid - valid.mean()) * np.float32(len(valid) / (len(valid) - 1)))


ESTIMATORS: dict[str, Callable[[Rewards], Advantages]] = {
    "group": group,
    "group_sample_std": group_sample_std,
    "centred": centred,
    "leave_one_out": leave_one_out,
}


def _over_valid(rewards_G: Rewards, estimate: Callable[[np.ndarray], np.ndarray]) -> Advantages:
    """Applies the estimator to the valid rewards; one valid reward, or all equal, teaches nothing: exactly 0."""
    with np.errstate(over="ignore"):  # refused below
        valid = np.array([reward for reward in rewards_G if reward is not None], dtype=np.float32)
    if not (np.abs(valid) <= LARGEST_REWARD).all():
        raise ValueError(
            f"rewards are {list(rewards_G)}; expected of each {REWARD_RANGE}; mask a grade that is none with None"
        )
    if len(valid) < 2 or (valid == valid[0]).all():
        found = iter([0.0] * len(valid))
    else:
        found = iter(estimate(valid).astype(np.float32).tolist())
    return [None if reward is None else next(found) for reward in rewards_G]
