"""The two integrals behind the covariance of two ReLUs, to rounding, for every correlation.

For z₁ ~ N(h,1), z₂ ~ N(k,1) with correlation ρ, Price's theorem gives

    Cov(relu z₁, relu z₂) = ρΦ(h)Φ(k) + J,      J = ∫₀^ρ (ρ − r) φ₂(h,k;r) dr      (nonlinear part)
    P(z₁>0, z₂>0)         = Φ(h)Φ(k) + D,       D = ∫₀^ρ φ₂(h,k;r) dr              (orthant excess)

with φ₂ the bivariate normal density at (h,k). The half-angle substitution r = 2τ/(1+τ²) makes both algebraic,

    φ₂ dr = (1/π) exp(−(1+τ²)·[((h+k)/2)²/(1+τ)² + ((h−k)/2)²/(1−τ)²]) dτ/(1+τ²),

no trigonometry and a sum of squares in the exponent, so nothing cancels as ρ → ±1. With T = ρ/(1+√(1−ρ²)) the
range is τ = Tu, u in [0,1], and Gauss–Legendre in u converges faster than in r or in the angle asin r, whose
nearest singularity is closer. Negative ρ is the same integral with k and ρ negated.

Largest absolute error of J / D by nodes, 4,000 points with |h|,|k| ≤ 5 crowded at h ≈ ±k (`benchmarks/nodes.py`):
see `RULES`. Beyond |ρ| = 0.99 the nodes of J are graded towards u = 1, and D, whose integrand there has a
boundary layer of any width, comes from Owen's T instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from netmoments.normal import distribution, gauss_legendre, owen_t


@dataclass(frozen=True)
class Rule:
    """Nodes u, weights and 1 − u, good for |ρ| ≤ `limit`."""

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
    """Gauss–Legendre in y with 1 − u = expm1(by)/expm1(b): nodes crowd towards u = 1."""
    nodes, weights = gauss_legendre(count)
    scale = math.expm1(steepness)
    rest = [math.expm1(steepness * y) / scale for y in nodes]
    jacobian = [steepness * math.exp(steepness * y) / scale for y in nodes]
    return Rule(limit, tuple((1 - v, w * g, v) for v, w, g in zip(rest, weights, jacobian, strict=True)))


RULES = {
    torch.float32: (
        plain(3, 0.4),
        plain(4, 0.6),
        plain(5, 0.8),
        plain(7, 0.9),
        plain(8, 0.95),
        plain(12, 0.99),
        graded(16, 1.0, steepness=3.0),
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

GATHER_COST = 4
"""Picking single pairs out of a block costs about as much as this many nodes each."""


@dataclass(frozen=True)
class _Geometry:
    """What all nodes share: T and 1 − T (each to full relative accuracy), and half the sum and difference of h, ±k."""

    extent: Tensor
    rest: Tensor
    half_sum: Tensor
    half_difference: Tensor


def _geometry(h: Tensor, k: Tensor, rho: Tensor) -> _Geometry:
    size = rho.abs()
    root = torch.sqrt((1 - size) * (1 + size))
    divisor = 1 + root
    flipped = torch.where(rho < 0, -k, k)
    return _Geometry(
        extent=size / divisor,
        rest=(1 - size + root) / divisor,
        half_sum=(h + flipped) * 0.5,
        half_difference=(h - flipped) * 0.5,
    )


def _node(at: _Geometry, u: float, v: float) -> tuple[Tensor, Tensor, Tensor]:
    """τ, 1 + τ² and the exponential at one node u = 1 − v."""
    tau = at.extent * u
    spread = torch.addcmul(tau.new_ones(()), tau, tau)
    exponent = (at.half_sum / (1 + tau)).square_()
    apart = at.half_difference / torch.add(at.rest, at.extent, alpha=v)
    exponent = exponent.addcmul_(apart, apart).mul_(-spread)
    return tau, spread, exponent.exp_()


def _nonlinear_sum(rule: Rule, h: Tensor, k: Tensor, rho: Tensor) -> Tensor:
    at = _geometry(h, k, rho)
    one = rho.new_ones(())
    total = torch.zeros_like(at.half_sum)
    for u, weight, v in rule.nodes:
        tau, spread, height = _node(at, u, v)
        factor = torch.addcmul(one, at.extent, tau, value=-1).div_(spread).div_(spread)
        total.addcmul_(factor, height, value=weight * v)
    square = at.extent * at.extent
    return total.mul_(square.mul(2 / math.pi).div_(1 + square))


def _excess_sum(rule: Rule, h: Tensor, k: Tensor, rho: Tensor) -> Tensor:
    if rule.limit == 1.0:
        return _excess_by_owen(h, k, rho)
    at = _geometry(h, k, rho)
    total = torch.zeros_like(at.half_sum)
    for u, weight, v in rule.nodes:
        _, spread, height = _node(at, u, v)
        total.addcdiv_(height, spread, value=weight)
    return total.mul_(torch.copysign(at.extent, rho).mul_(1 / math.pi))


class Residuals(NamedTuple):
    """One unit given that the other is exactly 0: its mean (`first`: h − ρk, `second`: k − ρh) and deviation `root`."""

    root: Tensor
    first: Tensor
    second: Tensor

    def heights(self) -> tuple[Tensor, Tensor]:
        """(h − ρk)/q and (k − ρh)/q, infinite at ρ = ±1 unless the numerator is 0, when the quotient counts as 0."""
        zero = torch.zeros((), dtype=self.root.dtype, device=self.root.device)
        first = torch.where(self.first == 0, zero, self.first / self.root)
        second = torch.where(self.second == 0, zero, self.second / self.root)
        return first, second


def residuals(h: Tensor, k: Tensor, rho: Tensor) -> Residuals:
    """q = √(1−ρ²), h − ρk and k − ρh, the latter as (h∓k) ± (1−|ρ|)k so that nothing cancels near ρ = ±1."""
    size = rho.abs()
    gap = 1 - size
    flip = torch.where(rho < 0, -1.0, 1.0).to(rho.dtype)
    return Residuals(
        root=torch.sqrt(gap * (1 + size)),
        first=(h - flip * k) + flip * gap * k,
        second=(k - flip * h) + flip * gap * h,
    )


def _excess_by_owen(h: Tensor, k: Tensor, rho: Tensor) -> Tensor:
    """P = Φ(h)/2 + Φ(k)/2 − T(h, (k−ρh)/hq) − T(k, (h−ρk)/kq) − [h and k on different sides]/2, minus Φ(h)Φ(k)."""
    h, k, rho = torch.broadcast_tensors(h, k, rho)
    origin = (h == 0) & (k == 0)
    h = torch.where(origin, 1e-30, h)
    k = torch.where(origin, 1e-30, k)
    first, second = residuals(h, k, rho).heights()
    below_h, below_k = distribution(h), distribution(k)
    opposite = 0.5 * ((h < 0) != (k < 0)).to(h.dtype)
    probability = 0.5 * (below_h + below_k) - owen_t(h, second) - owen_t(k, first) - opposite
    return probability - below_h * below_k


def _cheapest_base(rules: tuple[Rule, ...], size: Tensor) -> int:
    """Which rule to use for the whole block, given that the pairs beyond its limit are then done one by one."""
    largest = float(size.max())
    last = next(i for i, rule in enumerate(rules) if largest <= rule.limit)
    if last == 0:
        return 0
    beyond = [int((size > rule.limit).sum()) for rule in rules[:last]] + [0]
    costs = []
    for base in range(last + 1):
        exceptions = [(beyond[i - 1] - beyond[i]) * (rules[i].cost + GATHER_COST) for i in range(base + 1, last + 1)]
        costs.append(size.numel() * rules[base].cost + sum(exceptions))
    return costs.index(min(costs))


def _by_correlation(evaluate: Callable[..., Tensor], h: Tensor, k: Tensor, rho: Tensor) -> Tensor:
    """Evaluate a block with the cheapest rule for most of it, then its more correlated pairs with theirs."""
    rules = RULES[rho.dtype]
    size = rho.abs()
    base = _cheapest_base(rules, size)
    result = evaluate(rules[base], h, k, rho)
    for lower, rule in zip(rules[base:], rules[base + 1 :], strict=False):
        chosen = (size > lower.limit) & (size <= rule.limit)
        if not bool(chosen.any()):
            continue
        chosen = chosen.expand(result.shape)
        picked = (x.expand(result.shape)[chosen] for x in (h, k, rho))
        result[chosen] = evaluate(rule, *picked)
    return result


def nonlinear_part(h: Tensor, k: Tensor, rho: Tensor) -> Tensor:
    """J(h,k;ρ) = Cov(relu z₁, relu z₂) − ρΦ(h)Φ(k) for unit variances; positive, even in ρ with k, O(ρ²).

    Shapes broadcast; |ρ| ≤ 1 is required and not checked. Not differentiable by autograd.
    """
    return _by_correlation(_nonlinear_sum, h, k, rho)


def orthant_excess(h: Tensor, k: Tensor, rho: Tensor) -> Tensor:
    """D(h,k;ρ) = P(z₁>0, z₂>0) − Φ(h)Φ(k) = ∂J/∂ρ, of the sign of ρ. Same conventions."""
    return _by_correlation(_excess_sum, h, k, rho)
