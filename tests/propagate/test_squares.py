"""Covariances as squares: what cumulants are worth, which units are followed, when squares are taken, and no noise."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

import netmoments as nm
from netmoments.propagate import rows, squares
from netmoments.propagate.layerwise import has_squares, layerwise, numbers_seen
from tests.networks import seeded
from tests.propagate.small import SMALL, image, isotropic, plan_for, pooled, sampled


def random_mlp(width: int, depth: int) -> nn.Module:
    """A network as in the Whitebox Estimation Challenge: He's initialisation, no offsets, a ReLU after every layer."""
    generator, layers = torch.Generator().manual_seed(1), []
    for _ in range(depth):
        layer = nn.Linear(width, width, bias=False)
        layer.weight.data = torch.randn(width, width, generator=generator) * math.sqrt(2 / width)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers).double().eval()


def test_cumulants_are_worth_a_power_of_ten(monkeypatch):
    """Mean squared errors of the last layer's means, less that of the reference with its 4·10⁵ samples."""
    network, x = random_mlp(32, 4), torch.zeros(1, 32, dtype=torch.float64)
    reference = sampled(network, x, 1.0, 400_000, seed=1)
    floor = float(reference.mean_standard_error.square().mean())
    outputs = torch.arange(32).unsqueeze(0)

    def error() -> float:
        plan = plan_for(network, x)  # with gradients on it is made anew: units to follow are chosen once for a plan
        with torch.no_grad():
            mean, _ = squares.carried(plan, x, isotropic(1.0, x), outputs)
        return float((mean[0] - reference.mean).square().mean()) - floor

    with_cumulants = error()
    monkeypatch.setattr(squares, "MOST_CENTRES", 0)
    assert with_cumulants < error() / 10


@pytest.mark.parametrize("name", ["2×2 pools", "residual"])
def test_tighter_than_rows(name):
    """At large noise, where rows are off by more than the samples can tell."""
    make, shape = SMALL[name]
    network, x = seeded(make), image(*shape)
    reference = sampled(network, x, 0.5, 400_000, seed=4)
    plan, outputs = plan_for(network, x), torch.arange(reference.mean.numel()).unsqueeze(0)
    with torch.no_grad():
        by_squares = squares.carried(plan, x, isotropic(0.5, x), outputs)
        by_rows = rows.carried(plan, x, isotropic(0.5, x), outputs, skewed=True)
    errors = []
    for mean, covariance in (by_squares, by_rows):
        mean_error = (mean[0] - reference.mean).abs() / reference.variance.sqrt()
        errors.append(float(mean_error.mean() + (covariance[0].diagonal() / reference.variance - 1).abs().mean()))
    assert errors[0] < 0.8 * errors[1], errors


def test_which_units_are_followed(monkeypatch):
    """All units but the last layer's; if these are too many, each layer's share, and fewer units with wide windows."""
    network, x = seeded(pooled), image(1, 8, 8)
    plan = plan_for(network, x)
    units = [stage.rule.units for stage in plan.stages]
    assert squares.followed_units(plan) == (*units[:-1], 0)
    assert has_squares(plan, x, 2**30)
    monkeypatch.setattr(squares, "MOST_CENTRES", 200)
    fewer = squares.followed_units(plan)
    assert fewer[-1] == 0
    assert 4 * sum(fewer) <= 200
    assert not has_squares(plan_for(network, x), x, 2**30)  # a new plan, as the old one keeps its layout


def test_half_of_the_units_give_nearly_the_same(monkeypatch):
    network = seeded(
        lambda: nn.Sequential(nn.Linear(12, 60), nn.ReLU(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 4))
    )
    x = image(12)
    outputs, moments = torch.arange(4).unsqueeze(0), []
    for most in (4096, 40, 0):
        monkeypatch.setattr(squares, "MOST_CENTRES", most)
        plan = plan_for(network, x)
        with torch.no_grad():
            moments.append(squares.carried(plan, x, isotropic(0.7, x), outputs))
    (mean, covariance), half, none = moments
    assert float((half[0] - mean).abs().max()) < 0.5 * float((none[0] - mean).abs().max())
    assert float((half[1] - covariance).abs().max()) < 0.5 * float((none[1] - covariance).abs().max())


def test_a_small_budget_takes_rows(monkeypatch):
    """And a tiny one is an error that says what is needed."""
    network, x = random_mlp(64, 3), torch.zeros(1, 64, dtype=torch.float64)
    plan, outputs = plan_for(network, x), torch.arange(3).unsqueeze(0)
    budget = rows.need_of(plan, 64, 8, 3).bytes
    monkeypatch.setattr(squares, "need_of", lambda *_: rows.Need("1", budget + 1))
    with torch.no_grad():
        mean, _ = layerwise(plan, x, isotropic(1.0, x), outputs, budget)
        expected, _ = rows.carried(plan, x, isotropic(1.0, x), outputs, skewed=True)
        assert torch.equal(mean, expected)
        with pytest.raises(ValueError, match="raise memory_budget="):
            layerwise(plan, x, isotropic(1.0, x), outputs, 1000)


def small_after(first: nn.Module, inputs: int) -> nn.Module:
    """A first layer, then two small nonlinear ones."""
    return nn.Sequential(first, nn.GELU(), nn.Flatten(), nn.Linear(inputs, 40), nn.ReLU(), nn.Linear(40, 3))


def test_large_squares_are_for_units_that_look_at_many_numbers(monkeypatch):
    """When squares would carry many more numbers, rows are taken for a convolution, but not for a dense layer.

    A unit of a dense layer sees all numbers of a colour at once, which gives its rows a chance error.
    """
    x = image(1, 9, 9)
    convolution = plan_for(seeded(lambda: small_after(nn.Conv2d(1, 4, 3), 196)), x)
    dense = plan_for(seeded(lambda: nn.Sequential(nn.Flatten(), *small_after(nn.Linear(81, 196), 196))), x)
    assert numbers_seen(convolution, x) == 9
    assert numbers_seen(dense, x) == 81
    assert has_squares(convolution, x, 2**30)
    assert has_squares(dense, x, 2**30)
    monkeypatch.setattr("netmoments.propagate.layerwise.DEARER", 0.0)
    assert has_squares(convolution, x, 2**30)  # small enough in any case
    monkeypatch.setattr("netmoments.propagate.layerwise.CHEAP", 0)
    assert not has_squares(convolution, x, 2**30)
    assert has_squares(dense, x, 2**30)


def test_how_many_numbers_a_pool_sees():
    """A 2×2 window after a 3×3 convolution sees 4×4 numbers of the image."""
    x = image(1, 8, 8)
    assert numbers_seen(plan_for(seeded(pooled), x), x) == 16


def test_large_convolutions_go_by_rows():
    """Squares would carry several times the numbers of rows, which agree with the samples as it is."""

    def along(inputs: int) -> nn.Module:
        return nn.Conv2d(inputs, 16, (1, 5), padding=(0, 2))

    network = seeded(lambda: nn.Sequential(along(1), nn.Tanh(), *small_after(along(16), 1920)))
    x = image(1, 1, 120)
    plan, outputs = plan_for(network, x), torch.arange(3).unsqueeze(0)
    assert not has_squares(plan, x, 2**34)
    with torch.no_grad():
        mean, covariance = layerwise(plan, x, isotropic(0.1, x), outputs)
    reference = sampled(network, x, 0.1, 200_000, seed=2)
    mean_error = (mean[0] - reference.mean).abs() / reference.variance.sqrt()
    variance_error = (covariance[0].diagonal() / reference.variance - 1).abs()
    assert float(mean_error.max()) < 0.01
    assert float(variance_error.max()) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_without_noise(dtype):
    """A black image with noise on a few pixels only, and with no noise at all."""
    network, x = seeded(pooled).to(dtype), torch.zeros(1, 8, 8, dtype=dtype)
    variance = torch.zeros(64, dtype=dtype)
    variance[10:14] = 0.01
    found = nm.output_moments(network, nm.Gaussian(x, nm.Diagonal(variance)), "layerwise", check=0)
    assert bool(found.mean.isfinite().all() and found.covariance.isfinite().all())
    still = nm.output_moments(network, nm.Gaussian(x, nm.Diagonal(0 * variance)), "layerwise", check=0)
    torch.testing.assert_close(still.mean, network(x.unsqueeze(0))[0].detach(), rtol=1e-5, atol=1e-6)
    assert float(still.variance.abs().max()) < 1e-9


def test_derivatives_of_variances():
    """Derivatives in the variance of the noise, with fourth cumulants, against central differences."""
    network, x = random_mlp(12, 4), image(12)
    plan, outputs = plan_for(network, x), torch.arange(12).unsqueeze(0)

    def value(variance: Tensor) -> Tensor:
        mean, covariance = squares.carried(plan, x, nm.Diagonal(variance), outputs)
        return mean.sum() + covariance.diagonal(dim1=1, dim2=2).sum()

    at = torch.full((12,), 0.3, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(value(at), at)
    step = 1e-5 * torch.rand(12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        change = (value(at + step) - value(at - step)) / 2
    assert float(change) == pytest.approx(float((slope * step).sum()), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("height", [-6.0, -10.0, -20.0, -30.0, -37.0])
def test_units_that_see_dead_ones_only(height, dtype):
    """Their inputs hardly vary, and have huge standardized cumulants, which must not spoil other units."""
    widths = 3, 12, 12, 12
    hidden = [(nn.Linear(i, o), nn.ReLU()) for i, o in itertools.pairwise(widths)]
    network = seeded(lambda: nn.Sequential(*itertools.chain(*hidden), nn.Linear(12, 2))).to(dtype)
    with torch.no_grad():
        for layer, bias in ((network[0], 0.2 * height), (network[2], 0.0), (network[4], 1e-4)):
            layer.bias += 0.2
            # the first units: a dead one, then one that sees only that, then one that sees only this
            layer.weight[0] = torch.eye(layer.in_features)[0]
            layer.bias[0] = bias
        network[4].weight[0] *= -1
    noise = nm.Gaussian(torch.zeros(3, dtype=dtype), std=0.2)
    found = nm.output_moments(network, noise, "layerwise", check=0)
    with torch.no_grad():
        network[2].weight[0] = 0.0
    without = nm.output_moments(network, noise, "layerwise", check=0)
    rtol = 1e-4  # rounding of float32; what a unit adds that is open in 1e-9 of cases is less
    torch.testing.assert_close(found.mean, without.mean, rtol=rtol, atol=0)
    torch.testing.assert_close(found.covariance, without.covariance, rtol=rtol, atol=0)
