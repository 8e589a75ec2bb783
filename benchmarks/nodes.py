"""Truncation error of each quadrature rule at its limit: `python -m benchmarks.nodes`.

Largest absolute error of the nonlinear part J (against 160 graded nodes) and of the orthant excess D (against Owen's
T, which is also what stands at |ρ| = 1), all in float64, over 4,000 points with |h|, |k| ≤ 8 crowded where the
integrand is steepest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from netmoments.relu.bivariate import nonlinear_part_by, orthant_excess_by
from netmoments.relu.quadrature_rules import NONLINEAR_RULES, RULES, graded

POINTS = 4000


def steep_points(rho: float, closest: float = -4) -> tuple[Tensor, Tensor, Tensor]:
    """h anywhere, k within 10^closest … 3 of ±h."""
    generator = torch.Generator().manual_seed(0)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(POINTS, dtype=torch.float64, generator=generator)

    sign = uniform(-1, 1).sign()
    h = uniform(-8, 8) * torch.where(uniform(0, 1) < 0.5, 1.0, 0.3)
    return h, sign * h + uniform(-1, 1).sign() * 10 ** uniform(closest, 0.5), sign * rho


def main() -> None:
    fine = graded(160, 1.0, steepness=6.0)
    for name, every, value in (("J", NONLINEAR_RULES, nonlinear_part_by), ("D", RULES, orthant_excess_by)):
        for dtype, rules in every.items():
            print(f"{name}, {dtype}")
            for rule in rules:
                places = steep_points(rule.limit)
                largest = float((value(rule, *places) - value(fine, *places)).abs().max())
                print(f"  |ρ| ≤ {rule.limit:<5}  {len(rule.nodes):>2} nodes  {largest:.0e}")
    places = steep_points(1.0, closest=-14)
    by_nodes = orthant_excess_by(graded(96, 0.9999, steepness=12.0), *places)
    error = (by_nodes - orthant_excess_by(fine, *places)).abs().max()
    print(f"D at |ρ| = 1 by 96 nodes graded with steepness 12, |h ∓ k| down to 1e-14: {float(error):.0e}")


if __name__ == "__main__":
    main()
