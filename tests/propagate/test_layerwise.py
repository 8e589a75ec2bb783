"""Layerwise moments: exact where they must be, elsewhere within Monte Carlo's error or stated bounds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import netmoments as nm
from netmoments import memory
from netmoments.covariances import Covariance, Dense, Diagonal, Isotropic, LowRank
from netmoments.propagate import squares
from netmoments.propagate.layerwise import layerwise, without_negative_variances
from tests.closeness import assert_close
from tests.networks import seeded
from tests.propagate.small import SMALL, image, isotropic, moments, plan_for, pooled, sampled
from tests.quadrature import moments_by_quadrature


@pytest.mark.parametrize("covariance", ["isotropic", "diagonal", "low rank", "dense"])
def test_equal_to_the_exact_engine(covariance):
    generator = torch.Generator().manual_seed(5)
    network = seeded(lambda: nn.Sequential(nn.Linear(6, 30), nn.ReLU(), nn.Linear(30, 4)))
    x = image(6)
    factor = 0.5 * torch.randn(6, 4, dtype=torch.float64, generator=generator)
    structure: dict[str, Covariance] = {
        "isotropic": isotropic(0.7, x),
        "diagonal": Diagonal(torch.rand(6, dtype=torch.float64, generator=generator)),
        "low rank": LowRank(factor, 0.1),
        "dense": Dense(factor @ factor.T),
    }
    mean, found = moments(network, x, structure[covariance])
    exact = nm.AffineReluAffine(network[0].weight, network[0].bias, network[2].weight, network[2].bias)
    noise = nm.Gaussian(x[0], structure[covariance])
    torch.testing.assert_close(mean, exact.mean(noise).detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(found, exact.covariance(noise).detach(), rtol=0, atol=1e-10)


ONE_LAYER = {
    "leaky": nn.LeakyReLU(0.2), "prelu": nn.PReLU(30, 0.25), "relu6": nn.ReLU6(), "hardtanh": nn.Hardtanh(-0.5, 0.3),
    "relu": nn.ReLU(),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_LAYER)
def test_one_piecewise_linear_layer_is_exact(name):
    """Every mean and covariance is within five standard errors of 2·10⁵ samples."""
    network = seeded(lambda: nn.Sequential(nn.Linear(6, 30), ONE_LAYER[name], nn.Linear(30, 4)))
    x = image(6)
    mean, covariance = moments(network, x, isotropic(1.0, x))
    reference = sampled(network, x, 1.0, 200_000, seed=2)
    assert float(((mean - reference.mean) / reference.mean_standard_error).abs().max()) < 5
    assert float(((covariance - reference.covariance) / reference.covariance_standard_error).abs().max()) < 5


BOUNDS = {
    "residual": (0.02, 0.03, 0.3),
    "normalised, overlapping 3×3 pools": (0.02, 0.03, 0.3),
    "2×2 pools": (0.02, 0.03, 0.5),
    "leaky": (0.01, 0.05, 0.5),
}
"""At the larger noise: mean errors in deviations, relative variance errors, and that noise's standard deviation."""


@pytest.mark.parametrize("name", BOUNDS)
def test_within_five_standard_errors_at_small_noise(name):
    make, shape = SMALL[name]
    network, x = seeded(make), image(*shape)
    mean, covariance = moments(network, x, isotropic(0.02, x))
    reference = sampled(network, x, 0.02, 100_000, seed=3)
    assert float(((mean - reference.mean) / reference.mean_standard_error).abs().max()) < 5
    assert float(((covariance - reference.covariance) / reference.covariance_standard_error).abs().max()) < 5


@pytest.mark.parametrize("name", BOUNDS)
def test_within_stated_bounds_at_larger_noise(name):
    make, shape = SMALL[name]
    network, x = seeded(make), image(*shape)
    in_deviations, relative, std = BOUNDS[name]
    mean, covariance = moments(network, x, isotropic(std, x))
    reference = sampled(network, x, std, 100_000, seed=4)
    deviation = reference.variance.sqrt()
    slack = 5 * reference.mean_standard_error / deviation
    assert bool(((mean - reference.mean).abs() / deviation < in_deviations + slack).all())
    error = (covariance.diagonal() - reference.variance).abs() / reference.variance
    assert bool((error < relative + 5 * reference.variance_standard_error / reference.variance).all()), error


@pytest.mark.parametrize("name", ["residual", "2×2 pools"])
def test_tiles_change_nothing(name, monkeypatch):
    make, shape = SMALL[name]
    network, x = seeded(make), image(*shape)
    mean, covariance = moments(network, x, isotropic(0.3, x))
    for kind, numbers in (("cache", 5000), ("pass", 3000)):
        monkeypatch.setitem(memory.PIECE["cpu"], kind, 8 * numbers)
    tiled_mean, tiled = moments(network, x, isotropic(0.3, x))
    torch.testing.assert_close(tiled_mean, mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(tiled, covariance, rtol=1e-10, atol=1e-12)


def test_float32_is_float64_to_its_rounding():
    network, x = seeded(pooled), image(1, 8, 8)
    mean, covariance = moments(network, x, isotropic(0.1, x))
    single = Isotropic(torch.tensor(0.01), x.numel())
    mean_32, covariance_32 = moments(pooled_like(network), x.float(), single)
    torch.testing.assert_close(mean_32.double(), mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(covariance_32.double(), covariance, rtol=2e-3, atol=1e-6)


def pooled_like(network: nn.Module) -> nn.Module:
    single = pooled()
    single.load_state_dict(network.state_dict())
    return single.float().eval()


SMALLER = {"residual": (2, 5, 5), "normalised, overlapping 3×3 pools": (1, 7, 7)}
"""Images with fewer pairs of directions, all of which are followed."""


@pytest.mark.parametrize(
    "name",
    ["residual", "2×2 pools", "leaky", pytest.param("normalised, overlapping 3×3 pools", marks=pytest.mark.slow)],
)
def test_derivatives_in_the_mean_and_the_weights(name):
    """Against central differences, to the error of these.

    Maxima of nine inputs are integrated along lines on which the inputs often change their order, so that differences
    need longer steps there.
    """
    make, shape = SMALL[name]
    shape = SMALLER.get(name, shape)
    network, x = seeded(make), image(*shape)
    outputs, structure = torch.arange(network(x).shape[1]).unsqueeze(0), isotropic(0.3, x)
    weights = list(network.parameters())
    generator = torch.Generator().manual_seed(0)
    towards = torch.randn(x.shape, dtype=torch.float64, generator=generator)
    directions = [torch.randn(p.shape, dtype=torch.float64, generator=generator) for p in weights]

    def value(at: Tensor) -> Tensor:
        return layerwise(plan_for(network, x), at, structure, outputs)[0].sum()

    def with_weights_moved(amount: float) -> float:
        with torch.no_grad():
            for p, direction in zip(weights, directions, strict=True):
                p.add_(amount * direction)
            return float(value(x))

    step = 1e-3 if "3×3" in name else 1e-4
    at = x.clone().requires_grad_()
    slope, *by_weight = torch.autograd.grad(value(at), [at, *weights], allow_unused=True)
    with torch.no_grad():
        difference = float(value(x + step * towards) - value(x - step * towards)) / (2 * step)
    along = sum(float((g * d).sum()) for g, d in zip(by_weight, directions, strict=True) if g is not None)
    up, down = with_weights_moved(step), with_weights_moved(-2 * step)
    tolerance = 1e-2 if "3×3" in name else 2e-4
    assert float((slope * towards).sum()) == pytest.approx(difference, rel=tolerance, abs=tolerance)
    assert along == pytest.approx((up - down) / (2 * step), rel=tolerance, abs=tolerance)


def test_windows_of_one_input_are_looked_up():
    """A pool of one pixel with stride 2 picks pixels: the network is (Affine, ReLU, Affine) of those it picks."""
    network = seeded(lambda: nn.Sequential(nn.MaxPool2d(1, 2), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3)))
    x = image(1, 4, 4)
    mean, covariance = moments(network, x, isotropic(0.5, x))
    picked = x[0, 0, ::2, ::2].reshape(-1)
    last = network[-1]
    exact = nm.AffineReluAffine(torch.eye(4).double(), torch.zeros(4).double(), last.weight, last.bias)
    noise = nm.Gaussian(picked, std=0.5)
    torch.testing.assert_close(mean, exact.mean(noise).detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(covariance, exact.covariance(noise).detach(), rtol=0, atol=1e-10)


def test_a_batch_is_its_images_one_by_one():
    """Images with different noise."""
    network = seeded(pooled)
    x = torch.cat([image(1, 8, 8, seed=seed) for seed in range(3)])
    variance = torch.tensor([0.01, 0.04, 0.09], dtype=torch.float64)
    plan, outputs = plan_for(network, x), torch.tensor([[0, 1], [3, 1], [2, 2]])
    with torch.no_grad():
        mean, covariance = layerwise(plan, x, Isotropic(variance, 64), outputs)
        for place in range(3):
            alone = layerwise(plan, x[place : place + 1], Isotropic(variance[place], 64), outputs[place : place + 1])
            torch.testing.assert_close(mean[place], alone[0][0], rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(covariance[place], alone[1][0], rtol=1e-10, atol=1e-12)


# the covariance of scores: quadratic parts of all layers together, including parallel ones


def smooth() -> nn.Module:
    """Two nonlinear layers that are curved at the same scale, for two inputs."""
    net = seeded(lambda: nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.5)
    return net


def test_the_error_is_of_the_fourth_order():
    """Against quadrature: twice the noise has 16 times the relative error, which is a hundredth of a linearization's.

    Without the quadratic part of either layer, or of both together, the error would be of second order.
    """
    net, x = smooth(), torch.tensor([[0.3, -0.2]], dtype=torch.float64)
    errors, linear = [], []
    for std in (0.05, 0.1):
        _, exact = moments_by_quadrature(net, x[0], std)
        slopes = torch.func.jacrev(lambda v: net(v.unsqueeze(0))[0])(x[0]).detach()
        for found, into in ((moments(net, x, isotropic(std, x))[1], errors), (std**2 * slopes @ slopes.mT, linear)):
            into.append(float((found - exact).abs().max() / exact.abs().max()))
    assert 10 < errors[1] / errors[0] < 25
    assert 3 < linear[1] / linear[0] < 5
    assert errors[0] < 0.01 * linear[0]


class Branches(nn.Module):
    """relu(Ax), relu(Bx) and x side by side: (Affine, ReLU, Affine) in two stages, with a path around."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Linear(6, 30), nn.Linear(6, 30), nn.Linear(66, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([torch.relu(self.left(x)), torch.relu(self.right(x)), x], 1))


def test_parallel_branches_have_their_nonlinear_covariance():
    """Against the exact engine, to 0.5 % and not 1e-10: across branches there are two terms of the series."""
    network, x = seeded(Branches), image(6)
    mean, covariance = moments(network, x, isotropic(1.0, x))
    both = torch.cat([network.left.weight, network.right.weight]), torch.cat([network.left.bias, network.right.bias])
    weights = network.last.weight
    exact = nm.AffineReluAffine(*both, weights[:, :60], network.last.bias, weights[:, 60:])
    noise = nm.Gaussian(x[0], std=1.0)
    assert_close(mean, exact.mean(noise), atol=1e-10)
    assert_close(covariance.diagonal(), exact.variance(noise), rtol=5e-3)
    sd = exact.variance(noise).sqrt()
    error = (covariance - exact.covariance(noise)) / (sd * sd.unsqueeze(-1))
    assert_close(error, torch.zeros(4, 4), atol=5e-3)


@pytest.mark.parametrize("images", [1, 3])
def test_no_variance_is_negative_where_cumulants_are_too_large(images):
    """A narrow network under much noise: first-order corrections alone make a variance of −7, where 6.8 is true."""
    generator = torch.Generator().manual_seed(11)
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 8), (8, 6), (6, 4), (4, 2)):
        layer = nn.Linear(inputs, outputs).double()
        for part in (layer.weight, layer.bias):
            part.data = torch.randn(part.shape, generator=generator, dtype=torch.float64)
        layers += [layer, nn.ReLU()]
    network = nn.Sequential(*layers[:-1]).eval()
    x = torch.zeros(images, 3, dtype=torch.float64)
    x[1:] += 100.0  # far from every kink: nothing is wrong there
    noise, outputs = nm.Gaussian(x, std=1.0), torch.arange(2).expand(images, -1)
    bare = squares.carried(plan_for(network, x), x, isotropic(1.0, x), outputs)
    assert bool(bare[1][0, 0, 0] < 0)
    found = nm.output_moments(network, noise, "layerwise", check=0)
    gaussian = squares.carried(plan_for(network, x), x, isotropic(1.0, x), outputs, [0, 0, 0])
    assert_close(found.covariance[0], gaussian[1][0].detach(), atol=1e-10)
    assert_close(found.mean[0], gaussian[0][0].detach(), atol=1e-10)
    assert_close(found.covariance[1:], bare[1][1:].detach(), atol=1e-10 * float(bare[1].detach().abs().max()))
    assert bool((found.variance > 0).all())
    assert float(torch.linalg.eigvalsh(found.covariance).min()) > 0
    (slope,) = torch.autograd.grad(
        nm.output_moments(network, nm.Gaussian(x.clone().requires_grad_(), std=1.0), "layerwise").variance.sum(),
        network[0].weight,
    )
    assert bool(torch.isfinite(slope).all() & slope.any())


def test_scores_of_units_that_never_move_have_no_variance():
    """Far up a Hardtanh in float32, where a sum of rounding errors may come out negative."""
    negative = 0
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        layers = [nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 5), nn.Hardtanh()]
        network = nn.Sequential(*layers, nn.Linear(5, 3)).eval()
        for parameter in network.parameters():
            parameter.data = 0.7 * torch.randn(parameter.shape, generator=generator)
        network[4].bias.data = torch.tensor([30.0, -40.0, 50.0, 35.0, -60.0])
        x, outputs = torch.zeros(1, 3), torch.arange(3).unsqueeze(0)
        _, bare = squares.carried(plan_for(network, x), x, nm.Diagonal(torch.ones(3)), outputs)
        negative += bool((bare.diagonal(dim1=-2, dim2=-1) < 0).any())
        found = nm.output_moments(network, nm.Gaussian(x[0], std=1.0), "layerwise", check=0)
        assert bool((found.variance >= 0).all())
        assert float(found.variance.max()) < 1e-3
    assert negative > 0


@torch.no_grad()
def test_computing_again_keeps_to_the_callers_memory():
    """A negative variance is computed again without cumulants: as squares where these fit, else as rows."""
    make, shape = SMALL["2×2 pools"]
    network, x = make().double().eval(), image(*shape)
    covariance, outputs = isotropic(0.1, x), torch.arange(2).unsqueeze(0)
    plan = plan_for(network, x)
    scores, square = layerwise(plan, x, covariance, outputs)
    spoilt = scores, square - 2 * torch.diag_embed(square.diagonal(dim1=-2, dim2=-1))
    for budget in (None, 1000):
        again = without_negative_variances(spoilt, plan, x, covariance, outputs, budget)[1]
        variances = again.diagonal(dim1=-2, dim2=-1)
        assert_close(variances, square.diagonal(dim1=-2, dim2=-1), rtol=0.1)  # corrections are small at this noise
