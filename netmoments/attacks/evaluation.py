"""The network decides: how often noise around M + μ fools it, and how much is seen of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from netmoments.gaussian import random_seed
from netmoments.memory import elements_together
from netmoments.normal import wilson_interval
from netmoments.precision import full_precision
from netmoments.progress import progress_bar

WINDOW, SPREAD = 11, 1.5
"""Of the structural similarity: side of the window and deviation of its weights, as Wang et al. (2004) have them."""
STABLE = (0.01, 0.03)


def structural_similarity(images: Tensor, others: Tensor, span: float) -> Tensor:
    """Mean SSIM of (N, C, H, W) images with others, (N,): 1 for equal images; `span` is the range of a pixel.

    Gaussian windows of 11 pixels, fewer in smaller images, only where they fit whole; channels are averaged.
    """
    side = min(WINDOW, *images.shape[-2:])
    place = torch.arange(side, dtype=torch.float64) - (side - 1) / 2
    bell = torch.exp(-0.5 * (place / SPREAD) ** 2)
    window = torch.outer(bell, bell).to(images)
    window = (window / window.sum()).reshape(1, 1, side, side)

    def local(x: Tensor) -> Tensor:
        return conv2d(x.flatten(0, 1).unsqueeze(1), window)

    x, y = images, others
    mean_x, mean_y = local(x), local(y)
    var_x, var_y = local(x * x) - mean_x**2, local(y * y) - mean_y**2
    together = local(x * y) - mean_x * mean_y
    first, second = ((k * span) ** 2 for k in STABLE)
    likeness = (2 * mean_x * mean_y + first) * (2 * together + second)
    likeness = likeness / ((mean_x**2 + mean_y**2 + first) * (var_x + var_y + second))
    return likeness.flatten(1).mean(1).reshape(len(images), -1).mean(1)


Bounds = tuple[float, float]
TOGETHER = 50
"""Samples of an image that are drawn at a time."""


@dataclass(frozen=True, eq=False)
class Success:
    """How often the noise did what the attacker wants, (N,), with the ends of a 95 % interval."""

    rate: Tensor
    samples: int

    @classmethod
    def of(cls, fooled: Tensor) -> Success:
        """From outcomes (samples, N)."""
        return cls(fooled.double().mean(0), len(fooled))

    @property
    def low(self) -> Tensor:
        """The lower end of Wilson's interval, (N,)."""
        return wilson_interval(self.rate, self.samples)[0]

    @property
    def high(self) -> Tensor:
        """Its upper end."""
        return wilson_interval(self.rate, self.samples)[1]

    def reaches(self, share: float, errors: float) -> Tensor:
        """Whether the rate is a share that was asked for, or above, to within so many of its standard errors, (N,)."""
        return self.rate >= share - errors * (share * (1 - share) / self.samples) ** 0.5


def scores_of(network: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Scores (M, d) of inputs (M, *event), as many at a time as are a piece of work."""
    with full_precision():
        parts = inputs.split(elements_together("inputs", inputs, inputs[0].numel()))
        return torch.cat(list(map(network, parts)))


def fooled_margin(scores: Tensor, labels: Tensor, targets: Tensor | None) -> Tensor:
    """Below 0 exactly where an answer is what the attacker wants, for scores (..., N, d) and classes (N,).

    Without targets the score of the label less the best other one; with them the best other one less the target's.
    """
    wanted = labels if targets is None else targets
    index = wanted.unsqueeze(-1).expand(*scores.shape[:-1], 1)
    own = scores.gather(-1, index).squeeze(-1)
    others = scores.scatter(-1, index, -torch.inf).amax(-1)
    return own - others if targets is None else others - own


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
    with progress_bar("sampling", samples) as show:
        for start in range(0, samples, TOGETHER):
            show(start)
            count = min(TOGETHER, samples - start)
            shape = (count, *centres.shape[1:])
            draws = [torch.empty(shape, dtype=centres.dtype, device=centres.device).normal_(generator=one)
                     for one in generators]  # fmt: skip
            noise = torch.stack(draws, 1)
            inputs = centres + scale * noise
            if bounds is not None:
                inputs = inputs.clamp(*bounds)
            yield scores_of(network, inputs.flatten(0, 1)).unflatten(0, (count, len(centres)))
