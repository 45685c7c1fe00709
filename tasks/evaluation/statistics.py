"""Means and paired differences with their 95 % confidence intervals, which also hold for few values.

Scores between 0 and 1, or between -1 and 1, are taken to have these bounds. An interval of bounded values stays within
the bounds, and it has a width even if all values are equal: 0 of 24 is 0 to 0.142. Its lower end is the 2.5 % quantile
of the mean of the values and of one more value at the lower bound, with random weights (Dirichlet, all parameters 1);
the upper end is the 97.5 % quantile with one more value at the upper bound (Gaffke; arXiv:1905.06208). For scores of 0
and 1 this is the exact interval of Clopper and Pearson, and a paired difference of such scores is clear if the exact
McNemar test is significant at 5 %. For other bounded scores the coverage of at least 95 % is a conjecture, which the
tests check by simulation. Each of many different bounded values is rounded down for the lower end, and up for the upper
end, to one of `GRID_POINTS` values, so that the interval becomes wider and keeps its coverage. Scores without
these bounds have Student's t interval.
"""

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, stdev

import numpy as np

from storage.serialization import Frozen

CONFIDENCE = 0.95
TAIL = (1 - CONFIDENCE) / 2
"""Probability that is left out on each side of an interval."""
Bounds = tuple[float, float]
BOUNDS_OF_SCORES: tuple[Bounds, ...] = ((0.0, 1.0), (-1.0, 1.0))
"""The bounds that scores may have, the narrowest first."""
_ROUNDING = 1e-9
"""How far a sum of rounded numbers may lie outside of its bounds."""
_LOG_STEP = 0.05
_NODES = np.exp(np.arange(-20.0, 20.0, _LOG_STEP))
"""Points of the integral in `_probability_below_zero`, at equal distances of their logarithms."""
GRID_POINTS = 2001
"""Largest number of different values of which an interval is computed. More values are rounded to as many equidistant
ones, which widens the interval at each end by at most the range of the values divided by GRID_POINTS - 1."""
_HALVINGS = 36
"""Number of bisections: the quantiles are precise to the range of the values divided by 2**36."""


class Mean(Frozen):
    """A sample mean and its 95 % interval, in the unit of the values."""

    mean: float
    low: float | None
    """Lower end of the interval; None if the values have no known bounds and are all equal, or only one."""
    high: float | None
    n: int
    """Number of values."""


class PairedDifference(Frozen):
    """Mean of (after - before) over the same n items, with its 95 % interval."""

    before_mean: float
    after_mean: float
    difference: float
    low: float | None
    """Lower end of the interval; None if the scores have no known bounds and all differences are equal, or only one."""
    high: float | None
    n: int

    @property
    def clear(self) -> bool:
        """Whether the interval does not contain 0, so that the difference is significant at the 5 % level."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    def __str__(self) -> str:
        interval = "" if self.low is None or self.high is None else f" (95 % CI {self.low:+.3f} to {self.high:+.3f})"
        return f"{self.difference:+.3f}{interval}, n={self.n}"


def mean_interval(values: Sequence[float]) -> Mean:
    """The mean with its interval. Raises ValueError when empty or not finite."""
    return _interval(values, score_bounds(values))


def paired_difference(before: Sequence[float], after: Sequence[float]) -> PairedDifference:
    """The mean change of the same items between two measurements, with the interval of the mean of the changes.

    Pairing removes the spread between easy and hard items, which an unpaired interval would count as noise.
    Raises ValueError when the lists differ in length, are empty, or hold NaN or infinity.
    """
    if len(before) != len(after):
        raise ValueError(
            f"{len(before)} values before and {len(after)} after cannot be paired; "
            "give the values of the same items, in the same order"
        )
    differences = [late - early for early, late in zip(before, after, strict=True)]
    bounds = score_bounds([*before, *after])
    # scores between a and b differ by at most b - a in each direction
    change = _interval(differences, None if bounds is None else (bounds[0] - bounds[1], bounds[1] - bounds[0]))
    return PairedDifference(
        before_mean=fmean(before),
        after_mean=fmean(after),
        difference=change.mean,
        low=change.low,
        high=change.high,
        n=change.n,
    )


def score_bounds(scores: Sequence[float]) -> Bounds | None:
    """The narrowest of `BOUNDS_OF_SCORES` that holds all scores, or None."""
    for low, high in BOUNDS_OF_SCORES:
        if all(low - _ROUNDING <= score <= high + _ROUNDING for score in scores):
            return low, high
    return None


def _interval(values: Sequence[float], bounds: Bounds | None) -> Mean:
    """The mean of values within `bounds` (None: any values), with its interval."""
    if not values:
        raise ValueError("a mean of no values was asked for; give at least one value")
    if not all(math.isfinite(value) for value in values):
        raise ValueError("the values hold NaN or infinity; leave masked grades out before taking a mean")
    mean, n = fmean(values), len(values)
    if bounds is not None:
        low = _quantile_of_weighted_mean([*values, bounds[0]], TAIL)
        high = _quantile_of_weighted_mean([*values, bounds[1]], 1 - TAIL)
        return Mean(mean=mean, low=low, high=high, n=n)
    # equal values do not show how far others may lie from them
    spread = stdev(values) if n > 1 else 0.0
    if spread == 0:
        return Mean(mean=mean, low=None, high=None, n=n)
    half_width = t_quantile(n - 1) * spread / math.sqrt(n)
    return Mean(mean=mean, low=mean - half_width, high=mean + half_width, n=n)


def _quantile_of_weighted_mean(values: Sequence[float], probability: float) -> float:
    """The quantile of the mean of the values with Dirichlet(1, ..., 1) weights, that is with weights E_i / sum(E) of
    independent exponential E_i.

    More than GRID_POINTS different values are rounded: down for a probability below 1/2, else up. The mean grows with
    each value at any weights, so a quantile that is an end of an interval moves outwards only."""
    counts = Counter(values)
    if len(counts) > GRID_POINTS:
        counts = Counter(_rounded(values, up=probability > 0.5))
    distinct, multiplicity = np.array(list(counts)), np.array(list(counts.values()))
    low, high = float(distinct.min()), float(distinct.max())
    for _ in range(_HALVINGS if low < high else 0):
        middle = (low + high) / 2
        # the weighted mean is below `middle` if the sum of (value - middle) E is negative
        if _probability_below_zero(distinct - middle, multiplicity) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _rounded(values: Sequence[float], *, up: bool) -> list[float]:
    """The values, rounded up or down to GRID_POINTS equidistant ones between the smallest and the largest value."""
    grid = np.linspace(min(values), max(values), GRID_POINTS)
    if up:
        return grid[np.searchsorted(grid, values, side="left")].tolist()
    return grid[np.searchsorted(grid, values, side="right") - 1].tolist()


def _probability_below_zero(factors: np.ndarray, counts: np.ndarray) -> float:
    """P(sum of factor * Gamma(count) < 0) for independent gamma variables, by inversion of the characteristic function
    (Imhof 1961): 1/2 - 1/pi * integral over t > 0 of sin(theta(t)) / (t rho(t)), with theta = sum of
    count * atan(t factor) and rho = product of (1 + t^2 factor^2)^(count / 2)."""
    # A power of two scales the factors without rounding, so that the squares of small ones are not 0.
    factors = np.ldexp(factors, -np.frexp(np.abs(factors).max())[1])
    factors = factors / math.sqrt(counts @ factors**2)
    # the mean in standard deviations. Cantelli: P(below 0) <= 1 / (1 + mean^2), which is under the tail that is sought
    mean = float(counts @ factors)
    if 1 + mean**2 > 1 / TAIL:
        return 0.0 if mean > 0 else 1.0
    # the trapezoidal rule in log t, whose error falls exponentially with the distance of the nodes
    products = np.multiply.outer(_NODES, factors)
    theta, log_rho = np.arctan(products) @ counts, np.log1p(products**2) @ counts / 2
    integral = float(np.sum(np.sin(theta) * np.exp(-log_rho))) * _LOG_STEP
    return 0.5 - integral / math.pi


def t_quantile(degrees: int) -> float:
    """The t with P(|T| < t) = 0.95 under Student's t with `degrees` >= 1 degrees of freedom."""
    # Bisect. The largest quantile is that of one degree of freedom, 12.706; 60 halvings reach the precision of floats.
    low, high = 0.0, 16.0
    for _ in range(60):
        middle = (low + high) / 2
        if _central_probability(middle, degrees) < CONFIDENCE:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _central_probability(t: float, degrees: int) -> float:
    """P(|T| < t) as a finite sum, exact for whole degrees (Abramowitz & Stegun 26.7.3 and 26.7.4)."""
    theta = math.atan(t / math.sqrt(degrees))
    sine, square = math.sin(theta), math.cos(theta) ** 2
    total = 0.0
    if degrees % 2 == 1:
        term = math.cos(theta)
        for i in range(degrees // 2):
            total += term
            term *= square * ((2 * i + 2) / (2 * i + 3))
        return 2 / math.pi * (theta + sine * total)
    term = 1.0
    for i in range(degrees // 2):
        total += term
        term *= square * ((2 * i + 1) / (2 * i + 2))
    return sine * total
