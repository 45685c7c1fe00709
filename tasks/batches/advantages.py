"""Computes advantages from rewards: within the group of a prompt, over a whole batch, and per token with a value model
(GAE); and the penalties on rewards, with the KL controllers that choose their coefficient.

Estimators of one group take plain lists without padding. The reward of a masked grade is None: it does not count in the
statistics, and its advantage is None. They compute in float32, the type of advantages in a batch; those of a whole
batch compute in float64.

Axes: G completion of one prompt · N completion of a step · T token of all completions, one after the other
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, Protocol

import numpy as np
from pydantic import Field

from engine.losses.base import KLEstimator
from storage.chain.records import CommitRecord
from storage.serialization import Coefficient, Divisor, Frozen, Positive

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


def max_rl(rewards_G: Rewards) -> Advantages:
    """(r - mean) / mean   (MaxRL, arXiv:2602.02710): for rewards of 1 and 0, a solved prompt weighs 1 / (pass rate).

    Raises ValueError for a mean of 0 or less with unequal rewards: the rewards are success rates."""

    def estimate(valid: np.ndarray) -> np.ndarray:
        if not valid.mean() > 0:
            raise ValueError(
                f"advantage_estimator='max_rl' divides by the mean reward of a prompt, and that is {valid.mean():g}; "
                "give rewards of at least 0, such as 1 for a right answer and 0 for a wrong one"
            )
        return valid / valid.mean() - 1

    return _over_valid(rewards_G, estimate)


def raw(rewards_G: Rewards) -> Advantages:
    """r, without a baseline (REINFORCE). It also credits a completion that is the only one of its prompt."""
    return _over_valid(rewards_G, lambda valid: valid, compares=False)


def pass_at_k(rewards_G: Rewards, *, k: int) -> Advantages:
    """1/C(n, k) times the sum, over the sets of k of the n completions with i, of the set's highest reward minus that
    of the set without i   (the leave-one-out-minus-one form of PKPO, arXiv:2505.15201, theorem 4): an unbiased estimate
    of the gradient of the expected highest reward of k completions.

    Of fewer than k valid rewards there is no estimate, and each advantage is 0."""

    def estimate(valid: np.ndarray) -> np.ndarray:
        count = len(valid)
        # In ascending order, reward j is the highest of C(j, k - 2) sets of k - 1: it and k - 2 of the j before it.
        # Each of these sets gains r_i - r_j by a higher reward i, and nothing by a lower one.
        ascending = np.argsort(valid, kind="stable")
        sorted_G = valid[ascending].astype(np.float64)
        sets_G = np.array([math.comb(j, k - 2) / math.comb(count, k) for j in range(count)])
        gains_GG = np.maximum(sorted_G[:, None] - sorted_G[None, :], 0.0)
        advantages_G = np.empty(count)
        advantages_G[ascending] = gains_GG @ sets_G
        return advantages_G

    return _over_valid(rewards_G, estimate, least=k)


ESTIMATORS: dict[str, Callable[[Rewards], Advantages]] = {
    "group": group,
    "group_sample_std": group_sample_std,
    "centred": centred,
    "leave_one_out": leave_one_out,
    "max_rl": max_rl,
    "raw": raw,
}

PASS_AT_K = "pass_at_k"
"""The estimator `pass_at_k`, which has a setting of its own."""


def estimator_of(name: str, pass_k: int | None) -> Callable[[Rewards], Advantages]:
    """The estimator of one group with this name. `pass_k` is the k of PASS_AT_K."""
    if name == PASS_AT_K:
        assert pass_k is not None  # BatchPlan checks it
        return partial(pass_at_k, k=pass_k)
    return ESTIMATORS[name]


def _over_valid(
    rewards_G: Rewards,
    estimate: Callable[[np.ndarray], np.ndarray],
    *,
    compares: bool = True,
    least: int = 2,
) -> Advantages:
    """Applies the estimator to the valid rewards. The advantage of a masked grade stays None.

    An estimator that compares the rewards of a group gives exactly 0 if there are fewer than `least` valid rewards,
    or all are equal, since such a group has no gradient. Raises ValueError for a reward that is too large or not
    finite."""
    with np.errstate(over="ignore"):  # an overflow becomes infinity, which the check below refuses
        valid = np.array([reward for reward in rewards_G if reward is not None], dtype=np.float32)
    if not (np.abs(valid) <= LARGEST_REWARD).all():
        raise ValueError(
            f"rewards are {list(rewards_G)}; each must be {REWARD_RANGE}; give None for a missing grade"
        )
    if compares and (len(valid) < least or (valid == valid[0]).all()):
        advantages = iter([0.0] * len(valid))
    else:
        advantages = iter(estimate(valid).astype(np.float32).tolist())
    return [None if reward is None else next(advantages) for reward in rewards_G]


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
engine.losses.base, on arrays instead of tensors; a test compares both."""


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


class TokenSelection(Frozen):
    """Which tokens of a batch Clip-Cov or KL-Cov (arXiv:2505.22617) selects, by their covariance: (l - mean l) times
    (A - mean A), with the logprob l under the old policy and the advantage A, and means over all trained tokens.
    Tokens of a large covariance lower the entropy most."""

    kind: Literal["clip_cov", "kl_cov"]
    """clip_cov: tokens at random, of those whose covariance is in [low, high]. kl_cov: those of the largest
    covariance."""
    fraction: float = Field(2e-4, gt=0, le=1)
    """Fraction of the trained tokens that is selected, rounded down, but at least one token."""
    low: float = Field(1.0, allow_inf_nan=False)
    high: float = Field(5.0, allow_inf_nan=False)

    def of(self, logprobs_T: np.ndarray, advantages_T: np.ndarray, *, seed: int) -> np.ndarray:
        """(T,) bool: the selected tokens. clip_cov selects fewer if fewer tokens are within the bounds."""
        covariances_T = (logprobs_T - logprobs_T.mean()) * (advantages_T - advantages_T.mean())
        count = max(1, int(self.fraction * len(covariances_T)))
        if self.kind == "clip_cov":
            candidates = np.flatnonzero((covariances_T >= self.low) & (covariances_T <= self.high))
            chosen = np.random.default_rng(seed).permutation(candidates)[:count]
        else:
            chosen = np.argsort(-covariances_T, kind="stable")[:count]
        selected_T = np.zeros(len(covariances_T), dtype=bool)
        selected_T[chosen] = True
        return selected_T


DECOUPLED = "gdpo"
"""The estimator that normalises the parts of the rewards before it adds them (GDPO, arXiv:2601.05242)."""

KL_STATE = "kl_beta"
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
        beta = record.request.controllers_in.get(KL_STATE, self.beta)
        kl = record.metrics.get("kl_mean")
        if kl is None:  # no sample of the step had a gradient, so no KL was measured
            return beta
        error = min(0.2, max(-0.2, kl / self.target - 1))
        return beta * (1 + error * min(1.0, samples / self.horizon))

    def state(self, beta: float) -> dict[str, float]:
        return {KL_STATE: beta}
