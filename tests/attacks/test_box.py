"""Noise within a box: on the embedded digits network, and its solver against linear programming."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

import netmoments as nm
from netmoments.attacks.box import Box, PixelSupport, Targeted, descend_in_box
from netmoments.attacks.evaluation import fooled_margin
from tests.attacks.problems import GREY, SIZE, affine_relu_affine, margins_of, problem_of, random_images


def test_targeted(digits):
    network, images = digits
    targets = (images.labels + 1) % 10
    attack = Targeted(beta=0.3, samples=100)
    result = attack(network, images.images, images.labels, targets)
    assert float(result.linf.max()) <= 0.3 + 1e-6
    assert bool(((result.sigma > 0) & (result.sigma <= 2**0.5 * GREY * (1 + 1e-6))).all())
    assert float((images.images + result.mu).min()) >= -1e-6
    assert float((images.images + result.mu).max()) <= 1 + 1e-6
    assert float(result.success.rate.mean()) > 0.8
    wider = dataclasses.replace(attack, beta=0.5)(network, images.images, images.labels, targets)
    assert float(wider.network_margin.mean()) < float(result.network_margin.mean())


def test_the_margin_is_the_formulas_and_nearly_the_least(digits):
    network, images = digits
    x, labels = images.images[:4], images.labels[:4]
    targets = (labels + 1) % 10
    result = Targeted(beta=0.1, polish=0)(network, x, labels, targets)
    scores = nm.ExpectedLogits(network, result.sigma, at=x)(x, result.mu)
    torch.testing.assert_close(fooled_margin(scores, labels, targets), result.margin, atol=1e-3, rtol=1e-3)
    assert float(result.gap.max()) < 0.05
    assert torch.equal(result.feasible, result.margin < 0)


def test_few_pixels(digits):
    network, images = digits
    result = PixelSupport(percent=10, beta=1.0, seed=3)(network, images.images, images.labels)
    changed = (result.mu != 0).flatten(1).sum(1)
    assert int(changed.max()) <= round(0.1 * 64)
    assert int(changed.min()) >= 1
    assert not torch.equal(result.mu[0] != 0, result.mu[1] != 0)
    again = PixelSupport(percent=10, beta=1.0, seed=3)(network, images.images, images.labels)
    assert torch.equal(result.mu, again.mu)


def test_more_pixels_do_more(digits):
    network, images = digits
    margins = [
        float(PixelSupport(percent=p, beta=0.5, polish=0)(network, images.images, images.labels).margin.mean())
        for p in (5, 30, 100)
    ]
    assert margins[0] > margins[1] > margins[2]


def test_a_mask(digits):
    network, images = digits
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[2:5, 2:6] = True
    result = PixelSupport(mask=mask, beta=1.0)(network, images.images, images.labels)
    assert not bool(result.mu[..., ~mask].any())
    assert bool(result.mu[..., mask].any())
    each = torch.zeros(12, 1, 8, 8, dtype=torch.bool)
    for number in range(12):  # one pixel more for each
        each[number].view(-1)[20 : 21 + number] = True
    result = PixelSupport(mask=each, beta=1.0)(network, images.images, images.labels)
    assert not bool(result.mu[~each].any())
    targets = (images.labels + 1) % 10
    towards = PixelSupport(mask=mask, beta=1.0)(network, images.images, images.labels, targets)
    assert torch.equal(towards.towards, targets)


def test_the_network_is_followed_where_the_formula_fails(digits):
    network, images = digits
    alone = PixelSupport(percent=12, beta=0.6, polish=0)(network, images.images, images.labels)
    both = PixelSupport(percent=12, beta=0.6)(network, images.images, images.labels)
    assert float(both.success.rate.mean()) >= float(alone.success.rate.mean())
    assert bool((both.polished[alone.success.rate >= 0.95] == 0).all())


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
    lower, upper = problem.lower.unsqueeze(1), problem.upper.unsqueeze(1)
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
