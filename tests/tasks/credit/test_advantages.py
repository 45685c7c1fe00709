"""Tests of the advantages of a group against golden values, and of the cases that must be exactly zero."""

from __future__ import annotations

import pytest

from tasks.batches.advantages import BATCH_ESTIMATORS, ESTIMATORS, centred, group, group_sample_std, leave_one_out, raw
from tasks.plans import AdvantageEstimator


@pytest.mark.parametrize(
    ("estimator", "winner", "loser"),
    [
        (group, 1.732051, -0.577350),
        (group_sample_std, 1.5, -0.5),
        (leave_one_out, 1.0, -0.333333),
        (centred, 0.75, -0.25),
    ],
)
def test_one_winner_of_four(estimator, winner: float, loser: float) -> None:
    assert estimator([1.0, 0.0, 0.0, 0.0]) == pytest.approx([winner, loser, loser, loser], abs=1e-6)


@pytest.mark.parametrize(
    ("estimator", "winner"),
    [(group, 1.0), (group_sample_std, 0.866025), (leave_one_out, 0.666667), (centred, 0.5)],
)
def test_two_winners_of_four(estimator, winner: float) -> None:
    assert estimator([1.0, 0.0, 0.0, 1.0]) == pytest.approx([winner, -winner, -winner, winner], abs=1e-6)


COMPARING = {name: estimator for name, estimator in ESTIMATORS.items() if name != "raw"}
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
    assert set(ESTIMATORS) | set(BATCH_ESTIMATORS) == set(AdvantageEstimator.__args__)
