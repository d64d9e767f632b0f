"""Means over seeds with their uncertainty, and differences between runs that share a seed.

A bootstrap interval over few seeds is too narrow (with three it is their range), so a paired difference also
carries the probability that random signs would give a mean as large.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np

RESAMPLES = 10_000


@dataclass(frozen=True)
class Estimate:
    """A mean, or median, and its 95 % interval; which kind, the function that made it says."""

    mean: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        interval = f" [{self.low:.3f}, {self.high:.3f}]" if self.seeds > 1 else ""  # one seed has no spread
        return f"{self.mean:.3f}{interval}"


@dataclass(frozen=True)
class Difference(Estimate):
    """A mean of paired differences; `p_value` is that of the two-sided sign-flip test (Fisher 1935).

    It is exact for up to 14 seeds, estimated from random signs beyond that, and NaN if a value is not finite.
    """

    p_value: float

    def __str__(self) -> str:
        interval = f" [{self.low:+.3f}, {self.high:+.3f}]" if self.seeds > 1 else ""
        return f"{self.mean:+.3f}{interval}"

    @property
    def seen(self) -> bool:
        """Whether the interval excludes zero and chance is an unlikely explanation."""
        return (self.low > 0 or self.high < 0) and self.p_value <= 0.05


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of `values`, one per seed, with the interval of its percentile bootstrap (Efron 1979)."""
    x = np.asarray(values, float)
    draws = np.random.default_rng(0).integers(len(x), size=(RESAMPLES, len(x)))
    low, high = np.quantile(x[draws].mean(1), [0.025, 0.975])
    return Estimate(float(x.mean()), float(low), float(high), len(x))


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> Difference:
    """`values - baseline`, both with one value per seed in the same order."""
    x = np.asarray(values, float) - np.asarray(baseline, float)
    e = estimate(x.tolist())
    if len(x) <= 14:  # all sign patterns
        signs = np.array(list(product((-1, 1), repeat=len(x))))
    else:  # the observed pattern, and random ones
        drawn = np.random.default_rng(0).choice((-1, 1), size=(RESAMPLES, len(x)))
        signs = np.concatenate([np.ones((1, len(x))), drawn])
    means = np.abs((signs * x).mean(1))
    p_value = float((means >= abs(x.mean()) * (1 - 1e-12)).mean()) if np.isfinite(x).all() else math.nan
    return Difference(e.mean, e.low, e.high, e.seeds, p_value)


def t_test(values: Sequence[float], baseline: Sequence[float]) -> float:
    """The two-sided p-value of Student's paired t-test; NaN if a value is not finite.

    The sign-flip test cannot go below 2 / 2^n, so with few seeds it never survives a correction for many
    comparisons.  The t-test can, but assumes that differences are roughly normal.  If all differences are
    equal, as can happen with accuracies on few examples, there is no spread, and the p-value is that of the
    sign-flip test.
    """
    x = np.asarray(values, float) - np.asarray(baseline, float)
    if not np.isfinite(x).all():
        return math.nan
    if np.ptp(x) == 0:
        return 1.0 if x[0] == 0 else 2.0 ** (1 - len(x))
    return _two_tails(float(x.mean() / (x.std(ddof=1) / math.sqrt(len(x)))), len(x))


def t_interval(values: Sequence[float]) -> Estimate:
    """The mean of `values`, one per seed, and Student's 95 % interval; one seed has none.

    It is as wide as few seeds deserve, where the bootstrap's is too narrow, and assumes that seeds scatter
    about normally.
    """
    x = np.asarray(values, float)
    if len(x) < 2:
        return Estimate(float(x.mean()), -math.inf, math.inf, len(x))
    half = _t_quantile(len(x)) * float(x.std(ddof=1)) / math.sqrt(len(x))
    return Estimate(float(x.mean()), float(x.mean()) - half, float(x.mean()) + half, len(x))


@cache
def _t_quantile(n: int, level: float = 0.05) -> float:
    """The t that `n` values exceed in size with this probability, by bisection."""
    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _two_tails(middle, n) > level else (low, middle)
    return low


def _two_tails(t: float, n: int) -> float:
    """The probability that Student's t of `n` values is larger in size."""
    # With t = sqrt(n - 1) tan(a), the density of t becomes that of cos(a)^(n - 2) between -pi/2 and pi/2.
    angles = np.linspace(0, math.pi / 2, 20_001)
    density = np.cos(angles) ** (n - 2)
    outside = np.linspace(math.atan(abs(t) / math.sqrt(n - 1)), math.pi / 2, 20_001)
    return float(np.trapezoid(np.cos(outside) ** (n - 2), outside) / np.trapezoid(density, angles))


def median_interval(values: Sequence[float]) -> Estimate:
    """The median of repeated timings, and the 95 % interval between two of them that needs no assumption.

    Timings have outliers, which a mean follows.  With fewer than six values it is their range, of less than
    95 %.

    >>> median_interval([1, 2, 3, 4, 5, 6, 7, 800])
    Estimate(mean=4.5, low=1.0, high=800.0, seeds=8)
    """
    x = np.sort(np.asarray(values, float))
    n, below, rank = len(x), 0.0, -1  # `below`: the probability that at most `rank` are below the median
    while below + (p := math.comb(n, rank + 1) / 2**n) <= 0.025:
        below, rank = below + p, rank + 1
    rank = max(rank, 0)
    return Estimate(float(np.median(x)), float(x[rank]), float(x[n - 1 - rank]), n)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected by Holm's step-down method (Holm 1979); a NaN stays NaN and counts as 1.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    p = [1.0 if math.isnan(x) else x for x in p_values]
    adjusted, highest = list(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        highest = max(highest, min(1.0, (len(p) - rank) * p[i]))
        adjusted[i] = math.nan if math.isnan(p_values[i]) else highest
    return adjusted
