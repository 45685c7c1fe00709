"""Tests of the transformations of rewards before they become advantages. Expected numbers are computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.losses.base import KL_ESTIMATORS
from tasks.batches.advantages import KL_OF_GAP, Overlong, reinforce_plus_plus, subtract_group_mean, whiten


def test_whitening_by_hand() -> None:
    # mean 2, population variance 2/3
    assert whiten(np.array([1.0, 2.0, 3.0])) == pytest.approx([-1.2247449, 0.0, 1.2247449], abs=1e-6)


@pytest.mark.parametrize("values", [[], [3.0], [0.1, 0.1, 0.1]])
def test_equal_values_whiten_to_exactly_zero(values: list[float]) -> None:
    assert whiten(np.array(values)).tolist() == [0.0] * len(values)


def test_returns_of_reinforce_plus_plus_by_hand() -> None:
    # token rewards -0.1, 1 - 0.2 | 0 - 0.3: returns 0.7, 0.8 | -0.3; their mean 0.4, variance 0.74 / 3
    advantages = reinforce_plus_plus(np.array([1.0, 0.0]), np.array([0.1, 0.2, 0.3]), np.array([2, 1]))
    assert advantages == pytest.approx(np.array([0.3, 0.4, -0.7]) / np.sqrt(0.74 / 3), abs=1e-6)


def test_a_later_reward_is_discounted_once_per_token() -> None:
    """The returns of verl's compute_reinforce_plus_plus_outcome_advantage (trainer/ppo/core_algos.py)."""
    # rewards -0.1, 0, 1 - 0.2 | 0 - 0.3 with gamma 0.5: returns -0.1 + 0.4 / 2, 0.4, 0.8 | -0.3
    advantages = reinforce_plus_plus(np.array([1.0, 0.0]), np.array([0.1, 0.0, 0.2, 0.3]), np.array([3, 1]), gamma=0.5)
    returns = np.array([0.1, 0.4, 0.8, -0.3])  # mean 0.25, mean square 0.225
    assert advantages == pytest.approx((returns - 0.25) / np.sqrt(0.225 - 0.25**2), abs=1e-6)


def test_without_a_penalty_every_token_of_an_answer_has_its_return() -> None:
    # 2, 2, 2, 0: mean 1.5, variance 0.75
    advantages = reinforce_plus_plus(np.array([2.0, 0.0]), np.zeros(4), np.array([3, 1]))
    assert advantages == pytest.approx(np.array([0.5, 0.5, 0.5, -1.5]) / np.sqrt(0.75), abs=1e-6)


def test_the_mean_that_is_taken_off_is_that_of_the_prompt() -> None:
    prompts = np.array(["a", "b", "a", "b"])
    assert subtract_group_mean(np.array([1.0, 5.0, 0.0, 7.0]), prompts).tolist() == [0.5, -1.0, -0.5, 1.0]


def test_an_overlong_answer_loses_more_the_nearer_it_comes_to_the_limit() -> None:
    penalty = Overlong(limit=100, buffer=20, penalty=2.0)
    assert penalty.of(np.array([10, 80, 85, 90, 100])).tolist() == [0.0, 0.0, 0.5, 1.0, 2.0]


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_plain_numbers_and_tensors_have_the_same_kl(name: str) -> None:
    assert set(KL_OF_GAP) == set(KL_ESTIMATORS)
    logprobs, reference = np.array([-1.0, -0.2, -3.0]), np.array([-1.5, -0.1, -3.0])
    of_tensors = KL_ESTIMATORS[name](torch.tensor(logprobs), torch.tensor(reference))
    assert KL_OF_GAP[name](logprobs - reference) == pytest.approx(of_tensors.numpy(), abs=1e-12)
