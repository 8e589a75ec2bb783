"""Operators that are affine in their noisy arguments, others that look like it, and unusual ways to write them.

Chains of elementwise functions are one layer, whose moments are as exact as quadrature.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import netmoments as nm
from netmoments.propagate.operators import ARITHMETIC, IN_ORDER, KEEPS_SIGN, OPERATORS, VIEWS
from netmoments.propagate.plan import Plan
from netmoments.rules.composed import OneSigned, PowerSum, Squared, SumOfProducts
from netmoments.rules.one_number import Elementwise, PiecewiseLinear
from tests.closeness import assert_within_standard_errors
from tests.networks import seeded
from tests.propagate.small import image, plan_for

aten = torch.ops.aten


class Between(nn.Module):
    """A function between two linear layers."""

    def __init__(self, function: Callable[[Tensor], Tensor], inputs: int = 5) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(inputs, 6), nn.Linear(6, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


class OnlyAdded(nn.Module):
    """addmm with only its added argument noisy."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.first(x), self.first.weight[:1].repeat(len(x), 1), self.second.weight)


def part_in_place(y: Tensor) -> Tensor:
    y = y.clone()
    y[:, 2:].relu_()
    return y


def assignments(y: Tensor) -> Tensor:
    y = functional.relu(y).clone()
    y[:, 0] = 0.7
    y[:, 1] *= 2
    y[:, 2:4] += 1
    y[:, 4].clamp_(max=0.3)
    return y.mul_(1.5)


def stretched(y: Tensor) -> Tensor:
    return functional.interpolate(functional.relu(y)[:, None], size=6, mode="linear")[:, 0]


def circular(y: Tensor) -> Tensor:
    return functional.pad(functional.relu(y)[:, None], (2, 1), mode="circular")[:, 0, 1:-2]


def overlapping(y: Tensor) -> Tensor:
    return functional.relu(y).as_strided((len(y), 2, 3), (6, 2, 1)).flatten(1)


UNUSUAL = {
    "instance norm": lambda: Between(lambda y: functional.instance_norm(y[:, None])[:, 0], inputs=4),
    "only added": OnlyAdded,
    "part of a tensor in place": lambda: Between(part_in_place, inputs=4),
    "assignments": lambda: Between(assignments, inputs=4),
    "interpolation": lambda: Between(stretched, inputs=4),
    "overlapping chunks": lambda: Between(overlapping, inputs=4),
    "circular padding": lambda: Between(circular, inputs=4),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_operations_against_samples(name):
    """Within 7 % of the sampled variance, for 512 probes of a sketch; 5 standard errors of 10⁵ samples are 2 %."""
    net, noise = seeded(UNUSUAL[name]), nm.Gaussian(torch.tensor([0.5, -0.3, 1.0, 0.2]).double(), std=0.1)
    answers = [nm.output_moments(net, noise), nm.output_moments(net, noise, nm.Sketch(probes=512))]
    sampled = nm.monte_carlo(net, noise, 100_000, seed=4)
    for found in answers[answers[0].method == "sketch" :]:  # a sketch by default has fewer probes and larger errors
        assert float((found.variance / sampled.variance - 1).abs().max()) < 0.07
        assert float(((found.mean - sampled.mean) / sampled.variance.sqrt()).abs().max()) < 0.05


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


SHAPES = {
    aten.unflatten: (1, [3, 1]),
    aten.unsqueeze: (1,),
    **dict.fromkeys((aten.view, aten._unsafe_view, aten.reshape), ([3, 2],)),
}
"""Arguments after the tensor, (2, 3), of operators that have some."""


@pytest.mark.parametrize("operator", sorted(IN_ORDER, key=str), ids=str)
def test_operators_that_keep_the_order_of_numbers_are_affine_and_keep_them(operator):
    x = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(operator(x, *SHAPES.get(operator, ())).flatten(), x.flatten())
    assert operator in OPERATORS
    assert operator in KEEPS_SIGN or operator is aten.detach
    assert (operator in ARITHMETIC) == (operator not in VIEWS)
