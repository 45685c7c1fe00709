"""Estimates the advantages of one prompt's group of completions, on plain lists without padding.

The reward of a masked grade is None. It does not count in the statistics, and its advantage is None. Advantages are
computed in float32, the type in which the batch stores them.

Axes: G completion of one prompt
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Rewards = Sequence[float | None]
Advantages = list[float | None]

EPSILON = 1e-8
LARGEST_REWARD = 1e15
"""Largest absolute value of a reward. float32 ends at 3.4e38, and a standard deviation sums the squares of the rewards
of a group."""
REWARD_RANGE = (
    f"a number from {-LARGEST_REWARD:g} to {LARGEST_REWARD:g} (advantages are computed in float32, where squares of "
    "larger rewards overflow)"
)
"""Describes a valid reward in error messages."""


def group(rewards_G: Rewards) -> Advantages:
    """(r - mean) / (population std + 1e-8)   (GRPO, arXiv:2402.03300)."""
    return _over_valid(rewards_G, lambda valid: (valid - valid.mean()) / (valid.std() + np.float32(EPSILON)))


def group_sample_std(rewards_G: Rewards) -> Advantages:
    """(r - mean) / (sample std + 1e-8): like `group`, but the variance divides by n - 1."""
    return _over_valid(rewards_G, lambda valid: (valid - valid.mean()) / (valid.std(ddof=1) + np.float32(EPSILON)))


def centred(rewards_G: Rewards) -> Advantages:
    """r - mean   (Dr. GRPO, arXiv:2503.20783)."""
    return _over_valid(rewards_G, lambda valid: valid - valid.mean())


def leave_one_out(rewards_G: Rewards) -> Advantages:
    """r - mean of the others   (RLOO, arXiv:2402.14740)."""
    # r - mean of the others = (r - mean) n / (n - 1)
    return _over_valid(rewards_G, lambda valid: (valid - valid.mean()) * np.float32(len(valid) / (len(valid) - 1)))


def raw(rewards_G: Rewards) -> Advantages:
    """r, without a baseline (REINFORCE). It also credits a completion that is the only one of its prompt."""
    return _over_valid(rewards_G, lambda valid: valid, compares=False)


ESTIMATORS: dict[str, Callable[[Rewards], Advantages]] = {
    "group": group,
    "group_sample_std": group_sample_std,
    "centred": centred,
    "leave_one_out": leave_one_out,
    "raw": raw,
}


def _over_valid(
    rewards_G: Rewards, estimate: Callable[[np.ndarray], np.ndarray], *, compares: bool = True
) -> Advantages:
    """Applies the estimator to the valid rewards. The advantage of a masked grade stays None.

    An estimator that compares the rewards of a group gives exactly 0 if there is only one valid reward or all are
    equal, since such a group has no gradient. Raises ValueError for a reward that is too large or not finite."""
    with np.errstate(over="ignore"):  # an overflow becomes infinity, which the check below refuses
        valid = np.array([reward for reward in rewards_G if reward is not None], dtype=np.float32)
    if not (np.abs(valid) <= LARGEST_REWARD).all():
        raise ValueError(
            f"rewards are {list(rewards_G)}; each must be {REWARD_RANGE}; give None for a missing grade"
        )
    if compares and (len(valid) < 2 or (valid == valid[0]).all()):
        advantages = iter([0.0] * len(valid))
    else:
        advantages = iter(estimate(valid).astype(np.float32).tolist())
    return [None if reward is None else next(advantages) for reward in rewards_G]
