"""On a CUDA device: everything equals its CPU twin, at full precision even where TF32 is allowed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import netmoments as nm
from tests.closeness import assert_close, assert_within_standard_errors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

TOLERANCE = {torch.float32: 5e-6, torch.float64: 1e-13}


@pytest.fixture(autouse=True)
def tf32_allowed():
    """The user allows TF32 everywhere; the library must not use it."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


def layer(units: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(2, units, rank, dtype=torch.float64, generator=generator)
    factor = torch.nn.functional.normalize(factor, dim=-1)
    matrix = factor @ factor.mT
    return torch.randn(2, units, dtype=torch.float64, generator=generator).to(dtype), matrix.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [300, 6, 2])
def test_covariance_and_gradients_equal_the_cpus(dtype, rank):
    mean, matrix = layer(400, rank, dtype)
    upstream = torch.randn(2, 400, 400, dtype=dtype, generator=torch.Generator().manual_seed(1)) / 400
    results = []
    for device in ("cpu", "cuda"):
        m, s = (x.to(device).requires_grad_() for x in (mean, matrix))
        value = nm.relu_covariance(m, s)
        assert value.device.type == device
        results.append([value, *torch.autograd.grad(value, (m, s), upstream.to(device))])
    for name, one, other in zip(("value", "by mean", "by covariance"), *results, strict=True):
        # rank 2 has correlations of 1 to rounding, where the gradient moves by the square root of that rounding
        loose = rank == 2 and name != "value"
        assert_close(
            other.cpu(),
            one.double(),
            atol=(1e-2 if dtype == torch.float32 else 1e-6) if loose else TOLERANCE[dtype],
            what=name,
        )


def test_orthant_probability_equals_the_cpus():
    mean, matrix = layer(200, 3, torch.float64)
    value = nm.orthant_probability(mean.cuda(), matrix.cuda()).cpu()
    assert_close(value, nm.orthant_probability(mean, matrix), atol=1e-14)


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


def test_sampling_on_the_device():
    network = nm.AffineReluAffine(
        torch.ones(5, 3).cuda(), torch.zeros(5).cuda(), torch.ones(2, 5).cuda(), torch.zeros(2).cuda()
    )
    noise = nm.Gaussian(torch.zeros(4, 3), std=0.3).to("cuda")
    sampled = nm.monte_carlo(network, noise, samples=100_000, seed=1)
    assert sampled.mean.device.type == "cuda"
    assert_within_standard_errors(sampled.mean, network.mean(noise), sampled.mean_standard_error)
    assert_within_standard_errors(sampled.variance, network.variance(noise), sampled.variance_standard_error)


def test_mixed_devices_are_refused():
    with pytest.raises(ValueError, match="one device"):
        nm.relu_covariance(torch.zeros(3), torch.eye(3).cuda())
    network = nm.AffineReluAffine(
        torch.ones(5, 3).cuda(), torch.zeros(5).cuda(), torch.ones(2, 5).cuda(), torch.zeros(2).cuda()
    )
    with pytest.raises(ValueError, match=r"noise\.to\('cuda:0'\)"):
        network.mean(nm.Gaussian(torch.zeros(3), std=1.0))
