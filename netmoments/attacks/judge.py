"""The network decides: how often noise around M + μ fools it, from samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from netmoments.attacks.measures import wilson_interval
from netmoments.precision import full_precision
from netmoments.progress import Progress
from netmoments.sweep import random_seed

Bounds = tuple[float, float]
INPUTS = {"cpu": 256, "cuda": 8192}
"""Noisy images that go through the network at a time."""
TOGETHER = 50
"""Samples of an image that are drawn at a time."""


@dataclass(frozen=True, eq=False)
class Success:
    """How often the noise did what the attacker wants, (N,), with the ends of a 95 % interval."""

    rate: Tensor
    low: Tensor
    high: Tensor
    samples: int

    @classmethod
    def of(cls, fooled: Tensor) -> Success:
        """From outcomes (samples, N)."""
        rate = fooled.double().mean(0)
        return cls(rate, *wilson_interval(rate, len(fooled)), len(fooled))


@torch.no_grad()
def noisy_scores(
    network: nn.Module,
    centres: Tensor,
    sigma: Tensor,
    places: Tensor,
    samples: int,
    seed: int,
    bounds: Bounds | None = None,
) -> Iterator[Tensor]:
    """Scores (samples at a time, N, d) of N(centre, σ²I) for centres (N, *event); cut to the bounds if there are any.

    An image's noise depends on the seed and on its place (N,) among those that were given, not on the images beside it;
    cut or not it is the same.
    """
    generators = [
        torch.Generator(centres.device).manual_seed(random_seed(seed, "noise", place)) for place in places.tolist()
    ]
    scale = sigma.reshape(-1, *(1,) * (centres.dim() - 1))
    with full_precision(), Progress("sampling", samples) as progress:
        for start in range(0, samples, TOGETHER):
            count = min(TOGETHER, samples - start)
            shape = (count, *centres.shape[1:])
            draws = [torch.empty(shape, dtype=centres.dtype, device=centres.device).normal_(generator=one)
                     for one in generators]  # fmt: skip
            noise = torch.stack(draws, 1)
            inputs = centres + scale * noise
            if bounds is not None:
                inputs = inputs.clamp(*bounds)
            parts = inputs.flatten(0, 1).split(INPUTS.get(centres.device.type, INPUTS["cpu"]))
            yield torch.cat([network(part) for part in parts]).unflatten(0, (count, len(centres)))
            progress.advance(count)
