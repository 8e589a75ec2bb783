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
"""Of the Gauss–Hermite rule: exact for polynomials of degree 127; a kink costs accuracy."""
TERMS = 8
"""Of the series Σ aₙaₙ' ρⁿ/n! of the covariance of two units, aₙ = E[f Heₙ]."""


@dataclass(frozen=True, eq=False)
class Elementwise(Nonlinearity):
    """y = function(z), each number by itself; `function` takes batches (B, *shape) and keeps their shape.

    Pairs of units have `TERMS` terms of the Hermite series; each unit's own variance is that of the quadrature.
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

    def restricted(self, units: Tensor) -> SomeElements:
        """Chosen units only, for `pairs`."""
        return SomeElements(self, units)

    def values_at_nodes(self, mean: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """f(m + s u) at the nodes u, (nodes, n), the nodes and their weights, (nodes, 1)."""
        nodes, weights = (x.to(mean).unsqueeze(-1) for x in _gauss_hermite(NODES))
        z = (mean + s * nodes).reshape(NODES, *self.shape)
        return self.function(z).reshape(NODES, -1), nodes, weights


@dataclass(frozen=True, eq=False)
class SomeElements:
    """Some units of an elementwise layer."""

    layer: Elementwise
    units: Tensor

    def pairs(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """Σₙ₌₂ aₙaₙ' ρⁿ/n! for all pairs, (k, k), of units with means (k,) and covariances (k, k)."""
        s = standard_deviation(covariance.diagonal())
        whole, deviation = (self._placed(x) for x in (mean, s))
        value, nodes, weights = self.layer.values_at_nodes(whole, deviation)
        value = value[:, self.units]
        safe = torch.where(s > 0, s, torch.ones_like(s))
        rho = (covariance / safe.unsqueeze(-1) / safe).clamp(-1, 1)
        total, power = torch.zeros_like(covariance), rho
        before, hermite = torch.ones_like(nodes), nodes
        for order in range(2, TERMS + 1):
            before, hermite = hermite, nodes * hermite - (order - 1) * before
            power = power * rho / order
            coefficient = (weights * hermite * value).sum(0)
            total = total + coefficient.unsqueeze(-1) * coefficient * power
        return total

    def _placed(self, some: Tensor) -> Tensor:
        """Numbers of the chosen units, zeros for the others."""
        return some.new_zeros(self.layer.units).index_copy(0, self.units, some)


@cache
def _gauss_hermite(count: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights with Σ w f(u) ≈ E f(N(0, 1))."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    return torch.from_numpy(nodes), torch.from_numpy(weights / weights.sum())
