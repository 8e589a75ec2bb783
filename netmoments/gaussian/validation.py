"""The values of a Gaussian: finite, non-negative variances, symmetric and positive semidefinite covariance."""

from __future__ import annotations

import torch
from torch import Tensor

from netmoments.checks import require_finite, values_hold
from netmoments.gaussian.covariance import Covariance, Dense, Diagonal, Isotropic, LowRank

CALLER = "Gaussian"


def require_non_negative(name: str, value: Tensor) -> None:
    """Finite and ≥ 0."""
    require_finite(CALLER, name, value)
    if not values_hold(value >= 0):
        raise ValueError(f"{CALLER}: {name} must be ≥ 0 everywhere, got a smallest value of {float(value.min()):g}")


def require_covariance_values(covariance: Covariance) -> None:
    """Whatever the structure needs to be a covariance."""
    match covariance:
        case Isotropic(variance=variance) | Diagonal(variance=variance):
            require_non_negative("variance", variance)
        case LowRank(factor=factor, diagonal=diagonal):
            require_finite(CALLER, "LowRank factor", factor)
            require_non_negative("LowRank diagonal", torch.as_tensor(diagonal, dtype=factor.dtype))
            require_finite(CALLER, "variance", covariance.variances())
        case Dense(matrix=matrix):
            require_finite(CALLER, "covariance", matrix)
            require_symmetric(matrix)
            require_positive_semidefinite(matrix)


def tolerance(matrix: Tensor) -> float:
    """max(n, 100)·eps: how far rounding may take a computed n×n covariance from being one, relative to its size."""
    return max(matrix.shape[-1], 100) * torch.finfo(matrix.dtype).eps


def require_symmetric(matrix: Tensor) -> None:
    """|Σᵢⱼ − Σⱼᵢ| ≤ `tolerance`·max|Σ|, what rounding leaves of A Σ Aᵀ."""
    largest = matrix.detach().abs().amax((-2, -1))
    asymmetry = (matrix.detach() - matrix.detach().mT).abs().amax((-2, -1))
    if not values_hold(asymmetry <= tolerance(matrix) * largest):
        raise ValueError(
            f"{CALLER}: covariance must be symmetric, got |Σ − Σᵀ| up to {float(asymmetry.max()):.3g} where the "
            f"largest entry is {float(largest.max()):.3g}; pass (S + S.mT) / 2 if the difference is noise"
        )


def require_positive_semidefinite(matrix: Tensor) -> None:
    """λ_min ≥ −`tolerance`·λ_max. A Cholesky factorization just above the bound decides; eigenvalues if it fails."""
    fixed = matrix.detach()
    bound = tolerance(matrix)
    variances = fixed.diagonal(dim1=-2, dim2=-1)
    if not values_hold(variances >= 0):
        raise ValueError(
            f"{CALLER}: covariance must have variances ≥ 0 on its diagonal, got {float(variances.min()):g}"
        )
    shift = bound * variances.amax(-1)
    shifted = fixed + torch.diag_embed(shift.unsqueeze(-1).expand(variances.shape))
    _, failed = torch.linalg.cholesky_ex(shifted)
    if values_hold(failed == 0):
        return
    values = torch.linalg.eigvalsh(fixed)
    smallest, largest = values[..., 0], values[..., -1]
    if not values_hold(smallest >= -bound * largest):
        worst = int((smallest / largest.clamp(min=torch.finfo(matrix.dtype).tiny)).argmin())
        raise ValueError(
            f"{CALLER}: covariance must be positive semidefinite, got a smallest eigenvalue of "
            f"{float(smallest.flatten()[worst]):.3g} (largest {float(largest.flatten()[worst]):.3g}, "
            f"tolerance {bound:.1g} of it)"
        )
