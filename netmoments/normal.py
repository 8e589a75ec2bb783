"""The standard normal distribution: density, distribution, Owen's T; standardized means; Gauss–Legendre nodes.

The functions are elementwise, for float32 or float64 tensors that broadcast, and accurate in the tails.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

SATURATED = 53.0
"""The |h| at which standardized means are cut: s·φ(53) is 0 in float64 for every s, so no moment changes beyond."""
QUANTILE = 1.959963984540054
"""The 97.5 % quantile, for intervals of 95 %."""
OWEN_NODES = {torch.float32: 7, torch.float64: 14}
"""Gauss–Legendre nodes for Owen's T, by dtype."""


def density(x: Tensor) -> Tensor:
    """φ(x) = exp(−x²/2) / √(2π)."""
    return torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))


def distribution(x: Tensor) -> Tensor:
    """Φ(x), with full relative accuracy in the left tail."""
    return 0.5 * torch.erfc(x * -math.sqrt(0.5))


def standard_deviation(variance: Tensor) -> Tensor:
    """√variance, with derivative 0 at 0, where the true one is infinite."""
    noisy = variance > 0
    return torch.where(noisy, torch.sqrt(torch.where(noisy, variance, torch.ones_like(variance))), 0.0)


def standardize(mean: Tensor, std: Tensor) -> Tensor:
    """h = m/s, cut to ±`SATURATED`; at s = 0 it is ±`SATURATED` with the sign of m, and 0 at m = s = 0."""
    inside = mean.abs() < SATURATED * std
    h = mean / torch.where(inside, std, torch.ones_like(std))
    return torch.where(inside, h, torch.sign(mean.detach()) * SATURATED)


@cache
def gauss_legendre(count: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Nodes and weights of the Gauss–Legendre rule on [0, 1], correctly rounded if long double is more than double.

    At 56 nodes some of numpy's weights have relative errors above 1e-13; a Newton step on P_n in long double removes
    them.
    """
    x = np.polynomial.legendre.leggauss(count)[0].astype(np.longdouble)
    value, slope = _legendre(count, x)
    x = x - value / slope
    _, slope = _legendre(count, x)
    weights = 1 / ((1 - x) * (1 + x) * slope * slope)
    return tuple(((1 + x) / 2).astype(float).tolist()), tuple(weights.astype(float).tolist())


def _legendre(degree: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """P_n(x) and its derivative, by the three-term recurrence."""
    previous, current = np.ones_like(x), x
    for n in range(2, degree + 1):
        previous, current = current, ((2 * n - 1) * x * current - (n - 1) * previous) / n
    return current, degree * (x * current - previous) / ((x - 1) * (x + 1))


def owen_t(height: Tensor, reach: Tensor) -> Tensor:
    """Owen's (1956) T(h, a) = (1/2π) ∫₀^a exp(−h²(1+x²)/2) / (1+x²) dx as a function of h and r = a·h.

    In h and r it has no pole at h = 0. For |r| ≤ |h| the integral is smooth and short; otherwise
    T(h, a) = Φ(|h|)/2 + Φ(|r|)/2 − Φ(|h|)Φ(|r|) − T(r, 1/a) for positive a, and T is odd in a.
    Infinite r is the limit T(h, ±∞) = ±Φ(−|h|)/2; the sign of a at h = 0 is that of r.
    """
    a, b = height.abs(), reach.abs()
    inner = torch.maximum(a, b)
    slope = torch.minimum(a, b) / torch.clamp(inner, min=torch.finfo(inner.dtype).tiny)
    square, decay = slope * slope, inner.square().mul_(-0.5)
    one, total = slope.new_ones(()), torch.zeros_like(slope)
    for node, weight in zip(*gauss_legendre(OWEN_NODES[slope.dtype]), strict=True):
        spread = torch.add(one, square, alpha=node * node)
        total.addcdiv_(torch.mul(decay, spread).exp_(), spread, value=weight)
    direct = total * slope * (0.5 / math.pi)
    lower_a, lower_b = distribution(-a), distribution(-b)
    swapped = 0.5 * (lower_a + lower_b) - lower_a * lower_b - direct
    value = torch.where(b > a, swapped, direct)
    sign = torch.where((height < 0) != (reach < 0), -1.0, 1.0).to(value.dtype)
    return sign * value


def wilson_interval(share: Tensor, count: Tensor | int) -> tuple[Tensor, Tensor]:
    """The ends of Wilson's (1927) interval of 95 % for a probability that was a `share` of `count` samples.

    >>> wilson_interval(torch.tensor(0.5), 100)
    (tensor(0.4038), tensor(0.5962))
    """
    width = QUANTILE * QUANTILE / count
    middle = (share + width / 2) / (1 + width)
    half = QUANTILE / (1 + width) * (share * (1 - share) / count + width / (4 * count)).clamp(min=0).sqrt()
    return (middle - half).clamp(min=0), (middle + half).clamp(max=1)
