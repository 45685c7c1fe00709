"""Means and paired differences with their 95 % confidence intervals by Student's t, which also hold for few values."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from storage.serialization import Frozen

CONFIDENCE = 0.95


class Mean(Frozen):
    """A sample mean and its 95 % interval, in the unit of the values."""

    mean: float
    low: float | None
    """Lower end of the interval; None if n is 1, because one value has no spread."""
    high: float | None
    n: int
    """Number of values."""


class PairedDifference(Frozen):
    """Mean of (after - before) over the same n items, with its 95 % interval."""

    before_mean: float
    after_mean: float
    difference: float
    low: float | None
    """Lower end of the interval of the difference; None if n is 1."""
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
    """mean ± t(0.975, n-1) · s / √n, where s divides by n-1. Raises ValueError when empty or not finite."""
    if not values:
        raise ValueError("a mean of no values was asked for; give at least one value")
    if not all(math.isfinite(value) for value in values):
        raise ValueError("the values hold NaN or infinity; leave masked grades out before taking a mean")
    mean, n = fmean(values), len(values)
    if n == 1:
        return Mean(mean=mean, low=None, high=None, n=1)
    half_width = t_quantile(n - 1) * stdev(values) / math.sqrt(n)
    return Mean(mean=mean, low=mean - half_width, high=mean + half_width, n=n)


def paired_difference(before: Sequence[float], after: Sequence[float]) -> PairedDifference:
    """The mean change of the same items between two measurements, with the paired t interval.

    Pairing removes the spread between easy and hard items, which an unpaired interval would count as noise.
    Raises ValueError when the lists differ in length, are empty, or hold NaN or infinity.
    """
    if len(before) != len(after):
        raise ValueError(
            f"{len(before)} values before and {len(after)} after cannot be paired; "
            "give the values of the same items, in the same order"
        )
    differences = [late - early for early, late in zip(before, after, strict=True)]
    change = mean_interval(differences)
    return PairedDifference(
        before_mean=fmean(before),
        after_mean=fmean(after),
        difference=change.mean,
        low=change.low,
        high=change.high,
        n=change.n,
    )


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
