"""The GPU's kernels: chosen where they can run, and, in Triton's interpreter, equal to the plain version.

Where Triton is installed, `TRITON_INTERPRET=1 pytest tests/test_fused.py` runs the kernels on the CPU; elsewhere only
the choice is tested. On a GPU see `test_gpu.py`.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import netmoments as nm
from netmoments.memory import Scratch
from netmoments.relu.bivariate import (
    SeriesFactors,
    TileSeries,
    excess_limits,
    nonlinear_limits,
    nonlinear_part,
    nonlinear_part_by,
    nonlinear_sum,
    recurrence,
)
from netmoments.relu.quadratic_form import layer_form, layer_form_diagonal, pairs_form, pairs_form_diagonal
from netmoments.relu.quadrature_rules import NONLINEAR_RULES, graded, radau
from netmoments.relu.triton import forward_kernels, kernels
from netmoments.relu.triton import launch as fused
from netmoments.relu.triton import launch as kernel_tables

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")  # by Triton's interpreter

interpreted = pytest.mark.skipif(
    not (kernels.PRESENT and bool(kernels.INTERPRETED)), reason="needs Triton and TRITON_INTERPRET=1"
)
DTYPES = [torch.float32, torch.float64]
TOLERANCE = {torch.float32: 5e-7, torch.float64: 1e-14}


def layer(units: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Two images with certain, linear, dead and repeated units among them: means, a factor of the covariance, it."""
    generator = torch.Generator().manual_seed(units)
    factor = torch.nn.functional.normalize(
        torch.randn(2, units, rank, dtype=torch.float64, generator=generator), dim=-1
    )
    factor *= 0.2 + torch.rand(2, units, 1, dtype=torch.float64, generator=generator)
    mean = torch.randn(2, units, dtype=torch.float64, generator=generator)
    if units > 20:
        factor[0, 3] = 0
        factor[1, 5], factor[1, 6] = factor[1, 4], -factor[1, 4]
        mean[0, 10:14] = torch.tensor([40.0, -40.0, 8.0, -8.0])
        mean[0, 3] = 0
    factor = factor.to(dtype)
    return mean.to(dtype), factor, factor @ factor.mT


def plainly(monkeypatch: pytest.MonkeyPatch, call):
    with monkeypatch.context() as missing:
        missing.setattr(kernels, "PRESENT", False)
        return call()


def assert_exact(found: Tensor, exact: Tensor, matrix: Tensor) -> None:
    """To the accuracy promised, relative to the deviations of each pair."""
    std = matrix.double().diagonal(dim1=1, dim2=2).sqrt()
    allowed = TOLERANCE[found.dtype] * std.unsqueeze(-1) * std.unsqueeze(-2)
    assert bool(((found - exact).abs() <= allowed + 1e-20).all())
    assert torch.equal(found, found.mT)


def test_without_triton_or_a_gpu_the_plain_version_is_used(monkeypatch):
    tensor = torch.zeros(1)
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    assert not fused.available(tensor)
    monkeypatch.setattr(kernels, "PRESENT", False)
    assert not fused.available(tensor)
    monkeypatch.setattr(kernels, "INTERPRETED", True)
    assert not fused.available(tensor)
    monkeypatch.setattr(kernels, "PRESENT", True)
    assert fused.available(tensor)


def test_the_kernels_are_called_where_they_can_run(monkeypatch):
    called = []
    monkeypatch.setattr(fused, "available", lambda tensor: True)
    monkeypatch.setattr(fused, "relu_covariance", lambda mean, *rest: called.append(1) or torch.zeros(1, 3, 3))
    nm.relu_covariance(torch.zeros(3), torch.eye(3))
    assert called == [1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_unit_that_is_certain_in_one_image_only(dtype, monkeypatch):
    mean, _, matrix = layer(30, 5, dtype)
    together = plainly(monkeypatch, lambda: nm.relu_covariance(mean, matrix))
    apart = plainly(
        monkeypatch, lambda: torch.stack([nm.relu_covariance(m, s) for m, s in zip(mean, matrix, strict=True)])
    )
    torch.testing.assert_close(together, apart, rtol=0, atol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_forms_are_products_with_the_covariance(dtype):
    mean, _, matrix = layer(25, 5, dtype)
    weights = torch.randn(3, 25, dtype=dtype, generator=torch.Generator().manual_seed(0))
    exact = weights @ nm.relu_covariance(mean, matrix) @ weights.mT
    torch.testing.assert_close(layer_form(mean, matrix, weights), exact)
    torch.testing.assert_close(layer_form_diagonal(mean, matrix, weights), exact.diagonal(dim1=1, dim2=2))


@pytest.mark.parametrize("count", [2, 5, 12])
def test_radau_rules_integrate_polynomials_with_a_zero_at_the_end(count):
    """∫₀¹ (1−u) uᵐ du = 1/((m+1)(m+2)), exactly up to m = 2n − 1."""
    rule = radau(count, 1.0)
    for power in range(2 * count):
        value = math.fsum(weight * v * u**power for u, weight, v in rule.nodes)
        assert value == pytest.approx(1 / ((power + 1) * (power + 2)), rel=1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_nonlinear_rules_are_as_exact_as_promised(dtype):
    h = torch.linspace(-6, 6, 49, dtype=torch.float64).view(-1, 1)
    k = torch.linspace(-6, 6, 53, dtype=torch.float64).view(1, -1)
    fine = graded(160, 1.0, steepness=6.0)
    for rule in NONLINEAR_RULES[dtype]:
        for sign in (-1, 1):
            rho = torch.full((1, 1), sign * rule.limit, dtype=torch.float64)
            error = nonlinear_part_by(rule, h, k, rho) - nonlinear_part_by(fine, h, k, rho)
            assert float(error.abs().max()) < (1e-7 if dtype == torch.float32 else 4e-15)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_series_is_the_quadrature(dtype):
    h = torch.linspace(-6, 6, 60, dtype=dtype).unsqueeze(0)
    series = TileSeries(SeriesFactors(h), slice(0, 60), slice(0, 60))
    limits = nonlinear_limits(40, dtype)
    assert list(limits) == sorted(limits)
    for terms in (1, 3, 8, 24, 40):
        rho = torch.full((1, 60, 60), -limits[terms], dtype=dtype)
        found = nonlinear_sum(series, terms, rho, Scratch(dtype, h.device, 3600))
        exact = nonlinear_part(h.double().unsqueeze(-1), h.double().unsqueeze(-2), rho.double())
        assert float((found - exact).abs().max()) < (1.2e-7 if dtype == torch.float32 else 2e-15)
    assert excess_limits(40, dtype)[-1] < limits[-1]


def test_the_recurrence_gives_hermite_polynomials():
    h = torch.tensor([0.7], dtype=torch.float64)
    factors = SeriesFactors(h).first(5).squeeze(-1).tolist()
    x, y = recurrence(4)[3]
    assert factors[4] == pytest.approx(x * 0.7 * factors[3] - y * factors[2])
    hermite = 0.7**4 - 6 * 0.7**2 + 3
    assert factors[4] == pytest.approx(hermite * math.exp(-0.245) / math.sqrt(2 * math.pi * 720))


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("units", "rank"), [(1, 1), (7, 3), (70, 60), (40, 6), (40, 1)])
def test_interpreted_covariance_is_the_plain_one(units, rank, dtype, monkeypatch):
    mean, _, matrix = layer(units, rank, dtype)
    exact = plainly(monkeypatch, lambda: nm.relu_covariance(mean.double(), matrix.double()))
    assert_exact(nm.relu_covariance(mean, matrix), exact, matrix)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [30, 4])
def test_interpreted_gradients_are_the_plain_ones(rank, dtype, monkeypatch):
    mean, factor, matrix = layer(40, rank, dtype)
    factor[1, 5:7] += 0.1
    matrix = factor @ factor.mT
    upstream = torch.randn(2, 40, 40, dtype=dtype, generator=torch.Generator().manual_seed(1))

    def call() -> tuple[Tensor, ...]:
        m, s = mean.clone().requires_grad_(), matrix.clone().requires_grad_()
        return torch.autograd.grad(nm.relu_covariance(m, s), (m, s), upstream)

    for one, other in zip(call(), plainly(monkeypatch, call), strict=True):
        tolerance = 3e-5 if dtype == torch.float32 else 1e-12
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [pairs_form, pairs_form_diagonal, layer_form, layer_form_diagonal])
def test_interpreted_forms_are_the_plain_ones(form, dtype, monkeypatch):
    """Values and gradients; the forms of pairs in strips, with a unit that B never uses."""
    mean, factor, _ = layer(70, 20, dtype)
    weights = torch.randn(1, 3, 70, dtype=dtype, generator=torch.Generator().manual_seed(1)) / 8
    weights[..., 9] = 0

    def call() -> list[Tensor]:
        m, f, b = (x.clone().requires_grad_() for x in (mean, factor, weights))
        square = f @ f.mT
        if form in (pairs_form, pairs_form_diagonal):
            value = form(m, square.diagonal(dim1=1, dim2=2), f, f, b, 2**16)
        else:
            value = form(m, square, b)
        return [value.detach(), *torch.autograd.grad(value.sin().sum(), (m, f, b))]

    for one, other in zip(call(), plainly(monkeypatch, call), strict=True):
        tolerance = 3e-5 if dtype == torch.float32 else 1e-12
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def lookup_rows(dtype: torch.dtype, strong: bool) -> list[list[int]]:
    at = kernel_tables.tables(dtype, torch.device("cpu"))
    return (at.strong if strong else at.weak).tolist()


def correlations_between(low: float, high: float, dtype: torch.dtype) -> list[float]:
    """A fine grid, and numbers at, right below and right above the parts' ends, as the dtype has them."""
    ends = torch.arange(1, 512, dtype=dtype) / 512
    every = torch.cat(
        (
            torch.linspace(low, high, 20_011, dtype=dtype),
            ends,
            torch.nextafter(ends, torch.zeros_like(ends)),
            torch.nextafter(ends, torch.ones_like(ends)),
        )
    ).double()
    return every[(every >= low) & (every <= high)].tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_series_terms_looked_up_are_enough_and_hardly_more(dtype):
    at, rows = kernel_tables.tables(dtype, torch.device("cpu")), lookup_rows(dtype, strong=False)
    limits, at_once = nonlinear_limits(kernel_tables.TERMS[dtype], dtype), int(kernels.AT_ONCE)

    def rounded_up(terms: int) -> int:
        return -(-terms // at_once) * at_once

    for rho in correlations_between(0.0, at.series_reach, dtype):
        terms = rows[int(rho * int(forward_kernels.BINS))][0]
        assert limits[terms] >= rho
        assert terms in range(0, kernel_tables.TERMS[dtype] + 1, at_once)
        beyond = min(rho + 1 / int(forward_kernels.BINS), at.series_reach)
        assert terms <= rounded_up(next(n for n, limit in enumerate(limits) if limit >= beyond))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strong", [False, True])
def test_the_rules_looked_up_have_nodes_enough_and_hardly_more(strong, dtype):
    at, rows, rules = (
        kernel_tables.tables(dtype, torch.device("cpu")),
        lookup_rows(dtype, strong),
        NONLINEAR_RULES[dtype],
    )
    reach = 1.0 if strong else at.reach
    starts = at.rules.tolist()
    for rho in correlations_between(0.0, reach, dtype):
        _, start, stop = rows[int(rho * int(forward_kernels.BINS))]
        rule = rules[starts.index(start)]
        assert stop - start == rule.cost
        assert rule.limit >= rho
        beyond = min(rho + 1 / int(forward_kernels.BINS), reach)
        assert rule.cost <= next(other.cost for other in rules if other.limit >= beyond)


def assert_exact_in_both_forms(mean: Tensor, matrix: Tensor, weights: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The covariance, and the diagonal of the form."""
    exact = plainly(monkeypatch, lambda: nm.relu_covariance(mean.double(), matrix.double()))
    assert_exact(nm.relu_covariance(mean, matrix), exact, matrix)
    wide = weights.double() @ exact @ weights.double().mT
    found = layer_form_diagonal(mean, matrix, weights)
    size = (weights.double().abs() @ matrix.double().diagonal(dim1=1, dim2=2).sqrt().unsqueeze(-1)).squeeze(-1).square()
    assert bool(((found - wide.diagonal(dim1=1, dim2=2)).abs() <= 2 * TOLERANCE[mean.dtype] * size).all())


def some_weights(outputs: int, units: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(outputs)
    return torch.randn(2, outputs, units, dtype=torch.float64, generator=generator).to(dtype) / 8


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("units", "side"), [(100, 32), (96, 32), (50, 16)])
def test_runs_of_tiles_may_pass_a_rows_end_and_the_last_one_be_short(units, side, dtype, monkeypatch):
    """There are 10, 6 and 10 tiles, of which the second and third run of 4 begin within rows."""
    monkeypatch.setattr(fused, "RUNS", 1)
    for shapes in (fused.TILES, fused.DIAGONAL_TILES):
        monkeypatch.setitem(shapes, dtype, fused.Shape(side, 4, 255, 4))
    tiles = fused._tiles(-(-units // side))
    assert fused._run(fused.TILES[dtype], 2 * tiles) == 4
    assert tiles % 4 == 2
    mean, _, matrix = layer(units, 12, dtype)
    assert_exact_in_both_forms(mean, matrix, some_weights(3, units, dtype), monkeypatch)


@interpreted
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
    monkeypatch.setattr(fused, "MANY_PAIRS", 1 if many else 2**40)
    for shapes in (fused.TILES, fused.DIAGONAL_TILES):
        monkeypatch.setitem(shapes, dtype, fused.Shape(side, 4, 255, 4))
    mean, factor, _ = layer(110, 60, dtype)
    factor[:, :66] = factor[:, :1] * factor[:, :66, :1].sign() + 0.02 * factor[:, :66]
    matrix = factor @ factor.mT
    std = matrix[1].diagonal().sqrt()
    strong = (matrix[1] / (std * std.unsqueeze(-1))).abs() > kernel_tables.tables(dtype, torch.device("cpu")).reach
    assert bool(strong[:66, :66].all())
    assert not bool(strong[66:].tril(65).any())
    assert_exact_in_both_forms(mean, matrix, some_weights(3, 110, dtype), monkeypatch)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [17, 70])
def test_many_outputs_are_summed_in_parts(outputs, dtype, monkeypatch):
    mean, _, matrix = layer(40, 4, dtype)
    assert_exact_in_both_forms(mean, matrix, some_weights(outputs, 40, dtype), monkeypatch)


@interpreted
def test_products_at_ieee_precision(monkeypatch):
    monkeypatch.setitem(fused.PRECISION, torch.float32, "ieee")
    mean, _, matrix = layer(70, 4, torch.float32)
    assert_exact_in_both_forms(mean, matrix, some_weights(3, 70, torch.float32), monkeypatch)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [4, 60])
def test_a_covariance_that_is_nan_spoils_no_other(rank, dtype):
    mean, _, matrix = layer(70, rank, dtype)
    whole = nm.relu_covariance(mean, matrix)
    for i, j in ((4, 2), (40, 7), (69, 66)):
        matrix[1, i, j] = matrix[1, j, i] = whole[1, i, j] = whole[1, j, i] = torch.nan
    torch.testing.assert_close(nm.relu_covariance(mean, matrix), whole, rtol=0, atol=TOLERANCE[dtype], equal_nan=True)


@interpreted
def test_interpreted_kernels_refuse_what_the_plain_version_refuses():
    mean, _, matrix = layer(25, 10, torch.float64)
    with pytest.raises(ValueError, match="mean of a ReLU layer holds NaN"):
        nm.relu_covariance(torch.full_like(mean, torch.nan), matrix)
    with pytest.raises(ValueError, match="diagonal of the covariance"):
        nm.relu_covariance(mean, matrix - 10 * torch.eye(25, dtype=torch.float64))
    matrix[1, 4, 2] = matrix[1, 2, 4] = torch.nan
    assert bool(torch.isnan(nm.relu_covariance(mean, matrix)[1, 4, 2]))
