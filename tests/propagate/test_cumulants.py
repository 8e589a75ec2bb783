"""Cumulants in factored form: against dense tensors, and against quadrature behind one nonlinear layer."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch
from torch import Tensor

from netmoments.propagate.cumulants import Cumulants
from netmoments.propagate.squares import DenseJoint, through_layer
from netmoments.rules.one_number import Elementwise, between, relu
from tests.closeness import assert_close
from tests.propagate.small import normal


def dense(rows: Tensor) -> Tensor:
    """κ_ijk = Σ P(e, v, b) + ½P(e, e, x), term by term."""
    e, v, b, x = rows.unbind(1)
    total = torch.zeros(e.shape[0], *[e.shape[-1]] * 3, dtype=e.dtype)
    for one, other, last, share in ((e, v, b, 1.0), (e, e, x, 0.5)):
        product = torch.einsum("nai,naj,nak->nijk", one, other, last)
        for order in permutations((1, 2, 3)):
            total = total + share * product.permute(0, *order)
    return total


def test_contractions_of_third_cumulants():
    cumulants = Cumulants(normal(2, 4, 5, 7), None)
    kappa = dense(cumulants.rows)
    own = torch.stack([kappa[:, i, i, i] for i in range(4)], 1)
    assert_close(cumulants.kappa_iij(4)[..., :4].diagonal(dim1=-2, dim2=-1), own, rtol=1e-12)
    assert_close(cumulants.kappa_iij(4), torch.stack([kappa[:, i, i] for i in range(4)], 1), rtol=1e-12, atol=1e-12)
    axes, bend = normal(2, 3, 2, 7, seed=5), normal(2, 3, 2, 2, seed=6)
    bend = bend + bend.mT
    seen = [torch.einsum("nuqp,nap->nuqa", axes, rows) for rows in cumulants.rows.unbind(1)]
    third, turned = cumulants.of_windows(seen, bend)
    assert_close(third, torch.einsum("nuai,nubj,nuck,nijk->nuabc", axes, axes, axes, kappa), rtol=1e-11, atol=1e-11)
    wanted = torch.einsum("nuab,nuai,nubj,nijk->nuk", bend, axes, axes, kappa)
    assert_close(turned, wanted, rtol=1e-11, atol=1e-11)


def exact_cumulants(function, mean: Tensor, std: Tensor, rho: float, weights: Tensor) -> tuple[Tensor, Tensor]:
    """κ₃ and κ₄ of Σ wᵢ f(zᵢ) for two correlated numbers, from a fine grid: (k,) each for weights (k, 2)."""
    grid = torch.linspace(-9, 9, 1801, dtype=torch.float64)
    mass = torch.exp(-0.5 * (grid.square().unsqueeze(1) + grid.square()))
    mass = mass / mass.sum()
    second = rho * grid.unsqueeze(1) + np.sqrt(1 - rho**2) * grid
    both = function(mean[0] + std[0] * grid).unsqueeze(1).expand_as(second), function(mean[1] + std[1] * second)
    cumulants = []
    for w in weights:
        z = w[0] * both[0] + w[1] * both[1]
        z = z - (mass * z).sum()
        moments = [(mass * z**k).sum() for k in (2, 3, 4)]
        cumulants.append(torch.stack([moments[1], moments[2] - 3 * moments[0] ** 2]))
    third, fourth = torch.stack(cumulants, 1)
    return third, fourth


LAYERS = {
    "relu": (relu(2, torch.zeros(1, dtype=torch.float64)), torch.relu),
    "hardtanh": (between(-0.5, 0.7, 2, torch.zeros(1, dtype=torch.float64)), lambda z: z.clamp(-0.5, 0.7)),
    "tanh": (Elementwise(torch.tanh, (2,), torch.zeros(1, dtype=torch.float64)), torch.tanh),
}


@pytest.mark.parametrize("name", LAYERS)
def test_behind_one_layer_of_two_units(name):
    """Third cumulants have four terms in ρ and an error of order ρ⁵; fourth ones have every term of order ρ.

    The grid's own error at a kink is 1e-5 (the square of its step).
    """
    rule, function = LAYERS[name]
    mean, std = torch.tensor([0.2, -0.4], dtype=torch.float64), torch.tensor([1.0, 0.7], dtype=torch.float64)
    weights = torch.tensor([[1.0, 0.8], [0.6, -1.0], [-0.3, 0.9]], dtype=torch.float64)
    errors = []
    for rho in (0.1, 0.2):
        covariance = torch.outer(std, std) * torch.tensor([[1.0, rho], [rho, 1.0]], dtype=torch.float64)
        before = DenseJoint(mean[None], covariance[None], Cumulants.none(mean[None], fourth=True))
        after = through_layer(before, rule, 2, 2).cumulants.through(lambda rows: rows @ weights.mT)
        third, fourth = exact_cumulants(function, mean, std, rho, weights)
        assert_close(after.kappa_iij(3)[0, :, :3].diagonal(), third, atol=2e-5 + 0.2 * rho**5)
        found = after.fourths(3)
        assert found is not None
        errors.append(float((found.own[0] - fourth).abs().max()))
    assert errors[0] < 0.01
    assert errors[1] < 0.04
    assert errors[1] > 2.5 * errors[0] or errors[1] < 1e-3


@pytest.mark.parametrize("name", LAYERS)
def test_moments_of_powers(name):
    """E[gᵏ Heᵣ(u)] of g = f(z) − f(m) against a fine grid, whose error at a kink is below 1e-6."""
    rule, function = LAYERS[name]
    mean, std = torch.tensor([[0.2, -0.4]], dtype=torch.float64), torch.tensor([[1.0, 0.7]], dtype=torch.float64)
    power = rule.power_moments(mean, std.square())
    assert power is not None
    grid = torch.linspace(-10, 10, 200_001, dtype=torch.float64)
    mass = torch.exp(-0.5 * grid.square())
    mass = mass / mass.sum()
    value = function(mean[0].unsqueeze(-1) + std[0].unsqueeze(-1) * grid) - function(mean[0]).unsqueeze(-1)
    assert_close(power.centre, function(mean), atol=1e-15)
    hermite = [torch.ones_like(grid), grid]
    while len(hermite) < 7:
        hermite.append(grid * hermite[-1] - (len(hermite) - 1) * hermite[-2])
    for k, found in enumerate((power.first, power.second, power.third, (power.fourth,)), start=1):
        for he, own in zip(hermite, found, strict=False):
            assert_close(own[0], (mass * value**k * he).sum(-1), atol=2e-6)


def test_units_far_from_the_kink_or_without_noise():
    """Far from the kink f is linear or constant, without noise it is f(m). Nothing overflows in float32."""
    rule = relu(4, torch.zeros(1))
    mean, variance = torch.tensor([[30.0, -30.0, 2.0, -2.0]]), torch.tensor([[1e-4, 1e-4, 0.0, 0.0]])
    power = rule.power_moments(mean, variance)
    assert_close(power.centre, torch.tensor([[30.0, 0.0, 2.0, 0.0]]))
    assert_close(power.first[0], torch.zeros(1, 4), atol=1e-9)
    assert_close(power.first[1], torch.tensor([[0.01, 0.0, 0.0, 0.0]]))
    assert_close(power.fourth, torch.tensor([[3e-8, 0.0, 0.0, 0.0]]), rtol=1e-5)
    for moments in power[1:4]:
        assert bool(torch.stack(moments[2:]).isfinite().all())
