"""Expected margins: differences of exact means, with their slopes."""

from __future__ import annotations

import pytest
import torch

import netmoments as nm
from netmoments.attacks.margins import contrast
from tests.attacks.problems import SIZE, affine_relu_affine, margins_of, random_images


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
