"""The largest of a window: ties, singular covariances, no noise."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import netmoments as nm
from netmoments.rules.maximum import Largest
from tests.networks import seeded


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


@pytest.mark.parametrize("with_zero", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_sketch_of_the_widest_windows(sign, with_zero):
    """Known from draws, as a window of a few more inputs than have a formula is with all of them: to 1/√4096."""
    generator = torch.Generator().manual_seed(1)
    windows = torch.arange(80).reshape(2, 40)
    windows[1, 37:] = -1
    rule = Largest(windows, with_zero=with_zero, sign=sign)
    mean = torch.randn(3, 80, dtype=torch.float64, generator=generator).requires_grad_()
    samples = mean.detach().unsqueeze(1) + torch.randn(3, 64, 80, dtype=torch.float64, generator=generator)
    assert not rule.has_formula
    found, formula = rule.in_sketch(mean, samples), rule.sketch_moments(mean, rule.observed(samples).covariance, 4096)
    assert torch.equal(found.values, rule.observed(samples).values)
    assert float((found.mean - formula.mean).detach().abs().max()) < 0.05
    gain = found.pull_back(torch.eye(2, dtype=torch.float64).expand(3, 2, 2))
    assert torch.allclose(gain[:, 0, :40], formula.gain[:, 0], atol=0.04)
    assert torch.allclose(gain[:, 1, 40:77], formula.gain[:, 1, :37], atol=0.04)
    (slope,) = torch.autograd.grad(found.mean[:, 0].sum(), mean)
    assert torch.allclose(slope, gain[:, 0], atol=1e-12)


def test_the_largest_of_many_in_float32():
    """The largest of 1,000: powers of the radius of so many dimensions are beyond float32."""

    class OfMany(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 3000), nn.Linear(3, 2)

        def forward(self, x):
            return self.last(self.first(x).reshape(-1, 3, 1000).amax(-1))

    net, noise = seeded(OfMany, torch.float32), nm.Gaussian(torch.zeros(8), std=0.5)
    found, truth = nm.output_moments(net, noise, "sketch", check=0), nm.monte_carlo(net, noise, 10_000)
    assert float(((found.mean - truth.mean) / truth.variance.sqrt()).abs().max()) < 0.5
    assert float((found.variance / truth.variance).log().abs().max()) < 1.0
