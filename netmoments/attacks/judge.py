"""The network decides: how often noise around M + μ fools it, from samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from netmoments.attacks.margins import fooled_margin
from netmoments.attacks.measures import wilson_interval
from netmoments.precision import full_precision
from netmoments.progress import Progress

Bounds = tuple[float, float]
INPUTS = {"cpu": 256, "cuda": 8192}
"""Noisy images that go through the network at a time."""


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
    network: nn.Module, centres: Tensor, sigma: Tensor, samples: int, seed: int, bounds: Bounds | None
) -> Iterator[Tensor]:
    """Scores (samples at a time, N, d) of N(centre, σ²I) for centres (N, *event); cut to the bounds if there are any.

    The same seed gives the same noise, cut or not.
    """
    generator = torch.Generator(centres.device).manual_seed(seed)
    together = max(1, INPUTS.get(centres.device.type, INPUTS["cpu"]) // len(centres))
    scale = sigma.reshape(-1, *(1,) * (centres.dim() - 1))
    with full_precision(), Progress("sampling", samples) as progress:
        for start in range(0, samples, together):
            count = min(together, samples - start)
            noise = torch.randn(count, *centres.shape, generator=generator, dtype=centres.dtype, device=centres.device)
            inputs = centres + scale * noise
            if bounds is not None:
                inputs = inputs.clamp(*bounds)
            yield network(inputs.flatten(0, 1)).unflatten(0, (count, len(centres)))
            progress.advance(count)


def noisy_margins(
    network: nn.Module,
    centres: Tensor,
    sigma: Tensor,
    labels: Tensor,
    targets: Tensor | None,
    samples: int,
    seed: int,
    bounds: Bounds | None = None,
) -> Tensor:
    """Margins (samples, N) of noisy images, below 0 where the attacker has what they want."""
    parts = noisy_scores(network, centres, sigma, samples, seed, bounds)
    return torch.cat([fooled_margin(scores, labels, targets) for scores in parts])
