"""Margins: differences of exact means by the formula, those of the network itself, and the one that counts."""

from __future__ import annotations

import pytest
import torch

import netmoments as nm
from netmoments.attacks.evaluation import fooled_margin
from netmoments.attacks.margins import Formula, NetworkMargins, contrast
from tests.attacks.problems import SHAPE, SIZE, affine_relu_affine, margins_of, random_images, small_network


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
    weighted = (here.gradients() * multipliers.unsqueeze(-1)).sum(2)
    torch.testing.assert_close(here.weighted_gradient(multipliers), weighted, rtol=1e-12, atol=1e-13)
    numeric = (margins.at(shift, sigma + step) - margins.at(shift, sigma - step)) / (2 * step)
    exact, numeric = here.weighted_sigma_slope(multipliers), (numeric * multipliers).sum(-1)
    torch.testing.assert_close(exact, numeric, rtol=1e-6, atol=1e-8)


def test_deviations_of_margins_have_their_linear_part(generator):
    network, images = affine_relu_affine(generator), random_images(generator)
    margins, larger, smaller = margins_of(network, images)
    followed = torch.arange(4).expand(len(images), -1)
    formula = Formula(images, followed, network, margins.scores)
    shift = 0.1 * torch.randn(len(images), 2, SIZE, generator=generator, dtype=torch.float64)
    for sigma in (torch.full((len(images),), level, dtype=torch.float64) for level in (1e-4, 0.5)):
        whole = formula.deviations(margins, sigma, shift)
        least = margins.with_slopes(shift, sigma.unsqueeze(1)).least_deviations(sigma)
        assert bool((least <= whole * (1 + 1e-9)).all())
        assert bool((least >= 0.5 * whole).all())
    for number in range(len(images)):  # by the covariance of the scores
        own = nm.Gaussian(images[number].flatten() + shift[number, 0], std=float(sigma[number]))
        alone = network.entries(number).covariance(own)
        expected = alone[larger[number, 0], larger[number, 0]] + alone[smaller[number, 0], smaller[number, 0]]
        expected = expected - 2 * alone[larger[number, 0], smaller[number, 0]]
        torch.testing.assert_close(whole[number, 0], expected.sqrt())


def test_free_coordinates_are_columns(generator):
    network, images = affine_relu_affine(generator, around=True), random_images(generator)
    whole, *_ = margins_of(network, images)
    free = torch.stack([torch.randperm(SIZE, generator=generator)[:9].sort().values for _ in range(3)])
    some, *_ = margins_of(network, images, free)
    few = torch.randn(3, 2, 9, generator=generator, dtype=torch.float64)
    all_of_them = torch.zeros(3, 2, SIZE, dtype=torch.float64).scatter_(2, free.unsqueeze(1).expand(-1, 2, -1), few)
    sigma = torch.full((3, 2), 0.2, dtype=torch.float64)
    torch.testing.assert_close(some.at(few, sigma), whole.at(all_of_them, sigma), rtol=1e-12, atol=1e-12)


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
