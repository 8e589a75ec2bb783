"""The paper's random input covariances."""

from __future__ import annotations

import torch
from torch import Generator, Tensor


def random_covariance(size: int, sigma: float, generator: Generator) -> Tensor:
    """A dense (size, size) covariance in float64 with trace σ²·size, on the generator's device.

    As in Tables 2 and 4: eigenvalues uniform on (0, 1], scaled to the trace; eigenvectors from the QR decomposition of
    a Gaussian matrix.
    """
    factor = random_factor(size, generator)
    return sigma**2 * (factor @ factor.T)


def random_factor(size: int, generator: Generator) -> Tensor:
    """F, (size, size) in float64, with F Fᵀ a random covariance of trace `size`: noise of level σ is N(·, σ²FFᵀ)."""
    device = generator.device
    values = 1 - torch.rand(size, dtype=torch.float64, device=device, generator=generator)
    gaussian = torch.randn(size, size, dtype=torch.float64, device=device, generator=generator)
    return orthogonalized(gaussian) * (values * (size / values.sum())).sqrt()


def orthogonalized(matrix: Tensor) -> Tensor:
    """Q of the QR decomposition with a positive diagonal of R, by two rounds of Cholesky: many times faster on a GPU.

    One round is orthogonal to eps·cond², two to rounding as long as that is below 1; beyond, Householder's QR.
    """
    once, failed = _cholesky_round(matrix)
    twice, failed_again = _cholesky_round(once)
    if bool(failed + failed_again):
        q, r = torch.linalg.qr(matrix)
        return q * torch.sign(r.diagonal())
    return twice


def _cholesky_round(matrix: Tensor) -> tuple[Tensor, Tensor]:
    root, failed = torch.linalg.cholesky_ex(matrix.mT @ matrix, upper=True)
    return torch.linalg.solve_triangular(root, matrix, upper=True, left=False), failed
