"""Functions with kinks: what has a closed form, against quadrature."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from netmoments.rules.piecewise_linear import PiecewiseLinear, between

HARD_TANH = between(torch.tensor([-0.5]).double(), torch.tensor([0.4]).double(), 1, torch.zeros(1).double())


def test_two_fully_correlated_kinks():
    """The variance of one unit with two kinks has a closed form of its own; against quadrature."""
    nodes = torch.linspace(-9, 9, 200_001, dtype=torch.float64)
    density = torch.exp(-nodes * nodes / 2)
    density /= density.sum()
    for mean, std in ((0.1, 0.9), (-1.5, 0.4), (3.0, 1.0), (0.0, 1e-3)):
        y = (mean + std * nodes).clamp(-0.5, 0.4)
        centre = (density * y).sum()
        local = HARD_TANH.local(torch.tensor([[mean]]).double(), torch.tensor([[[std**2]]]).double())
        assert float(local.mean) == pytest.approx(float(centre), abs=1e-7)
        assert float(local.variance) == pytest.approx(float((density * (y - centre) ** 2).sum()), rel=1e-4, abs=1e-8)


def test_pairs_of_two_kinks_are_exact():
    """Cov of two hard tanhs against a two-dimensional Gauss–Hermite sum of the conditional closed form."""
    rule = PiecewiseLinear(*(torch.cat([x, x], -1) for x in _parts(HARD_TANH)))
    mean = torch.tensor([0.2, -0.1]).double()
    covariance = torch.tensor([[0.8, 0.5], [0.5, 0.6]]).double()
    found = rule.pairs(mean.unsqueeze(0), covariance.unsqueeze(0))[0, 0, 1]
    gains = rule.local(mean.unsqueeze(-1), covariance.diagonal().reshape(2, 1, 1)).gain.squeeze(-1)
    total = found + gains[0] * gains[1] * covariance[0, 1]
    nodes = torch.linspace(-9, 9, 20_001, dtype=torch.float64)
    weight = torch.exp(-nodes * nodes / 2)
    weight /= weight.sum()
    first = mean[0] + covariance[0, 0].sqrt() * nodes
    slope = covariance[0, 1] / covariance[0, 0]
    rest = (covariance[1, 1] - slope * covariance[0, 1]).expand(len(nodes)).reshape(-1, 1, 1)
    one = PiecewiseLinear(*(x.expand(*x.shape[:-1], len(nodes)) for x in _parts(HARD_TANH)))
    second = one.local((mean[1] + slope * (first - mean[0])).unsqueeze(-1), rest).mean
    y = first.clamp(-0.5, 0.4)
    expected = (weight * y * second).sum() - (weight * y).sum() * (weight * second).sum()
    assert float(total) == pytest.approx(float(expected), abs=1e-7)


def _parts(rule: PiecewiseLinear) -> tuple[Tensor, ...]:
    return rule.offset, rule.slope, rule.bends, rule.kinks
