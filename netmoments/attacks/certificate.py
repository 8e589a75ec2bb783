"""How far from the best a sparse and smooth shift can be: a lower bound by duality.

At the solution the margins are linearized, h(μ*) + ∇h(μ*)·(μ − μ*); the problem with those is convex, and for any
λ ≥ 0 and any p of length at most 1 a pixel,

    Σ λ(h(μ*) − ∇h(μ*)·μ*) + Σ min over lower ≤ m ≤ upper of (c m + |m|),   c = Σ λ∇h(μ*) + Dᵀp,

is below its optimum. Where it meets the objective of μ*, μ* is a stationary point of the true problem and the best one
wherever the margins are affine between μ* and the best one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from netmoments.attacks.primal_dual import Iterate, Problem, Scales
from netmoments.attacks.proximal import into_unit_discs, shrink_into_box
from netmoments.attacks.total_variation import adjoint_differences, forward_differences

ITERATIONS = 400
EVERY = 20


def least_in_box(slope: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """min over lower ≤ m ≤ upper of slope·m + |m|, where lower ≤ 0 ≤ upper: at 0 or at an end."""
    at_ends = torch.minimum(slope * lower + lower.abs(), slope * upper + upper.abs())
    return at_ends.clamp(max=0)


def lower_bound(problem: Problem, solution: Iterate) -> Tensor:
    """The bound (N, R): from the multipliers of the solution, improved by the same method on the linearized problem.

    The gradients are fixed, so an iteration costs no product with the network. The box may be cut to |μ| ≤ ‖μ*‖₁ +
    TV(μ*), beyond which nothing is better; and multipliers may be scaled down until |c| ≤ 1, when the second sum is 0.
    """
    here = problem.margins.with_slopes(solution.shift, problem.sigma.unsqueeze(1))
    gradients = here.gradients()
    scales = Scales.at(problem, solution.shift, here.value, gradients)
    rest = here.value + problem.gamma - (gradients @ solution.shift.unsqueeze(-1)).squeeze(-1)
    cost = problem.objective(solution.shift).unsqueeze(-1)
    lower, upper = torch.maximum(problem.box[0], -cost), torch.minimum(problem.box[1], cost)
    stride, dual = scales.stride.unsqueeze(-1), scales.dual.reshape(*scales.dual.shape, 1, 1, 1)
    shift, pair, multipliers = solution.shift, solution.pair, solution.multipliers
    best = torch.zeros_like(scales.stride)
    for step in range(ITERATIONS + 1):
        slope = (multipliers.unsqueeze(-2) @ gradients).squeeze(-2) + adjoint_differences(pair).flatten(-3)
        if step % EVERY == 0:
            best = torch.maximum(best, _bound(multipliers, rest, slope, lower, upper))
        moved = shrink_into_box(shift - stride * slope, stride, lower, upper)
        ahead = 2 * moved - shift
        pair = into_unit_discs(pair + dual * forward_differences(ahead.unflatten(-1, problem.shape)))
        h = rest + (gradients @ ahead.unsqueeze(-1)).squeeze(-1)
        multipliers = torch.relu(multipliers + scales.penalty * h)
        shift = moved
    return best


def _bound(multipliers: Tensor, rest: Tensor, slope: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """The better of the bound with multipliers as they are and scaled down."""
    level = (multipliers * rest).sum(-1)
    as_they_are = level + least_in_box(slope, lower, upper).sum(-1)
    return torch.maximum(as_they_are, level / slope.abs().amax(-1).clamp(min=1))
