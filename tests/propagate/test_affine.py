"""Operators that are affine in their noisy arguments, others that look like it, and unusual ways to write them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import netmoments as nm
from tests.networks import seeded


class Part(nn.Module):
    """A function between two linear layers, for vectors of 4."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 6), nn.Linear(6, 3), function

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


UNUSUAL = {
    "instance norm": lambda: Part(lambda y: functional.instance_norm(y[:, None])[:, 0]),
    "only added": OnlyAdded,
    "part of a tensor in place": lambda: Part(part_in_place),
    "assignments": lambda: Part(assignments),
    "interpolation": lambda: Part(stretched),
    "circular padding": lambda: Part(circular),
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
