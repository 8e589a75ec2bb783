"""The parts of the attacks: differences, proximal steps, margins and their slopes, the two solvers, the certificate."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import ndimage, stats
from torch import nn

import netmoments as nm
from netmoments.attacks.box import Box, descend_in_box
from netmoments.attacks.evaluation import (
    LARGEST_SQUARE,
    Success,
    adjoint_differences,
    forward_differences,
    noisy_scores,
    structural_similarity,
    total_variation,
    wilson_interval,
)
from netmoments.attacks.expected_margins import ExpectedMargins, Surrogate
from netmoments.attacks.margins import NetworkMargins, contrast, fooled_margin
from netmoments.attacks.primal_dual import (
    Iterate,
    Problem,
    descend,
    finished,
    into_unit_discs,
    least_in_box,
    lower_bound,
    scaled_to_edge,
    shrink_into_box,
)
from tests.convex_reference import convex, differences, objective, successive_convex

SHAPE = (1, 6, 7)
SIZE = 42


def affine_relu_affine(generator, images=3, units=20, outputs=4, size=SIZE, around=False) -> nm.AffineReluAffine:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    A, B = draw(images, units, size) / size**0.5, draw(images, outputs, units) / units**0.5
    D = draw(images, outputs, size) / size if around else None
    return nm.AffineReluAffine(A, draw(images, units), B, draw(images, outputs), D)


def random_images(generator, images=3) -> torch.Tensor:
    return torch.rand(images, *SHAPE, generator=generator, dtype=torch.float64)


def margins_of(network, images, free=None) -> tuple[ExpectedMargins, torch.Tensor, torch.Tensor]:
    """Two problems of three margins each: everything against class 0, everything against class 1."""
    larger = torch.tensor([[[1, 2, 3], [0, 2, 3]]]).expand(len(images), -1, -1)
    smaller = torch.tensor([[[0, 0, 0], [1, 1, 1]]]).expand(len(images), -1, -1)
    return ExpectedMargins.between(Surrogate.of(network, images, free), larger, smaller), larger, smaller


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


@pytest.mark.parametrize("around", [False, True])
def test_margins_are_differences_of_exact_means(generator, around):
    network, images = affine_relu_affine(generator, around=around), random_images(generator)
    margins, larger, smaller = margins_of(network, images)
    shift = 0.3 * torch.randn(3, 2, SIZE, generator=generator, dtype=torch.float64)
    sigma = torch.rand(3, 2, generator=generator, dtype=torch.float64) + 0.1
    ours = margins.at(shift, sigma)
    for problem in range(2):
        noise = nm.Gaussian(images.flatten(1) + shift[:, problem], std=sigma[:, problem, None])
        mean = network.mean(noise).unsqueeze(1)
        exact = contrast(mean, larger[:, problem, None], smaller[:, problem, None])
        torch.testing.assert_close(ours[:, problem, None], exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("around", [False, True])
def test_slopes_of_margins_are_finite_differences(generator, around):
    network, images = affine_relu_affine(generator, around=around), random_images(generator)
    margins, *_ = margins_of(network, images)
    shift = 0.3 * torch.randn(3, 2, SIZE, generator=generator, dtype=torch.float64)
    sigma = torch.rand(3, 2, generator=generator, dtype=torch.float64) + 0.1
    here = margins.with_slopes(shift, sigma)
    direction = torch.randn(3, 2, SIZE, generator=generator, dtype=torch.float64)
    step = 1e-5
    numeric = (margins.at(shift + step * direction, sigma) - margins.at(shift - step * direction, sigma)) / (2 * step)
    exact = (here.gradients() * direction.unsqueeze(2)).sum(-1)
    torch.testing.assert_close(exact, numeric, rtol=1e-7, atol=1e-8)  # third derivatives · step² ~ 1e-10 · 20 units
    multipliers = torch.rand(3, 2, 3, generator=generator, dtype=torch.float64)
    pulled = (here.gradients() * multipliers.unsqueeze(-1)).sum(2)
    torch.testing.assert_close(here.pulled(multipliers), pulled, rtol=1e-12, atol=1e-13)
    numeric = (margins.at(shift, sigma + step) - margins.at(shift, sigma - step)) / (2 * step)
    torch.testing.assert_close(here.by_sigma(multipliers), (numeric * multipliers).sum(-1), rtol=1e-6, atol=1e-8)


def test_free_coordinates_are_columns(generator):
    network, images = affine_relu_affine(generator, around=True), random_images(generator)
    whole, *_ = margins_of(network, images)
    free = torch.stack([torch.randperm(SIZE, generator=generator)[:9].sort().values for _ in range(3)])
    some, *_ = margins_of(network, images, free)
    few = torch.randn(3, 2, 9, generator=generator, dtype=torch.float64)
    all_of_them = torch.zeros(3, 2, SIZE, dtype=torch.float64).scatter_(2, free.unsqueeze(1).expand(-1, 2, -1), few)
    sigma = torch.full((3, 2), 0.2, dtype=torch.float64)
    torch.testing.assert_close(some.at(few, sigma), whole.at(all_of_them, sigma), rtol=1e-12, atol=1e-12)


def small_network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = (nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(80, 12), nn.ReLU(), nn.Linear(12, 4))
        return nn.Sequential(*layers).double().eval()


def test_margins_of_the_network_and_their_slopes(generator):
    network, images = small_network(), random_images(generator)
    larger = torch.tensor([[[1, 2]]]).expand(3, -1, -1)
    smaller = torch.zeros_like(larger)
    margins = NetworkMargins(network, images, larger, smaller)
    shift = 0.1 * torch.randn(3, 1, SIZE, generator=generator, dtype=torch.float64)
    sigma = torch.ones(3, 1, dtype=torch.float64)
    scores = network(images + shift.reshape(3, *SHAPE))
    torch.testing.assert_close(margins.at(shift, sigma)[:, 0, 0], scores[:, 1] - scores[:, 0])
    here = margins.with_slopes(shift, sigma)
    direction = torch.randn(3, 1, SIZE, generator=generator, dtype=torch.float64)
    numeric = (margins.at(shift + 1e-7 * direction, sigma) - margins.at(shift - 1e-7 * direction, sigma)) / 2e-7
    torch.testing.assert_close((here.gradients() * direction.unsqueeze(2)).sum(-1), numeric, rtol=1e-5, atol=1e-7)
    free = torch.arange(5).expand(3, -1)
    few = NetworkMargins(network, images, larger, smaller, free).with_slopes(shift[..., :5], sigma).gradients()
    moved = torch.cat([shift[..., :5], torch.zeros(3, 1, SIZE - 5, dtype=torch.float64)], 2)
    torch.testing.assert_close(few, margins.with_slopes(moved, sigma).gradients()[..., :5])


def test_the_margin_that_counts_is_negative_exactly_where_the_answer_is_wanted(generator):
    scores = torch.randn(50, 3, 4, generator=generator)
    labels, targets = torch.tensor([0, 1, 2]), torch.tensor([3, 2, 0])
    answers = scores.argmax(-1)
    assert torch.equal(fooled_margin(scores, labels, None) < 0, answers != labels)
    assert torch.equal(fooled_margin(scores, labels, targets) < 0, answers == targets)


def problem_of(network, images, sigma=0.05, gamma=0.0, bounds=(0.0, 1.0)) -> Problem:
    """The most likely class against every other, a problem each."""
    scores = network(images.flatten(1))
    order = scores.argsort(1, descending=True)
    larger = order[:, :1, None].expand(-1, order.shape[1] - 1, 1)
    margins = ExpectedMargins.between(Surrogate.of(network, images), larger, order[:, 1:, None])
    flat = images.flatten(1)
    levels = torch.full((len(images),), sigma, dtype=images.dtype)
    wanted = torch.full_like(larger, gamma, dtype=images.dtype)
    return Problem(margins, levels, wanted, bounds[0] - flat, bounds[1] - flat, tuple(images.shape[1:]))


def as_reference(problem: Problem, image: int, contest: int):
    """Margins of one problem for the reference."""

    def margins(shift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        everywhere = torch.zeros(*problem.gamma.shape[:2], len(shift), dtype=problem.gamma.dtype)
        everywhere[image, contest] = torch.as_tensor(shift, dtype=problem.gamma.dtype)
        here = problem.margins.with_slopes(everywhere, problem.sigma.unsqueeze(1))
        value = here.value[image, contest] + problem.gamma[image, contest]
        return value.double().numpy(), here.gradients()[image, contest].double().numpy()

    return margins


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
    lower, upper = problem.box
    assert bool((found >= lower).all())
    assert bool((found <= upper).all())
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
    shift = scaled_to_edge(problem, rough)
    possible = problem.excess(1.5 * rough) <= 0
    assert bool(possible.any())
    assert bool((problem.excess(shift)[possible] <= 0).all())
    assert bool((problem.excess(0.999 * shift)[possible] > 0).all())


def test_the_box_solver_reaches_the_corner_of_affine_margins(generator):
    network, images = affine_relu_affine(generator, images=3), random_images(generator)
    network = nm.AffineReluAffine(network.A, network.c1 + 50, network.B, network.c2 - 50 * network.B.sum(-1))
    problem = problem_of(network, images)
    least, most = torch.full((3,), 1e-3, dtype=torch.float64), torch.full((3,), 0.1, dtype=torch.float64)
    box = Box(problem.lower, problem.upper, least, most)
    start = torch.zeros(3, 3, SIZE, dtype=torch.float64)
    sigma = torch.full((3, 3), 0.05, dtype=torch.float64)
    found = descend_in_box(problem.margins, box, start, sigma, 200)
    here = problem.margins.with_slopes(start, sigma)
    slope = here.gradients().squeeze(2)
    lower, upper = problem.box
    best = here.value.squeeze(2) + torch.minimum(slope * lower, slope * upper).sum(-1)
    torch.testing.assert_close(found.margin, best, rtol=1e-9, atol=1e-9)
    assert float(found.gap.abs().max()) < 1e-9


def test_the_box_solver_against_linear_programming(generator):
    """The largest of three margins, all affine: min t with margins ≤ t is a linear program."""
    from scipy.optimize import linprog

    network, images = affine_relu_affine(generator, images=3), random_images(generator)
    network = nm.AffineReluAffine(network.A, network.c1 + 50, network.B, network.c2 - 50 * network.B.sum(-1))
    margins, *_ = margins_of(network, images)
    flat = images.flatten(1)
    least, most = torch.full((3,), 1e-3, dtype=torch.float64), torch.full((3,), 0.1, dtype=torch.float64)
    box = Box(-flat, 1 - flat, least, most)
    start, sigma = torch.zeros(3, 2, SIZE, dtype=torch.float64), torch.full((3, 2), 0.05, dtype=torch.float64)
    found = descend_in_box(margins, box, start, sigma, 400)
    here = margins.with_slopes(start, sigma)
    value, slopes = here.value.numpy(), here.gradients().numpy()
    for image in range(3):
        bounds = [*zip((-flat[image]).tolist(), (1 - flat[image]).tolist(), strict=True), (None, None)]
        for contest in range(2):
            rows = np.c_[slopes[image, contest], -np.ones(3)]
            best = linprog(np.r_[np.zeros(SIZE), 1.0], rows, -value[image, contest], bounds=bounds).fun
            drop = value[image, contest].max() - best
            assert best - 1e-9 <= float(found.margin[image, contest]) <= best + 0.01 * drop
            assert float(found.margin[image, contest]) - best <= float(found.gap[image, contest]) + 1e-9


def test_the_interval_is_wilsons():
    for count in (10, 200):
        for hits in (0, 1, count // 2, count):
            expected = stats.binomtest(hits, count).proportion_ci(method="wilson")
            low, high = wilson_interval(torch.tensor(hits / count, dtype=torch.float64), count)
            assert float(low) == pytest.approx(expected.low, abs=1e-12)
            assert float(high) == pytest.approx(expected.high, abs=1e-12)


def test_structural_similarity_is_that_of_a_filter(generator):
    x, y = (torch.rand(2, 1, 20, 24, generator=generator, dtype=torch.float64) for _ in range(2))

    def local(image: np.ndarray) -> np.ndarray:
        return ndimage.gaussian_filter(image, 1.5, truncate=5 / 1.5)[5:-5, 5:-5]

    for number, ours in enumerate(structural_similarity(x, y, 1.0).tolist()):
        a, b = x[number, 0].numpy(), y[number, 0].numpy()
        ma, mb = local(a), local(b)
        va, vb, vab = local(a * a) - ma**2, local(b * b) - mb**2, local(a * b) - ma * mb
        likeness = (2 * ma * mb + 1e-4) * (2 * vab + 9e-4) / ((ma**2 + mb**2 + 1e-4) * (va + vb + 9e-4))
        assert ours == pytest.approx(likeness.mean(), rel=1e-10)
    torch.testing.assert_close(structural_similarity(x, x, 1.0), torch.ones(2, dtype=torch.float64))


def test_samples_of_an_image_do_not_depend_on_the_images_beside_it(generator):
    network, images = small_network(), random_images(generator)
    labels, sigma = torch.tensor([0, 1, 2]), torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    places = torch.tensor([4, 7, 9])

    def sampled(chosen, bounds=None):
        return torch.cat(list(noisy_scores(network, images[chosen], sigma[chosen], places[chosen], 120, 3, bounds)))

    once = sampled([0, 1, 2])
    assert once.shape == (120, 3, 4)
    assert torch.equal(once, sampled([0, 1, 2]))
    torch.testing.assert_close(once[:, [2]], sampled([2]))
    torch.testing.assert_close(once[:, [2, 0]], sampled([2, 0]))
    assert not torch.equal(once, sampled([0, 1, 2], (0.2, 0.8)))
    frequency = Success.of(fooled_margin(once, labels, None) < 0)
    assert bool((frequency.low <= frequency.rate).all())
    assert bool((frequency.rate <= frequency.high).all())
