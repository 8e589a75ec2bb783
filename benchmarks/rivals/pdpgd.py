"""PDPGD, primal-dual proximal gradient descent: Matyasko, Chau 2021 (arXiv:2106.01538), the ℓ1 attack."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.rivals.problem import Best, Problem, over_images
from benchmarks.rivals.proximal import Shrink, l1_in_box, l1_tv_in_box

RATES = (0.3, 0.1, 0.03)
"""Primal learning rates, one run each; 0.1 is the authors'."""

RATE_DECAY = 0.01
DUAL_RATE, DUAL_DECAY, DUAL_AVERAGE = 0.1, 0.1, 0.9
FIRST_RATIO, SMALLEST_RATIO = 0.01, 1e-6
MOMENTUM, SQUARED_MOMENTUM = 0.9, 0.999
POLISH_EVERY = 50


def pdpgd_l1(problem: Problem, *, rates: tuple[float, ...] = RATES, iterations: int = 1000) -> Tensor:
    """min over μ, max over λ of λ₀‖μ‖₁ + λ₁·softplus(max(margin + γ, 0)), λ on the simplex: proximal Adam and ascent.

    The prox of ‖·‖₁ in Adam's metric is taken exactly, where the paper iterates.
    """
    return primal_dual(problem, l1_in_box(problem.lower, problem.upper), rates, iterations)


def pdpgd_l1_tv(problem: Problem, *, rates: tuple[float, ...] = RATES, iterations: int = 1000) -> Tensor:
    """The same with λ₀(‖μ‖₁ + TV(μ)): its prox in Adam's metric by 20 warm dual iterations."""
    return primal_dual(problem, l1_tv_in_box(problem.lower, problem.upper), rates, iterations)


def primal_dual(problem: Problem, shrink: Shrink, rates: tuple[float, ...], iterations: int) -> Tensor:
    best = Best(problem)
    for rate in rates:
        one_run(problem, best, shrink, rate, iterations)
    return best.result()


def one_run(problem: Problem, best: Best, shrink: Shrink, first_rate: float, iterations: int) -> None:
    """From μ = 0; the rate falls to a hundredth, the dual rate to a tenth. Every 50th iterate is polished."""
    mu = torch.zeros_like(problem.lower)
    adam, dual = Adam(mu), Dual(problem)
    for k in range(iterations):
        margins, gradient = problem.descent(mu)
        best.see(mu, margins)
        if k % POLISH_EVERY == POLISH_EVERY - 1:
            best.polish(mu)
        rate = first_rate * RATE_DECAY ** (k / iterations)
        direction, metric = adam.step(over_images(hinge_slope(margins + problem.gamma)) * gradient)
        mu = shrink(problem.clip(mu - rate * direction), dual.ratio, rate * metric)
        dual.ascend(margins + problem.gamma, DUAL_RATE * (1 - (1 - DUAL_DECAY) * k / iterations))
    best.polish(mu)


def hinge_slope(excess: Tensor) -> Tensor:
    """Derivative of softplus(max(x, 0)): the logistic function of x where x > 0, otherwise 0."""
    return torch.where(excess > 0, torch.sigmoid(excess), torch.zeros_like(excess))


class Dual:
    """λ = softmax(0, log-ratio), moved by the sign of the constraint and averaged; `ratio` is λ₀/λ₁."""

    def __init__(self, problem: Problem) -> None:
        self.logit = torch.full_like(problem.gamma, -torch.log(torch.tensor(FIRST_RATIO)).item())
        self.average = torch.sigmoid(self.logit)

    @property
    def ratio(self) -> Tensor:
        return over_images((1 - self.average) / self.average)

    def ascend(self, excess: Tensor, rate: float) -> None:
        largest = -torch.log(torch.tensor(SMALLEST_RATIO)).item()
        self.logit = (self.logit + rate * excess.sign()).clamp(-largest, largest)
        self.average = DUAL_AVERAGE * self.average + (1 - DUAL_AVERAGE) * torch.sigmoid(self.logit)


class Adam:
    """Averages of the gradient and its square: the direction m/(√v + ε) and the metric 1/(√v + ε)."""

    def __init__(self, mu: Tensor) -> None:
        self.mean, self.square, self.count = torch.zeros_like(mu), torch.zeros_like(mu), 0

    def step(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        self.count += 1
        self.mean = MOMENTUM * self.mean + (1 - MOMENTUM) * gradient
        self.square = SQUARED_MOMENTUM * self.square + (1 - SQUARED_MOMENTUM) * gradient**2
        root = (self.square / (1 - SQUARED_MOMENTUM**self.count)).sqrt()
        metric = 1 / (root + 1e-3 * root.amax((1, 2, 3), keepdim=True) + 1e-8)
        return self.mean / (1 - MOMENTUM**self.count) * metric, metric
