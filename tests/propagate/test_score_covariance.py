"""The covariance of scores: quadratic parts of all layers together, also of layers side by side."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import netmoments as nm
from tests.closeness import assert_close
from tests.networks import seeded
from tests.propagate.small import image, isotropic, moments
from tests.quadrature import moments_by_quadrature


def smooth() -> nn.Module:
    """Two nonlinear layers that bend at the same scale, for two inputs."""
    net = seeded(lambda: nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.5)
    return net


def test_what_is_left_is_of_the_fourth_order():
    """Against quadrature: twice the noise has 16 times the relative error, and a hundredth of a linearization's.

    Were the quadratic part of a layer, or that of both together, left out, the error would be of the second order.
    """
    net, x = smooth(), torch.tensor([[0.3, -0.2]], dtype=torch.float64)
    errors, linear = [], []
    for std in (0.05, 0.1):
        _, exact = moments_by_quadrature(net, x[0], std)
        slopes = torch.func.jacrev(lambda v: net(v.unsqueeze(0))[0])(x[0]).detach()
        for found, kept in ((moments(net, x, isotropic(std, x))[1], errors), (std**2 * slopes @ slopes.mT, linear)):
            kept.append(float((found - exact).abs().max() / exact.abs().max()))
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
    """Against the exact engine; across branches it is two terms of the series, so 0.5 % and not 1e-10."""
    network, x = seeded(Branches), image(6)
    mean, covariance = moments(network, x, isotropic(1.0, x))
    both = torch.cat([network.left.weight, network.right.weight]), torch.cat([network.left.bias, network.right.bias])
    weights = network.last.weight
    exact = nm.AffineReluAffine(*both, weights[:, :60], network.last.bias, weights[:, 60:])
    noise = nm.Gaussian(x[0], std=1.0)
    assert_close(mean, exact.mean(noise), atol=1e-10)
    assert_close(covariance.diagonal(), exact.variance(noise), rtol=5e-3)
    sd = exact.variance(noise).sqrt()
    off = (covariance - exact.covariance(noise)) / (sd * sd.unsqueeze(-1))
    assert_close(off, torch.zeros(4, 4), atol=5e-3)
