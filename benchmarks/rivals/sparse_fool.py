"""SparseFool: Modas, Moosavi-Dezfooli, Frossard, CVPR 2019 (arXiv:1811.02248)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from benchmarks.rivals.problem import Best, Problem, over_images
from benchmarks.rivals.proximal import l1_tv_in_box

REACHES = (1.0, 1.5, 2.0, 3.0)
"""λ of the paper, which recommends 3 and trades sparsity for speed with it; one run each."""

OVERSHOOT = 0.02
SMALLEST_STEP = 1e-4
BEYOND = 1e-3
NEIGHBOURHOODS = (1, 3, 5, 7)
SMOOTHINGS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
LONGEST_RESCALE = 20.0


def sparse_fool(problem: Problem, *, reaches: tuple[float, ...] = REACHES, rounds: int = 20) -> Tensor:
    """Until margin ≤ −γ: DeepFool to the boundary, then the sparsest way to its tangent plane there, pixel by pixel."""
    best = Best(problem)
    for reach in reaches:
        one_run(problem, best, reach, 1, rounds)
    return best.result()


def sparse_fool_tv(
    problem: Problem,
    *,
    reaches: tuple[float, ...] = REACHES,
    neighbourhoods: tuple[int, ...] = NEIGHBOURHOODS,
    rounds: int = 20,
) -> Tensor:
    """SparseFool has no objective to add TV to, so: pixels are taken in the order of the plane's normal averaged over
    k×k neighbours, which makes patches, and every result is smoothed by proxes of w(‖·‖₁ + TV) and rescaled to the
    boundary. All λ, k and w are tried, and the best kept."""
    best = Best(problem)
    for reach in reaches:
        for neighbours in neighbourhoods:
            smoothed(problem, best, one_run(problem, best, reach, neighbours, rounds))
    smoothed(problem, best, best.mu)
    return best.result()


def one_run(problem: Problem, best: Best, reach: float, neighbours: int, rounds: int) -> Tensor:
    """μ of the first round at which (1 + overshoot)·μ is feasible, or of the last."""
    mu = torch.zeros_like(problem.lower)
    with torch.no_grad():
        done = problem.reached(problem.margin(mu))
    for _ in range(rounds):
        normal, target = deepfool(problem, mu, done, reach)
        mu = torch.where(over_images(done), mu, linear_solver(problem, mu, normal, target, neighbours))
        done = done | best.see(problem.clip((1 + OVERSHOOT) * mu))
        if bool(done.all()):
            break
    best.polish(mu)
    return mu


def deepfool(problem: Problem, mu: Tensor, skip: Tensor, reach: float, rounds: int = 50) -> tuple[Tensor, Tensor]:
    """Normal of the boundary at DeepFool's point μ + r (gradient of −margin), and the target μ + λr. No box here."""
    total, done = torch.zeros_like(mu), skip
    for _ in range(rounds):
        if bool(done.all()):
            break
        total = torch.where(over_images(done), total, total + nearest_plane(problem, mu + total))
        with torch.no_grad():
            done = done | problem.reached(problem.margin(mu + (1 + OVERSHOOT) * total))
    _, gradient = problem.descent(mu + total)
    return -gradient, mu + reach * total


def nearest_plane(problem: Problem, mu: Tensor) -> Tensor:
    """Step to the nearest of the linearized boundaries E_k − E_label = γ: |f_k|/‖w_k‖² · w_k."""
    scores, slopes = jacobian(problem, mu)
    images = torch.arange(len(scores), device=mu.device)
    gaps = (scores - scores[images, problem.labels, None] - problem.gamma[:, None]).abs()
    normals = slopes - slopes[images, problem.labels, None]
    lengths = normals.flatten(2).norm(dim=2).clamp_min(torch.finfo(mu.dtype).eps)
    distances = (gaps / lengths).scatter(1, problem.labels[:, None], torch.inf)
    distance, nearest = distances.min(1)
    direction = normals[images, nearest] / over_images(lengths[images, nearest])
    return over_images(distance.clamp_min(SMALLEST_STEP)) * direction


def jacobian(problem: Problem, mu: Tensor) -> tuple[Tensor, Tensor]:
    """Scores (N, d) and their gradients (N, d, C, H, W)."""
    mu = mu.detach().requires_grad_()
    scores = problem.scores(mu)
    rows = [torch.autograd.grad(scores[:, k].sum(), mu, retain_graph=True)[0] for k in range(scores.shape[1])]
    return scores.detach(), torch.stack(rows, 1)


def linear_solver(problem: Problem, mu: Tensor, normal: Tensor, target: Tensor, neighbours: int) -> Tensor:
    """The paper's LinearSolver in closed form: each pixel in turn moves to the plane w·(x − target) = 0 or to the box.

    Pixels come in the order of |w|, here of w averaged over neighbours, with w's own sign; those where the average has
    another sign come last. Gain of a pixel: |w|·room. Pixels before the gains add up to what is missing move all the
    way, the next one part of it.
    """
    room = torch.where(normal > 0, problem.upper - mu, mu - problem.lower)
    gain = (normal.abs() * room).flatten(1)
    average = avg_pool2d(normal, neighbours, 1, neighbours // 2, count_include_pad=True)
    order = (average * normal.sign()).flatten(1).argsort(1, descending=True)
    missing = (normal * (target - mu)).flatten(1).sum(1, keepdim=True) + BEYOND
    gained = gain.gather(1, order).cumsum(1)
    earlier = gained - gain.gather(1, order)
    share = ((missing - earlier) / gain.gather(1, order).clamp_min(torch.finfo(mu.dtype).tiny)).clamp(0, 1)
    moved = torch.zeros_like(share).scatter(1, order, share).view_as(mu)
    return problem.clip(mu + moved * room * normal.sign())


def smoothed(problem: Problem, best: Best, mu: Tensor) -> None:
    """Polish the proxes of w(‖·‖₁ + TV) at μ for weights w relative to max |μ|."""
    one = torch.ones_like(over_images(problem.gamma))
    largest = mu.abs().amax((1, 2, 3), keepdim=True)
    for smoothing in SMOOTHINGS:
        shrink = l1_tv_in_box(problem.lower, problem.upper, iterations=100)
        best.polish(shrink(mu, smoothing * largest, one), LONGEST_RESCALE)
