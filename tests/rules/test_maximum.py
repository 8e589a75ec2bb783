"""The largest of a window: ties, singular covariances, no noise."""

from __future__ import annotations

import pytest
import torch

from netmoments.rules.maximum import Largest


def test_tied_and_constant_windows():
    """Equal means, a singular covariance or no noise give finite moments, which are right where they are known."""
    rule = Largest(torch.arange(8).reshape(2, 4), with_zero=False)
    mean = torch.zeros(2, 4, dtype=torch.float64)
    covariance = torch.zeros(2, 4, 4, dtype=torch.float64)
    covariance[0] = 1.0  # four copies of one number
    local = rule.local(mean, covariance)
    assert float(local.mean[0]) == pytest.approx(0, abs=1e-3)
    assert float(local.variance[0]) == pytest.approx(1, abs=1e-2)
    assert float(local.gain[0].sum()) == pytest.approx(1, abs=1e-6)
    assert local.mean[1] == 0
    assert local.variance[1] == 0
    assert all(bool(torch.isfinite(part).all()) for part in local)


def test_many_equal_windows_are_all_right():
    """In a flat background errors could add up: each mean is right to 0.01 deviations, their average to 0.001.

    The mean for four independent numbers and 0 is ∫ 1 − Φ(x)⁴ over x > 0, here by the trapezoidal rule.
    """
    windows = 6000  # so many that each has as few points as there may be
    rule = Largest(torch.arange(4 * windows).reshape(windows, 4), with_zero=True)
    local = rule.local(
        torch.zeros(windows, 4, dtype=torch.float64), torch.eye(4, dtype=torch.float64).expand(windows, 4, 4)
    )
    x = torch.linspace(0, 10, 20001, dtype=torch.float64)
    exact = torch.trapezoid(1 - torch.special.ndtr(x) ** 4, x)
    away = (local.mean - exact) / local.variance.sqrt()
    assert float(away.abs().max()) < 0.01
    assert abs(float(away.mean())) < 0.001
