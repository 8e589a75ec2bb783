"""Small networks and noise that every method can be asked about, for vectors of 4 in float64."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import netmoments as nm
from tests.closeness import assert_close
from tests.networks import seeded

PROPAGATED = ("layerwise", "sketch")


def perceptron(scores: int = 3) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, scores)))


def deep(scores: int = 3) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, scores)))


def means(*batch: int, seed: int = 2) -> Tensor:
    return torch.randn(*batch, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def noise(*batch: int, std: float = 0.3) -> nm.Gaussian:
    return nm.Gaussian(means(*batch), std=std, event_ndim=1)


def assert_same(found: nm.OutputMoments, expected: nm.OutputMoments, atol: float = 1e-12) -> None:
    assert_close(found.mean, expected.mean, atol=atol, what="mean")
    assert_close(found.covariance, expected.covariance, atol=atol, what="covariance")
