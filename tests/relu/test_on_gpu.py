"""Layers of ReLUs on a CUDA device: the CPU's values, and those of the plain version where kernels are used."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import netmoments as nm
from netmoments.relu.covariance import layer_covariance
from netmoments.relu.triton import kernels
from tests.closeness import assert_close
from tests.gpu import NEEDS_CUDA, tf32_allowed
from tests.relu.layers import by_kernels_and_plainly, hard_layer

pytestmark = [pytest.mark.gpu, NEEDS_CUDA]


@pytest.fixture(autouse=True)
def _tf32() -> Iterator[None]:
    with tf32_allowed():
        yield


TOLERANCE = {torch.float32: 5e-6, torch.float64: 1e-13}
KERNEL_TOLERANCE = {torch.float32: 5e-7, torch.float64: 1e-14}


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


def correlated_layer(units: int, kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two images: weak, strong or ±1 correlations, with certain, linear, dead and repeated units among them."""
    mean, _, matrix = hard_layer(units, {"weak": 400, "strong": 6, "one": 1}[kind], dtype)
    return mean.cuda(), matrix.cuda()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["weak", "strong", "one"])
@pytest.mark.parametrize("units", [1, 7, 130, 256, 1000])
def test_the_kernels_covariance_is_the_plain_one(units, kind, dtype, monkeypatch):
    mean, matrix = correlated_layer(units, kind, dtype)
    fast, _ = by_kernels_and_plainly(lambda: [nm.relu_covariance(mean, matrix)], monkeypatch)
    with monkeypatch.context() as missing:
        missing.setattr(kernels, "PRESENT", False)
        exact = nm.relu_covariance(mean.double(), matrix.double())
    std = matrix.double().diagonal(dim1=1, dim2=2).sqrt()
    scale = std.unsqueeze(-1) * std.unsqueeze(-2)
    error = ((fast[0].double() - exact).abs() - KERNEL_TOLERANCE[dtype] * scale).max()
    assert float(error) <= 1e-20
    assert torch.equal(fast[0], fast[0].mT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["weak", "strong"])
@pytest.mark.parametrize("units", [7, 130, 500])
def test_the_kernels_gradients_are_the_plain_ones(units, kind, dtype, monkeypatch):
    mean, matrix = correlated_layer(units, kind, dtype)
    upstream = torch.randn(2, units, units, dtype=dtype, device="cuda") / units

    def call() -> list[Tensor]:
        m, s = mean.clone().requires_grad_(), matrix.clone().requires_grad_()
        return list(torch.autograd.grad(nm.relu_covariance(m, s), (m, s), upstream))

    tolerance = 3e-5 if dtype == torch.float32 else 1e-12
    for one, other in zip(*by_kernels_and_plainly(call, monkeypatch), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "accuracy"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("rank", [200, 3, 1])
def test_seldom_open_units_are_accurate_relative_to_their_own_parts(rank, dtype, accuracy, monkeypatch):
    """Means from 3 to 25 deviations below 0, in an image of its own and among open units."""
    generator = torch.Generator().manual_seed(rank)
    factor = torch.randn(2, 70, rank, dtype=torch.float64, generator=generator)
    matrix = (factor @ factor.mT).to(dtype).cuda()
    std = matrix.diagonal(dim1=1, dim2=2).double().sqrt()
    h = -3 - 22 * torch.rand(2, 70, dtype=torch.float64, generator=generator).cuda()
    h[1, 40:] += 25
    mean = (h * std).to(dtype)

    def call() -> list[Tensor]:
        return [nm.relu_covariance(mean, matrix), layer_covariance(mean, matrix)]

    fast, _ = by_kernels_and_plainly(call, monkeypatch)
    with monkeypatch.context() as missing:
        missing.setattr(kernels, "PRESENT", False)
        exact = nm.relu_covariance(mean.double(), matrix.double())
    gate = 0.5 * torch.special.erfc(mean.double() / std * -(0.5**0.5))
    parts = exact.abs() + matrix.double().abs() * gate.unsqueeze(-1) * gate.unsqueeze(-2)
    seldom = (h < -3).unsqueeze(-1) | (h < -3).unsqueeze(-2)
    tiny = torch.finfo(dtype).tiny
    error = torch.where(seldom, (fast[0].double() - exact).abs() - accuracy * parts, 0.0)
    assert float(error.max()) <= tiny
    assert torch.equal(fast[0], fast[0].mT)
    whole = (fast[1].double() - exact).abs().amax((1, 2)) / exact.abs().amax((1, 2))  # accurate as a layer
    assert float(whole.max()) <= accuracy


def test_the_kernels_refuse_what_the_plain_version_refuses():
    mean, matrix = correlated_layer(40, "weak", torch.float32)
    with pytest.raises(ValueError, match="mean of a ReLU layer holds NaN"):
        nm.relu_covariance(torch.full_like(mean, torch.nan), matrix)
    with pytest.raises(ValueError, match="diagonal of the covariance"):
        nm.relu_covariance(mean, matrix - 10 * torch.eye(40, device="cuda"))
    matrix[1, 4, 2] = matrix[1, 2, 4] = torch.nan
    assert bool(torch.isnan(nm.relu_covariance(mean, matrix)[1, 4, 2]))
