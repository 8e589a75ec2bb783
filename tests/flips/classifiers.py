"""Classifiers whose flip probability is known, and their margins."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor, nn

from netmoments.flips.noisy_network import Clock, NoisyNetwork, Work, run_together
from netmoments.gaussian import Gaussian
from netmoments.network.model import NetworkModel
from netmoments.sampling.fast_network import fast_network

Result = TypeVar("Result")


def tail(x: float) -> float:
    """Φ(−x)."""
    return 0.5 * math.erfc(x / math.sqrt(2))


def linear(size: int = 12, classes: int = 2, seed: int = 0) -> nn.Linear:
    network = nn.Linear(size, classes, bias=False)
    network.weight.data = torch.randn(classes, size, generator=torch.Generator().manual_seed(seed))
    return network.eval()


def at_distance(network: nn.Linear, distance: float) -> Tensor:
    """A point so many standard deviations of N(0, I) noise away from the boundary between the two classes."""
    normal = (network.weight[0] - network.weight[1]).detach()
    return distance * normal / normal.norm()


class Corner(nn.Module):
    """Scores (0, max(x₀ − a, x₁ − b)) as a network of two layers with ReLUs: class 1 wins if x₀ > a or x₁ > b."""

    def __init__(self, first: float, second: float) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 3), nn.Linear(3, 2)
        self.inner.weight.data.zero_()
        self.inner.weight.data[0, 0], self.inner.weight.data[0, 1] = 1.0, -1.0
        self.inner.weight.data[1, 1], self.inner.weight.data[2, 1] = 1.0, -1.0
        self.inner.bias.data = torch.tensor([second - first, 0.0, 0.0])
        self.outer.weight.data = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, -1.0]])
        self.outer.bias.data = torch.tensor([0.0, -second])

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x).relu())

    @staticmethod
    def probability(first: float, second: float) -> float:
        """1 − (1 − Φ(−a))(1 − Φ(−b)) under N(0, I)."""
        return tail(first) + tail(second) - tail(first) * tail(second)


class Ball(nn.Module):
    """Scores (r², |x|²): class 1 wins outside a ball."""

    def __init__(self, radius: float) -> None:
        super().__init__()
        self.square = radius**2

    def forward(self, x: Tensor) -> Tensor:
        inside = torch.full_like(x[:, 0], self.square)
        return torch.stack([inside, x.square().sum(1)], 1)


class Rounded(nn.Module):
    """A linear classifier of rounded numbers: it runs, and has no gradient."""

    def __init__(self, distance: float) -> None:
        super().__init__()
        self.distance = distance

    def forward(self, x: Tensor) -> Tensor:
        fine = torch.round(x[:, :1].detach() * 1000) / 1000
        return torch.cat([torch.full_like(fine, self.distance), fine], 1)


def noisy_network(network: nn.Module, noise: Gaussian, label: int = 0, seed: int = 0) -> NoisyNetwork:
    flat = noise.flattened()
    model = NetworkModel.of_any(network, flat.mean, "flip_probability")
    return NoisyNetwork(model, fast_network(model), flat, label, torch.Generator().manual_seed(seed), Clock())


def run_alone(work: Work[Result]) -> Result:
    """The result of the work on one input."""
    ((_, result),) = run_together([work], 1)
    return result
