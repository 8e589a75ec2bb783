"""Networks of many kinds, with noise under which they take some thousand samples."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

import netmoments as nm
from netmoments.network.model import NetworkModel
from tests.networks import Residual, seeded


class Recurrent(nn.Module):
    """The last state of a sequence (N, 4, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.GRU(3, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.cell(x)
        return self.last(states[:, -1])


class Hourglass(nn.Module):
    """Down, up, and past both, from (2, 4, 4) images to (1, 4, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.past = nn.Conv2d(2, 4, 2, 2), nn.ConvTranspose2d(4, 2, 2, 2), nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.past(torch.cat([x, functional.relu(self.up(functional.relu(self.down(x))))], 1))


class Called(nn.Module):
    """Two layers with something in between."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(6, 8), nn.Linear(8, 3), between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))


class NoGradient(Called):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().forward(x)


def perceptron(scores: int = 3) -> nn.Module:
    layers = (nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, scores))
    return nn.Sequential(*layers)


KIND: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float, float]] = {
    "perceptron": (perceptron, (6,), 1.0, 0.03),
    "residual": (Residual, (2, 6, 6), 0.5, 0.03),
    "recurrent": (Recurrent, (4, 3), 2.0, 0.03),
    "softmax": (lambda: nn.Sequential(perceptron(), nn.Softmax(1)), (6,), 2.0, 0.03),
    "hourglass": (Hourglass, (2, 4, 4), 1.0, 0.002),
    "rounded": (lambda: Called(lambda z: (2 * z).round()), (6,), 0.5, 0.03),
    "without a gradient": (lambda: NoGradient(torch.tanh), (6,), 1.0, 0.03),
}
"""Networks, their inputs, the noise on these, and a tolerance for which some thousand samples are needed: of much fewer
the error of a variance is known badly, and quotients of the two have longer tails than a normal distribution.
"""
WITHOUT_SLOPES = ("rounded", "without a gradient")


def model_of(kind: str) -> tuple[NetworkModel, nm.Gaussian]:
    make, shape, std, _ = KIND[kind]
    mean = torch.randn(1, *shape, generator=torch.Generator().manual_seed(1))
    noise = nm.Gaussian(mean, std=std, event_ndim=len(shape))
    return NetworkModel.of_any(seeded(make, torch.float32), mean, "test"), noise
