"""The two integrals of a pair of ReLUs, at adversarial points, for every correlation."""

from __future__ import annotations

import csv
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

from netmoments.normal import density, distribution
from netmoments.relu.bivariate import (
    Scratch,
    SeriesFactors,
    TileSeries,
    common_shape,
    conditional,
    correlation_and_gap,
    excess_by_owen,
    excess_series,
    nonlinear_part,
    nonlinear_series,
    orthant_excess,
    scratch_for,
)
from netmoments.relu.quadrature_rules import excess_limits, nonlinear_limits, recurrence
from tests.closeness import assert_close
from tests.reference import bivariate_integrals

DTYPES = [torch.float32, torch.float64]


def hard_points(count: int) -> tuple[Tensor, ...]:
    return tuple(map(torch.tensor, bivariate_integrals.hard_points(count)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_digits(dtype):
    """The inputs are exact in the dtype; the 25 digits are mpmath's, see `tests/reference`."""
    with bivariate_integrals.PATH.open() as file:
        rows = [row for row in csv.DictReader(file) if row["dtype"] == str(dtype).removeprefix("torch.")]
    assert len(rows) == bivariate_integrals.COUNT
    h, k, rho = (
        torch.tensor([float.fromhex(row[name]) for row in rows], dtype=dtype) for name in ("h_hex", "k_hex", "rho_hex")
    )
    tolerance = {torch.float64: 5e-16, torch.float32: 2e-7}[dtype]
    for name, value in (("nonlinear_part", nonlinear_part(h, k, rho)), ("orthant_excess", orthant_excess(h, k, rho))):
        exact = np.array([np.longdouble(row[name]) for row in rows])
        assert np.abs(value.double().numpy() - exact).max() <= tolerance, name


def test_the_reference_is_what_mpmath_says():
    """A few rows of the reference are computed again."""
    with bivariate_integrals.PATH.open() as file:
        rows = list(csv.DictReader(file))
    for row in rows[:: len(rows) // 6]:
        place = [float.fromhex(row[name]) for name in ("h_hex", "k_hex", "rho_hex")]
        for name, value in bivariate_integrals.exact_integrals(*place)._asdict().items():
            written = row["nonlinear_part" if name == "nonlinear" else "orthant_excess"]
            assert abs(value - type(value)(written)) <= 1e-24


def test_orthant_excess_of_nodes_equals_owens():
    """Two unrelated formulas for every ρ: nodes up to 0.99, Owen's T beyond."""
    h, k, rho = hard_points(4000)
    inside = rho.abs() <= 0.99
    by_owen = excess_by_owen(h, k, rho, Scratch(h.dtype, h.device, h.numel()))
    assert_close(orthant_excess(h, k, rho)[inside], by_owen[inside], atol=1e-15)


def test_closed_forms_at_perfect_correlation():
    h, k, _ = hard_points(2000)
    e = lambda x: x * distribution(x) + torch.exp(-x * x / 2) / (2 * torch.pi) ** 0.5  # noqa: E731
    gate_h, gate_k = distribution(h), distribution(k)
    low, high = torch.minimum(h, k), torch.maximum(h, k)
    one = torch.ones_like(h)
    assert_close(gate_h * gate_k + orthant_excess(h, k, one), distribution(low), atol=4e-16)
    positive = distribution(low) - e(low) * e(-high)
    assert_close(gate_h * gate_k + nonlinear_part(h, k, one), positive, atol=4e-15)
    both = torch.where(h + k > 0, distribution(h) - distribution(-k), 0.0)
    assert_close(gate_h * gate_k + orthant_excess(h, k, -one), both, atol=4e-16)
    negative = torch.where(h + k > 0, -both - e(-h) * e(-k), -e(h) * e(k))
    assert_close(-gate_h * gate_k + nonlinear_part(h, k, -one), negative, atol=4e-15)


def test_a_block_equals_its_pairs_one_by_one():
    """It changes nothing that a block gets one rule, and exceptions are picked out of it."""
    h, k, rho = hard_points(3000)
    block = nonlinear_part(h, k, rho)
    excess = orthant_excess(h, k, rho)
    for i in range(0, 3000, 37):
        pair = slice(i, i + 1)
        assert_close(block[pair], nonlinear_part(h[pair], k[pair], rho[pair]), atol=3e-16)
        assert_close(excess[pair], orthant_excess(h[pair], k[pair], rho[pair]), atol=5e-16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0.0, 1e-39, 1e-31, 1e-20])
def test_orthant_of_tiny_means(dtype, size):
    """P(z₁>0, z₂>0) → 1/4 + asin(ρ)/2π as both means vanish, from any direction."""
    rho = torch.tensor([0.995, -0.995, 0.3, 1.0, -1.0], dtype=dtype)
    for ratio in (1.0, -2.0):
        h = torch.full_like(rho, size)
        assert_close(
            orthant_excess(h, ratio * h, rho),
            torch.asin(rho.double()) / (2 * torch.pi),
            atol=2e-7 if dtype == torch.float32 else 1e-15,
        )


def test_broadcasting():
    h, k, _ = hard_points(5)
    rho = torch.linspace(-1, 1, 25, dtype=torch.float64).reshape(1, 5, 5)
    full = nonlinear_part(h.reshape(1, 5, 1), k.reshape(1, 1, 5), rho)
    assert full.shape == (1, 5, 5)
    assert_close(full[0, 3, 1], nonlinear_part(h[3:4], k[1:2], rho[0, 3, 1:2])[0], atol=2e-16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_series_of_the_excess_is_the_quadrature(dtype):
    """They agree up to the bound on the terms left out, and the rounding of the others."""
    h = torch.linspace(-6, 6, 60, dtype=dtype).unsqueeze(0)
    series = TileSeries(SeriesFactors(h), slice(0, 60), slice(0, 60))
    limits = excess_limits(40, dtype)
    for terms in (1, 3, 8, 24, 40):
        rho = torch.full((1, 60, 60), -limits[terms], dtype=dtype)
        found = excess_series(series, terms, rho, Scratch(dtype, h.device, 3600))
        exact = orthant_excess(h.double().unsqueeze(-1), h.double().unsqueeze(-2), rho.double())
        assert float((found - exact).abs().max()) < (1.2e-7 if dtype == torch.float32 else 2e-15)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_excess_takes_terms_or_nodes_as_correlations_ask(dtype):
    """A block with all correlations has the same values with the series and without it."""
    h = torch.linspace(-4, 4, 200, dtype=dtype).unsqueeze(0)
    series = TileSeries(SeriesFactors(h), slice(0, 200), slice(0, 200))
    generator = torch.Generator().manual_seed(0)
    for most in (0.05, 0.3, 1.0):
        rho = most * (2 * torch.rand(1, 200, 200, dtype=dtype, generator=generator) - 1)
        rho[..., :3] = most
        found = orthant_excess(h.unsqueeze(-1), h.unsqueeze(-2), rho, series=series)
        exact = orthant_excess(h.double().unsqueeze(-1), h.double().unsqueeze(-2), rho.double())
        assert float((found - exact).abs().max()) < (2.4e-7 if dtype == torch.float32 else 2e-15)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_series_is_the_quadrature(dtype):
    h = torch.linspace(-6, 6, 60, dtype=dtype).unsqueeze(0)
    series = TileSeries(SeriesFactors(h), slice(0, 60), slice(0, 60))
    limits = nonlinear_limits(40, dtype)
    for terms in (1, 3, 8, 24, 40):
        rho = torch.full((1, 60, 60), -limits[terms], dtype=dtype)
        found = nonlinear_series(series, terms, rho, Scratch(dtype, h.device, 3600))
        exact = nonlinear_part(h.double().unsqueeze(-1), h.double().unsqueeze(-2), rho.double())
        assert float((found - exact).abs().max()) < (1.2e-7 if dtype == torch.float32 else 2e-15)


def test_the_recurrence_gives_hermite_polynomials():
    h = torch.tensor([0.7], dtype=torch.float64)
    factors = SeriesFactors(h).first(5).squeeze(-1).tolist()
    x, y = recurrence(4)[3]
    assert factors[4] == pytest.approx(x * 0.7 * factors[3] - y * factors[2])
    hermite = 0.7**4 - 6 * 0.7**2 + 3
    assert factors[4] == pytest.approx(hermite * math.exp(-0.245) / math.sqrt(2 * math.pi * 720))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_unit_given_the_other(dtype):
    """(h−ρk)/q against double precision away from ±1; at ±1 the gate is open, closed, or half open where h = ±k."""
    h, k, rho = hard_points(400)
    inside = rho.abs() < 0.9
    h, k, rho = (x[inside].to(dtype) for x in (h, k, rho))
    found = conditional(h, k, rho, Scratch(dtype, h.device, h.numel()))
    wide = [x.double() for x in (h, k, rho)]
    q = torch.sqrt(1 - wide[2] ** 2)
    rtol = 4 * torch.finfo(dtype).eps
    # the numerator is a sum of two numbers of size |h| + |k|, each rounded
    for value, exact in (
        (found.first, (wide[0] - wide[2] * wide[1]) / q),
        (found.second, (wide[1] - wide[2] * wide[0]) / q),
    ):
        assert bool(((value.double() - exact).abs() <= 4 * rtol * (wide[0].abs() + wide[1].abs()) / q + 1e-300).all())
    assert_close(found.deviation, q, rtol=rtol)
    ends = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0], dtype=dtype)
    first, second = (torch.tensor(x, dtype=dtype) for x in ([2.0, 1.0, 1.5, 1.0, 1.0], [1.0, 2.0, 1.5, -1.0, 3.0]))
    given = conditional(first, second, ends, Scratch(dtype, ends.device, 5))
    assert distribution(given.first).tolist() == [1.0, 0.0, 0.5, 0.5, 1.0]
    assert density(given.first).tolist()[:2] == [0.0, 0.0]


def test_scratch_gives_back_the_same_memory():
    scratch = Scratch(torch.float32, torch.device("cpu"), elements=20)
    first = scratch.take("a", torch.Size((4, 5)))
    assert scratch.take("a", torch.Size((2, 3))).data_ptr() == first.data_ptr()
    assert scratch.take("b", torch.Size((2, 3))).data_ptr() != first.data_ptr()
    kept = scratch_for(first, elements=1000)
    assert scratch_for(first, elements=500) is kept
    assert scratch_for(first.double(), elements=500) is not kept
    assert scratch_for(first, elements=10**7) is not kept


def test_scratch_of_inference_mode_is_of_use_outside():
    """A thread keeps scratch memory for its next call, which may need gradients."""
    with torch.inference_mode():
        scratch = Scratch(torch.float32, torch.device("cpu"), elements=4)
        scratch.take("a", torch.Size((4,)))
    weight = torch.ones(4, requires_grad=True)
    with torch.no_grad():
        block = torch.mul(weight, 2, out=scratch.take("a", torch.Size((4,))))
    assert not block.is_inference()
    (block * weight).sum().backward()
    assert weight.grad.tolist() == [2.0] * 4


def test_shapes_are_broadcast():
    assert common_shape(torch.zeros(1, 4, 1), torch.zeros(3, 1, 1), torch.zeros(1, 1, 2)) == (3, 4, 2)


def test_gaps_are_those_of_the_numbers_given():
    """1 − |ρ| against rational arithmetic, of pairs whose v₁v₂ and c² agree to nearly all digits, at any scale."""
    generator = torch.Generator().manual_seed(0)
    first, second = (10 ** torch.empty(50, dtype=torch.float64).uniform_(-90, 90, generator=generator) for _ in "12")
    covariance = (first.sqrt() * second.sqrt()) * (1 - 2.0 ** -torch.arange(50.0, dtype=torch.float64)).clamp(min=0.5)
    covariance[::7] *= -1
    rho, gap = correlation_and_gap(first, second, covariance)
    for v, w, c, r, g in zip(*(x.tolist() for x in (first, second, covariance, rho, gap)), strict=True):
        square = Fraction(c) ** 2 / (Fraction(v) * Fraction(w))
        with mpmath.workdps(60):
            size = mpmath.sqrt(mpmath.mpf(square.numerator) / square.denominator)
            exact = max(1 - size, mpmath.mpf(0))
            assert abs(g - exact) <= 1e-14 * exact + mpmath.mpf(10) ** -31
        assert r == math.copysign(1 - g, c)
