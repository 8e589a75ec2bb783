"""The nodes and limits of the two integrals: every rule is good to its limit."""

from __future__ import annotations

import math

import pytest
import torch

from netmoments.relu.bivariate import nonlinear_part_by, orthant_excess_by
from netmoments.relu.quadrature_rules import (
    EXCESS_SERIES_RULES,
    NONLINEAR_RULES,
    RULES,
    SERIES_RULES,
    SeriesRule,
    excess_limits,
    graded,
    nonlinear_limits,
    radau,
)
from tests.closeness import assert_close
from tests.reference.bivariate_integrals import hard_points

DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_rule_is_good_to_its_limit(dtype):
    """Truncation error alone, both computed in float64: 1e-15, or 6e-8 (half a float32 step at 1) for float32."""
    fine = graded(160, 1.0, steepness=6.0)
    tolerance = {torch.float64: 1e-15, torch.float32: 6e-8}[dtype]
    for rule in RULES[dtype]:
        h, k, rho = map(torch.tensor, hard_points(4000, rule.limit))
        assert_close(
            nonlinear_part_by(rule, h, k, rho),
            nonlinear_part_by(fine, h, k, rho),
            atol=tolerance,
            what=f"J, {len(rule.nodes)} nodes at ρ = {rule.limit}",
        )
        assert_close(
            orthant_excess_by(rule, h, k, rho),
            orthant_excess_by(fine, h, k, rho),  # Owen's T
            atol=2 * tolerance,
            what=f"D, {len(rule.nodes)} nodes at ρ = {rule.limit}",
        )


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


@pytest.mark.parametrize("count", [2, 5, 12])
def test_radau_rules_integrate_polynomials_with_a_zero_at_the_end(count):
    """∫₀¹ (1−u) uᵐ du = 1/((m+1)(m+2)), exactly up to m = 2n − 1."""
    rule = radau(count, 1.0)
    for power in range(2 * count):
        value = math.fsum(weight * v * u**power for u, weight, v in rule.nodes)
        assert value == pytest.approx(1 / ((power + 1) * (power + 2)), rel=1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_terms_reach_further_and_the_excess_needs_more_of_them(dtype):
    limits = nonlinear_limits(40, dtype)
    assert list(limits) == sorted(limits)
    assert excess_limits(40, dtype)[-1] < limits[-1]
    for rules in (RULES, NONLINEAR_RULES, SERIES_RULES, EXCESS_SERIES_RULES):
        reached = [rule.limit for rule in rules[dtype]]
        cost = [rule.terms if isinstance(rule, SeriesRule) else len(rule.nodes) for rule in rules[dtype]]
        assert reached == sorted(reached)
        assert cost == sorted(cost)
