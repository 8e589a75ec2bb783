"""Lemma 3 and Lemma 4: E[max(x₁,0) max(x₂,0)], in closed form for zero means and as a series otherwise."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from netmoments.checks import require_broadcastable, require_float_tensors, values_hold

ROOT_TWO = math.sqrt(2)
ROOT_TWO_PI = math.sqrt(2 * math.pi)
FAR = 26.0
"""Where erf is ±1 and exp(−x²) still a number: infinite limits of integration stop here."""


def relu_product_zero_mean(covariance: Tensor, std1: Tensor, std2: Tensor) -> Tensor:
    """Lemma 3: E[max(x₁,0) max(x₂,0)] for zero means. (Its proof lacks a square: σ₁₂²/(σ₁²σ₂²) belongs there.)"""
    scale = std1 * std2
    rho = (covariance / scale).clamp(-1, 1)
    return (covariance * torch.asin(rho) + scale * torch.sqrt(1 - rho * rho)) / (2 * math.pi) + covariance / 4


def relu_cross_moment_series(
    mu1: Tensor, mu2: Tensor, sigma1: Tensor, sigma2: Tensor, rho: Tensor, terms: int = 20
) -> Tensor:
    """Lemma 4: E[max(x₁,0) max(x₂,0)] for any means, the series cut to `terms` terms (u = 0, …, terms − 1).

    Both branches as printed; |ρ| = 1/√2 exactly is taken with the first, and hardly converges.
    """
    (value,) = deque(relu_cross_moment_partial_sums(mu1, mu2, sigma1, sigma2, rho, terms), maxlen=1)
    return value


def relu_cross_moment_partial_sums(
    mu1: Tensor, mu2: Tensor, sigma1: Tensor, sigma2: Tensor, rho: Tensor, terms: int
) -> Iterator[Tensor]:
    """Lemma 4 with 1, 2, …, `terms` terms, one after the other."""
    caller = "relu_cross_moment_series"
    named = {"mu1": mu1, "mu2": mu2, "sigma1": sigma1, "sigma2": sigma2, "rho": rho}
    require_float_tensors(caller, **named)
    require_broadcastable(caller, **{name: value.shape for name, value in named.items()})
    if isinstance(terms, bool) or not isinstance(terms, int) or terms < 1:
        raise ValueError(f"{caller}: terms must be a positive integer, got {terms!r}")
    if not values_hold(sigma1 > 0) or not values_hold(sigma2 > 0):
        raise ValueError(f"{caller}: sigma1 and sigma2 must be > 0")
    if not values_hold(rho.abs() <= 1):
        raise ValueError(f"{caller}: rho must be within [−1, 1]")
    return _partial_sums(mu1, mu2, sigma1, sigma2, rho, terms)


def _partial_sums(
    mu1: Tensor, mu2: Tensor, sigma1: Tensor, sigma2: Tensor, rho: Tensor, terms: int
) -> Iterator[Tensor]:
    h, k = mu1 / sigma1, mu2 / sigma2
    root = torch.sqrt((1 - rho) * (1 + rho))
    first = _quotient(h - rho * k, root)  # e₁ᵀΣ̃μ
    second = _quotient(k - rho * h, root)  # e₂ᵀΣ̃μ
    scale = mu1 * mu2 + rho * sigma1 * sigma2
    omega = (
        sigma1 * sigma2 * root / (2 * math.pi) * torch.exp(-0.5 * (h**2 + second**2))
        + mu1 * sigma2 / (2 * ROOT_TWO_PI) * torch.exp(-0.5 * k**2) * (1 + torch.erf(first / ROOT_TWO))
        + mu2 * sigma1 / (2 * ROOT_TWO_PI) * torch.exp(-0.5 * h**2) * (1 + torch.erf(second / ROOT_TWO))
        + scale / 4 * (1 + torch.erf(k / ROOT_TWO))
    )
    near = rho.abs() <= 1 / ROOT_TWO
    sign = torch.copysign(torch.ones_like(rho), rho)
    divisor = torch.where(near, root, rho.abs())
    a = torch.where(near, rho, root) / divisor
    b = torch.where(near, h, -sign * h) / (ROOT_TWO * divisor)
    limit = torch.where(near, -k, sign * first) / ROOT_TWO
    closed = 0.25 * math.pi * (sign + torch.erf(first / ROOT_TWO) * torch.erf(k / ROOT_TWO))
    for integral in _integrals_beyond(a, b, limit, terms):
        yield omega + scale / math.pi * torch.where(near, integral, closed - sign * integral)


def _integrals_beyond(a: Tensor, b: Tensor, x: Tensor, terms: int) -> Iterator[Tensor]:
    """I(∞) − I(x) for I(x) = (√π/2) ∫₀ˣ exp(−t²) erf(at+b) dt, with 1, 2, … terms of its series (|a| ≤ 1).

    Both sums of the lemma are one over n = 2u and 2u + 1:
    I(x) = π/4 erf(x) erf(b) + (√π/2) e^{−b²} Σₙ (−sign x)ⁿ (a/2)ⁿ⁺¹ P(n/2+1, x²) Hₙ(b) / Γ(n/2+3/2).
    The Hermite polynomials run scaled by e^{−b²}/√(2ⁿn!), so that nothing overflows.
    """
    a, b, x = torch.broadcast_tensors(a, b, x.clamp(-FAR, FAR))
    sign = torch.sign(x)
    total = 0.25 * math.pi * (1 - torch.erf(x)) * torch.erf(b)
    previous, hermite = torch.zeros_like(b), torch.exp(-b * b)
    for n, gamma in enumerate(_incomplete_gammas(x * x, 2 * terms)):
        beyond = 1 - gamma if n % 2 == 0 else sign * gamma - 1
        log_size = 0.5 * (math.lgamma(n + 1) - (n + 2) * math.log(2)) - math.lgamma(n / 2 + 1.5)
        total = total + 0.5 * math.sqrt(math.pi) * math.exp(log_size) * a ** (n + 1) * hermite * beyond
        hermite, previous = b * math.sqrt(2 / (n + 1)) * hermite - math.sqrt(n / (n + 1)) * previous, hermite
        if n % 2 == 1:
            yield total


def _incomplete_gammas(y: Tensor, count: int) -> Iterator[Tensor]:
    """P(n/2 + 1, y) for n = 0, 1, …, from P(s+1, y) = P(s, y) − yˢe^{−y}/Γ(s+1)."""
    decay, root = torch.exp(-y), torch.sqrt(y)
    step_whole, step_half = decay * y, decay * root * (2 / math.sqrt(math.pi))
    whole, half = -torch.expm1(-y), torch.erf(root) - step_half
    step_half = step_half * y / 1.5
    for n in range(count):
        s = n / 2 + 1
        if n % 2 == 0:
            yield whole
            whole, step_whole = (whole - step_whole).clamp(min=0), step_whole * y / (s + 1)
        else:
            yield half
            half, step_half = (half - step_half).clamp(min=0), step_half * y / (s + 1)


def _quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Infinite at ρ = ±1, except 0/0 = 0."""
    return torch.where(numerator == 0, torch.zeros_like(numerator), numerator / denominator)
