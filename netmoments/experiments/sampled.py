"""Monte Carlo moments of the scores of every image at every noise level: made once, shared by Tables 2, 3 and 4."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from netmoments.experiments.over_images import SIGMAS, Subjects, blocks, rows, same_bits
from netmoments.precision import full_precision
from netmoments.sweep import Columns

CHUNK = {"cpu": 334, "cuda": 10_000}
"""Samples that go through the network at a time: what keeps a CPU's cache or a GPU busy with MNIST's images."""


@dataclass(frozen=True, eq=False)
class MonteCarloSweep:
    """Rows: image, sigma, logit, mean, variance."""

    name: str
    """Also what its samples derive from: another name, an independent run."""
    subjects: Subjects
    samples: int
    block: int
    unit: str = "images"

    @property
    def configuration(self) -> dict[str, Any]:
        return {**self.subjects.description(), "samples": self.samples, "block": self.block}

    @property
    def counts(self) -> Sequence[int]:
        return [len(part) for part in blocks(len(self.subjects.images), self.block)]

    def prepare(self, device: str) -> Callable[[int], Columns]:
        subjects = self.subjects.on(device)
        parts = blocks(len(subjects.images), self.block)

        def work(item: int) -> Columns:
            found = [self._image(subjects, place) for place in parts[item]]
            mean, variance = (torch.stack(values) for values in zip(*found, strict=True))
            return rows(subjects.numbers[parts[item]].tolist(), {"mean": mean, "variance": variance})

        return work

    def _image(self, subjects: Subjects, place: int) -> tuple[Tensor, Tensor]:
        generator = subjects.generator(self.name, place)
        return sampled_moments(
            subjects.network, subjects.images[place], subjects.factor(place), self.samples, generator
        )


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
