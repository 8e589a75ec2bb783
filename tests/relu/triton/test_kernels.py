"""The kernels in Triton's interpreter are the plain version.

Where Triton is installed, `TRITON_INTERPRET=1 pytest tests/relu/triton/test_kernels.py` runs them on the CPU. On
a GPU see `tests/relu/test_on_gpu.py`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import netmoments as nm
from netmoments.relu.quadratic_form import pairs_form, pairs_form_diagonal
from netmoments.relu.triton import kernels, launch
from tests.relu.layers import hard_layer

pytestmark = [
    pytest.mark.skipif(
        not (kernels.PRESENT and bool(kernels.INTERPRETED)), reason="needs Triton and TRITON_INTERPRET=1"
    ),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0"),  # by Triton's interpreter
]
DTYPES = [torch.float32, torch.float64]
TOLERANCE = {torch.float32: 5e-7, torch.float64: 1e-14}


def plainly(monkeypatch: pytest.MonkeyPatch, call):
    with monkeypatch.context() as missing:
        missing.setattr(kernels, "PRESENT", False)
        return call()


def assert_exact(found: Tensor, exact: Tensor, matrix: Tensor) -> None:
    """Check the promised accuracy, relative to the deviations of each pair."""
    std = matrix.double().diagonal(dim1=1, dim2=2).sqrt()
    allowed = TOLERANCE[found.dtype] * std.unsqueeze(-1) * std.unsqueeze(-2)
    assert bool(((found - exact).abs() <= allowed + 1e-20).all())
    assert torch.equal(found, found.mT)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("units", "rank"), [(1, 1), (7, 3), (70, 60), (40, 6), (40, 1)])
def test_interpreted_covariance_is_the_plain_one(units, rank, dtype, monkeypatch):
    mean, _, matrix = hard_layer(units, rank, dtype)
    exact = plainly(monkeypatch, lambda: nm.relu_covariance(mean.double(), matrix.double()))
    assert_exact(nm.relu_covariance(mean, matrix), exact, matrix)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [30, 4])
def test_interpreted_gradients_are_the_plain_ones(rank, dtype, monkeypatch):
    mean, factor, matrix = hard_layer(40, rank, dtype)
    factor[1, 5:7] += 0.1
    matrix = factor @ factor.mT
    upstream = torch.randn(2, 40, 40, dtype=dtype, generator=torch.Generator().manual_seed(1))

    def call() -> tuple[Tensor, ...]:
        m, s = mean.clone().requires_grad_(), matrix.clone().requires_grad_()
        return torch.autograd.grad(nm.relu_covariance(m, s), (m, s), upstream)

    for one, other in zip(call(), plainly(monkeypatch, call), strict=True):
        tolerance = 3e-5 if dtype == torch.float32 else 1e-12
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [pairs_form, pairs_form_diagonal])
def test_interpreted_forms_are_the_plain_ones(form, dtype, monkeypatch):
    """Values and gradients agree, computed in strips, with a unit that B never uses."""
    mean, factor, _ = hard_layer(70, 20, dtype)
    weights = torch.randn(1, 3, 70, dtype=dtype, generator=torch.Generator().manual_seed(1)) / 8
    weights[..., 9] = 0

    def call() -> list[Tensor]:
        m, f, b = (x.clone().requires_grad_() for x in (mean, factor, weights))
        value = form(m, (f @ f.mT).diagonal(dim1=1, dim2=2), f, f, b, 2**16)
        return [value.detach(), *torch.autograd.grad(value.sin().sum(), (m, f, b))]

    for one, other in zip(call(), plainly(monkeypatch, call), strict=True):
        tolerance = 3e-5 if dtype == torch.float32 else 1e-12
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def assert_exact_in_both_forms(mean: Tensor, matrix: Tensor, weights: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the covariance, and the diagonal of B K Bᵀ."""
    exact = plainly(monkeypatch, lambda: nm.relu_covariance(mean.double(), matrix.double()))
    assert_exact(nm.relu_covariance(mean, matrix), exact, matrix)
    wide = weights.double() @ exact @ weights.double().mT
    layer = launch.layer_of(mean, matrix.diagonal(dim1=1, dim2=2))
    found = launch.form_diagonal(layer, launch.Strip(matrix, 0), weights)
    size = (weights.double().abs() @ matrix.double().diagonal(dim1=1, dim2=2).sqrt().unsqueeze(-1)).squeeze(-1).square()
    assert bool(((found - wide.diagonal(dim1=1, dim2=2)).abs() <= 2 * TOLERANCE[mean.dtype] * size).all())


def some_weights(outputs: int, units: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(outputs)
    return torch.randn(2, outputs, units, dtype=torch.float64, generator=generator).to(dtype) / 8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("units", "side"), [(100, 32), (96, 32), (50, 16)])
def test_runs_of_tiles_may_pass_a_rows_end_and_the_last_one_be_short(units, side, dtype, monkeypatch):
    """There are 10, 6 and 10 tiles, of which the second and third run of 4 begin within rows."""
    monkeypatch.setattr(launch, "RUNS", 1)
    for shapes in (launch.TILES, launch.DIAGONAL_TILES):
        monkeypatch.setitem(shapes, dtype, launch.Shape(side, 4, 255, 4))
    tiles = launch._tiles(-(-units // side))
    assert launch._run(launch.TILES[dtype], 2 * tiles) == 4
    assert tiles % 4 == 2
    mean, _, matrix = hard_layer(units, 12, dtype)
    assert_exact_in_both_forms(mean, matrix, some_weights(3, units, dtype), monkeypatch)


@pytest.mark.parametrize(
    ("side", "many", "dtype"),
    [
        (32, False, torch.float32),
        (32, True, torch.float32),
        (32, True, torch.float64),
        (16, True, torch.float32),
        (64, False, torch.float32),
    ],
)
def test_full_and_empty_tiles_may_be_in_a_group(side, many, dtype, monkeypatch):
    """Of 110 units the first 66 are nearly the same but for their signs, and none of the others like another."""
    monkeypatch.setattr(launch, "MANY_PAIRS", 1 if many else 2**40)
    for shapes in (launch.TILES, launch.DIAGONAL_TILES):
        monkeypatch.setitem(shapes, dtype, launch.Shape(side, 4, 255, 4))
    mean, factor, _ = hard_layer(110, 60, dtype)
    factor[:, :66] = factor[:, :1] * factor[:, :66, :1].sign() + 0.02 * factor[:, :66]
    matrix = factor @ factor.mT
    std = matrix[1].diagonal().sqrt()
    strong = (matrix[1] / (std * std.unsqueeze(-1))).abs() > launch.tables(dtype, torch.device("cpu")).reach
    assert bool(strong[:66, :66].all())
    assert not bool(strong[66:].tril(65).any())
    assert_exact_in_both_forms(mean, matrix, some_weights(3, 110, dtype), monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [17, 70])
def test_many_outputs_are_summed_in_parts(outputs, dtype, monkeypatch):
    mean, _, matrix = hard_layer(40, 4, dtype)
    assert_exact_in_both_forms(mean, matrix, some_weights(outputs, 40, dtype), monkeypatch)


def test_products_at_ieee_precision(monkeypatch):
    monkeypatch.setitem(launch.PRECISION, torch.float32, "ieee")
    mean, _, matrix = hard_layer(70, 4, torch.float32)
    assert_exact_in_both_forms(mean, matrix, some_weights(3, 70, torch.float32), monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [4, 60])
def test_a_covariance_that_is_nan_spoils_no_other(rank, dtype):
    mean, _, matrix = hard_layer(70, rank, dtype)
    whole = nm.relu_covariance(mean, matrix)
    for i, j in ((4, 2), (40, 7), (69, 66)):
        matrix[1, i, j] = matrix[1, j, i] = whole[1, i, j] = whole[1, j, i] = torch.nan
    torch.testing.assert_close(nm.relu_covariance(mean, matrix), whole, rtol=0, atol=TOLERANCE[dtype], equal_nan=True)


def test_interpreted_kernels_refuse_what_the_plain_version_refuses():
    mean, _, matrix = hard_layer(25, 10, torch.float64)
    with pytest.raises(ValueError, match="mean of a ReLU layer holds NaN"):
        nm.relu_covariance(torch.full_like(mean, torch.nan), matrix)
    with pytest.raises(ValueError, match="diagonal of the covariance"):
        nm.relu_covariance(mean, matrix - 10 * torch.eye(25, dtype=torch.float64))
    matrix[1, 4, 2] = matrix[1, 2, 4] = torch.nan
    assert bool(torch.isnan(nm.relu_covariance(mean, matrix)[1, 4, 2]))
