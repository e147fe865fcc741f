"""Student's t without SciPy equals SciPy's."""

import math

import pytest

from layerwise.experiments.intervals import mean_interval, share_interval, student_probability, student_quantile

scipy_stats = pytest.importorskip("scipy.stats", reason="needs SciPy: pip install 'layerwise[scipy]'")


@pytest.mark.parametrize("nu", [1, 2, 3, 4, 5, 6, 7, 9, 10, 29, 30, 99, 200])
@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.999])
def test_quantile(nu, level):
    assert student_quantile(nu, level) == pytest.approx(scipy_stats.t.ppf((1 + level) / 2, nu), rel=1e-9)


@pytest.mark.parametrize("nu", [1, 2, 3, 8, 15])
@pytest.mark.parametrize("t", [0.0, 0.3, 2.0, 40.0])
def test_probability(nu, t):
    expected = scipy_stats.t.cdf(t, nu) - scipy_stats.t.cdf(-t, nu)
    assert student_probability(t, nu) == pytest.approx(expected, abs=1e-13)


def test_interval_is_that_of_the_mean():
    values = [0.3, 1.7, 2.2, 0.9]
    expected = scipy_stats.t.interval(0.95, 3, loc=scipy_stats.tmean(values), scale=scipy_stats.sem(values))
    assert mean_interval(values) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("values", [[], [1.0], [1.0, math.nan], [math.inf, 1.0]])
def test_no_interval(values):
    assert mean_interval(values) is None


@pytest.mark.parametrize(("held", "n"), [(0, 1), (1, 1), (0, 5), (3, 5), (5, 5), (29, 30), (40, 200)])
def test_interval_of_a_share(held, n):
    expected = scipy_stats.binomtest(held, n).proportion_ci(method="exact")
    assert share_interval(held, n) == pytest.approx((expected.low, expected.high), abs=1e-9)
