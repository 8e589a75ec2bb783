"""StrAttack, the structured attack: Xu, Liu, Zhao, Chen, Zhang, Fan and others, ICLR 2019 (arXiv:1808.01664)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from benchmarks.rivals.problem import Best, Problem, Tradeoff, over_images
from benchmarks.rivals.proximal import l1_tv_in_box

Block = Callable[[Tensor], Tensor]
"""One term of the objective: its prox with penalty ρ."""

RHO, ALPHA, TAU, SQUARE = 1.0, 5.0, 2.0, 1.0
FIRST_C, GROWTH = 1.0, 5.0
REFINING_SQUARE = 0.01
SMALLEST_KEPT = 0.03
"""Refinement drops this share of the moved pixels, those that moved least."""

SIZE = 2
SHIFTS = tuple((down, right) for down in range(SIZE) for right in range(SIZE))


def str_attack(problem: Problem, *, tau: float = TAU, searches: int = 9, iterations: int = 1000) -> Tensor:
    """min c·max(margin + γ, 0) + ‖μ‖₂² + τ Σ over 2×2 groups ‖μ_g‖₂ in the box, by ADMM; then refined on its support.

    The groups slide by one pixel: four partitions of the image, each a block of its own.
    """
    best = Best(problem)
    search(problem, best, [*sliding_groups(tau), shrink_square(SQUARE), problem.clip], searches, iterations)
    narrow = on_support(problem, best.mu)
    search(narrow, best, [narrow.clip, shrink_square(REFINING_SQUARE)], searches, refinements(iterations))
    return best.result()


def str_attack_tv(problem: Problem, *, tau: float = 0.1, searches: int = 9, iterations: int = 1000) -> Tensor:
    """min c·max(margin + γ, 0) + ‖μ‖₁ + TV(μ) + τ Σ ‖μ_g‖₂ in the box: the block of the square becomes that of ℓ1 + TV.

    Refinement is the same without groups, on the support. τ is small: the groups now only help.
    """
    best = Best(problem)
    search(problem, best, [shrink_l1_tv(problem), *sliding_groups(tau), problem.clip], searches, iterations)
    narrow = on_support(problem, best.mu)
    search(narrow, best, [shrink_l1_tv(narrow), narrow.clip], searches, refinements(iterations))
    return best.result()


def refinements(iterations: int) -> int:
    """Two fifths of the iterations, at least one: the authors' 400 for 1000."""
    return max(2 * iterations // 5, 1)


def on_support(problem: Problem, mu: Tensor) -> Problem:
    """The problem with every pixel held that μ does not move, or hardly."""
    support = largest_pixels(mu)
    return replace(problem, lower=problem.lower * support, upper=problem.upper * support)


def search(problem: Problem, best: Best, blocks: list[Block], searches: int, iterations: int) -> None:
    tradeoff = Tradeoff(problem, FIRST_C, GROWTH)
    for _ in range(searches):
        tradeoff.update(admm(problem, best, blocks, tradeoff.c, iterations))


def admm(problem: Problem, best: Best, blocks: list[Block], c: Tensor, iterations: int) -> Tensor:
    """Consensus ADMM with the margin linearized: yᵢ = proxᵢ(z − uᵢ), uᵢ ← uᵢ + yᵢ − z,
    z ← (ηz + ρ Σ(yᵢ + uᵢ) − c∇f(z))/(η + ρ·blocks), η = α√k. The first block's y, clipped, is the candidate."""
    z = torch.zeros_like(problem.lower)
    duals = [torch.zeros_like(z) for _ in blocks]
    succeeded = torch.zeros_like(c, dtype=torch.bool)
    candidate = z
    for k in range(iterations):
        parts = [block(z - u) for block, u in zip(blocks, duals, strict=True)]
        margins, gradient = problem.descent(z)
        slope = over_images(c * (margins > -problem.gamma)) * gradient
        pulled = sum((y + u for y, u in zip(parts, duals, strict=True)), torch.zeros_like(z))
        eta = ALPHA * (k + 1) ** 0.5
        z = (eta * z + RHO * pulled - slope) / (eta + RHO * len(blocks))
        duals = [u + y - z for y, u in zip(parts, duals, strict=True)]
        candidate = problem.clip(parts[0])
        succeeded |= best.see(candidate)
    best.polish(candidate)
    return succeeded


def shrink_square(weight: float) -> Block:
    """prox of weight·‖·‖₂²: y·ρ/(ρ + 2·weight)."""
    return lambda y: y * (RHO / (RHO + 2 * weight))


def shrink_l1_tv(problem: Problem) -> Block:
    """prox of ‖·‖₁ + TV in the box."""
    shrink = l1_tv_in_box(problem.lower, problem.upper)
    threshold = torch.full_like(over_images(problem.gamma), 1 / RHO)
    return lambda y: shrink(y, threshold, torch.ones_like(threshold))


def sliding_groups(tau: float) -> list[Block]:
    return [grouped_shrink(shift, tau / RHO) for shift in SHIFTS]


def grouped_shrink(shift: tuple[int, int], threshold: float) -> Block:
    """y_g·max(1 − threshold/‖y_g‖₂, 0) for the 2×2 groups, channels together, of the image moved by `shift`."""
    down, right = shift

    def shrink(y: Tensor) -> Tensor:
        height, width = y.shape[-2:]
        padded = pad(y, (right, (-width - right) % SIZE, down, (-height - down) % SIZE))
        cells = padded.unflatten(-1, (-1, SIZE)).unflatten(-3, (-1, SIZE))
        norm = cells.square().sum((1, 3, 5), keepdim=True).sqrt().clamp_min(torch.finfo(y.dtype).tiny)
        shrunk = cells * (1 - threshold / norm).clamp_min(0)
        return shrunk.flatten(-2).flatten(-3, -2)[..., down : down + height, right : right + width]

    return shrink


def largest_pixels(mu: Tensor) -> Tensor:
    """1 where |μ| is among all but the smallest 3 % of an image's moved pixels, otherwise 0."""
    sizes = mu.abs().flatten(1)
    moved = torch.where(sizes > 0, sizes, torch.nan)
    least = torch.nan_to_num(torch.nanquantile(moved, SMALLEST_KEPT, dim=1))
    return (mu.abs() > over_images(least)).to(mu)
