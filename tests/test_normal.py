"""The normal distribution's special functions against mpmath and scipy."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
import scipy.special
import torch
from scipy import stats

from netmoments.normal import density, distribution, gauss_legendre, owen_t, standard_deviation, wilson_interval
from tests.closeness import assert_close

mpmath.mp.dps = 30


def test_distribution_keeps_relative_accuracy_in_the_left_tail():
    x = torch.linspace(-30, 8, 77, dtype=torch.float64)
    exact = torch.tensor([float(mpmath.ncdf(v)) for v in x.tolist()], dtype=torch.float64)
    # erfc amplifies the rounding of its argument by x²: 900 · 2.2e-16 at −30
    assert_close(distribution(x), exact, rtol=5e-13)


def test_density():
    x = torch.linspace(-9, 9, 37, dtype=torch.float64)
    assert_close(density(x), [float(mpmath.npdf(v)) for v in x.tolist()], rtol=2e-14)


@pytest.mark.parametrize("count", [1, 2, 7, 56])
def test_gauss_legendre_integrates_polynomials(count):
    nodes, weights = gauss_legendre(count)
    for degree in range(2 * count):
        value = sum(w * u**degree for u, w in zip(nodes, weights, strict=True))
        assert value == pytest.approx(1 / (degree + 1), rel=1e-14)


def test_gauss_legendre_weights_are_rounded_correctly():
    """Against mpmath at 30 digits; numpy's own weights are not, which is why they are mended."""
    nodes, weights = gauss_legendre(56)
    exact = []
    for start in nodes:
        x = mpmath.findroot(lambda t: mpmath.legendre(56, t), mpmath.mpf(2 * start - 1))
        slope = 56 * (x * mpmath.legendre(56, x) - mpmath.legendre(55, x)) / (x * x - 1)
        exact.append(float(1 / ((1 - x * x) * slope**2)))
    expected = np.array(exact)
    assert np.abs(np.array(weights) / expected - 1).max() < 5e-16
    assert np.abs(0.5 * np.polynomial.legendre.leggauss(56)[1] / expected - 1).max() > 1e-13


def test_owen_t_against_scipy():
    rng = np.random.default_rng(1)
    h, a = rng.uniform(-6, 6, 2000), rng.standard_cauchy(2000)
    value = owen_t(torch.tensor(h), torch.tensor(a * h))
    assert_close(value, torch.tensor(scipy.special.owens_t(h, a)), atol=2e-16)


def test_owen_t_limits():
    h = torch.tensor([0.0, 0.5, -2.0], dtype=torch.float64)
    infinite = torch.full_like(h, torch.inf)
    assert_close(owen_t(h, infinite), torch.sign(h + 1e-300) * 0.5 * distribution(-h.abs()), atol=1e-16)
    assert_close(owen_t(h, torch.zeros_like(h)), [0.0, 0.0, 0.0], atol=0)


def test_standard_deviation_has_no_infinite_slope_at_zero():
    variance = torch.tensor([0.0, 4.0], dtype=torch.float64, requires_grad=True)
    standard_deviation(variance).sum().backward()
    assert variance.grad is not None
    assert variance.grad.tolist() == [0.0, 0.25]


def test_the_interval_is_wilsons():
    for count in (10, 200):
        for hits in (0, 1, count // 2, count):
            expected = stats.binomtest(hits, count).proportion_ci(method="wilson")
            low, high = wilson_interval(torch.tensor(hits / count, dtype=torch.float64), count)
            assert float(low) == pytest.approx(expected.low, abs=1e-12)
            assert float(high) == pytest.approx(expected.high, abs=1e-12)
