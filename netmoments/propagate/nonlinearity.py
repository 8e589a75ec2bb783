"""What every rule for a nonlinear layer offers: the moments of each unit by itself, and of pairs of units."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

FLOOR = {torch.float32: 1e-6, torch.float64: 1e-12}
"""Added to the variances of a window, relative to the largest, so that tied inputs have a Cholesky factor."""


class Local(NamedTuple):
    """One unit y = f(z) for z ~ N(m, S) over the w inputs it looks at, for each of n units; images come first."""

    mean: Tensor
    """E f, (n,)."""
    variance: Tensor
    """Var f, (n,)."""
    gain: Tensor
    """E ∇f, (n, w): by Stein's identity Cov(x, f(z)) = Cov(x, z)·gain for every x jointly Gaussian with z."""
    curvature: Tensor
    """E ∇²f, (n, w, w)."""

    def linear_variance(self, covariance: Tensor) -> Tensor:
        """gᵀSg, what the best linear approximation of f has: (n,)."""
        return ((covariance @ self.gain.unsqueeze(-1)).squeeze(-1) * self.gain).sum(-1)

    def quadratic_variance(self, covariance: Tensor) -> Tensor:
        """½ tr(HSHS), what the second Hermite term adds: (n,)."""
        bent = self.curvature @ covariance
        return 0.5 * (bent * bent.mT).sum((-2, -1))


class ThirdCumulants(NamedTuple):
    """Third cumulants of what units look at, in coordinates u with z = m + R u and Cov u = I."""

    root: Tensor
    """R, (n, w, w), RRᵀ = S."""
    kappa: Tensor
    """κ, (n, q, q, q), of the first q coordinates; the others are Gaussian."""


def cholesky_root(covariance: Tensor) -> Tensor:
    """R with RRᵀ = S, (..., w, w), S with a floor on its diagonal: `FLOOR` of the largest variance of the window."""
    own = covariance.diagonal(dim1=-2, dim2=-1)
    floor = FLOOR[covariance.dtype] * own.detach().amax(-1, keepdim=True) + 1e-30
    if own.shape[-1] == 1:
        return (own + floor).sqrt().unsqueeze(-1)
    return torch.linalg.cholesky(covariance + torch.diag_embed(floor.expand_as(own)))


def whitened(covariance: Tensor, curvature: Tensor, present: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """R with RRᵀ = S, and R⁻¹: (n, w, w) each. If w > first, the unit bends most along the first columns of R.

    R' of Cholesky, or R' times the eigenvectors of R'ᵀHR' in the order of their eigenvalues' size. Any rotation of a
    root is one, so nothing is differentiated through them.
    """
    root = cholesky_root(covariance)
    if root.shape[-1] > first:
        with torch.no_grad():
            both = present.unsqueeze(-1) & present.unsqueeze(-2)
            bend = root.mT @ torch.where(both, curvature, 0.0) @ root
            size = bend.abs().amax((-2, -1), keepdim=True)
            values, vectors = torch.linalg.eigh((bend / torch.where(size > 0, size, 1.0)).double())
            order = values.abs().argsort(-1, descending=True).unsqueeze(-2).expand_as(vectors)
            turn = vectors.gather(-1, order).to(root.dtype)
        root = root @ turn
    return root, torch.linalg.inv(root)


class Nonlinearity(ABC):
    """A layer of n units, each a function of w of the p numbers that go in."""

    windows: Tensor
    """Which, (n, w), as places in the flattened input; −1 where a window has fewer."""

    @abstractmethod
    def local(self, mean: Tensor, covariance: Tensor, cumulants: ThirdCumulants | None = None) -> Local:
        """The units' moments, from means (..., n, w) and covariances (..., n, w, w) of what they look at.

        Places beyond a window have mean 0, variance 0 and gain 0. With third cumulants, the mean, the variance and the
        gain E ∇f are right to first order in them.
        """

    @abstractmethod
    def values(self, z: Tensor) -> Tensor:
        """f itself, from (..., n, w) to (..., n)."""

    @property
    def units(self) -> int:
        return len(self.windows)

    @property
    def width(self) -> int:
        return self.windows.shape[1]

    def gathered(self, z: Tensor) -> Tensor:
        """(..., p) to (..., n, w), zeros beyond the windows."""
        picked = z[..., self.windows.clamp(min=0)]
        return picked if bool((self.windows >= 0).all()) else picked * (self.windows >= 0)
