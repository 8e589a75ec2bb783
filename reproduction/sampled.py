"""Monte Carlo moments of the scores of every image at every noise level: made once, shared by Tables 2, 3 and 4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from netmoments.precision import full_precision
from netmoments.sweep.item import Columns
from reproduction.over_images import SIGMAS, BlocksOfImages, Subjects, rows, same_bits

CHUNK = {"cpu": 334, "cuda": 10_000}
"""Samples that go through the network at a time: what keeps a CPU's cache or a GPU busy with MNIST's images."""


@dataclass(frozen=True, eq=False)
class MonteCarloSweep(BlocksOfImages):
    """Rows: image, sigma, logit, mean, variance. Samples derive from the name too: another one, an independent run."""

    samples: int

    @property
    def configuration(self) -> dict[str, Any]:
        return {**self.subjects.description(), "samples": self.samples, "block": self.block}

    def rows_of(self, subjects: Subjects, places: range) -> Columns:
        found = [
            sampled_moments(
                subjects.network, subjects.images[place], subjects.factor(place), self.samples,
                subjects.generator(self.name, place),
            )
            for place in places
        ]  # fmt: skip
        mean, variance = (torch.stack(values) for values in zip(*found, strict=True))
        return rows(subjects.numbers[places.start : places.stop].tolist(), {"mean": mean, "variance": variance})


@torch.no_grad()
def sampled_moments(
    network: nn.Module, image: Tensor, factor: Tensor, samples: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Mean and variance of the scores under N(image, σ²FFᵀ) for every noise level, (levels, scores), in float64.

    The levels share their normal draws, as they share the covariance. Sums are about the scores of the image itself.
    """
    with full_precision(), same_bits():
        centre = network(image[None]).double()
        first, second = (centre.new_zeros(len(SIGMAS), centre.shape[1]) for _ in range(2))
        chunk = CHUNK[image.device.type]
        for start in range(0, samples, chunk):
            count = min(chunk, samples - start)
            normal = torch.randn(count, image.numel(), dtype=image.dtype, device=image.device, generator=generator)
            deviation = (normal @ factor.T).reshape(count, *image.shape)
            for level, sigma in enumerate(SIGMAS):
                delta = network(image + sigma * deviation).double() - centre
                first[level] += delta.sum(0)
                second[level] += (delta * delta).sum(0)
    shift = first / samples
    return centre + shift, (second - samples * shift**2) / (samples - 1)


def pooled(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], samples: int) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance of two runs of `samples` each, taken as one: Σ(x − m)² = Σ₁ + Σ₂ + n (m₁ − m₂)²/2."""
    squares = (samples - 1) * (first[1] + second[1]) + samples * (first[0] - second[0]).square() / 2
    return (first[0] + second[0]) / 2, squares / (2 * samples - 1)
