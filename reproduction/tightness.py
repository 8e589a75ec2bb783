"""The analytic moments that Tables 2, 3 and 4 compare with sampling: ours, the paper's, the delta method's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from netmoments import paper
from netmoments.affine_relu_affine import AffineReluAffine
from netmoments.covariances import LowRank
from netmoments.gaussian import Gaussian
from netmoments.linearize.two_stage import two_stage
from netmoments.precision import matmul
from netmoments.relu.marginal import relu_variance
from netmoments.sweep.item import Columns
from reproduction.over_images import SIGMAS, BlocksOfImages, Subjects, rows, same_bits

TERMS = 5
"""Of the series, as the authors ran it."""


@dataclass(frozen=True, eq=False)
class TightnessSweep(BlocksOfImages):
    """The two-stage linearization at each image itself. Rows: image, sigma, logit, and the values of `moments_at`."""

    layer: int = -1

    @property
    def configuration(self) -> dict[str, Any]:
        return {**self.subjects.description(), "block": self.block, "layer": self.layer, "terms": TERMS}

    def rows_of(self, subjects: Subjects, places: range) -> Columns:
        images = subjects.images[places.start : places.stop]
        factors = torch.stack([subjects.factor(place) for place in places])
        with same_bits():
            network = two_stage(subjects.network, images, self.layer)
        values = moments_at(network, images, factors) | delta_method(network, images, factors)
        return rows(subjects.numbers[places.start : places.stop].tolist(), values)


@torch.no_grad()
def moments_at(network: AffineReluAffine, images: Tensor, factors: Tensor) -> dict[str, Tensor]:
    """All variances of the comparison, and the mean, (images, levels, outputs), for covariances σ²FFᵀ.

    `mean` and `variance` are exact for the linearized network; `series` is Lemma 4 with 5 terms as the authors ran it,
    `theorem_2` the old variance to the letter, `authors_old` as the authors ran it.
    """
    levels = [Gaussian(images, LowRank(sigma * factors)) for sigma in SIGMAS]
    return core_moments_at(network, images, factors) | {
        "series": _by_level(lambda noise: paper.variance_series_by_pairs(network, noise, TERMS), levels),
        "theorem_2": _scaled(paper.variance_zero_mean(network, Gaussian(images, LowRank(factors)))),
    }


@torch.no_grad()
def core_moments_at(network: AffineReluAffine, images: Tensor, factors: Tensor) -> dict[str, Tensor]:
    """The mean, the exact variance, and the old one as the authors ran it: what Table 4 needs."""
    levels = [Gaussian(images, LowRank(sigma * factors)) for sigma in SIGMAS]
    pairs = paper.pairs_variance_zero_mean(network, Gaussian(images, LowRank(factors)))
    return {
        "mean": _by_level(network.mean, levels),
        "variance": _by_level(network.variance, levels),
        "authors_old": _scaled(pairs) + _by_level(lambda noise: _own_variance(network, noise), levels),
    }


@torch.no_grad()
def delta_method(network: AffineReluAffine, images: Tensor, factors: Tensor) -> dict[str, Tensor]:
    """The scores at the image as the mean, and JΣJᵀ as the variance, J being the network's own derivative there."""
    open_units = network.pre_activation(images) > 0
    slope = matmul(network.B * open_units.unsqueeze(-2), network.A)
    slope = slope if network.D is None else slope + network.D
    scores = network(images)
    return {
        "delta_mean": scores.unsqueeze(1).expand(-1, len(SIGMAS), -1),
        "delta_variance": _scaled(matmul(slope, factors).square().sum(-1)),
    }


def _own_variance(network: AffineReluAffine, noise: Gaussian) -> Tensor:
    """What the units' own variances add to those of the outputs: Σ b² Var relu(z)."""
    mean = network.pre_activation(noise.mean)
    deviation = noise.covariance.push_diagonal(network.A).sqrt()
    return (network.B**2 * relu_variance(mean, deviation).unsqueeze(-2)).sum(-1)


def _by_level(quantity: Callable[[Gaussian], Tensor], levels: Sequence[Gaussian]) -> Tensor:
    return torch.stack([quantity(noise) for noise in levels], 1)


def _scaled(at_one: Tensor) -> Tensor:
    """A variance that grows as σ²: (images, outputs) at σ = 1 to (images, levels, outputs)."""
    squares = torch.tensor([sigma**2 for sigma in SIGMAS], dtype=at_one.dtype, device=at_one.device)
    return at_one.unsqueeze(1) * squares.unsqueeze(-1)
