"""Tests of statistics against tables, binomial sums, and sums and integrals done by hand."""

import math

import numpy as np
import pytest

from tasks.evaluation import statistics
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
    result = paired_difference([3.0, 4.0, 5.0, 6.0], [1.0, 2.0, 3.0, 3.0])
    # differences -2, -2, -2, -3: mean -2.25, s = 0.5, t(3) = 3.1824, half = 0.7956
    assert (result.difference, result.clear) == (-2.25, True)
    assert str(result) == "-2.250 (95 % CI -3.046 to -1.454), n=4"


@pytest.mark.parametrize("n", [1, 24])
def test_equal_differences_without_known_bounds_have_no_interval(n: int) -> None:
    result = paired_difference([1.0] * n, [3.0] * n)
    assert (result.difference, result.low, result.high, result.n) == (2.0, None, None, n)
    assert not result.clear
    assert str(result) == f"+2.000, n={n}"


def test_mean_interval_by_hand() -> None:
    # s² = (4 + 0 + 4) / 2 = 4, half = 4.3027 · 2 / √3 = 4.9683
    result = mean_interval([1.0, 3.0, 5.0])
    assert (result.mean, result.n) == (3.0, 3)
    assert (result.low, result.high) == (pytest.approx(-1.9683, abs=1e-4), pytest.approx(7.9683, abs=1e-4))


# -- bounded scores ----------------------------------------------------------------------------------------------


def binomial(n: int, k: int, p: float) -> float:
    """P(k of n) if each has probability p."""
    return math.comb(n, k) * p**k * (1 - p) ** (n - k)


@pytest.mark.parametrize(
    ("ones", "n", "low", "high"),
    [(0, 24, 0.0, 0.1425), (24, 24, 0.8575, 1.0), (4, 20, 0.0573, 0.4366), (12, 24, 0.2912, 0.7088),
     (0, 1, 0.0, 0.975), (1, 1, 0.025, 1.0)],
)  # fmt: skip
def test_zeros_and_ones_have_the_interval_of_clopper_and_pearson(ones: int, n: int, low: float, high: float) -> None:
    result = mean_interval([1.0] * ones + [0.0] * (n - ones))
    assert (result.low, result.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


@pytest.mark.parametrize("n", [3, 24, 336, 1000])
def test_each_end_leaves_out_a_tail_of_two_and_a_half_percent(n: int) -> None:
    for ones in sorted({0, 1, n // 3, n - 1, n}):
        result = mean_interval([1.0] * ones + [0.0] * (n - ones))
        assert result.low is not None and result.high is not None
        # the definition: at least (at most) so many ones have probability 0.025 at the lower (upper) end
        at_least = math.fsum(binomial(n, k, result.low) for k in range(ones, n + 1))
        at_most = math.fsum(binomial(n, k, result.high) for k in range(ones + 1))
        assert at_least == pytest.approx(0.025, abs=1e-5) or (ones, result.low) == (0, 0)
        assert at_most == pytest.approx(0.025, abs=1e-5) or (ones, result.high) == (n, 1)


@pytest.mark.parametrize("changed", range(25))
def test_a_difference_of_zeros_and_ones_is_clear_if_the_exact_mcnemar_test_is(changed: int) -> None:
    for better in range(changed + 1):
        worse, same = changed - better, 24 - changed
        before = [0.0] * better + [1.0] * worse + [1.0] * same
        after = [1.0] * better + [0.0] * worse + [1.0] * same
        tail = sum(binomial(changed, k, 0.5) for k in range(min(better, worse) + 1))
        assert paired_difference(before, after).clear is (2 * tail < 0.05), (better, worse)


def test_scores_between_the_bounds_by_hand() -> None:
    # n equal values v: the lower end is v 0.025^(1/n), because the weight at 0 has the distribution Beta(1, n)
    result = mean_interval([0.6] * 5)
    assert (result.low, result.high) == (
        pytest.approx(0.6 * 0.025**0.2, abs=1e-8), pytest.approx(1 - 0.4 * 0.025**0.2, abs=1e-8),
    )  # fmt: skip
    # Three weights are uniform on a triangle. 0.5 w1 + w2 <= c has the share 2 c² of it, for c <= 0.5
    result = mean_interval([0.5, 1.0])
    assert (result.low, result.high) == (
        pytest.approx(math.sqrt(0.0125), abs=1e-8), pytest.approx((1 + math.sqrt(0.975)) / 2, abs=1e-8),
    )  # fmt: skip


def test_scores_from_minus_1_to_1_have_these_bounds() -> None:
    # equal differences: the weight of the added value at a bound, b - a or a - b, has the distribution Beta(1, 24)
    mixed = paired_difference([-1.0] + [1.0] * 23, [-1.0] + [1.0] * 23)
    assert (mixed.low, mixed.high) == (pytest.approx(-2 * 0.14247, abs=1e-5), pytest.approx(2 * 0.14247, abs=1e-5))
    same = paired_difference([1.0] * 24, [1.0] * 24)
    assert (same.low, same.high) == (pytest.approx(-0.14247, abs=1e-5), pytest.approx(0.14247, abs=1e-5))


@pytest.mark.parametrize("n", [5, 24])
@pytest.mark.parametrize("probabilities", [(0.98, 0.01, 0.01), (0.02, 0.0, 0.98), (0.0, 0.9, 0.1), (0.3, 0.4, 0.3)])
def test_the_coverage_is_at_least_95_percent(n: int, probabilities: tuple[float, float, float]) -> None:
    # Exact: every sample of n scores of 0, 0.5 and 1, with its probability.
    mean = 0.5 * probabilities[1] + probabilities[2]
    covered, total = 0.0, 0.0
    for halves in range(n + 1):
        for ones in range(n + 1 - halves):
            zeros = n - halves - ones
            ways = math.comb(n, halves) * math.comb(n - halves, ones)
            probability = ways * math.prod(p**k for p, k in zip(probabilities, (zeros, halves, ones), strict=True))
            total += probability
            if probability > 1e-9:
                result = mean_interval([0.0] * zeros + [0.5] * halves + [1.0] * ones)
                assert result.low is not None and result.high is not None
                assert 0 <= result.low <= result.mean <= result.high <= 1
                covered += probability * (result.low <= mean <= result.high)
    assert total == pytest.approx(1)
    assert covered >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize(("a", "b"), [(0.2, 1.8), (5.0, 0.2), (2.0, 2.0)])
def test_the_coverage_of_continuous_scores_by_simulation(a: float, b: float) -> None:
    samples = np.random.default_rng(1).beta(a, b, (400, 24))
    covered = 0
    for sample in samples:
        result = mean_interval(list(sample))
        assert result.low is not None and result.high is not None
        covered += result.low <= a / (a + b) <= result.high
    # at a coverage of 0.95, fewer than 368 of 400 have probability 0.003
    assert covered >= 368


def test_the_work_does_not_grow_with_the_number_of_different_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def counted(factors: np.ndarray, counts: np.ndarray) -> float:
        assert counts.sum() == 100_001  # with the value at the bound
        sizes.append(len(factors))
        return 0.5

    monkeypatch.setattr(statistics, "_probability_below_zero", counted)
    mean_interval(np.random.default_rng(1).random(100_000).tolist())
    assert len(sizes) <= 2 * 36 and max(sizes) <= 2001


def test_rounded_scores_have_an_interval_that_holds_the_exact_one(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = np.random.default_rng(1).beta(2.0, 3.0, 100).tolist()
    exact = mean_interval(scores)
    monkeypatch.setattr(statistics, "GRID_POINTS", 21)
    rounded = mean_interval(scores)
    assert exact.low is not None and exact.high is not None and rounded.low is not None and rounded.high is not None
    # Values move by at most 1/20 of their range, which with a bound of the scores is at most 1.
    assert exact.low - 0.05 <= rounded.low < exact.low
    assert exact.high < rounded.high <= exact.high + 0.05
    assert rounded.mean == exact.mean


@pytest.mark.filterwarnings("error")
def test_tiny_scores_have_the_interval_of_equal_values() -> None:
    # as above: the lower end is v 0.025^(1/n)
    result = mean_interval([1e-200] * 5)
    assert result.low == pytest.approx(1e-200 * 0.025**0.2, rel=1e-8, abs=0)
    assert result.high == pytest.approx(1 - 0.025**0.2, abs=1e-8)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="2 values before and 1 after"):
        paired_difference([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="no values"):
        paired_difference([], [])
    with pytest.raises(ValueError, match="NaN"):
        paired_difference([1.0, 2.0], [1.0, math.nan])
