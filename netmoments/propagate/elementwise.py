"""Any function of one number at a time, its expectations by quadrature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from netmoments.normal import standard_deviation
from netmoments.propagate.nonlinearity import Local, Nonlinearity, ThirdCumulants

NODES = 64
"""Of the Gauss–Hermite rule: exact for polynomials of degree 127; a kink costs accuracy (about 1e-3 of a deviation)."""


@dataclass(frozen=True, eq=False)
class Elementwise(Nonlinearity):
    """y = function(z), each number by itself; `function` takes batches (B, *shape) and keeps their shape.

    Pairs of units have two terms of the Hermite series, gain and curvature; each unit's own variance is that of the
    quadrature.
    """

    function: Callable[[Tensor], Tensor]
    shape: tuple[int, ...]
    """Of the input of one image, without batch."""
    like: Tensor
    """Any tensor of the right dtype on the right device."""

    @property
    def windows(self) -> Tensor:  # type: ignore[override]
        return torch.arange(int(np.prod(self.shape)), device=self.like.device).unsqueeze(-1)

    def gathered(self, z: Tensor) -> Tensor:
        return z.unsqueeze(-1)

    def values(self, z: Tensor) -> Tensor:
        flat = z.squeeze(-1)
        return self.function(flat.reshape(-1, *self.shape)).reshape(flat.shape)

    def local(self, mean: Tensor, covariance: Tensor, cumulants: ThirdCumulants | None = None) -> Local:
        m, variance = mean.squeeze(-1), covariance.reshape(len(mean))
        s = standard_deviation(variance)
        nodes, weights = (x.to(mean).unsqueeze(-1) for x in _gauss_hermite(NODES))
        z = (m + s * nodes).reshape(NODES, *self.shape)
        value, slope = torch.func.jvp(self.function, (z,), (torch.ones_like(z),))[:2]
        value, slope = value.reshape(NODES, -1), slope.reshape(NODES, -1)
        bent = (weights * slope * nodes).sum(0)
        if cumulants is not None:
            weights = weights * (1 + cumulants.kappa.reshape(-1) / 6 * (nodes**3 - 3 * nodes))
        expected = (weights * value).sum(0)
        curvature = torch.where(s > 0, bent / torch.where(s > 0, s, 1.0), 0.0)
        return Local(
            mean=expected,
            variance=(weights * (value - expected).square()).sum(0).clamp(min=0),
            gain=(weights * slope).sum(0).unsqueeze(-1),
            curvature=curvature.reshape(-1, 1, 1),
        )


@cache
def _gauss_hermite(count: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights with Σ w f(u) ≈ E f(N(0, 1))."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    return torch.from_numpy(nodes), torch.from_numpy(weights / weights.sum())
