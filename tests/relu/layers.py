"""Layers of ReLUs to try kernels on, with the kernels of a GPU and without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from netmoments.relu.triton import kernels


def random_layer(units: int, seed: int, rank: int | None = None, batch: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    """Means and covariances (..., p), (..., p, p) in float64; of low rank, with correlations near ±1, if asked."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(*batch, units, dtype=torch.float64, generator=generator)
    factor = torch.randn(*batch, units, rank or units + 2, dtype=torch.float64, generator=generator)
    matrix = factor @ factor.mT / factor.shape[-1]
    return mean, 0.5 * (matrix + matrix.mT)


def hard_layer(units: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Means, a factor of the covariance and the covariance; two images with certain, linear, dead and equal units."""
    generator = torch.Generator().manual_seed(units)
    factor = torch.nn.functional.normalize(
        torch.randn(2, units, rank, dtype=torch.float64, generator=generator), dim=-1
    )
    factor *= 0.2 + torch.rand(2, units, 1, dtype=torch.float64, generator=generator)
    mean = torch.randn(2, units, dtype=torch.float64, generator=generator)
    if units > 20:
        factor[0, 3] = 0
        factor[1, 5], factor[1, 6] = factor[1, 4], -factor[1, 4]
        mean[0, 10:14] = torch.tensor([40.0, -40.0, 8.0, -8.0])
        mean[0, 3] = 0
    factor = factor.to(dtype)
    return mean.to(dtype), factor, factor @ factor.mT


def by_kernels_and_plainly(
    call: Callable[[], list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Tensor], list[Tensor]]:
    """The results of a call with Triton's kernels and without Triton."""
    pytest.importorskip("triton")
    fast = call()
    with monkeypatch.context() as missing:
        missing.setattr(kernels, "PRESENT", False)
        plain = call()
    return fast, plain
