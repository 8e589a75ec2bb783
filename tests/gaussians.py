"""Gaussians of every structure."""

from __future__ import annotations

import torch
from torch import Tensor

import netmoments as nm

SIZE = 6


def structures(batch: tuple[int, ...] = ()) -> dict[str, nm.Gaussian]:
    """One of each kind, with a batch if asked; the zero variances and the missing rank are on purpose."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*batch, *shape, dtype=torch.float64, generator=generator)

    mean, factor = normal(SIZE), normal(SIZE, 2)
    variances = normal(SIZE).square()
    variances[..., 2] = 0
    square = factor @ factor.mT
    square = 0.5 * (square + square.mT)
    covariances = {
        "isotropic": 0.3,
        "diagonal": nm.Diagonal(variances),
        "low rank": nm.LowRank(factor),
        "low rank plus number": nm.LowRank(factor, 0.2),
        "low rank plus diagonal": nm.LowRank(factor, variances),
        "dense": nm.Dense(square + torch.diag_embed(variances)),
        "dense and singular": nm.Dense(square),
        "certain": 0.0,
    }
    return {name: nm.Gaussian(mean, covariance, event_ndim=1) for name, covariance in covariances.items()}


KINDS = list(structures())
