"""Tests of statistics against a t table and sums done by hand."""

import math

import pytest

from tasks.evaluation.statistics import mean_interval, paired_difference, t_quantile


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (9, 2.2622), (10, 2.2281), (30, 2.0423),
     (99, 1.9842), (120, 1.9799), (1000, 1.9623)],
)  # fmt: skip
def test_t_quantile_is_that_of_the_table(degrees: int, expected: float) -> None:
    assert t_quantile(degrees) == pytest.approx(expected, abs=6e-5)


def test_paired_difference_by_hand() -> None:
    # differences 1, 2, 3: mean 2, s = 1, t(2) = 4.3027, half = 4.3027 / √3 = 2.4842
    result = paired_difference([0.0, 10.0, 5.0], [1.0, 12.0, 8.0])
    assert (result.before_mean, result.after_mean, result.difference, result.n) == (5.0, 7.0, 2.0, 3)
    assert result.low == pytest.approx(-0.4842, abs=1e-4)
    assert result.high == pytest.approx(4.4842, abs=1e-4)
    assert not result.clear


def test_pairing_sees_a_change_that_the_spread_of_the_items_would_hide() -> None:
    before = [0.0, 100.0, 200.0, 300.0]
    result = paired_difference(before, [value + change for value, change in zip(before, [1, 1, 1, 2], strict=True)])
    # differences 1, 1, 1, 2: mean 1.25, s = 0.5, t(3) = 3.1824, half = 0.7956
    assert (result.low, result.high) == (pytest.approx(0.4544, abs=1e-4), pytest.approx(2.0456, abs=1e-4))
    assert result.clear


def test_the_sign_is_after_minus_before() -> None:
    result = paired_difference([3.0, 4.0, 5.0], [1.0, 2.0, 3.0])
    assert (result.difference, result.low, result.high) == (-2.0, -2.0, -2.0)
    assert result.clear
    assert str(result) == "-2.000 (95 % CI -2.000 to -2.000), n=3"


def test_one_item_has_a_difference_and_no_interval() -> None:
    result = paired_difference([1.0], [3.0])
    assert (result.difference, result.low, result.high, result.n) == (2.0, None, None, 1)
    assert not result.clear
    assert str(result) == "+2.000, n=1"


def test_mean_interval_by_hand() -> None:
    # s² = (4 + 0 + 4) / 2 = 4, half = 4.3027 · 2 / √3 = 4.9683
    result = mean_interval([1.0, 3.0, 5.0])
    assert (result.mean, result.n) == (3.0, 3)
    assert (result.low, result.high) == (pytest.approx(-1.9683, abs=1e-4), pytest.approx(7.9683, abs=1e-4))


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="2 values before and 1 after"):
        paired_difference([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="no values"):
        paired_difference([], [])
    with pytest.raises(ValueError, match="NaN"):
        paired_difference([1.0, 2.0], [1.0, math.nan])
