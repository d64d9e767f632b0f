"""Intervals and significance tests against enumeration and known coverage."""

import math
from itertools import product

import numpy as np
import pytest

from osdn.results.experiments import conclusion
from osdn.results.statistics import (
    estimate,
    holm,
    median_interval,
    paired_difference,
    t_interval,
    t_test,
)


def test_bootstrap_of_four_values_matches_all_resamples():
    values = [0.1, 0.4, 1.0, 1.1]
    means = [np.mean(draw) for draw in product(values, repeat=4)]
    low, high = np.quantile(means, [0.025, 0.975], method="inverted_cdf")
    found = estimate(values)
    assert found.mean == pytest.approx(np.mean(values))
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.01)


def test_intervals_have_about_their_nominal_coverage():
    rng = np.random.default_rng(1)
    covered = sum(e.low <= 2.0 <= e.high for e in (estimate(rng.normal(2.0, 1.0, 30)) for _ in range(300)))
    assert 0.89 <= covered / 300 <= 0.98


def test_pairing_removes_variation_shared_by_seeds():
    rng = np.random.default_rng(2)
    seeds = rng.normal(0, 10, 6)
    found = paired_difference(seeds + 0.5 + rng.normal(0, 0.01, 6), seeds)
    assert found.mean == pytest.approx(0.5, abs=0.02)
    assert found.high - found.low < 0.05
    assert found.p_value == 2 / 2**6
    assert found.seen


def test_three_agreeing_seeds_are_not_enough():
    found = paired_difference([1.1, 1.2, 1.3], [1.0, 1.0, 1.0])
    assert found.low > 0
    assert found.p_value == 2 / 2**3
    assert not found.seen


def test_p_values_are_rarely_small_without_an_effect():
    rng = np.random.default_rng(3)
    p = [paired_difference(rng.normal(size=8), rng.normal(size=8)).p_value for _ in range(400)]
    assert 0.02 <= np.mean(np.array(p) <= 0.05) <= 0.08


def test_p_values_are_never_zero_and_are_nan_for_values_that_are_not_finite():
    assert paired_difference([1.0] * 20, [0.0] * 20).p_value == 1 / 10_001
    found = paired_difference([1.0, np.nan, 2.0], [0.0] * 3)
    assert np.isnan(found.p_value)
    assert not found.seen
    assert "not a finite number" in conclusion(found)


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([1.0, 2.0, 3.0, 4.0, 5.0], 0.0132),  # t = 4.243 on 4 degrees of freedom
        ([0.3, -0.2, 0.1, 0.4, -0.1, 0.2], 0.2722),
        ([2.0, 4.0], 0.2048),  # one degree of freedom: the Cauchy distribution
    ],
)
def test_the_t_test_agrees_with_published_tables(differences, expected):
    assert t_test(differences, [0.0] * len(differences)) == pytest.approx(expected, abs=2e-4)
    assert t_test([-x for x in differences], [0.0] * len(differences)) == pytest.approx(expected, abs=2e-4)


def test_the_t_test_without_spread():
    assert t_test([0.5, 0.5], [0.5, 0.5]) == 1
    assert t_test([0.5, 0.5], [0.25, 0.25]) == paired_difference([0.5, 0.5], [0.25, 0.25]).p_value == 0.5
    assert t_test([0.5] * 6, [0.25] * 6) == paired_difference([0.5] * 6, [0.25] * 6).p_value
    assert math.isnan(t_test([math.nan, 0.5], [0.5, 0.5]))


def test_the_t_test_rejects_equal_means_at_its_nominal_rate():
    draws = np.random.default_rng(0).normal(size=(4000, 6))
    found = np.mean([t_test(row, np.zeros(6)) <= 0.05 for row in draws[:800]])
    assert abs(found - 0.05) < 4 * (0.05 * 0.95 / 800) ** 0.5


def test_holm_steps_down_and_never_falls():
    # by hand: 4 * 0.01, 3 * 0.013, 2 * 0.03, 0.5, each at least the one before
    assert holm([0.5, 0.01, 0.03, 0.013]) == pytest.approx([0.5, 0.04, 0.06, 0.04])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
    found = holm([0.01, math.nan])
    assert found[0] == 0.02
    assert math.isnan(found[1])


@pytest.mark.parametrize(("n", "quantile"), [(2, 12.7062), (3, 4.3027), (6, 2.5706), (31, 2.0423)])
def test_t_intervals_have_the_width_of_the_tables(n, quantile):
    x = np.random.default_rng(n).normal(size=n)
    found = t_interval(x.tolist())
    assert found.high - found.mean == pytest.approx(quantile * x.std(ddof=1) / math.sqrt(n), rel=1e-4)
    assert found.mean - found.low == pytest.approx(found.high - found.mean)
    assert t_test((x - found.low).tolist(), [0.0] * n) == pytest.approx(0.05, abs=1e-4)


def test_one_seed_has_no_interval():
    found = t_interval([0.3])
    assert (found.mean, found.low, found.high) == (0.3, -math.inf, math.inf)


@pytest.mark.parametrize("n", [6, 9, 50])
def test_the_interval_of_a_median_covers_it_and_is_no_wider_than_it_must_be(n):
    def coverage(rank):  # that the median lies between the values of this rank from either end
        return sum(math.comb(n, k) for k in range(rank, n - rank + 1)) / 2**n

    found = median_interval(range(1, n + 1))
    rank = round(found.low)
    assert (found.low, found.mean, found.high) == (rank, (n + 1) / 2, n + 1 - rank)
    assert coverage(rank) >= 0.95 > coverage(rank + 1)


def test_an_outlier_does_not_move_a_median():
    assert median_interval([*range(50)]).high == median_interval([*range(49), 1e9]).high
