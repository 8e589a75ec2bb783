"""Chains of elementwise functions are one layer, whose moments are as exact as quadrature."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import netmoments as nm
from netmoments.propagate.plan import Plan
from netmoments.rules.composed import OneSigned, PowerSum, Squared, SumOfProducts
from netmoments.rules.one_number import Elementwise, PiecewiseLinear
from tests.closeness import assert_within_standard_errors
from tests.networks import seeded
from tests.propagate.small import image, plan_for


class Between(nn.Module):
    """A function between two linear layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(5, 6), nn.Linear(6, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


ONE_LAYER: dict[str, Callable[[Tensor], Tensor]] = {
    "swish": lambda z: z * torch.sigmoid(z),
    "swish, with a scale": lambda z: z * torch.sigmoid(torch.arange(1.0, 7).to(z) * z) - 1,
    "GELU by hand": lambda z: 0.5 * z * (1 + torch.tanh(0.8 * (z + 0.045 * z**3))),
    "softsign": functional.softsign,
    "squared ReLU": lambda z: functional.relu(z) ** 2,
    "bell": lambda z: torch.exp(-z * z),
    "tanh by hand": lambda z: (z.exp() - (-z).exp()) / (z.exp() + (-z).exp()),
    "logarithm": lambda z: torch.log(1 + z**2),
    "copies": lambda z: (z.clone() * z.sigmoid().contiguous()).tanh(),
}


def kinds(plan: Plan) -> list[type]:
    return [type(stage.rule) for stage in plan.stages]


@pytest.mark.parametrize("name", ONE_LAYER)
def test_a_chain_is_one_layer(name):
    """Mean and variance against samples, for large noise; quadrature and the pairs' series are off by less than 1 %."""
    network, x = seeded(lambda: Between(ONE_LAYER[name])), image(5)
    assert kinds(plan_for(network, x)) == [Elementwise]
    noise = nm.Gaussian(x[0], std=0.5)
    found, sampled = nm.output_moments(network, noise, "layerwise"), nm.monte_carlo(network, noise, 100_000, seed=2)
    assert_within_standard_errors(found.mean, sampled.mean, sampled.mean_standard_error)
    slack = 0.01 * sampled.variance
    assert bool(((found.variance - sampled.variance).abs() < 5 * sampled.variance_standard_error + slack).all())


SEPARATE: dict[str, tuple[Callable[[Tensor], Tensor], list[type]]] = {
    "a sum between": (lambda z: z * z.square().sum(1, keepdim=True).rsqrt(), [Squared, OneSigned, SumOfProducts]),
    "another place": (lambda z: z * z.flip(1).sigmoid(), [Elementwise, SumOfProducts]),
    "roots of sums": (
        lambda z: z / z.square().sum(1, keepdim=True).sqrt().clamp_min(1e-6).expand_as(z),
        [Squared, OneSigned, SumOfProducts],
    ),
    "unit vectors": (lambda z: functional.normalize(z), [PowerSum, OneSigned, SumOfProducts]),
    "logarithm of what is positive": (lambda z: torch.log(9 + z), [OneSigned]),
    "ReLU of a ReLU": (lambda z: functional.relu(functional.relu(z)), [PiecewiseLinear]),
    "affine only": (lambda z: functional.relu(2 * z - 1), [PiecewiseLinear]),
}  # fmt: skip


@pytest.mark.parametrize("name", SEPARATE)
def test_operations_that_make_no_chain_stay_layers_of_their_own(name):
    function, expected = SEPARATE[name]
    assert kinds(plan_for(seeded(lambda: Between(function)), image(5))) == expected


def test_a_chain_from_a_positive_number():
    """√z, clamped, and its reciprocal are one function of a sum of squares, never evaluated below 0, however noisy."""
    network = seeded(lambda: Between(lambda z: z * z.square().sum(1, keepdim=True).sqrt().clamp_min(1e-3).reciprocal()))
    stages = plan_for(network, image(5)).stages
    assert [type(stage.rule) for stage in stages] == [Squared, OneSigned, SumOfProducts]
    one = torch.ones(1, 1, dtype=torch.float64)
    for spread in (0.1, 1.0, 10.0):
        local = stages[1].rule.local(one, spread**2 * one.unsqueeze(0))
        assert 0.9 < float(local.mean) < 2
        assert -5 < float(local.gain) < 0 <= float(local.variance) < 2


def test_numbers_that_are_never_negative():
    """For these |x|, relu(x) and sign(x) are x, x and 1."""

    def mean_square(z: Tensor) -> Tensor:
        y = z.square().mean(1, keepdim=True)
        return (torch.sign(y) * functional.relu(torch.abs(y))).expand_as(z)

    network, x = seeded(lambda: Between(mean_square)), image(5)
    found = nm.output_moments(network, nm.Gaussian(x[0], std=0.5), "layerwise")
    plain = seeded(lambda: Between(lambda z: z.square().mean(1, keepdim=True).expand_as(z)))
    wanted = nm.output_moments(plain, nm.Gaussian(x[0], std=0.5), "layerwise")
    torch.testing.assert_close(found.mean, wanted.mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.variance, wanted.variance, rtol=1e-3, atol=1e-9)


def test_division_with_rounding_is_no_link():
    network = seeded(lambda: Between(lambda z: functional.relu(torch.div(z, 0.5, rounding_mode="floor"))))
    with pytest.raises(ValueError, match="no rule for div"):
        nm.output_moments(network, nm.Gaussian(image(5)[0], std=0.5), "layerwise")
