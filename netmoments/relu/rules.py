"""Quadrature rules for the two integrals of `quadrature`, by correlation and dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from netmoments.normal import gauss_legendre


@dataclass(frozen=True)
class Rule:
    """Nodes (u, weight, 1 − u) on [0, 1], good for |ρ| ≤ `limit`."""

    limit: float
    nodes: tuple[tuple[float, float, float], ...]

    @property
    def cost(self) -> int:
        return len(self.nodes)


def plain(count: int, limit: float) -> Rule:
    """Gauss–Legendre with `count` nodes."""
    nodes, weights = gauss_legendre(count)
    return Rule(limit, tuple((u, w, 1 - u) for u, w in zip(nodes, weights, strict=True)))


def graded(count: int, limit: float, steepness: float) -> Rule:
    """Gauss–Legendre in y with 1 − u = expm1(by)/expm1(b): the nodes crowd towards u = 1."""
    nodes, weights = gauss_legendre(count)
    scale = math.expm1(steepness)
    rest = [math.expm1(steepness * y) / scale for y in nodes]
    jacobian = [steepness * math.exp(steepness * y) / scale for y in nodes]
    return Rule(limit, tuple((1 - v, w * g, v) for v, w, g in zip(rest, weights, jacobian, strict=True)))


# `python -m benchmarks.nodes` prints the largest absolute error of each rule at its limit, for J and for D.
RULES = {
    torch.float32: (
        plain(3, 0.4),
        plain(4, 0.6),
        plain(5, 0.8),
        plain(7, 0.9),
        plain(8, 0.95),
        plain(12, 0.99),
        graded(12, 1.0, steepness=2.0),
    ),
    torch.float64: (
        plain(6, 0.3),
        plain(8, 0.5),
        plain(10, 0.7),
        plain(12, 0.8),
        plain(16, 0.9),
        plain(20, 0.95),
        plain(32, 0.99),
        graded(56, 1.0, steepness=6.0),
    ),
}
