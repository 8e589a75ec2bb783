"""The two integrals of `quadrature` as power series in ρ, whose terms are products of one factor for each unit.

Mehler's formula φ₂(h,k;r) = φ(h)φ(k) Σ Heₙ(h)Heₙ(k) rⁿ/n!, integrated term by term, gives

    J = ρ² Σ aₙ(h) aₙ(k) ρⁿ,      D = ρ Σ (n+2) aₙ(h) aₙ(k) ρⁿ,      aₙ(h) = Heₙ(h) φ(h) / √((n+2)!).

A term costs one product and one sum a pair, and no exponential: up to moderate correlations nothing is cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from netmoments.normal import density
from netmoments.relu.scratch import Scratch, common_shape

CRAMER = 0.1879
"""φ(h)φ(k)|Heₙ(h)Heₙ(k)| ≤ this · n! for every h, k and n (Cramér's inequality)."""

ERROR = {torch.float32: 5e-8, torch.float64: 1e-15}
"""The largest absolute error by which a series may be cut short."""


def nonlinear_tail(terms: int, rho: float) -> float:
    """A bound on what all but the first `terms` terms add to J."""
    return CRAMER * rho ** (terms + 2) / ((terms + 1) * (terms + 2) * (1 - rho))


def excess_tail(terms: int, rho: float) -> float:
    """A bound on what all but the first `terms` terms add to D."""
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
    """Where on (0, 1) the tail grows past the error, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(terms, middle) <= error else (low, middle)
    return low


@cache
def recurrence(terms: int) -> tuple[tuple[float, float], ...]:
    """(x, y) for which aₙ₊₁ = x·h·aₙ − y·aₙ₋₁, for n = 0, …, terms − 1, from Heₙ₊₁ = h Heₙ − n Heₙ₋₁."""
    return tuple((1 / math.sqrt(n + 3), n / math.sqrt((n + 2) * (n + 3))) for n in range(terms))


class SeriesFactors:
    """The factors aₙ of some units, computed as far as they are asked for."""

    def __init__(self, h: Tensor) -> None:
        self._h = h
        self._factors = [density(h) * math.sqrt(0.5)]
        self._together = self._factors[0].unsqueeze(0)

    def first(self, terms: int) -> Tensor:
        """a₀, a₁, …, at least `terms` of them along a new first dimension."""
        while len(self._factors) < terms:
            n = len(self._factors) - 1
            following = self._h * self._factors[n] / math.sqrt(n + 3)
            if n > 0:
                following.sub_(self._factors[n - 1], alpha=n / math.sqrt((n + 2) * (n + 3)))
            self._factors.append(following)
        if len(self._together) < terms:
            self._together = torch.stack(self._factors)
        return self._together


class TileSeries(NamedTuple):
    """The series of a tile of pairs: the factors of all units, and which of them are its rows and its columns."""

    factors: SeriesFactors
    rows: slice
    columns: slice

    def downwards(self, terms: int) -> Iterator[tuple[Tensor, Tensor]]:
        """aₙ of the rows and of the columns, the last term first."""
        factors = self.factors.first(terms)[:terms].flip(0)
        return zip(
            factors[..., self.rows].unsqueeze(-1).unbind(),
            factors[..., self.columns].unsqueeze(-2).unbind(),
            strict=True,
        )


def nonlinear_sum(series: TileSeries, terms: int, rho: Tensor, scratch: Scratch) -> Tensor:
    """J by the first terms, Horner's way. The result lives in the scratch memory."""
    pairs = series.downwards(terms)
    a, b = next(pairs)
    outer, shape = common_shape(a, b), common_shape(a, b, rho)
    total, term = scratch.take("total", shape), scratch.take("height", outer)
    total.copy_(torch.mul(a, b, out=term))
    for a, b in pairs:
        torch.mul(a, b, out=term)
        torch.addcmul(term, total, rho, out=total)
    return total.mul_(rho).mul_(rho)
