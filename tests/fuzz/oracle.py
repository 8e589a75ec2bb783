"""Moments of one and two ReLUs to 40 digits, from formulas that the package does not use."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import mpmath

DIGITS = 40


class Pair(NamedTuple):
    """Of z₁ ~ N(h,1), z₂ ~ N(k,1) with correlation ρ."""

    separable: mpmath.mpf
    """ρΦ(h)Φ(k)."""
    nonlinear: mpmath.mpf
    """Cov(relu z₁, relu z₂) less that."""
    gates: mpmath.mpf
    """Φ(h)Φ(k)."""
    excess: mpmath.mpf
    """P(z₁>0, z₂>0) less that."""


def pair(h: float, k: float, rho: float) -> Pair:
    """Both integrals; 0 at ρ = 0."""
    return _pair(h, k, rho) if rho else Pair(mpmath.mpf(0), mpmath.mpf(0), _gates(h, k), mpmath.mpf(0))


def _gates(h: float, k: float) -> mpmath.mpf:
    with mpmath.workdps(DIGITS):
        return mpmath.ncdf(h) * mpmath.ncdf(k)


def _pair(h: float, k: float, rho: float) -> Pair:
    """By the integrals over the angle t = asin r, in pieces that shrink towards the end of the path.

    They are divided by the integrand's largest value first: mpmath's error estimates are absolute, and would be
    content with anything in the tails.
    """
    with mpmath.workdps(DIGITS):
        h, k, rho = mpmath.mpf(h), mpmath.mpf(k), mpmath.mpf(rho)
        end = mpmath.asin(rho)

        def exponent(t: mpmath.mpf) -> mpmath.mpf:
            return -((h - k * mpmath.sin(t)) ** 2 / mpmath.cos(t) ** 2 + k * k) / 2

        near = [mpmath.mpf(0), end * (1 - mpmath.mpf(10) ** -32)]
        if max(abs(h), abs(k)) > 0:  # where it is largest between them
            ratio = min(h, k, key=abs) / max(h, k, key=abs)
            near += [mpmath.asin(ratio)] if 0 < ratio / rho < 1 and abs(ratio) < 1 else []
        common = max(map(exponent, near))

        def height(t: mpmath.mpf) -> mpmath.mpf:
            return mpmath.exp(exponent(t) - common)

        ends = [end * (1 - mpmath.mpf(4) ** -j) for j in range(1, 40)]
        path = sorted({mpmath.mpf(0), *(end * j / 12 for j in range(1, 12)), *ends}, key=abs)
        path.append(end * (1 - mpmath.mpf(10) ** -32))
        scale = mpmath.exp(common) / (2 * mpmath.pi)
        gates = mpmath.ncdf(h) * mpmath.ncdf(k)
        return Pair(
            rho * gates,
            scale * _integral(lambda t: (rho - mpmath.sin(t)) * height(t), path),
            gates,
            scale * _integral(height, path),
        )


def _integral(function, path: list[mpmath.mpf]) -> mpmath.mpf:
    return mpmath.fsum(
        mpmath.quad(function, [low, high], method="gauss-legendre", maxdegree=7)
        for low, high in itertools.pairwise(path)
    )


def mean_and_variance(h: float) -> tuple[mpmath.mpf, mpmath.mpf]:
    """Of relu(z), z ~ N(h, 1): the closed forms, with digits enough to lose those that cancel."""
    with mpmath.workdps(DIGITS + 20 + int(h * h)):
        h = mpmath.mpf(h)
        mean = h * mpmath.ncdf(h) + mpmath.npdf(h)
        return mean, (1 + h * h) * mpmath.ncdf(h) + h * mpmath.npdf(h) - mean * mean
