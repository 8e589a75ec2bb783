"""Covariances as squares: what cumulants are worth, which layers get them, and what happens where there is no noise."""

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
from tests.propagate.small import SMALL, image, isotropic, plan, pooled, sampled


def random_mlp(width: int, depth: int) -> nn.Module:
    """As the Whitebox Estimation Challenge has them: He's initialisation, no offsets, a ReLU after every layer."""
    generator, layers = torch.Generator().manual_seed(1), []
    for _ in range(depth):
        layer = nn.Linear(width, width, bias=False)
        layer.weight.data = torch.randn(width, width, generator=generator) * math.sqrt(2 / width)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers).double().eval()


def test_cumulants_are_worth_a_power_of_ten(monkeypatch):
    """Mean squared errors of the last means: less the reference's own, which is that of 4·10⁵ samples."""
    network, x = random_mlp(32, 4), torch.zeros(1, 32, dtype=torch.float64)
    reference = sampled(network, x, 1.0, 400_000, seed=1)
    floor = float(reference.mean_standard_error.square().mean())
    every = torch.arange(32).unsqueeze(0)

    def error() -> float:
        cut = plan(network, x)  # with gradients on it is made anew: units to follow are chosen once a plan
        with torch.no_grad():
            mean, _ = squares.carried(cut, x, isotropic(1.0, x), every)
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
    cut, every = plan(network, x), torch.arange(reference.mean.numel()).unsqueeze(0)
    with torch.no_grad():
        found = squares.carried(cut, x, isotropic(0.5, x), every)
        others = rows.carried(cut, x, isotropic(0.5, x), every, rows.third_order)
    errors = []
    for mean, covariance in (found, others):
        off = (mean[0] - reference.mean).abs() / reference.variance.sqrt()
        errors.append(float(off.mean() + (covariance[0].diagonal() / reference.variance - 1).abs().mean()))
    assert errors[0] < 0.8 * errors[1], errors


def test_which_units_are_followed(monkeypatch):
    """All but the last layer's; where that is too much, as many of each layer as its share, and of windows fewer."""
    network, x = seeded(pooled), image(1, 8, 8)
    cut = plan(network, x)
    units = [stage.rule.units for stage in cut.stages]
    assert squares.followed_units(cut) == (*units[:-1], 0)
    assert has_squares(cut, x, 2**30)
    monkeypatch.setattr(squares, "MOST_CENTRES", 200)
    some = squares.followed_units(cut)
    assert some[-1] == 0
    assert 4 * sum(some) <= 200
    assert not has_squares(plan(network, x), x, 2**30)  # a plan of its own: what it takes is found once


def test_half_of_the_units_give_nearly_the_same(monkeypatch):
    network = seeded(
        lambda: nn.Sequential(nn.Linear(12, 60), nn.ReLU(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 4))
    )
    x = image(12)
    every, found = torch.arange(4).unsqueeze(0), []
    for most in (4096, 40, 0):
        monkeypatch.setattr(squares, "MOST_CENTRES", most)
        cut = plan(network, x)
        with torch.no_grad():
            found.append(squares.carried(cut, x, isotropic(0.7, x), every))
    (mean, covariance), some, none = found
    assert float((some[0] - mean).abs().max()) < 0.5 * float((none[0] - mean).abs().max())
    assert float((some[1] - covariance).abs().max()) < 0.5 * float((none[1] - covariance).abs().max())


def test_a_small_budget_takes_rows(monkeypatch):
    """And no budget at all is an error that says what would be needed."""
    network, x = random_mlp(64, 3), torch.zeros(1, 64, dtype=torch.float64)
    cut, every = plan(network, x), torch.arange(3).unsqueeze(0)
    budget = rows.need_of(cut, 64, 8).bytes
    monkeypatch.setattr(squares, "need_of", lambda *_: rows.Need("1", budget + 1))
    with torch.no_grad():
        mean, _ = layerwise(cut, x, isotropic(1.0, x), every, budget)
        expected, _ = rows.carried(cut, x, isotropic(1.0, x), every, rows.third_order)
        assert torch.equal(mean, expected)
        with pytest.raises(ValueError, match="raise memory_budget="):
            layerwise(cut, x, isotropic(1.0, x), every, 1000)


def near(first: nn.Module, inputs: int) -> nn.Module:
    """A layer of its own, then two small ones that bend."""
    return nn.Sequential(first, nn.GELU(), nn.Flatten(), nn.Linear(inputs, 40), nn.ReLU(), nn.Linear(40, 3))


def test_dear_squares_are_for_units_that_look_far(monkeypatch):
    """Rows are taken for a convolution when squares would carry many more numbers, but not for a dense layer.

    There the colours of rows do not keep apart what a unit sees.
    """
    x = image(1, 9, 9)
    convolution = plan(seeded(lambda: near(nn.Conv2d(1, 4, 3), 196)), x)
    dense = plan(seeded(lambda: nn.Sequential(nn.Flatten(), *near(nn.Linear(81, 196), 196))), x)
    assert numbers_seen(convolution, x) == 9
    assert numbers_seen(dense, x) == 81
    assert has_squares(convolution, x, 2**30)
    assert has_squares(dense, x, 2**30)
    monkeypatch.setattr("netmoments.propagate.layerwise.DEARER", 0.0)
    assert has_squares(convolution, x, 2**30)  # small enough in any case
    monkeypatch.setattr("netmoments.propagate.layerwise.CHEAP", 0)
    assert not has_squares(convolution, x, 2**30)
    assert has_squares(dense, x, 2**30)


def test_what_a_pool_sees_of_the_image():
    """All numbers of a window, of each of which a convolution has looked at nine."""
    x = image(1, 8, 8)
    assert numbers_seen(plan(seeded(pooled), x), x) == 16


def test_squares_of_large_convolutions_are_dear():
    """Squares would carry several times the numbers of rows, which are as close to samples as these can tell."""

    def along(inputs: int) -> nn.Module:
        return nn.Conv2d(inputs, 16, (1, 5), padding=(0, 2))

    network = seeded(lambda: nn.Sequential(along(1), nn.Tanh(), *near(along(16), 1920)))
    x = image(1, 1, 120)
    cut, every = plan(network, x), torch.arange(3).unsqueeze(0)
    assert not has_squares(cut, x, 2**34)
    with torch.no_grad():
        mean, covariance = layerwise(cut, x, isotropic(0.1, x), every)
    reference = sampled(network, x, 0.1, 200_000, seed=2)
    off = (mean[0] - reference.mean).abs() / reference.variance.sqrt()
    spread = (covariance[0].diagonal() / reference.variance - 1).abs()
    assert float(off.max()) < 0.01
    assert float(spread.max()) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_without_noise(dtype):
    """A black image whose noise is on a few pixels, and none at all."""
    network, x = seeded(pooled).to(dtype), torch.zeros(1, 8, 8, dtype=dtype)
    variance = torch.zeros(64, dtype=dtype)
    variance[10:14] = 0.01
    found = nm.output_moments(network, nm.Gaussian(x, nm.Diagonal(variance)), "layerwise", check=0)
    assert bool(found.mean.isfinite().all() and found.covariance.isfinite().all())
    still = nm.output_moments(network, nm.Gaussian(x, nm.Diagonal(0 * variance)), "layerwise", check=0)
    torch.testing.assert_close(still.mean, network(x.unsqueeze(0))[0].detach(), rtol=1e-5, atol=1e-6)
    assert float(still.variance.abs().max()) < 1e-9


def test_derivatives_of_variances():
    """Of a network with fourth cumulants, in the variance of the noise: against central differences."""
    network, x = random_mlp(12, 4), image(12)
    cut, every = plan(network, x), torch.arange(12).unsqueeze(0)

    def value(variance: Tensor) -> Tensor:
        mean, covariance = squares.carried(cut, x, nm.Diagonal(variance), every)
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
    """Their inputs vary by next to nothing, and have cumulants beyond all bounds: they must not spoil the others."""
    widths = 3, 12, 12, 12
    hidden = [(nn.Linear(i, o), nn.ReLU()) for i, o in itertools.pairwise(widths)]
    network = seeded(lambda: nn.Sequential(*itertools.chain(*hidden), nn.Linear(12, 2))).to(dtype)
    with torch.no_grad():
        for layer, bias in ((network[0], 0.2 * height), (network[2], 0.0), (network[4], 1e-4)):
            layer.bias += 0.2
            layer.weight[0] = torch.eye(layer.in_features)[
                0
            ]  # a dead unit, one that sees nothing else, one that sees that
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
