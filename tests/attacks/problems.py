"""Small networks, images and problems that attacks are tried on."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import netmoments as nm
from netmoments.attacks.margins import ExpectedMargins, LinearizedScores
from netmoments.attacks.primal_dual import (
    Problem,
)

GREY = 1 / 255
QUICK = {"iterations": 150, "polish": 40, "samples": 100}
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
    return ExpectedMargins.between(LinearizedScores.of(network, images, free), larger, smaller), larger, smaller


def small_network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = (nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(80, 12), nn.ReLU(), nn.Linear(12, 4))
        return nn.Sequential(*layers).double().eval()


def problem_of(network, images, sigma=0.05, gamma=0.0, bounds=(0.0, 1.0)) -> Problem:
    """The most likely class against every other, a problem each."""
    scores = network(images.flatten(1))
    order = scores.argsort(1, descending=True)
    larger = order[:, :1, None].expand(-1, order.shape[1] - 1, 1)
    margins = ExpectedMargins.between(LinearizedScores.of(network, images), larger, order[:, 1:, None])
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
