"""The solver of sparse and smooth noise: least ‖μ‖₁ + TV(μ) with every margin at most −γ and μ in a box.

`descend` solves many such problems at once by a primal–dual method with exact proximal steps (Chambolle and Pock 2011).
It linearizes the margins anew at every step, as in Valkonen (2014), and so follows them across their kinks. With
h = margin + γ, a multiplier λ for each margin, and for each pixel a pair p of length at most 1, whose best choice makes
⟨p, Dμ⟩ the total variation, a step is

    λ⁺ = [λ + ρh(μ)]₊,   μ⁺ = box(soft(μ − τ(λ⁺∇h(μ) + Dᵀp), τ)),   p⁺ = disc(p + sD(2μ⁺ − μ)).

The first steps are made under larger noise, which rounds off the kinks; over the first half it comes down to the noise
wanted. `finished` tidies the last shift, setting tiny pixels to zero where that hardly changes the objective, and
scales it by the smallest t for which clip(tμ) is feasible.

`lower_bound` says how far from the optimum a solution can be. With the margins linearized at the solution μ* the
problem is convex, and by duality, for any λ ≥ 0 and any p of length at most 1 a pixel,

    Σ λ(h(μ*) − ∇h(μ*)·μ*) + Σ min over lower ≤ m ≤ upper of (c m + |m|),   c = Σ λ∇h(μ*) + Dᵀp,

is at most its optimum. Where this bound meets the objective of μ*, μ* is a stationary point of the true problem; it is
an optimum wherever the margins are affine between μ* and that optimum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from netmoments.attacks.margins import Margins
from netmoments.progress import progress_bar

LARGEST_SQUARE = 8.0
"""‖D‖² is below this for images of any size, because a pixel is in at most two differences of each direction."""
STRIDE = 0.01
"""τ as a share of the distance from μ = 0 to where the linearized margins hold."""
SHARE = 0.5
"""The coupling to p and the coupling to λ may each use up this share of 1/τ: they keep the iteration stable."""
STEEPEST = (5.0, 50.0)
"""λ·max|∇margin| is kept below the first number at the first step and the second at the last. At an optimum it is below
5 wherever a pixel is off its bounds (1 of the length, 4 of the differences). The limit keeps λ from running away where
a margin does not come down."""
SMOOTHER = 10.0
"""The first steps are made under noise of so many times σ."""
TIDY = (1e-3, 1e-2)
"""Pixels below these shares of the largest |μ| are tried as zeros."""
INDIFFERENT = 1e-4
"""More zeros are worth this relative increase of the objective."""
SHORTEST = 1e-6
"""Stands for the width of a box without ends where the shortest distance is derived from the width."""
CHECKED = 4
"""After every so many steps the shift is kept if it is feasible and the cheapest so far."""
ENDS = (1.0, 1.05, 1.2, 1.5, 2.0)
"""Multiples t of a shift that are tried in order until clip(tμ) is feasible; in a box a larger t need not be."""
HALVINGS = 16
"""Halvings of the interval in which the smallest feasible t is sought."""
BOUND_ITERATIONS = 400
"""Steps that improve the lower bound."""
BOUND_CHECKED = 20
"""After every so many of them the bound is computed."""


def forward_differences(image: Tensor) -> Tensor:
    """D μ, (2, ...): right neighbour less pixel, 0 in the last column; lower neighbour less pixel, 0 in the last row.

    >>> forward_differences(torch.tensor([[1.0, 3.0], [4.0, 8.0]]))
    tensor([[[2., 0.],
             [4., 0.]],
    <BLANKLINE>
            [[3., 5.],
             [0., 0.]]])
    """
    differences = image.new_zeros(2, *image.shape)
    torch.sub(image[..., 1:], image[..., :-1], out=differences[0, ..., :-1])
    torch.sub(image[..., 1:, :], image[..., :-1, :], out=differences[1, ..., :-1, :])
    return differences


def adjoint_differences(pair: Tensor) -> Tensor:
    """Dᵀ p, the adjoint of `forward_differences`: ⟨D μ, p⟩ = ⟨μ, Dᵀ p⟩."""
    across, down = pair[0], pair[1]
    image = torch.zeros_like(across)
    image[..., :-1] -= across[..., :-1]
    image[..., 1:] += across[..., :-1]
    image[..., :-1, :] -= down[..., :-1, :]
    image[..., 1:, :] += down[..., :-1, :]
    return image


def total_variation(image: Tensor) -> Tensor:
    """Σ √(dx² + dy²) over the pixels and channels of (..., C, H, W), the paper's Ω; shape (...)."""
    return forward_differences(image).pow(2).sum(0).sqrt().sum((-3, -2, -1))


def shrink_into_box(value: Tensor, threshold: Tensor | float, lower: Tensor, upper: Tensor) -> Tensor:
    """argmin over lower ≤ m ≤ upper of threshold·|m| + (m − value)²/2: soft thresholding, then the box.

    Exact where lower ≤ 0 ≤ upper: the function is convex in each pixel, so the point of the box that is nearest to the
    free minimum is the minimum in the box. Values below the threshold become exactly zero.
    """
    return torch.clamp(torch.nn.functional.relu(value - threshold) - torch.nn.functional.relu(-value - threshold),
                       min=lower, max=upper)  # fmt: skip


def into_unit_discs(pair: Tensor) -> Tensor:
    """The nearest pairs (2, ...) of length at most 1: the proximal step of the dual of a sum of lengths."""
    return pair / pair.pow(2).sum(0).sqrt().clamp(min=1)


@dataclass(frozen=True, eq=False)
class Problem:
    """R problems for each of N images: margins (N, R, K) to bring to −γ or below within a box.

    Args:
        margins: the margins as functions of shifts (N, R, m) with m = C·H·W.
        sigma: the noise level, (N,).
        gamma: (N, R, K).
        lower, upper: the ends of the box for μ, (N, m), with 0 between them.
        shape: (C, H, W).
        memory: the weight, below 1, of earlier steps in an average of gradients, which smooths the kinks of a network
            that no noise rounds off; 0 for the gradient of each step alone.
    """

    margins: Margins
    sigma: Tensor
    gamma: Tensor
    lower: Tensor
    upper: Tensor
    shape: tuple[int, ...]
    memory: float = 0.0

    @cached_property
    def reach(self) -> tuple[Tensor, Tensor]:
        """The least and the largest distance that `Scales` derives the steps from, (N, 1) each."""
        width = (self.upper - self.lower).amax(-1, keepdim=True)
        return 1e-3 * torch.where(torch.isinf(width), SHORTEST, width), 4 * width

    def excess(self, shift: Tensor) -> Tensor:
        """The largest margin + γ, (N, R): at most 0 where the shift is feasible."""
        return (self.margins.at(shift, self.sigma.unsqueeze(1)) + self.gamma).amax(-1)

    def objective(self, shift: Tensor) -> Tensor:
        """‖μ‖₁ + TV(μ), (N, R)."""
        return shift.abs().sum(-1) + total_variation(shift.unflatten(-1, self.shape))


@dataclass(frozen=True, eq=False)
class Iterate:
    """The state of the method: μ (N, R, m), p (N, R, 2, C, H, W) and λ (N, R, K)."""

    shift: Tensor
    pair: Tensor
    multipliers: Tensor
    kept: Tensor
    """The cheapest feasible μ seen so far, (N, R, m); μ itself where there was none."""

    @classmethod
    def start(cls, problem: Problem) -> Iterate:
        n, r, _ = problem.gamma.shape
        shift = problem.lower.new_zeros(n, r, problem.lower.shape[-1])
        return cls(shift, shift.new_zeros(n, r, 2, *problem.shape), torch.zeros_like(problem.gamma), shift)

    def updated(self, images: Tensor, other: Iterate) -> Iterate:
        """This iterate with that of the images with these indices replaced by `other`."""
        return Iterate(
            self.shift.index_copy(0, images, other.shift),
            self.pair.index_copy(0, images, other.pair),
            self.multipliers.index_copy(0, images, other.multipliers),
            self.kept.index_copy(0, images, other.kept),
        )


@dataclass(frozen=True, eq=False)
class Scales:
    """The sizes of steps, which make the method independent of units.

    They are computed anew at every step: away from μ = 0 margins can be many times steeper than there.
    """

    stride: Tensor
    """τ, (N, R)."""
    dual: Tensor
    """s, (N, R)."""
    penalty: Tensor
    """ρ, (N, R, K)."""
    steepest: Tensor
    """max|∇margin|, (N, R, K)."""

    @classmethod
    def at(cls, problem: Problem, shift: Tensor, value: Tensor, gradients: Tensor) -> Scales:
        """From the margins (N, R, K) and their gradients (N, R, K, m) at a shift.

        τ follows from how far μ = 0 is from where the linearized margins hold, ρ from how steep they are.
        """
        squares = gradients.square().sum(-1).clamp(min=1e-30)
        at_rest = value + problem.gamma - (gradients @ shift.unsqueeze(-1)).squeeze(-1)
        distance = (at_rest * squares.rsqrt()).amax(-1)
        stride = STRIDE * torch.clamp(distance, *problem.reach)
        overlap: Tensor | float = 1.0
        if squares.shape[-1] > 1:  # at least the largest eigenvalue of the products of the gradients' directions
            units = gradients * squares.rsqrt().unsqueeze(-1)
            overlap = torch.linalg.matrix_norm(units @ units.mT, ord="fro").unsqueeze(-1)
        penalty = SHARE / (stride.unsqueeze(-1) * overlap * squares)
        return cls(stride, SHARE / (LARGEST_SQUARE * stride), penalty, gradients.abs().amax(-1).clamp(min=1e-20))


def descend(problem: Problem, start: Iterate, iterations: int, smoother: float = SMOOTHER) -> Iterate:
    """The iteration from a start, with noise σ·`smoother` at first and σ from the middle on.

    To go on from a solution, `smoother` = 1 keeps σ throughout.
    """
    lower, upper = problem.lower.unsqueeze(1), problem.upper.unsqueeze(1)
    shift, pair, multipliers = start.shift, start.pair.movedim(2, 0).contiguous(), start.multipliers
    kept, cost, gradients = shift, torch.full_like(shift[..., 0], torch.inf), None
    with progress_bar("sparse and smooth", iterations) as show:
        for step in range(iterations):
            show(step)
            done = step / iterations
            widening = max(1.0, smoother ** (1 - 2 * done))
            here = problem.margins.with_slopes(shift, widening * problem.sigma.unsqueeze(1))
            latest = here.gradients()
            gradients = latest if gradients is None else torch.lerp(latest, gradients, problem.memory)
            scales = Scales.at(problem, shift, here.value, gradients)
            excess = here.value + problem.gamma
            if widening == 1 and step % CHECKED == 0:
                kept, cost = _cheaper(problem, (kept, cost), shift, excess.amax(-1) <= 0)
            most = STEEPEST[0] * (STEEPEST[1] / STEEPEST[0]) ** done / scales.steepest
            multipliers = torch.minimum(torch.relu(multipliers + scales.penalty * excess), most)
            stride = scales.stride.unsqueeze(-1)
            slope = (multipliers.unsqueeze(-2) @ gradients).squeeze(-2) + adjoint_differences(pair).flatten(-3)
            moved = shrink_into_box(shift - stride * slope, stride, lower, upper)
            ahead = (2 * moved - shift).unflatten(-1, problem.shape)
            dual = scales.dual.reshape(*scales.dual.shape, 1, 1, 1)
            pair = into_unit_discs(pair + dual * forward_differences(ahead))
            shift = moved
    kept = torch.where(torch.isinf(cost).unsqueeze(-1), shift, kept)
    return Iterate(shift, pair.movedim(0, 2), multipliers, kept)


def _cheaper(problem: Problem, best: tuple[Tensor, Tensor], shift: Tensor, feasible: Tensor) -> tuple[Tensor, Tensor]:
    """The better of the best shift so far, with its objective, and a new one where that is feasible."""
    objective = torch.where(feasible, problem.objective(shift), torch.inf)
    better = objective < best[1]
    return torch.where(better.unsqueeze(-1), shift, best[0]), torch.where(better, objective, best[1])


def finished(problem: Problem, last: Iterate) -> Iterate:
    """The best of some candidates: the last shift, as it is and tidied, and the one kept on the way.

    Each is first scaled to the edge of what is feasible. Where none is feasible, the one that misses least is taken.
    """
    size = last.shift.abs()
    tidied = [torch.where(size > share * size.amax(-1, keepdim=True), last.shift, 0.0) for share in (0.0, *TIDY)]
    shift, excess = last.kept, torch.full_like(size[..., 0], torch.inf)
    objective, zeros = excess, torch.full_like(excess, -1, dtype=torch.int64)
    for candidate in (last.kept, *tidied):
        scaled = stretched(problem, candidate, edge(problem, candidate))
        scaled_excess, scaled_zeros = problem.excess(scaled), (scaled == 0).sum(-1)
        value = torch.where(scaled_excess <= 0, problem.objective(scaled), torch.inf)
        better = (value <= objective * (1 + INDIFFERENT)) & ((scaled_zeros > zeros) | (value < objective))
        better = torch.where(torch.isinf(objective) & torch.isinf(value), scaled_excess < excess, better)
        shift = torch.where(better.unsqueeze(-1), scaled, shift)
        objective = torch.where(better, torch.minimum(value, objective), objective)
        zeros, excess = torch.where(better, scaled_zeros, zeros), torch.where(better, scaled_excess, excess)
    return replace(last, shift=shift, kept=shift)


def cheapest(problem: Problem, solution: Iterate) -> tuple[Tensor, Tensor]:
    """For each image the problem with the least objective among the feasible ones, or else the least excess.

    Returns indices of the images and of their problems, (N, 1) each, as `entries` takes them.
    """
    excess = problem.excess(solution.shift)
    feasible = excess <= 0
    objective = torch.where(feasible, problem.objective(solution.shift), torch.inf)
    chosen = torch.where(
        feasible.any(1, keepdim=True), objective.argmin(1, keepdim=True), excess.argmin(1, keepdim=True)
    )
    return torch.arange(len(chosen), device=chosen.device).unsqueeze(1), chosen


def stretched(problem: Problem, shift: Tensor, t: Tensor) -> Tensor:
    """clip(tμ) for shifts (N, R, m) and t (N, R)."""
    return torch.clamp(t.unsqueeze(-1) * shift, min=problem.lower.unsqueeze(1), max=problem.upper.unsqueeze(1))


def edge(problem: Problem, shift: Tensor) -> Tensor:
    """The smallest t, (N, R), for which clip(tμ) is feasible, found by halving below the first feasible one of `ENDS`.

    It is 1 where none of `ENDS` is feasible.
    """

    def feasible_at(t: Tensor) -> Tensor:
        return problem.excess(stretched(problem, shift, t)) <= 0

    high = torch.full_like(shift[..., 0], torch.inf)
    for end in ENDS:
        high = torch.where(torch.isinf(high) & feasible_at(torch.full_like(high, end)), end, high)
        if bool(torch.isfinite(high).all()):
            break
    feasible, low, high = torch.isfinite(high), torch.zeros_like(high), high.nan_to_num(posinf=ENDS[-1])
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        enough = feasible_at(middle)
        high, low = torch.where(enough, middle, high), torch.where(enough, low, middle)
    return torch.where(feasible, high, 1.0)


def least_in_box(slope: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """min over lower ≤ m ≤ upper of slope·m + |m|, where lower ≤ 0 ≤ upper: at 0 or at an end."""
    at_ends = torch.minimum(slope * lower + lower.abs(), slope * upper + upper.abs())
    return at_ends.clamp(max=0)


def lower_bound(problem: Problem, solution: Iterate) -> Tensor:
    """The lower bound (N, R) of the objective, which the module's docstring explains.

    It starts from the multipliers of the solution, which the same method improves on the linearized problem. The
    gradients are fixed there, so a step needs no product with the network. Two things tighten the bound: the box is cut
    to |μ| ≤ ‖μ*‖₁ + TV(μ*), beyond which nothing is better, and the multipliers are also tried scaled down until
    |c| ≤ 1, where the second sum is 0.
    """
    here = problem.margins.with_slopes(solution.shift, problem.sigma.unsqueeze(1))
    gradients = here.gradients()
    scales = Scales.at(problem, solution.shift, here.value, gradients)
    rest = here.value + problem.gamma - (gradients @ solution.shift.unsqueeze(-1)).squeeze(-1)
    cost = problem.objective(solution.shift).unsqueeze(-1)
    lower, upper = torch.maximum(problem.lower.unsqueeze(1), -cost), torch.minimum(problem.upper.unsqueeze(1), cost)
    stride, dual = scales.stride.unsqueeze(-1), scales.dual.reshape(*scales.dual.shape, 1, 1, 1)
    shift, pair, multipliers = solution.shift, solution.pair.movedim(2, 0).contiguous(), solution.multipliers
    best = torch.zeros_like(scales.stride)
    for step in range(BOUND_ITERATIONS + 1):
        slope = (multipliers.unsqueeze(-2) @ gradients).squeeze(-2) + adjoint_differences(pair).flatten(-3)
        if step % BOUND_CHECKED == 0:
            first_sum = (multipliers * rest).sum(-1)
            unscaled = first_sum + least_in_box(slope, lower, upper).sum(-1)
            scaled_down = first_sum / slope.abs().amax(-1).clamp(min=1)
            best = torch.maximum(best, torch.maximum(unscaled, scaled_down))
        moved = shrink_into_box(shift - stride * slope, stride, lower, upper)
        ahead = 2 * moved - shift
        pair = into_unit_discs(pair + dual * forward_differences(ahead.unflatten(-1, problem.shape)))
        excess = rest + (gradients @ ahead.unsqueeze(-1)).squeeze(-1)
        multipliers = torch.relu(multipliers + scales.penalty * excess)
        shift = moved
    return best
