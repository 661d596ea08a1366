"""Student's t against its density, integrated, and printed tables; Holm's correction by hand."""

import math

import numpy as np
import pytest

from quiver.stages.evaluate.estimators import Estimate
from quiver.stages.evaluate.student import holm, interval, p_value

TABLE = {1: 12.7062047, 2: 4.3026527, 5: 2.5705818, 30: 2.0422725, 399: 1.9659275}
"""Quantiles 0.975 of Student's t, by degrees of freedom."""


def integrated(t: float, freedom: int) -> float:
    """P(|T| ≥ t) by Simpson's rule over the density."""
    x = np.linspace(0, t, 20_001)
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    density = (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
    weights = np.ones_like(x)
    weights[1:-1:2], weights[2:-1:2] = 4, 2
    inside = 2 * (density * weights).sum() * (x[1] - x[0]) / 3
    return 1 - inside * math.exp(log_scale) / math.sqrt(freedom * math.pi)


@pytest.mark.parametrize("n", [2, 3, 4, 7, 64, 401])
def test_p_values_are_those_of_the_density(n):
    for t in (0.0, 0.3, 1.0, 2.5, 6.0):
        assert p_value(Estimate(-0.5 * t, 0.5, n)) == pytest.approx(integrated(t, n - 1), abs=1e-9)


def test_intervals_have_the_quantiles_of_the_tables():
    for freedom, quantile in TABLE.items():
        low, high = interval(Estimate(1.0, 0.5, freedom + 1), 0.95)
        assert (low, high) == pytest.approx((1 - quantile / 2, 1 + quantile / 2), abs=1e-6)


def test_what_has_no_error_has_no_interval_and_equal_scores_differ_by_nothing():
    assert p_value(Estimate(0.5, None, 1)) is None and interval(Estimate(0.5, None, 1), 0.9) is None
    assert [p_value(Estimate(score, 0.0, 9)) for score in (0.0, 0.1)] == [1.0, 0.0]


def test_holm_multiplies_the_smallest_most_and_keeps_the_order():
    assert holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([]) == []
