"""The nonlinear part of the covariance of pairs of ReLUs, and its derivatives, in the units of the network.

For pre-activations z₁, z₂ with means m = (s₁h, s₂k), variances s₁², s₂² and covariance c = ρs₁s₂:

    Cov(relu z₁, relu z₂) = c Φ(h)Φ(k) + s₁s₂ J(h,k;ρ).

The first, separable part is what the best linear approximation of each ReLU would give. The second, called the
nonlinear part here, is O(ρ²), vanishes for every pair with a saturated unit, and is all that needs quadrature.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from netmoments.normal import density, distribution
from netmoments.relu.marginal import unit_nonlinear_variance
from netmoments.relu.quadrature import nonlinear_part, orthant_excess, residuals


class Units(NamedTuple):
    """Standardized means h and standard deviations s > 0 of a set of units, (images or 1, units)."""

    h: Tensor
    s: Tensor

    def rows(self) -> Units:
        return Units(self.h.unsqueeze(-1), self.s.unsqueeze(-1))

    def columns(self) -> Units:
        return Units(self.h.unsqueeze(-2), self.s.unsqueeze(-2))

    def __getitem__(self, index: slice) -> Units:  # type: ignore[override]
        return Units(self.h[:, index], self.s[:, index])


class Slopes(NamedTuple):
    """Derivatives of the nonlinear part s₁s₂J of each pair."""

    by_covariance: Tensor
    by_row_mean: Tensor
    by_column_mean: Tensor
    by_row_variance: Tensor
    by_column_variance: Tensor


def correlation(row: Units, column: Units, covariance: Tensor) -> Tensor:
    """ρ = c/(s₁s₂), cut to [−1, 1] against rounding."""
    return (covariance / row.s / column.s).clamp_(-1, 1)


def nonlinear_covariance(row: Units, column: Units, covariance: Tensor) -> Tensor:
    """s₁s₂J for a block of pairs."""
    value = nonlinear_part(row.h, column.h, correlation(row, column, covariance))
    return value.mul_(row.s).mul_(column.s)


def nonlinear_slopes(row: Units, column: Units, covariance: Tensor) -> Slopes:
    """The closed-form derivatives, with a = (h−ρk)/q, b = (k−ρh)/q, q = √(1−ρ²) and D the orthant excess:

    ∂/∂c   = D
    ∂/∂m₁  = s₂ (k D + φ(k)[Φ(a) − Φ(h)] + ρφ(h)[Φ(b) − Φ(k)])
    ∂/∂s₁² = s₂/(2s₁) (φ(h)(k−ρh)[Φ(b) − Φ(k)] + q φ(h)φ(b) − φ(h)φ(k))

    They follow from the guide's derivatives of the whole covariance by subtracting those of cΦ(h)Φ(k).
    Finite at ρ = ±1, where a quotient 0/0 counts as 0.
    """
    h, k = row.h, column.h
    rho = correlation(row, column, covariance)
    excess = orthant_excess(h, k, rho)
    rest = residuals(h, k, rho)
    a, b = rest.heights()
    phi_h, phi_k = density(h), density(k)
    change_h, change_k = distribution(a) - distribution(h), distribution(b) - distribution(k)
    common = rest.root * phi_h * density(b) - phi_h * phi_k
    pull_h, pull_k = phi_k * change_h, phi_h * change_k
    ratio = column.s / row.s
    return Slopes(
        by_covariance=excess,
        by_row_mean=column.s * (k * excess + pull_h + rho * pull_k),
        by_column_mean=row.s * (h * excess + pull_k + rho * pull_h),
        by_row_variance=0.5 * ratio * (rest.second * pull_k + common),
        by_column_variance=0.5 / ratio * (rest.first * pull_h + common),
    )


def nonlinear_variance(units: Units) -> Tensor:
    """The diagonal of the nonlinear part: s²(v(h) − Φ(h)²)."""
    return units.s * units.s * unit_nonlinear_variance(units.h)


def nonlinear_variance_slopes(units: Units) -> tuple[Tensor, Tensor]:
    """Its derivatives in the mean, 2s(e(h)Φ(−h) − Φ(h)φ(h)), and in the variance, Φ − eφ − Φ² + hΦφ."""
    h = units.h
    phi, above, below = density(h), distribution(h), distribution(-h)
    gain = h * above + phi
    by_mean = 2 * units.s * (gain * below - above * phi)
    by_variance = above * below - gain * phi + h * above * phi
    return by_mean, by_variance


def saturation(dtype: torch.dtype) -> float:
    """Beyond this |h| a unit is linear or dead to rounding: J ≤ exp(−h²/2)."""
    return 6.0 if dtype == torch.float32 else 8.5
