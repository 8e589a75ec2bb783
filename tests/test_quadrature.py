"""The two integrals of the kernel, with adversarial points, for every correlation."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

from netmoments.memory import Scratch, scratch_for
from netmoments.normal import distribution
from netmoments.relu.bivariate import (
    excess_by_owen,
    nonlinear_part,
    nonlinear_part_by,
    orthant_excess,
    orthant_excess_by,
)
from netmoments.relu.quadrature_rules import RULES, graded
from tests.closeness import assert_close

mpmath.mp.dps = 30


def hard_points(count: int, correlation: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """h, k and ρ crowded where the integrands are steep: h ≈ ±k at all scales, ρ → ±1 at all scales, tails, zeros."""
    rng = np.random.default_rng(7)
    sign = rng.choice([-1.0, 1.0], count)
    h = rng.uniform(-8, 8, count) * rng.choice([1, 0.3, 0.0], count)
    k = sign * h + 10.0 ** rng.uniform(-16, 0.8, count) * rng.choice([-1, 1, 0], count)
    k = np.where(rng.random(count) < 0.2, rng.uniform(-8, 8, count), k)
    if correlation is None:
        rho = sign * (1 - np.where(rng.random(count) < 0.2, 0, 10.0 ** rng.uniform(-17, -2, count)))
        rho = np.where(rng.random(count) < 0.4, rng.uniform(-1, 1, count), rho)
    else:
        rho = sign * correlation
    return torch.tensor(h), torch.tensor(k), torch.tensor(rho)


def exact_integrals(h: float, k: float, rho: float) -> tuple[float, float]:
    """J and D by mpmath in the angle t, as the design writes them: an independent form of the same integrals."""
    h, k, rho = mpmath.mpf(h), mpmath.mpf(k), mpmath.mpf(rho)

    def height(t: mpmath.mpf) -> mpmath.mpf:
        return mpmath.exp(-((h - k * mpmath.sin(t)) ** 2 / mpmath.cos(t) ** 2 + k * k) / 2)

    end = mpmath.asin(rho)
    path = [0, *(end * (1 - mpmath.mpf(10) ** -j) for j in range(1, 14)), end * (1 - mpmath.mpf(10) ** -22)]
    nonlinear = mpmath.quad(lambda t: (rho - mpmath.sin(t)) * height(t), path) / (2 * mpmath.pi)
    excess = mpmath.quad(height, path) / (2 * mpmath.pi)
    return float(nonlinear), float(excess)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_against_mpmath(dtype):
    places = hard_points(60)
    h, k, rho = (x.to(dtype) for x in places)
    exact = torch.tensor(
        [exact_integrals(*place) for place in zip(h.tolist(), k.tolist(), rho.tolist(), strict=True)],
        dtype=torch.float64,
    )
    tolerance = {torch.float64: 5e-16, torch.float32: 2e-7}[dtype]
    assert_close(nonlinear_part(h, k, rho), exact[:, 0], atol=tolerance, what="J")
    assert_close(orthant_excess(h, k, rho), exact[:, 1], atol=tolerance, what="D")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_rule_is_good_to_its_limit(dtype):
    """Truncation error alone, both computed in float64: 1e-15, or 6e-8 (half a float32 step at 1) for float32."""
    fine = graded(160, 1.0, steepness=6.0)
    tolerance = {torch.float64: 1e-15, torch.float32: 6e-8}[dtype]
    for rule in RULES[dtype]:
        h, k, rho = hard_points(4000, rule.limit)
        assert_close(
            nonlinear_part_by(rule, h, k, rho),
            nonlinear_part_by(fine, h, k, rho),
            atol=tolerance,
            what=f"J, {rule.cost} nodes at ρ = {rule.limit}",
        )
        assert_close(
            orthant_excess_by(rule, h, k, rho),
            orthant_excess_by(fine, h, k, rho),  # Owen's T
            atol=2 * tolerance,
            what=f"D, {rule.cost} nodes at ρ = {rule.limit}",
        )


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
    """The choice of one rule for a block, and the picking out of its exceptions, change nothing."""
    h, k, rho = hard_points(3000)
    block = nonlinear_part(h, k, rho)
    excess = orthant_excess(h, k, rho)
    for i in range(0, 3000, 37):
        pair = slice(i, i + 1)
        assert_close(block[pair], nonlinear_part(h[pair], k[pair], rho[pair]), atol=3e-16)
        assert_close(excess[pair], orthant_excess(h[pair], k[pair], rho[pair]), atol=5e-16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
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


def test_scratch_gives_back_the_same_memory():
    scratch = Scratch(torch.float32, torch.device("cpu"), elements=20)
    first = scratch.take("a", torch.Size((4, 5)))
    assert scratch.take("a", torch.Size((2, 3))).data_ptr() == first.data_ptr()
    assert scratch.take("b", torch.Size((2, 3))).data_ptr() != first.data_ptr()
    kept = scratch_for(first, elements=1000)
    assert scratch_for(first, elements=500) is kept
    assert scratch_for(first.double(), elements=500) is not kept
    assert scratch_for(first, elements=10**7) is not kept
