"""The solver of sparse and smooth noise: differences, steps, solutions and certificate, against convex programs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import netmoments as nm
from netmoments.attacks.primal_dual import (
    LARGEST_SQUARE,
    Iterate,
    adjoint_differences,
    descend,
    edge,
    finished,
    forward_differences,
    into_unit_discs,
    least_in_box,
    lower_bound,
    shrink_into_box,
    stretched,
    total_variation,
)
from tests.attacks.problems import SHAPE, affine_relu_affine, as_reference, problem_of, random_images
from tests.convex_reference import convex, differences, objective, successive_convex


def test_differences_are_those_of_the_matrices(generator):
    image = torch.randn(2, 3, 5, 4, generator=generator, dtype=torch.float64)
    across, down = differences(5, 4)
    ours = forward_differences(image)
    flat = image.reshape(-1, 20).numpy().T
    np.testing.assert_allclose(ours[0].reshape(-1, 20).numpy().T, across @ flat, atol=1e-15)
    np.testing.assert_allclose(ours[1].reshape(-1, 20).numpy().T, down @ flat, atol=1e-15)
    lengths = np.hypot(across @ flat, down @ flat).sum(0).reshape(2, 3).sum(1)
    np.testing.assert_allclose(total_variation(image).numpy(), lengths, rtol=1e-14)


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1), (4, 6), (2, 3, 8, 8)])
def test_the_adjoint_is_the_adjoint(generator, shape):
    image = torch.randn(*shape, generator=generator, dtype=torch.float64)
    pair = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    left, right = (forward_differences(image) * pair).sum(), (image * adjoint_differences(pair)).sum()
    torch.testing.assert_close(left, right, rtol=1e-13, atol=1e-13)


def test_the_norm_of_the_differences_is_below_its_bound(generator):
    image = torch.randn(32, 32, generator=generator, dtype=torch.float64)
    for _ in range(200):
        image = adjoint_differences(forward_differences(image / image.norm()))
    assert 0.98 * LARGEST_SQUARE < float(image.norm()) < LARGEST_SQUARE


def test_the_proximal_step_of_the_box_is_that_of_a_convex_program(generator):
    import cvxpy

    value = 3 * torch.randn(30, generator=generator, dtype=torch.float64)
    lower, upper = -2 * torch.rand(30, generator=generator).double(), 2 * torch.rand(30, generator=generator).double()
    ours = shrink_into_box(value, 0.7, lower, upper)
    m = cvxpy.Variable(30)
    cost = 0.7 * cvxpy.norm1(m) + 0.5 * cvxpy.sum_squares(m - value.numpy())
    cvxpy.Problem(cvxpy.Minimize(cost), [m >= lower.numpy(), m <= upper.numpy()]).solve(solver=cvxpy.CLARABEL)
    np.testing.assert_allclose(
        ours.numpy(), m.value, atol=1e-4
    )  # the solver's: 1e-8 of the objective, a square root of that of the point
    assert bool((ours[value.abs() <= 0.7] == 0).all())


def test_the_proximal_step_of_the_discs_is_a_projection(generator):
    import cvxpy

    pair = 2 * torch.randn(2, 20, generator=generator, dtype=torch.float64)
    p = cvxpy.Variable((2, 20))
    cvxpy.Problem(cvxpy.Minimize(cvxpy.sum_squares(p - pair.numpy())), [cvxpy.norm(p, 2, axis=0) <= 1]).solve(
        solver=cvxpy.CLARABEL
    )
    np.testing.assert_allclose(into_unit_discs(pair).numpy(), p.value, atol=1e-5)


def test_the_solver_against_successive_convex_programming(generator):
    """On small random networks; on LeNet and MNIST see test_attacks_on_lenet."""
    network, images = affine_relu_affine(generator, images=4), random_images(generator, 4)
    problem = problem_of(network, images, bounds=(-1.0, 2.0))
    found = finished(problem, descend(problem, Iterate.start(problem), 1500))
    ours, holds = problem.objective(found.shift), problem.excess(found.shift) <= 0
    gap = (ours - lower_bound(problem, found)) / ours
    ratios = []
    for image in range(4):
        for contest in range(3):
            box = problem.lower[image].numpy(), problem.upper[image].numpy()
            reference = successive_convex(as_reference(problem, image, contest), *box, *SHAPE[1:])
            if reference is not None:  # else one of its linearized problems had no solution
                assert bool(holds[image, contest])
                ratios.append(float(ours[image, contest]) / reference.objective)
                assert float(gap[image, contest]) > -1e-6
    assert len(ratios) >= 8
    assert np.mean(ratios) < 1.002
    assert max(ratios) < 1.03


def test_zeros_are_zeros_and_the_box_is_kept(generator):
    network, images = affine_relu_affine(generator, images=4), random_images(generator, 4)
    problem = problem_of(network, images, bounds=(-4.0, 5.0))
    found = finished(problem, descend(problem, Iterate.start(problem), 300)).shift
    assert bool((found >= problem.lower.unsqueeze(1)).all())
    assert bool((found <= problem.upper.unsqueeze(1)).all())
    assert float((found == 0).double().mean()) > 0.5


def test_the_certificate_is_a_lower_bound_of_the_linearized_problem(generator):
    """With every unit far from its kink the margins are affine, and the convex program is the problem itself."""
    network, images = affine_relu_affine(generator, images=3), random_images(generator)
    network = nm.AffineReluAffine(network.A, network.c1 + 50, network.B, network.c2 - 50 * network.B.sum(-1))
    problem = problem_of(network, images, bounds=(-1.0, 2.0))
    found = finished(problem, descend(problem, Iterate.start(problem), 1500))
    ours, bound = problem.objective(found.shift), lower_bound(problem, found)
    here = problem.margins.with_slopes(torch.zeros_like(found.shift), problem.sigma.unsqueeze(1))
    slopes = here.gradients()
    for image in range(3):
        for contest in range(3):
            box = problem.lower[image].numpy(), problem.upper[image].numpy()
            best = convex(slopes[image, contest].numpy(), -here.value[image, contest].numpy(), *box, *SHAPE[1:])
            if best is None:
                continue
            optimum = objective(best, *SHAPE[1:])
            assert float(bound[image, contest]) <= optimum * (1 + 1e-6)
            assert float(bound[image, contest]) >= optimum * 0.995
            assert optimum * (1 - 1e-6) <= float(ours[image, contest]) <= optimum * 1.005


def test_the_least_in_a_box(generator):
    slope = 3 * torch.randn(200, generator=generator, dtype=torch.float64)
    lower, upper = -torch.rand(200, generator=generator).double(), torch.rand(200, generator=generator).double()
    grid = lower + (upper - lower) * torch.linspace(0, 1, 2001, dtype=torch.float64).unsqueeze(1)
    brute = (slope * grid + grid.abs()).amin(0).clamp(max=0)
    torch.testing.assert_close(least_in_box(slope, lower, upper), brute, rtol=0, atol=2e-3)
    assert bool((least_in_box(slope, lower, upper) <= brute + 1e-12).all())


def test_scaling_stops_at_the_edge(generator):
    network, images = affine_relu_affine(generator, images=4), random_images(generator, 4)
    problem = problem_of(network, images, bounds=(-9.0, 9.0))
    rough = descend(problem, Iterate.start(problem), 200).shift
    shift = stretched(problem, rough, edge(problem, rough))
    possible = problem.excess(1.5 * rough) <= 0
    assert bool(possible.any())
    assert bool((problem.excess(shift)[possible] <= 0).all())
    assert bool((problem.excess(0.999 * shift)[possible] > 0).all())
