"""The sparse and smooth problem: least ‖μ‖₁ + TV(μ) with every margin at most −γ and μ in a box, many at once.

A primal–dual method with exact proximal steps (Chambolle and Pock 2011), the margins linearized anew at every step as
in Valkonen (2014), so that their kinks are walked around as they come. With h = margin + γ, a multiplier λ for each
margin, and a pair p of length at most 1 for each pixel, whose best choice makes ⟨p, Dμ⟩ the total variation:

    λ⁺ = [λ + ρh(μ)]₊,   μ⁺ = box(soft(μ − τ(λ⁺∇h(μ) + Dᵀp), τ)),   p⁺ = disc(p + sD(2μ⁺ − μ)).

It starts with larger noise, which rounds kinks off, and comes down to the noise asked for over the first half. The last
shift is tidied (what is tiny becomes zero where the objective does not mind) and scaled: the smallest t for which
clip(tμ) keeps the margins.

How far from the best it can be is a lower bound by duality. At the solution μ* the margins are linearized; the problem
with those is convex, and for any λ ≥ 0 and any p of length at most 1 a pixel,

    Σ λ(h(μ*) − ∇h(μ*)·μ*) + Σ min over lower ≤ m ≤ upper of (c m + |m|),   c = Σ λ∇h(μ*) + Dᵀp,

is below its optimum. Where it meets the objective of μ*, μ* is a stationary point of the true problem, and the best one
wherever the margins are affine between μ* and the best one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from netmoments.attacks.margins import Margins
from netmoments.progress import progress_bar

LARGEST_SQUARE = 8.0
"""‖D‖² is below this for images of any size: a pixel is in at most two differences of each direction."""


def forward_differences(image: Tensor) -> Tensor:
    """D μ: right neighbour less pixel, and lower neighbour less pixel; 0 in the last column, and in the last row.

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
    """Dᵀ p, for which ⟨D μ, p⟩ = ⟨μ, Dᵀ p⟩."""
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

    Exact where lower ≤ 0 ≤ upper: the function is convex in each pixel, so the nearest point of the box to the free
    minimum is the minimum in it. What is below the threshold is exactly zero.
    """
    return torch.clamp(torch.nn.functional.relu(value - threshold) - torch.nn.functional.relu(-value - threshold),
                       min=lower, max=upper)  # fmt: skip


def into_unit_discs(pair: Tensor) -> Tensor:
    """The nearest pairs (2, ...) of length at most 1: the dual of a sum of lengths."""
    return pair / pair.pow(2).sum(0).sqrt().clamp(min=1)


STRIDE = 0.01
"""τ as a share of the distance from μ = 0 to where the linearized margins hold."""
SHARE = 0.5
"""Of 1/τ that each of the two couplings, to p and to λ, may use up: together they keep the iteration stable."""
STEEPEST = (5.0, 50.0)
"""λ·max|∇margin| is kept below this, at the first and the last step. At an optimum it is below 5 wherever a pixel is
off its bounds (1 of the length, 4 of the differences); a margin that does not come down must not make λ run away."""
SMOOTHER = 10.0
"""How much larger the noise is at the start."""
TIDY = (1e-3, 1e-2)
"""Shares of the largest |μ| below which pixels are tried as zeros."""
INDIFFERENT = 1e-4
"""A relative increase of the objective that more zeros are worth."""
SHORTEST = 1e-6
"""Stands for the width of a box that has none, where the shortest distance is derived from it."""
CHECKED = 4
"""Steps after which it is seen whether the shift is feasible and the cheapest so far."""
ENDS = (1.0, 1.05, 1.2, 1.5, 2.0)
"""Multiples t of a shift that are tried, in order, until one is feasible; in a box a larger one need not be."""
HALVINGS = 16


@dataclass(frozen=True, eq=False)
class Problem:
    """R problems for each of N images: margins (N, R, K) to bring to −γ within a box.

    Args:
        margins: as functions of shifts (N, R, m) with m = C·H·W.
        sigma: the noise level, (N,).
        gamma: (N, R, K).
        lower, upper: what μ may be, (N, m), with 0 between them.
        shape: (C, H, W).
        memory: of the gradients from step to step, below 1: smooths the kinks of a network that no noise rounds off.
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
        """The shortest and the longest distance that steps are scaled by, (N, 1)."""
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
    """Where the method is: μ (N, R, m), p (N, R, 2, C, H, W), λ (N, R, K).

    `kept` (N, R, m) is the cheapest feasible μ seen on the way; μ itself where there was none.
    """

    shift: Tensor
    pair: Tensor
    multipliers: Tensor
    kept: Tensor

    @classmethod
    def start(cls, problem: Problem) -> Iterate:
        n, r, _ = problem.gamma.shape
        shift = problem.lower.new_zeros(n, r, problem.lower.shape[-1])
        return cls(shift, shift.new_zeros(n, r, 2, *problem.shape), torch.zeros_like(problem.gamma), shift)

    def updated(self, images: Tensor, other: Iterate) -> Iterate:
        """The other for these images, this for the rest."""
        return Iterate(
            self.shift.index_copy(0, images, other.shift),
            self.pair.index_copy(0, images, other.pair),
            self.multipliers.index_copy(0, images, other.multipliers),
            self.kept.index_copy(0, images, other.kept),
        )


@dataclass(frozen=True, eq=False)
class Scales:
    """What makes the steps independent of units: τ and s (N, R), ρ and the largest slope max|∇margin| (N, R, K).

    They are taken anew on the way: away from μ = 0 margins can be many times steeper than there.
    """

    stride: Tensor
    dual: Tensor
    penalty: Tensor
    steepest: Tensor

    @classmethod
    def at(cls, problem: Problem, shift: Tensor, value: Tensor, gradients: Tensor) -> Scales:
        """From margins and gradients at a shift: how far 0 is from where they hold, and how steep they are."""
        squares = gradients.square().sum(-1).clamp(min=1e-30)
        at_rest = value + problem.gamma - (gradients @ shift.unsqueeze(-1)).squeeze(-1)
        distance = (at_rest * squares.rsqrt()).amax(-1)
        stride = STRIDE * torch.clamp(distance, *problem.reach)
        together: Tensor | float = 1.0
        if squares.shape[-1] > 1:  # at least the largest eigenvalue of the products of the gradients' directions
            units = gradients * squares.rsqrt().unsqueeze(-1)
            together = torch.linalg.matrix_norm(units @ units.mT, ord="fro").unsqueeze(-1)
        penalty = SHARE / (stride.unsqueeze(-1) * together * squares)
        return cls(stride, SHARE / (LARGEST_SQUARE * stride), penalty, gradients.abs().amax(-1).clamp(min=1e-20))


def descend(problem: Problem, start: Iterate, iterations: int, smoother: float = SMOOTHER) -> Iterate:
    """The iteration, with σ·`smoother` at first and σ from the middle on; 1 keeps σ throughout, to go on from a
    solution."""
    lower, upper = problem.lower.unsqueeze(1), problem.upper.unsqueeze(1)
    shift, pair, multipliers = start.shift, start.pair.movedim(2, 0).contiguous(), start.multipliers
    kept, cost, gradients = shift, torch.full_like(shift[..., 0], torch.inf), None
    with progress_bar("sparse and smooth", iterations) as show:
        for step in range(iterations):
            show(step)
            done = step / iterations
            larger = max(1.0, smoother ** (1 - 2 * done))
            here = problem.margins.with_slopes(shift, larger * problem.sigma.unsqueeze(1))
            now = here.gradients()
            gradients = now if gradients is None else torch.lerp(now, gradients, problem.memory)
            scales = Scales.at(problem, shift, here.value, gradients)
            short = here.value + problem.gamma
            if larger == 1 and step % CHECKED == 0:
                kept, cost = _cheaper(problem, (kept, cost), shift, short.amax(-1) <= 0)
            most = STEEPEST[0] * (STEEPEST[1] / STEEPEST[0]) ** done / scales.steepest
            multipliers = torch.minimum(torch.relu(multipliers + scales.penalty * short), most)
            pull = (multipliers.unsqueeze(-2) @ gradients).squeeze(-2)
            stride = scales.stride.unsqueeze(-1)
            slope = pull + adjoint_differences(pair).flatten(-3)
            moved = shrink_into_box(shift - stride * slope, stride, lower, upper)
            ahead = (2 * moved - shift).unflatten(-1, problem.shape)
            dual = scales.dual.reshape(*scales.dual.shape, 1, 1, 1)
            pair = into_unit_discs(pair + dual * forward_differences(ahead))
            shift = moved
    kept = torch.where(torch.isinf(cost).unsqueeze(-1), shift, kept)
    return Iterate(shift, pair.movedim(0, 2), multipliers, kept)


def _cheaper(problem: Problem, best: tuple[Tensor, Tensor], shift: Tensor, holds: Tensor) -> tuple[Tensor, Tensor]:
    """The cheapest feasible shift so far, and its objective."""
    objective = torch.where(holds, problem.objective(shift), torch.inf)
    better = objective < best[1]
    return torch.where(better.unsqueeze(-1), shift, best[0]), torch.where(better, objective, best[1])


def finished(problem: Problem, last: Iterate) -> Iterate:
    """The last iterate tidied and scaled to the edge of what is feasible, or the best one kept on the way, scaled.

    Where no scaling is feasible, the one of them that misses the least.
    """
    size = last.shift.abs()
    tidied = [torch.where(size > share * size.amax(-1, keepdim=True), last.shift, 0.0) for share in (0.0, *TIDY)]
    shift, excess = last.kept, torch.full_like(size[..., 0], torch.inf)
    objective, zeros = excess, torch.full_like(excess, -1, dtype=torch.int64)
    for candidate in (last.kept, *tidied):
        scaled = stretched(problem, candidate, edge(problem, candidate))
        beyond, more = problem.excess(scaled), (scaled == 0).sum(-1)
        value = torch.where(beyond <= 0, problem.objective(scaled), torch.inf)
        better = (value <= objective * (1 + INDIFFERENT)) & ((more > zeros) | (value < objective))
        better = torch.where(torch.isinf(objective) & torch.isinf(value), beyond < excess, better)
        shift = torch.where(better.unsqueeze(-1), scaled, shift)
        objective = torch.where(better, torch.minimum(value, objective), objective)
        zeros, excess = torch.where(better, more, zeros), torch.where(better, beyond, excess)
    return replace(last, shift=shift, kept=shift)


def cheapest(problem: Problem, solution: Iterate) -> tuple[Tensor, Tensor]:
    """Which of the R problems of each image has the least objective of those that hold; the nearest to it if none.

    The images and their problems, (N, 1) each.
    """
    excess = problem.excess(solution.shift)
    holds = excess <= 0
    objective = torch.where(holds, problem.objective(solution.shift), torch.inf)
    chosen = torch.where(holds.any(1, keepdim=True), objective.argmin(1, keepdim=True), excess.argmin(1, keepdim=True))
    return torch.arange(len(chosen), device=chosen.device).unsqueeze(1), chosen


def stretched(problem: Problem, shift: Tensor, t: Tensor) -> Tensor:
    """clip(tμ) for shifts (N, R, m) and t (N, R)."""
    return torch.clamp(t.unsqueeze(-1) * shift, min=problem.lower.unsqueeze(1), max=problem.upper.unsqueeze(1))


def edge(problem: Problem, shift: Tensor) -> Tensor:
    """The smallest t for which clip(tμ) is feasible, by halving below the first of `ENDS` that is; 1 where none is."""

    def holds(t: Tensor) -> Tensor:
        return problem.excess(stretched(problem, shift, t)) <= 0

    high = torch.full_like(shift[..., 0], torch.inf)
    for end in ENDS:
        high = torch.where(torch.isinf(high) & holds(torch.full_like(high, end)), end, high)
        if bool(torch.isfinite(high).all()):
            break
    feasible, low, high = torch.isfinite(high), torch.zeros_like(high), high.nan_to_num(posinf=ENDS[-1])
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        true = holds(middle)
        high, low = torch.where(true, middle, high), torch.where(true, low, middle)
    return torch.where(feasible, high, 1.0)


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
    lower, upper = torch.maximum(problem.lower.unsqueeze(1), -cost), torch.minimum(problem.upper.unsqueeze(1), cost)
    stride, dual = scales.stride.unsqueeze(-1), scales.dual.reshape(*scales.dual.shape, 1, 1, 1)
    shift, pair, multipliers = solution.shift, solution.pair.movedim(2, 0).contiguous(), solution.multipliers
    best = torch.zeros_like(scales.stride)
    for step in range(ITERATIONS + 1):
        slope = (multipliers.unsqueeze(-2) @ gradients).squeeze(-2) + adjoint_differences(pair).flatten(-3)
        if step % EVERY == 0:
            level = (multipliers * rest).sum(-1)
            as_they_are = level + least_in_box(slope, lower, upper).sum(-1)
            scaled_down = level / slope.abs().amax(-1).clamp(min=1)
            best = torch.maximum(best, torch.maximum(as_they_are, scaled_down))
        moved = shrink_into_box(shift - stride * slope, stride, lower, upper)
        ahead = 2 * moved - shift
        pair = into_unit_discs(pair + dual * forward_differences(ahead.unflatten(-1, problem.shape)))
        h = rest + (gradients @ ahead.unsqueeze(-1)).squeeze(-1)
        multipliers = torch.relu(multipliers + scales.penalty * h)
        shift = moved
    return best
