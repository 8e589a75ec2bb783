"""Rules for the two integrals of `bivariate`: how many nodes or terms they need, by correlation and dtype.

Nodes are those of Gauss–Legendre or Gauss–Radau quadrature. Terms are those of the series that Mehler's formula (1866),
φ₂(h,k;r) = φ(h)φ(k) Σ Heₙ(h)Heₙ(k) rⁿ/n!, gives when it is integrated term by term:

    J = ρ² Σ aₙ(h) aₙ(k) ρⁿ,      D = ρ Σ (n+2) aₙ(h) aₙ(k) ρⁿ,      aₙ(h) = Heₙ(h) φ(h) / √((n+2)!).

For each pair a term costs one product and one sum, and no exponential: up to moderate correlations nothing is cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.polynomial import legendre

from netmoments.normal import gauss_legendre

CRAMER = 0.1879
"""A constant c with φ(h)φ(k)|Heₙ(h)Heₙ(k)| ≤ c · n! for every h, k and n (Cramér's inequality)."""

ERROR = {torch.float32: 5e-8, torch.float64: 1e-15}
"""The largest absolute error by which a series may be cut short."""


def nonlinear_tail(terms: int, rho: float) -> float:
    """A bound on the sum of all but the first `terms` terms of J."""
    return CRAMER * rho ** (terms + 2) / ((terms + 1) * (terms + 2) * (1 - rho))


def excess_tail(terms: int, rho: float) -> float:
    """A bound on the sum of all but the first `terms` terms of D."""
    return CRAMER * rho ** (terms + 1) / ((terms + 1) * (1 - rho))


@cache
def nonlinear_limits(terms: int, dtype: torch.dtype) -> tuple[float, ...]:
    """The largest |ρ| for which 0, 1, …, `terms` terms are enough for J."""
    return tuple(_largest(nonlinear_tail, n, ERROR[dtype]) for n in range(terms + 1))


@cache
def excess_limits(terms: int, dtype: torch.dtype) -> tuple[float, ...]:
    """The largest |ρ| for which 0, 1, …, `terms` terms are enough for D."""
    return tuple(_largest(excess_tail, n, ERROR[dtype]) for n in range(terms + 1))


def _largest(tail: Callable[[int, float], float], terms: int, error: float) -> float:
    """The ρ in (0, 1) at which the tail bound exceeds the error, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(terms, middle) <= error else (low, middle)
    return low


@cache
def recurrence(terms: int) -> tuple[tuple[float, float], ...]:
    """(x, y) for which aₙ₊₁ = x·h·aₙ − y·aₙ₋₁, for n = 0, …, terms − 1, from Heₙ₊₁ = h Heₙ − n Heₙ₋₁."""
    return tuple((1 / math.sqrt(n + 3), n / math.sqrt((n + 2) * (n + 3))) for n in range(terms))


@dataclass(frozen=True)
class Rule:
    """A rule of quadrature, nodes (u, weight, 1 − u) on [0, 1], that is accurate enough for |ρ| ≤ `limit`."""

    limit: float
    nodes: tuple[tuple[float, float, float], ...]


@dataclass(frozen=True)
class SeriesRule:
    """The first `terms` terms of the series, which are accurate enough for |ρ| ≤ `limit`."""

    limit: float
    terms: int


def plain(count: int, limit: float) -> Rule:
    """Gauss–Legendre with `count` nodes."""
    nodes, weights = gauss_legendre(count)
    return Rule(limit, tuple((u, w, 1 - u) for u, w in zip(nodes, weights, strict=True)))


def radau(count: int, limit: float) -> Rule:
    """Gauss–Radau for J with `count` nodes, and a free one at u = 1, where the integrand of J vanishes.

    Of the n + 1 nodes in all, x = 2u − 1 are the zeros of Pₙ − Pₙ₊₁, with weights (1 + x) / ((n+1) Pₙ(x))² in x. The
    gain over Gauss–Legendre is about one node.
    """
    difference, last = np.zeros(count + 2, np.longdouble), np.zeros(count + 1, np.longdouble)
    difference[-2:], last[-1] = (1, -1), 1
    x = np.sort(np.real(legendre.legroots(difference.astype(float))))[:-1].astype(np.longdouble)
    for _ in range(2):
        x = x - legendre.legval(x, difference) / legendre.legval(x, legendre.legder(difference))
    weights = (1 + x) / ((count + 1) * legendre.legval(x, last)) ** 2
    columns = (column.astype(float).tolist() for column in ((1 + x) / 2, weights / 2, (1 - x) / 2))
    return Rule(limit, tuple(zip(*columns, strict=True)))


def graded(count: int, limit: float, steepness: float) -> Rule:
    """Gauss–Legendre in y with 1 − u = expm1(by)/expm1(b): the nodes crowd towards u = 1."""
    nodes, weights = gauss_legendre(count)
    scale = math.expm1(steepness)
    from_end = [math.expm1(steepness * y) / scale for y in nodes]
    jacobian = [steepness * math.exp(steepness * y) / scale for y in nodes]
    return Rule(limit, tuple((1 - v, w * g, v) for v, w, g in zip(from_end, weights, jacobian, strict=True)))


NONLINEAR_RULES = {
    torch.float32: (
        radau(2, 0.3),
        radau(3, 0.55),
        radau(4, 0.75),
        radau(5, 0.87),
        radau(6, 0.93),
        radau(7, 0.965),
        radau(8, 0.98),
        radau(10, 0.996),
        graded(12, 1.0, steepness=2.0),
    ),
    torch.float64: (
        radau(4, 0.16),
        radau(5, 0.28),
        radau(6, 0.4),
        radau(8, 0.6),
        radau(10, 0.75),
        radau(12, 0.84),
        radau(16, 0.935),
        radau(20, 0.97),
        radau(28, 0.99),
        graded(56, 1.0, steepness=6.0),
    ),
}
"""The rules for J, by growing limit: absolute errors are below 1e-7 in float32 and 2e-15 in float64."""

SERIES_RULES = {
    dtype: tuple(SeriesRule(nonlinear_limits(terms[-1], dtype)[count], count) for count in terms)
    for dtype, terms in (
        (torch.float32, (3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40)),
        (torch.float64, (8, 12, 16, 20, 24, 32, 40, 48, 64)),
    )
}
"""The series for J, for blocks of pairs whose units have their factors (`SeriesFactors`)."""

EXCESS_SERIES_RULES = {
    dtype: tuple(SeriesRule(excess_limits(rules[-1].terms, dtype)[rule.terms], rule.terms) for rule in rules)
    for dtype, rules in SERIES_RULES.items()
}
"""The series for D: the same numbers of terms, with smaller limits."""

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
"""The rules for D, by growing limit. `python -m benchmarks.nodes` prints the error of each rule at its limit."""
