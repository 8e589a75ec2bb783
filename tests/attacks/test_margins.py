"""Margins of the network itself, and the one that counts."""

from __future__ import annotations

import torch

from netmoments.attacks.margins import NetworkMargins, fooled_margin
from tests.attacks.problems import SHAPE, SIZE, random_images, small_network


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
