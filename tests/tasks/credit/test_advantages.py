"""Tests of the advantages of a group against golden values, and of the cases that must be exactly zero."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import combinations
from math import comb

import numpy as np
import pytest

from tasks.batches.advantages import (
    BATCH_ESTIMATORS,
    DECOUPLED,
    ESTIMATORS,
    PASS_AT_K,
    TokenSelection,
    centred,
    group,
    group_sample_std,
    leave_one_out,
    max_rl,
    pass_at_k,
    raw,
)
from tasks.plans import AdvantageEstimator


@pytest.mark.parametrize(
    ("estimator", "winner", "loser"),
    [
        (group, 1.732051, -0.577350),
        (group_sample_std, 1.5, -0.5),
        (leave_one_out, 1.0, -0.333333),
        (centred, 0.75, -0.25),
        (max_rl, 3.0, -1.0),
    ],
)
def test_one_winner_of_four(estimator, winner: float, loser: float) -> None:
    assert estimator([1.0, 0.0, 0.0, 0.0]) == pytest.approx([winner, loser, loser, loser], abs=1e-6)


@pytest.mark.parametrize(
    ("estimator", "winner"),
    [(group, 1.0), (group_sample_std, 0.866025), (leave_one_out, 0.666667), (centred, 0.5), (max_rl, 1.0)],
)
def test_two_winners_of_four(estimator, winner: float) -> None:
    assert estimator([1.0, 0.0, 0.0, 1.0]) == pytest.approx([winner, -winner, -winner, winner], abs=1e-6)


def test_max_rl_needs_a_mean_above_0() -> None:
    # by hand: the mean of 0.2, 0.6 and 0.1 is 0.3
    assert max_rl([0.2, None, 0.6, 0.1]) == pytest.approx([-1 / 3, None, 1.0, -2 / 3], abs=1e-6)
    assert max_rl([0.0, 0.0]) == [0.0, 0.0]
    with pytest.raises(ValueError, match="divides by the mean reward of a prompt, and that is -0.5"):
        max_rl([-1.0, 0.0])


PASS_AT_2 = partial(pass_at_k, k=2)


def by_sets(rewards: Sequence[float], k: int) -> list[float]:
    """The definition: over all sets of k completions, what each member adds to the highest reward of the others."""
    sums = [0.0] * len(rewards)
    for members in combinations(range(len(rewards)), k):
        for member in members:
            others = [rewards[other] for other in members if other != member]
            sums[member] += max(rewards[member], *others) - max(others)
    return [total / comb(len(rewards), k) for total in sums]


def test_pass_at_k_is_the_gain_over_all_sets_of_k() -> None:
    # by hand, k = 2: of the 6 pairs, the winner gains 1 in 3; with two winners, each in 2
    assert PASS_AT_2([1.0, 0.0, 0.0, 0.0]) == pytest.approx([0.5, 0.0, 0.0, 0.0], abs=1e-7)
    assert PASS_AT_2([1.0, 0.0, 0.0, 1.0]) == pytest.approx([1 / 3, 0.0, 0.0, 1 / 3], abs=1e-7)
    # k = 4 has one set, to which only the best adds: 3 - 2
    assert pass_at_k([2.0, 3.0, -1.0, 0.5], k=4) == [0.0, 1.0, 0.0, 0.0]
    # k = 3 of (2, 3, -1, 0.5): the sets without -1, 0.5, 2 give 3 - 2, 3 - 2, 3 - 0.5, and that without 3 gives 2 - 0.5
    assert pass_at_k([2.0, 3.0, -1.0, 0.5], k=3) == pytest.approx([1.5 / 4, 4.5 / 4, 0.0, 0.0], abs=1e-7)


@pytest.mark.parametrize("k", [2, 3, 5, 7])
def test_pass_at_k_equals_the_sum_over_sets(k: int) -> None:
    rng = np.random.default_rng(k)
    for rewards in (rng.normal(size=7), rng.integers(0, 3, size=7), rng.integers(0, 2, size=9)):
        assert pass_at_k(rewards.tolist(), k=k) == pytest.approx(by_sets(rewards.tolist(), k), abs=1e-6)


def test_fewer_valid_rewards_than_k_have_no_estimate() -> None:
    assert pass_at_k([1.0, None, 0.0, None], k=3) == [0.0, None, 0.0, None]
    assert pass_at_k([1.0, None, 0.0, 0.5], k=3) == pytest.approx([0.5, None, 0.0, 0.0])


COMPARING = {name: estimator for name, estimator in ESTIMATORS.items() if name != "raw"} | {PASS_AT_K: PASS_AT_2}
"""The estimators that compare the rewards of a group."""


def test_a_raw_reward_is_its_own_advantage() -> None:
    assert raw([0.5, None, -2.0]) == [0.5, None, -2.0]
    # also alone, and where all are equal
    assert raw([0.5]) == [0.5] and raw([3.0, 3.0]) == [3.0, 3.0]
    with pytest.raises(ValueError, match="give None for a missing grade"):
        raw([float("nan")])


@pytest.mark.parametrize("estimator", COMPARING.values(), ids=COMPARING)
class TestEveryEstimator:
    def test_equal_rewards_teach_exactly_nothing(self, estimator) -> None:
        # the float32 mean of seven times 0.1 is not 0.1: dividing by the tiny std would make it -0.43
        assert estimator([0.1] * 7) == [0.0] * 7

    def test_one_valid_grade_teaches_exactly_nothing(self, estimator) -> None:
        assert estimator([None, 0.7, None]) == [None, 0.0, None]

    def test_a_masked_grade_leaves_the_statistics_and_keeps_its_place(self, estimator) -> None:
        without = estimator([1.0, 0.0, 0.0])
        assert estimator([1.0, None, 0.0, 0.0]) == [without[0], None, *without[1:]]

    def test_nothing_valid(self, estimator) -> None:
        assert estimator([None, None]) == [None, None]
        assert estimator([]) == []

    def test_advantages_sum_to_zero_and_follow_the_rewards(self, estimator) -> None:
        if estimator is PASS_AT_2:
            pytest.skip("its advantages are gains, which are never below 0")
        advantages = estimator([3.0, -1.0, 0.5, 2.0])
        assert sum(advantages) == pytest.approx(0, abs=1e-6)
        assert advantages[0] > advantages[3] > 0 > advantages[2] > advantages[1]

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e308, 1e30])
    def test_a_reward_that_is_no_number_is_refused(self, estimator, bad: float) -> None:
        with pytest.raises(ValueError, match="give None for a missing grade"):
            estimator([1.0, bad])


def test_the_population_std_is_scale_free_and_centred_is_not() -> None:
    assert group([10.0, 0.0]) == pytest.approx([1.0, -1.0])
    assert centred([10.0, 0.0]) == [5.0, -5.0]


def test_every_estimator_can_be_configured() -> None:
    assert {*ESTIMATORS, *BATCH_ESTIMATORS, DECOUPLED, PASS_AT_K} == set(AdvantageEstimator.__args__)


def test_the_tokens_of_a_large_covariance_by_hand() -> None:
    """Means -2 and 0: (l + 2)·A is 1, -0.5, -2, 0, 2, -1.5 for these six tokens."""
    logprobs, advantages = np.array([-1.0, -1.5, -4.0, -2.0, -4.0, 0.5]), np.array([1.0, -1.0, 1.0, 0.6, -1.0, -0.6])
    selection = TokenSelection(kind="kl_cov", fraction=0.35)
    assert np.flatnonzero(selection.of(logprobs, advantages, seed=0)).tolist() == [0, 4]  # 0.35 · 6, rounded down
    assert selection.model_copy(update={"fraction": 0.01}).of(logprobs, advantages, seed=0).tolist() == [
        False, False, False, False, True, False,
    ]  # fmt: skip
    # at random within the bounds, which only the first and the fifth token are, the same for the same seed
    selection = TokenSelection(kind="clip_cov", fraction=0.2, low=0.5, high=5.0)
    chosen = {int(np.flatnonzero(selection.of(logprobs, advantages, seed=seed))[0]) for seed in range(20)}
    assert chosen == {0, 4}
    assert all(selection.of(logprobs, advantages, seed=3) == selection.of(logprobs, advantages, seed=3))
    assert not selection.model_copy(update={"low": 2.5}).of(logprobs, advantages, seed=0).any()
