"""Functions with kinks: what has a closed form, against quadrature."""

from __future__ import annotations

import mpmath
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from netmoments.rules.piecewise_linear import PiecewiseLinear, between, one_kink, relu
from tests.closeness import assert_close

HARD_TANH = between(torch.tensor([-0.5]).double(), torch.tensor([0.4]).double(), 1, torch.zeros(1).double())


def test_two_fully_correlated_kinks():
    """The variance of one unit with two kinks, which has a closed form of its own, against quadrature."""
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


def exact_powers(h: float, std: float) -> list[list[float]]:
    """E[yᵏ Heᵣ(u)] of y = relu(std·(h + u)) for k = 1, …, 4, by integrals over the part that is open, to 40 digits."""
    with mpmath.workdps(40):
        orders = (7, 5, 5, 1)

        def moment(k: int, r: int) -> float:
            def height(w: mpmath.mpf) -> mpmath.mpf:
                polynomial = [mpmath.mpf(1), w - h]
                while len(polynomial) <= r:
                    polynomial.append((w - h) * polynomial[-1] - (len(polynomial) - 1) * polynomial[-2])
                return w**k * polynomial[r] * mpmath.exp(h * w - w * w / 2)

            total = mpmath.quad(height, [0, 0.2, 0.6, 2, 6, 16])
            return float(mpmath.mpf(std) ** k * mpmath.npdf(h) * total)

        return [[moment(k, r) for r in range(order)] for k, order in enumerate(orders, start=1)]


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 2e-7)])
@pytest.mark.parametrize("h", [-3.5, -7.0, -12.0, -30.0])
def test_powers_of_dead_units(h, dtype, rtol):
    """All moments have relative accuracy, down to the smallest floats: none is a difference of larger numbers."""
    std = 2.0 if h > -20 else 4.0
    mean, variance = torch.full((1, 1), h * std, dtype=dtype), torch.full((1, 1), std * std, dtype=dtype)
    power = relu(1, mean).power_moments(mean, variance)
    for found, exact in zip((*power[1:4], (power.fourth,)), exact_powers(h, std), strict=True):
        for one, other in zip(found, exact, strict=True):
            assert_close(one[0], [other], rtol=rtol, atol=torch.finfo(dtype).tiny)


def test_derivatives_at_a_kink():
    """dE f/dm is the expected slope also where the mean is at the kink."""
    for slope, bend in ((0.0, 1.0), (0.1, 0.9), (-1.0, 2.0)):
        rule = one_kink(*torch.tensor([[slope], [bend]], dtype=torch.float64))
        mean = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
        power = rule.power_moments(mean, torch.full_like(mean, 0.7))
        (found,) = torch.autograd.grad((power.centre + power.first[0]).sum(), mean)
        assert_close(found[0], [slope + bend / 2], atol=1e-15)


def test_derivatives_of_powers():
    generator = torch.Generator().manual_seed(0)
    shapes = ((4,), (4,), (2, 4), (2, 4), (2, 4), (2, 4))
    *own, mean, std = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    rule = PiecewiseLinear(*own)

    def every(mean: Tensor, variance: Tensor) -> Tensor:
        power = rule.power_moments(mean, variance)
        return torch.stack([*power.first, *power.second, *power.third, power.fourth])

    assert gradcheck(every, ((3 * mean).requires_grad_(), (std.square() + 0.1).requires_grad_()))


def test_an_infinite_spread_of_probes():
    """Near the end of float32 the sampled variance is rounding, and overflows: the mean is that without noise."""
    moments = relu(2, torch.zeros(1)).sketch_moments(
        torch.tensor([[1e30, -1e30]]), torch.full((1, 2, 1, 1), torch.inf), 4
    )
    assert_close(moments.mean, torch.tensor([[1e30, 0.0]]), rtol=1e-6)


def _parts(rule: PiecewiseLinear) -> tuple[Tensor, ...]:
    return rule.offset, rule.slope, rule.bends, rule.kinks
