"""Small float32 networks for vectors of 4, made around a function or returning what a function returns."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.networks import seeded

POINT = torch.tensor([[0.3, -1.0, 0.7, 0.2]])


class Wrapped(nn.Module):
    """Linear, a function, linear."""

    def __init__(self, function: Callable[[Tensor], Tensor], hidden: int = 5) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, hidden), nn.Linear(hidden, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


def wrapped(function: Callable[[Tensor], Tensor]) -> nn.Module:
    return seeded(lambda: Wrapped(function), torch.float32)


class Returning(nn.Module):
    """Returns any function of relu(x), for tests of what a network may return."""

    def __init__(self, function: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> object:
        return self.function(torch.relu(x))


def returning(function: Callable[[Tensor], object]) -> nn.Module:
    return Returning(function).eval()


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Dropout(), nn.Linear(5, 3))
