"""EAD, the elastic-net attack: Chen, Sharma, Zhang, Yi, Hsieh, AAAI 2018 (arXiv:1709.04114)."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.rivals.problem import Best, Problem, Tradeoff, over_images
from benchmarks.rivals.proximal import Shrink, l1_in_box, l1_tv_in_box

FIRST_C = 1e-3
RATE = 0.01


def ead(problem: Problem, *, beta: float = 0.01, searches: int = 9, iterations: int = 1000) -> Tensor:
    """min c·max(margin + γ, 0) + ‖μ‖₂² + β‖μ‖₁ by FISTA, c by search, at the paper's settings (its β: 10⁻³ to 10⁻¹)."""
    return elastic(problem, l1_in_box(problem.lower, problem.upper), beta, 1.0, searches, iterations)


def ead_tv(problem: Problem, *, beta: float = 0.01, searches: int = 9, iterations: int = 1000) -> Tensor:
    """min c·max(margin + γ, 0) + β(‖μ‖₁ + TV(μ)): TV joins the prox, and the square, not in our objective, goes."""
    return elastic(problem, l1_tv_in_box(problem.lower, problem.upper), beta, 0.0, searches, iterations)


def elastic(problem: Problem, shrink: Shrink, beta: float, square: float, searches: int, iterations: int) -> Tensor:
    """Runs of FISTA at the weights c of the search; the best feasible iterate of all."""
    best, tradeoff = Best(problem), Tradeoff(problem, FIRST_C)
    for _ in range(searches):
        last, succeeded = fista(problem, best, shrink, tradeoff.c, beta, square, iterations)
        best.polish(last)
        tradeoff.update(succeeded)
    return best.result()


def fista(
    problem: Problem, best: Best, shrink: Shrink, c: Tensor, beta: float, square: float, iterations: int
) -> tuple[Tensor, Tensor]:
    """x ← shrink_β(y − α∇g(y)), y ← x + k/(k+3)·(x − x_before), α = 0.01·(1 − k/K)^½; last x, and who ever succeeded.

    As in the paper the threshold is β and not αβ: the weight of the penalty is β/α.
    """
    x = y = torch.zeros_like(problem.lower)
    one, threshold = torch.ones_like(over_images(c)), torch.full_like(over_images(c), beta)
    succeeded = torch.zeros_like(c, dtype=torch.bool)
    for k in range(iterations):
        rate = RATE * (1 - k / iterations) ** 0.5
        margins, gradient = problem.descent(y)
        slope = over_images(c * (margins > -problem.gamma)) * gradient + 2 * square * y
        before, x = x, shrink(y - rate * slope, threshold, one)
        y = x + k / (k + 3) * (x - before)
        succeeded |= best.see(x)
    return x, succeeded
