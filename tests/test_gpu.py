"""The network of the paper on a CUDA device: the CPU's moments, and the plain version's where kernels are used."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import netmoments as nm
from tests.closeness import assert_close
from tests.gpu import NEEDS_CUDA, tf32_allowed
from tests.relu.layers import by_kernels_and_plainly

pytestmark = [pytest.mark.gpu, NEEDS_CUDA]


@pytest.fixture(autouse=True)
def _tf32() -> Iterator[None]:
    with tf32_allowed():
        yield


TOLERANCE = {torch.float32: 5e-6, torch.float64: 1e-13}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_network_moments_and_gradients(dtype):
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)

    parts = [normal(500, 100) / 10, normal(500), normal(7, 500) / 20, normal(7), normal(3, 100)]
    results = []
    for device in ("cpu", "cuda"):
        A, c1, B, c2, x = (part.to(device).requires_grad_() for part in parts)
        network, noise = nm.AffineReluAffine(A, c1, B, c2), nm.Gaussian(x, std=0.4)
        covariance = network.covariance(noise)
        gradients = torch.autograd.grad(covariance.diagonal(dim1=1, dim2=2).sum(), (A, c1, B, x))
        results.append([network.mean(noise), network.variance(noise), covariance, *gradients])
    for i, (one, other) in enumerate(zip(*results, strict=True)):
        assert_close(
            other.cpu(), one.double(), atol=10 * TOLERANCE[dtype], rtol=10 * TOLERANCE[dtype], what=f"result {i}"
        )


def test_mixed_devices_are_refused():
    with pytest.raises(ValueError, match="one device"):
        nm.relu_covariance(torch.zeros(3), torch.eye(3).cuda())
    network = nm.AffineReluAffine(
        torch.ones(5, 3).cuda(), torch.zeros(5).cuda(), torch.ones(2, 5).cuda(), torch.zeros(2).cuda()
    )
    with pytest.raises(ValueError, match=r"noise\.to\('cuda:0'\)"):
        network.mean(nm.Gaussian(torch.zeros(3), std=1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("moment", ["variance", "covariance"])
@pytest.mark.parametrize("budget", [None, 2**20])
def test_the_kernels_moments_of_a_network_are_the_plain_ones(budget, moment, dtype, monkeypatch):
    """A batch of noises, with a unit that B never uses, in one piece and in strips."""
    generator = torch.Generator().manual_seed(0)
    A, B = (torch.randn(*shape, generator=generator).to(dtype).cuda() for shape in ((300, 20), (5, 300)))
    B[:, 7] = 0
    images = torch.randn(3, 20, generator=generator).to(dtype).cuda()
    upstream = torch.randn(3, 5, 5, generator=generator).to(dtype).cuda()

    def call() -> list[Tensor]:
        x, a, b = (tensor.clone().requires_grad_() for tensor in (images, A, B))
        network = nm.AffineReluAffine(a, torch.zeros_like(a[:, 0]), b, torch.zeros_like(b[:, 0]))
        value = getattr(network, moment)(nm.Gaussian(x, std=0.3), memory_budget=budget)
        grad = upstream if value.dim() == 3 else upstream[..., 0]
        return [value.detach(), *torch.autograd.grad(value, (x, a, b), grad)]

    for one, other in zip(*by_kernels_and_plainly(call, monkeypatch), strict=True):
        scale = float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=0, atol=scale * (1e-4 if dtype == torch.float32 else 1e-12))
