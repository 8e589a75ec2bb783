"""The rival attacks of the benchmark: in the box, over the boundary, no worse than their start, near known optima."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import Tensor

import netmoments as nm
from benchmarks.rivals import (
    RIVALS,
    Problem,
    ead,
    ead_tv,
    pdpgd_l1,
    pdpgd_l1_tv,
    sparse_fool,
    sparse_fool_tv,
    str_attack,
    str_attack_tv,
)
from benchmarks.rivals.problem import Best
from benchmarks.rivals.proximal import (
    differences,
    differences_transposed,
    inside,
    l1_in_box,
    l1_tv_in_box,
    soft,
    total_variation,
)
from benchmarks.rivals.sparse_fool import linear_solver
from benchmarks.rivals.str_attack import grouped_shrink
from tests.closeness import assert_close

BUDGETS: dict[str, Callable[[Problem], Tensor]] = {
    "PDPGD": partial(pdpgd_l1, rates=(0.1,), iterations=150),
    "PDPGD + TV": partial(pdpgd_l1_tv, rates=(0.1,), iterations=150),
    "EAD": partial(ead, searches=6, iterations=30),
    "EAD + TV": partial(ead_tv, searches=6, iterations=30),
    "StrAttack": partial(str_attack, searches=4, iterations=30),
    "StrAttack + TV": partial(str_attack_tv, searches=4, iterations=30),
    "SparseFool": partial(sparse_fool, reaches=(1.0, 3.0)),
    "SparseFool + TV": partial(sparse_fool_tv, reaches=(1.0,), neighbourhoods=(1, 3)),
}


def expected_scores(generator: torch.Generator, images: Tensor, units: int = 24, classes: int = 3) -> Callable:
    """μ → E of B relu(A(M + μ + noise)) with a network of its own for each image, noise of a grey level."""
    size = images[0].numel()
    A = torch.randn(len(images), units, size, generator=generator) / size**0.5
    B = torch.randn(len(images), classes, units, generator=generator) / units**0.5
    s = A.norm(dim=-1) / 255

    def scores(mu: Tensor) -> Tensor:
        z = A @ (images + mu).flatten(1)[..., None]
        return (B @ nm.relu_mean(z[..., 0], s)[..., None])[..., 0]

    return scores


@cache
def small() -> Problem:
    """Four images of 8×8 with 3 classes; the box of the last is too small to get anywhere."""
    generator = torch.Generator().manual_seed(20261115)
    images = torch.rand(4, 1, 8, 8, generator=generator)
    scores = expected_scores(generator, images)
    room = torch.tensor([1.0, 1.0, 1.0, 1e-4])[:, None, None, None]
    labels = scores(torch.zeros_like(images)).argmax(1)
    gamma = torch.tensor([0.0, 0.01, 0.05, 0.05])
    return Problem(scores, labels, -images * room, (1 - images) * room, gamma)


@cache
def answer(name: str) -> Tensor:
    """What the rival makes of the small problem."""
    return BUDGETS[name](small())


def affine(generator: torch.Generator, pixels: int = 40) -> tuple[Problem, Tensor]:
    """Margin b + w·μ over `pixels` channels of 1×1 images, where TV = 0 and the objective is ‖μ‖₁; and the slopes w."""
    slopes = torch.randn(5, pixels, 1, 1, generator=generator)
    lower, upper = (sign * torch.rand(5, pixels, 1, 1, generator=generator) for sign in (-1.0, 1.0))

    def scores(mu: Tensor) -> Tensor:
        margin = 4 + (slopes * mu).sum((1, 2, 3))
        return torch.stack([margin, torch.zeros_like(margin)], 1)

    return Problem(scores, torch.zeros(5, dtype=torch.long), lower, upper, torch.full((5,), 0.1)), slopes


def least_l1(problem: Problem, slopes: Tensor, needed: float) -> Tensor:
    """Least ‖μ‖₁ with w·μ = −needed in the box: pixels in the order of |w|, each to its bound until it is enough."""
    room = torch.where(slopes > 0, -problem.lower, problem.upper).flatten(1)
    found = []
    for steepness, free in zip(slopes.abs().flatten(1), room, strict=True):
        left, length = needed, 0.0
        for pixel in steepness.argsort(descending=True).tolist():
            step = min(float(free[pixel]), left / float(steepness[pixel]))
            left, length = left - step * float(steepness[pixel]), length + step
        assert left < 1e-4, "the box is too small"
        found.append(length)
    return torch.tensor(found)


def test_every_rival_is_tried():
    assert BUDGETS.keys() == RIVALS.keys()


@pytest.mark.parametrize("name", BUDGETS)
def test_rival_stays_in_the_box_and_gets_over_the_boundary(name):
    problem, mu = small(), answer(name)
    assert torch.isfinite(mu).all()
    assert ((mu >= problem.lower) & (mu <= problem.upper)).all()
    assert problem.feasible(mu).tolist() == [True, True, True, False]
    start, objective = Best(problem), problem.objective(mu)[:3]
    assert (objective <= start.objective[:3]).all()
    assert (objective < 0.9 * start.objective[:3]).all(), "a dense start is easy to improve on"


@pytest.mark.parametrize("name", ["PDPGD", "EAD", "StrAttack"])
def test_total_variation_in_the_objective_helps(name):
    plain, smooth = (small().objective(answer(name + ending))[:3].mean() for ending in ("", " + TV"))
    assert smooth < plain


@pytest.mark.parametrize("name", BUDGETS)
def test_rival_leaves_alone_what_is_over_the_boundary_already(name):
    already = replace(small(), labels=(small().labels + 1) % 3, gamma=torch.zeros(4))
    attack = BUDGETS[name] if "Fool" in name else partial(RIVALS[name], iterations=5)
    assert (attack(already) == 0).all()


@pytest.mark.parametrize(
    ("attack", "factor"),
    [
        (partial(ead, iterations=200), 1.1),  # its objective has a square, which spreads μ
        (partial(ead_tv, iterations=50), 1.1),  # no square, and no TV in 1×1 images; fewer iterations
        (partial(pdpgd_l1, iterations=500), 1.02),
        (partial(pdpgd_l1_tv, rates=(0.1,), iterations=300), 1.02),
        (sparse_fool, 1.001),  # its linear solver is exact here; the polish undoes its overshoot
    ],
    ids=["EAD", "EAD + TV", "PDPGD", "PDPGD + TV", "SparseFool"],
)
def test_affine_margin_is_solved(attack, factor, generator):
    problem, slopes = affine(generator)
    mu = attack(problem)
    least = least_l1(problem, slopes, 4.1)
    ratio = problem.objective(mu) / least
    assert problem.feasible(mu).all()
    assert (ratio > 1 - 1e-4).all(), f"better than the optimum: {ratio}"
    assert (ratio < factor).all(), f"{ratio} times the optimum"


def test_total_variation_is_isotropic_with_forward_differences():
    mu = torch.tensor([[[[1.0, 4.0], [5.0, 0.0]]], [[[0.0, 0.0], [0.0, 2.0]]]])
    # |(4, 3)| + |−4 down| + |−5 right| + 0; in the other image the corner is reached from above and from the left
    assert_close(total_variation(mu), [5.0 + 4.0 + 5.0, 4.0], atol=1e-6)


def test_differences_and_their_transpose_are_adjoint(generator):
    mu = torch.randn(2, 3, 5, 4, dtype=torch.float64, generator=generator)
    flow = torch.randn(2, 2, 3, 5, 4, dtype=torch.float64, generator=generator)
    assert_close((differences(mu) * flow).sum(), (mu * differences_transposed(flow)).sum(), atol=1e-12)


def reference_prox(point: Tensor, weight: Tensor, metric: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Chambolle and Pock's primal-dual iteration, 4000 times, with constant steps and the square in the primal prox."""
    z = sliding = torch.zeros_like(point)
    flow = torch.zeros_like(differences(point))
    step = 8**-0.5
    for _ in range(4000):
        flow = inside(flow + step * differences(sliding), weight)
        pull = z - step * differences_transposed(flow)
        share = metric / (metric + step)
        before, z = z, soft(share * pull + (1 - share) * point, share * step * weight).clamp(lower, upper)
        sliding = 2 * z - before
    return z


@pytest.mark.parametrize("uneven", [0.0, 1.0], ids=["even metric", "uneven metric"])
def test_prox_of_l1_and_tv_agrees_with_a_long_run(uneven, generator):
    point = torch.randn(3, 2, 8, 8, dtype=torch.float64, generator=generator)
    metric = torch.exp(uneven * torch.randn(3, 2, 8, 8, dtype=torch.float64, generator=generator))
    weight = torch.tensor([0.05, 0.2, 0.5], dtype=torch.float64)[:, None, None, None]
    lower, upper = torch.full_like(point, -1.0), torch.full_like(point, 0.7)
    exact = reference_prox(point, weight, metric, lower, upper)
    long = l1_tv_in_box(lower, upper, iterations=1500)(point, weight, metric)
    assert_close(long, exact, atol=1e-5, what="both to the end")
    shrink = l1_tv_in_box(lower, upper)
    once, *_, warm = (shrink(point, weight, metric) for _ in range(20))
    assert_close(once, exact, atol=0.1, what="20 iterations; the points are of size 1")
    assert_close(warm, exact, atol=0.005, what="20 calls, each from where the last one stopped")


def test_prox_without_total_variation_is_the_soft_threshold(generator):
    point = torch.randn(2, 3, 1, 1, generator=generator)
    weight = torch.tensor([0.1, 0.4])[:, None, None, None]
    lower, upper = torch.full_like(point, -0.5), torch.full_like(point, 0.5)
    both = [make(lower, upper)(point, weight, torch.ones_like(weight)) for make in (l1_in_box, l1_tv_in_box)]
    assert torch.equal(*both)


def test_groups_shrink_together():
    y = torch.zeros(1, 1, 3, 4)
    y[0, 0, 0, 1], y[0, 0, 0, 2] = 3.0, 4.0
    # from the corner the pixels are in groups of their own; moved by one they share one, of norm 5
    assert_close(grouped_shrink((0, 0), 1.0)(y)[0, 0, 0], [0.0, 2.0, 3.0, 0.0], atol=1e-6)
    assert_close(grouped_shrink((1, 1), 1.0)(y)[0, 0, 0], [0.0, 2.4, 3.2, 0.0], atol=1e-6)


def test_linear_solver_fills_the_steepest_pixels_first():
    normal = torch.tensor([3.0, -2.0, 1.0, 0.5]).view(1, 1, 2, 2)
    box = torch.full_like(normal, 0.5)
    problem = Problem(lambda mu: mu.flatten(1), torch.zeros(1, dtype=torch.long), -box, box, torch.zeros(1))
    target = torch.tensor([0.0, 0.0, 2.0, 0.0]).view(1, 1, 2, 2)  # w·target = 2 = 1.5 by the first + 0.5 by the second
    mu = linear_solver(problem, torch.zeros_like(normal), normal, target, 1)
    assert_close(mu.flatten(), [0.5, -0.25, 0.0, 0.0], atol=1e-3)


def test_polish_stops_at_the_boundary(generator):
    problem, slopes = affine(generator)
    best = Best(problem)
    dense = problem.clip(-slopes)
    best.polish(dense)
    start = (slopes * dense).sum((1, 2, 3))
    assert (start < -4.1).all()
    assert (best.objective <= problem.objective(dense) * (-4.1 / start) * (1 + 1e-4)).all()
