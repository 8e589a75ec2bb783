"""The paper's random input covariances."""

from __future__ import annotations

import torch
from torch import Generator, Tensor


def random_covariance(size: int, sigma: float, generator: Generator) -> Tensor:
    """A dense (size, size) covariance in float64 with trace σ²·size, on the generator's device.

    As in Tables 2 and 4: eigenvalues uniform on (0, 1], scaled to the trace; eigenvectors from the QR decomposition of
    a Gaussian matrix.
    """
    device = generator.device
    values = 1 - torch.rand(size, dtype=torch.float64, device=device, generator=generator)
    values = values * (sigma**2 * size / values.sum())
    gaussian = torch.randn(size, size, dtype=torch.float64, device=device, generator=generator)
    vectors = torch.linalg.qr(gaussian).Q
    covariance = (vectors * values) @ vectors.T
    return 0.5 * (covariance + covariance.T)
