"""The rule for any function of one number at a time: expectations by Gauss–Hermite quadrature."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch
from torch import Tensor

from netmoments.memory import elements_together
from netmoments.normal import standard_deviation
from netmoments.precision import value_and_slope
from netmoments.rules.base import Local, OneInput, PowerMoments, ThirdCumulants
from netmoments.rules.sampled import UnitMoments

NODES = 64
"""Nodes of the Gauss–Hermite rule: exact for polynomials of degree 127; a kink costs accuracy."""
TERMS = 8
"""The highest order n in Mehler's series Σ aₙaₙ' ρⁿ/n! for the covariance of two units, aₙ = E[f Heₙ]."""


@dataclass(frozen=True, eq=False)
class Elementwise(OneInput):
    """y = function(z), applied to each number by itself; `function` takes batches (B, *shape) and keeps their shape.

    Variances of units come from the quadrature, covariances of pairs from a Hermite series up to order `TERMS`.
    """

    function: Callable[[Tensor], Tensor]
    shape: tuple[int, ...]
    """The shape of one image's input, without batch."""
    like: Tensor
    """Any tensor of the right dtype on the right device."""

    @cached_property
    def windows(self) -> Tensor:  # type: ignore[override]
        return torch.arange(int(np.prod(self.shape)), device=self.like.device).unsqueeze(-1)

    def values(self, z: Tensor) -> Tensor:
        flat = z.squeeze(-1)
        return self.function(flat.reshape(-1, *self.shape)).reshape(flat.shape)

    def local(self, mean: Tensor, covariance: Tensor, cumulants: ThirdCumulants | None = None) -> Local:
        m, variance = mean.squeeze(-1), covariance.squeeze((-2, -1))
        s = standard_deviation(variance)
        nodes, weights = self._nodes(m)
        z = (m + s * nodes).reshape(-1, *self.shape)
        value, slope = value_and_slope(self.function, (z,), (torch.ones_like(z),))
        value, slope = value.reshape(NODES, *m.shape), slope.reshape(NODES, *m.shape)
        second = (weights * slope * nodes).sum(0)
        if cumulants is not None:
            weights = weights * (1 + cumulants.kappa.reshape(m.shape) / 6 * (nodes**3 - 3 * nodes))
        expected = (weights * value).sum(0)
        curvature = torch.where(s > 0, second / torch.where(s > 0, s, 1.0), 0.0)
        return Local(
            mean=expected,
            variance=(weights * (value - expected).square()).sum(0).clamp(min=0),
            gain=(weights * slope).sum(0).unsqueeze(-1),
            curvature=curvature[..., None, None],
        )

    def pairs(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """Σₙ₌₂ aₙaₙ' ρⁿ/n! for all pairs of units, (..., n, n): means (..., n), covariances (..., n, n)."""
        s = standard_deviation(covariance.diagonal(dim1=-2, dim2=-1))
        nodes, weights = self._nodes(mean)
        value = self.function((mean + s * nodes).reshape(-1, *self.shape)).reshape(NODES, *mean.shape)
        previous, hermite = torch.ones_like(nodes), nodes
        coefficients = []
        for order in range(2, TERMS + 1):
            previous, hermite = hermite, nodes * hermite - (order - 1) * previous
            coefficients.append((weights * hermite * value).sum(0) / math.factorial(order) ** 0.5)
        inverse = 1 / torch.where(s > 0, s, torch.ones_like(s))
        together = elements_together("cache", mean, mean.numel())
        parts = []
        for start in range(0, mean.shape[-1], together):
            rows = slice(start, start + together)
            rho = covariance[..., rows, :] * inverse[..., rows, None] * inverse.unsqueeze(-2)
            parts.append(_power_series([a[..., rows] for a in coefficients], coefficients, rho.clamp(-1, 1)))
        return torch.cat(parts, -2) if len(parts) > 1 else parts[0]

    def power_moments(self, mean: Tensor, variance: Tensor) -> PowerMoments | None:
        """By the same quadrature; None for a subclass with a `local` of its own."""
        if type(self).local is not Elementwise.local:
            return None
        s = standard_deviation(variance)
        nodes, weights = self._nodes(mean)
        centre = self.values(mean.unsqueeze(-1))
        value = self.function((mean + s * nodes).reshape(-1, *self.shape)).reshape(NODES, *mean.shape) - centre
        weighted = [weights, weights * nodes]  # times the Hermite polynomials
        for order in range(2, 7):
            weighted.append(nodes * weighted[-1] - (order - 1) * weighted[-2])
        return PowerMoments(
            centre,
            tuple((w * value).sum(0) for w in weighted),
            tuple((w * value**2).sum(0) for w in weighted[:5]),
            tuple((w * value**3).sum(0) for w in weighted[:5]),
            (weights * value**4).sum(0),
        )

    def sketch_moments(self, mean: Tensor, covariance: Tensor, probes: int) -> UnitMoments:
        moments = torch.func.vmap(lambda m, s: tuple(self.local(m, s)))(self.gathered(mean), covariance)
        expected, _, gain, curvature = moments
        return UnitMoments(expected, gain.detach(), curvature.detach())

    @staticmethod
    def _nodes(like: Tensor) -> tuple[Tensor, Tensor]:
        """Nodes and weights, (nodes, ..., 1), that broadcast with numbers of units (..., n)."""
        nodes, weights = (x.to(like) for x in _gauss_hermite(NODES))
        return nodes.reshape(-1, *[1] * like.dim()), weights.reshape(-1, *[1] * like.dim())


def _power_series(left: list[Tensor], right: list[Tensor], rho: Tensor) -> Tensor:
    """Σₙ leftₙ rightₙ′ ρⁿ for pairs of units, n = 2, 3, …, by Horner's rule: (..., m) and (..., n) to (..., m, n)."""
    total = left[-1].unsqueeze(-1) * right[-1].unsqueeze(-2)
    for a, b in zip(reversed(left[:-1]), reversed(right[:-1]), strict=True):
        total = torch.addcmul(total * rho, a.unsqueeze(-1), b.unsqueeze(-2))
    return total * rho * rho


@cache
def _gauss_hermite(count: int) -> tuple[Tensor, Tensor]:
    """Nodes u and weights w with Σ w f(u) ≈ E f(N(0, 1))."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    return torch.from_numpy(nodes), torch.from_numpy(weights / weights.sum())
