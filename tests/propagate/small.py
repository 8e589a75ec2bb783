"""Small networks for (1, ...) images in float64, with the plans, moments and samples that tests here ask for."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

import netmoments as nm
from netmoments.covariances import Covariance, Isotropic
from netmoments.network.model import NetworkModel
from netmoments.propagate.layerwise import layerwise
from netmoments.propagate.plan import Plan, plan_of
from tests.networks import Residual


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def image(*shape: int, seed: int = 1) -> Tensor:
    return normal(1, *shape, seed=seed)


def symmetric(count: int, size: int, seed: int = 0) -> Tensor:
    matrices = normal(count, size, size, seed=seed)
    return matrices + matrices.mT


def isotropic(std: float, x: Tensor) -> Isotropic:
    return Isotropic(torch.tensor(std**2, dtype=torch.float64), x.numel())


def plan_for(network: nn.Module, x: Tensor) -> Plan:
    return plan_of(NetworkModel.of(network, x, "test"))


def moments(network: nn.Module, x: Tensor, covariance: Covariance) -> tuple[Tensor, Tensor]:
    """Means (d,) and covariances (d, d) of all scores by layerwise, for one image."""
    outputs = torch.arange(network(x).shape[1]).unsqueeze(0)
    with torch.no_grad():
        mean, covariances = layerwise(plan_for(network, x), x, covariance, outputs)
    return mean[0], covariances[0]


def sampled(network: nn.Module, x: Tensor, std: float, samples: int, seed: int) -> nm.SampledMoments:
    """The reference, in float32, which is twice as fast: its rounding, 1e-7, is far below the errors of samples."""
    return nm.monte_carlo(copy.deepcopy(network).float(), nm.Gaussian(x[0].float(), std=std), samples, seed=seed)


class Normalised(nn.Module):
    """Batch normalisation, overlapping 3×3 pools with padding, an average at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.Conv2d(6, 8, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(6), nn.BatchNorm2d(8)
        self.last = nn.Linear(8, 4)
        for norm in (self.norm1, self.norm2):
            norm.running_mean.normal_(0, 0.2)
            norm.running_var.uniform_(0.2, 0.6)
            nn.init.uniform_(norm.weight, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.norm1(self.conv1(x))), 3, 2, 1)
        x = functional.relu(functional.max_pool2d(self.norm2(self.conv2(x)), 3, 2, 1))
        return self.last(x.mean((2, 3)))


def pooled() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(6, 8, 3, padding=1), nn.MaxPool2d(2),
        nn.ReLU(), nn.Flatten(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 4),
    )  # fmt: skip


def leaky() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 60), nn.LeakyReLU(0.1), nn.Linear(60, 60), nn.PReLU(60, 0.3), nn.Linear(60, 60), nn.ReLU6(),
        nn.Dropout(), nn.Linear(60, 4),
    )  # fmt: skip


class Spellings(nn.Module):
    """Many operations, some written in unusual ways, for which a plan must find the right steps and rules."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.prelu, self.last = nn.PReLU(4), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu_(self.conv(x) * 0.5 - 0.1)
        z = self.prelu(y + functional.pad(x, (0, 0, 0, 0, 1, 1)))
        z = functional.avg_pool2d(z, 2).clamp(-1, 6)
        z = torch.maximum(z, z.flip(-1)).abs()
        low, high = torch.minimum(z, 0.3 - z).split(2, 1)
        z = torch.cat([high, low - 1], 1).transpose(-1, -2)
        top = z.amax((2, 3)).clamp_max(0.8)
        rest = functional.hardtanh(z, -0.4, 0.4).reshape(-1, 4, 9).sum(-1) / 3
        return self.last(torch.cat([top, rest, functional.adaptive_max_pool2d(z, (2, 1)).flatten(1)], 1))


SMALL = {
    "residual": (Residual, (2, 6, 6)),
    "normalised, overlapping 3×3 pools": (Normalised, (1, 9, 9)),
    "2×2 pools": (pooled, (1, 8, 8)),
    "leaky": (leaky, (12,)),
    "spellings": (Spellings, (2, 6, 6)),
}
