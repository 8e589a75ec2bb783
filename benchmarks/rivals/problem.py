"""What every rival is asked, where it starts, and what it is given for free at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.rivals.proximal import total_variation

LONGEST = 1.5
"""The polish looks for the smallest feasible multiple of a shift between 0 and this."""

HALVINGS = 20
"""Bisections of the polish: the multiple is found to 1.5·2⁻²⁰, about float32 at grey levels."""


@dataclass(frozen=True)
class Problem:
    """min ‖μ‖₁ + TV(μ) subject to margin(μ) ≤ −γ and lower ≤ μ ≤ upper, for N images at once.

    scores: μ (N, C, H, W) → expected logits (N, d), differentiable, each image on its own; labels, gamma: (N,).
    """

    scores: Callable[[Tensor], Tensor]
    labels: Tensor
    lower: Tensor
    upper: Tensor
    gamma: Tensor

    def margin(self, mu: Tensor) -> Tensor:
        """E_label − max_{k ≠ label} E_k at the shift μ, (N,)."""
        return margin(self.scores(mu), self.labels)

    def objective(self, mu: Tensor) -> Tensor:
        """‖μ‖₁ + TV(μ), (N,)."""
        return mu.abs().sum((1, 2, 3)) + total_variation(mu)

    def reached(self, margins: Tensor) -> Tensor:
        """margin ≤ −γ, (N,)."""
        return margins <= -self.gamma

    def feasible(self, mu: Tensor) -> Tensor:
        """Inside the box and over the boundary, (N,)."""
        inside = ((mu >= self.lower) & (mu <= self.upper)).all(-1).all(-1).all(-1)
        with torch.no_grad():
            return inside & self.reached(self.margin(mu))

    def clip(self, mu: Tensor) -> Tensor:
        return mu.clamp(self.lower, self.upper)

    def descent(self, mu: Tensor) -> tuple[Tensor, Tensor]:
        """margin(μ) and its gradient, (N,) and (N, C, H, W)."""
        mu = mu.detach().requires_grad_()
        margins = self.margin(mu)
        (gradient,) = torch.autograd.grad(margins.sum(), mu)
        return margins.detach(), gradient


def margin(scores: Tensor, labels: Tensor) -> Tensor:
    """E_label − max_{k ≠ label} E_k, (N,)."""
    own = labels[:, None]
    return scores.gather(1, own).squeeze(1) - scores.scatter(1, own, -torch.inf).amax(1)


def over_images(values: Tensor) -> Tensor:
    """(N,) → (N, 1, 1, 1)."""
    return values[:, None, None, None]


def uphill(problem: Problem, steps: int = 30, width: float = 0.1) -> Tensor:
    """A dense shift far over the boundary: signed gradient steps of a tenth of the box each, from μ = 0."""
    mu = problem.clip(torch.zeros_like(problem.lower))
    stride = width * (problem.upper - problem.lower)
    lowest, best = torch.full_like(problem.gamma, torch.inf), mu
    for _ in range(steps):
        margins, gradient = problem.descent(mu)
        best = torch.where(over_images(margins < lowest), mu, best)
        lowest = torch.minimum(margins, lowest)
        mu = problem.clip(mu - stride * gradient.sign())
    return best


class Best:
    """The best feasible shift seen of every image, from μ = 0 and the dense start on.

    Where nothing feasible is ever seen, `mu` is the dense start, and `objective` infinite.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.mu = uphill(problem)
        self.objective = torch.full_like(problem.gamma, torch.inf)
        self.see(self.mu)
        self.see(problem.clip(torch.zeros_like(self.mu)))
        self.polish(self.mu)

    def see(self, mu: Tensor, margins: Tensor | None = None) -> Tensor:
        """Keep μ, which is in the box, where it is feasible and better; gives where it is feasible."""
        with torch.no_grad():
            reached = self.problem.reached(self.problem.margin(mu) if margins is None else margins)
            objective = self.problem.objective(mu)
            better = reached & (objective < self.objective)
            self.mu = torch.where(over_images(better), mu, self.mu)
            self.objective = torch.where(better, objective, self.objective)
        return reached

    def polish(self, mu: Tensor, longest: float = LONGEST) -> None:
        """See clip(t μ) at the smallest t in (0, longest] that bisection finds feasible."""
        with torch.no_grad():
            low = torch.zeros_like(self.problem.gamma)
            high = torch.where(self.see(self.problem.clip(mu)), torch.ones_like(low), longest)
            self.see(self.problem.clip(longest * mu))
            for _ in range(HALVINGS):
                middle = (low + high) / 2
                reached = self.see(self.problem.clip(over_images(middle) * mu))
                low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)

    def result(self) -> Tensor:
        """The best of all, after a last polish."""
        self.polish(self.mu)
        return self.mu


class Tradeoff:
    """The weight c of the margin, one an image: ×growth until the attack succeeds, then bisection (Carlini, Wagner)."""

    def __init__(self, problem: Problem, first: float, growth: float = 10.0) -> None:
        self.c = torch.full_like(problem.gamma, first)
        self.low = torch.zeros_like(self.c)
        self.high = torch.full_like(self.c, torch.inf)
        self.growth = growth

    def update(self, succeeded: Tensor) -> None:
        self.high = torch.where(succeeded, torch.minimum(self.high, self.c), self.high)
        self.low = torch.where(succeeded, self.low, torch.maximum(self.low, self.c))
        self.c = torch.where(self.high.isfinite(), (self.low + self.high) / 2, self.c * self.growth)
