"""Tests of GAE and returns against golden values and sums done by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tasks.batches.advantages import advantages_and_returns, discounted


@pytest.mark.parametrize(
    ("rewards", "values", "targets"),
    [
        ([0, 0, 1], [0.1, 0.2, 0.3], [0.92675, 0.965, 1]),
        ([0, 0, 0, 1], [0.5, 0.4, 0.3, 0.2], [0.90065, 0.927, 0.96, 1]),
    ],
)
def test_golden_advantages_plus_values(rewards: list[float], values: list[float], targets: list[float]) -> None:
    lengths = np.array([len(rewards)])
    advantages, _ = advantages_and_returns(
        np.array(rewards, dtype=float), np.array(values), lengths, gamma=1.0, lam=0.95
    )
    assert advantages + values == pytest.approx(targets, abs=1e-7)


def test_a_sequence_knows_nothing_of_its_neighbours() -> None:
    rewards, values = np.array([0.0, 0, 1, 0, 0, 0, 1]), np.array([0.1, 0.2, 0.3, 0.5, 0.4, 0.3, 0.2])
    together = advantages_and_returns(rewards, values, np.array([3, 4]), gamma=0.9, lam=0.8)
    first = advantages_and_returns(rewards[:3], values[:3], np.array([3]), gamma=0.9, lam=0.8)
    second = advantages_and_returns(rewards[3:], values[3:], np.array([4]), gamma=0.9, lam=0.8)
    for whole, one, two in zip(together, first, second, strict=True):
        assert whole == pytest.approx(np.concatenate([one, two]), abs=1e-12)


def test_discounted_rewards_by_hand() -> None:
    assert discounted(np.array([1.0, 2.0, 4.0, 8.0]), np.array([3, 1]), 0.5).tolist() == [3.0, 4.0, 4.0, 8.0]


def test_with_lambda_1_and_no_discount_the_advantage_is_the_return_less_the_value() -> None:
    rewards, values = np.array([0.5, -1.0, 2.0]), np.array([0.3, 0.1, -0.2])
    advantages, returns = advantages_and_returns(rewards, values, np.array([3]), gamma=1.0, lam=1.0)
    assert returns.tolist() == [1.5, 1.0, 2.0]
    assert advantages == pytest.approx(returns - values, abs=1e-12)


def test_a_sequence_of_one_token_and_no_sequence_at_all() -> None:
    advantages, returns = advantages_and_returns(np.array([2.0]), np.array([0.5]), np.array([1]), gamma=0.9, lam=0.9)
    assert (advantages.tolist(), returns.tolist()) == ([1.5], [2.0])
    empty = advantages_and_returns(np.array([]), np.array([]), np.array([], dtype=int), gamma=1.0, lam=1.0)
    assert [part.tolist() for part in empty] == [[], []]
