"""What the network says to noise around M + μ, how often that fools it, and how visible μ is (SSIM)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from netmoments.checks import random_seed
from netmoments.memory import elements_together
from netmoments.normal import wilson_interval
from netmoments.precision import full_precision
from netmoments.progress import progress_bar

WINDOW, SPREAD = 11, 1.5
"""Side of the structural similarity's window and deviation of its weights, in pixels, as in Wang et al. (2004)."""
STABLE = (0.01, 0.03)
"""K₁ and K₂ of Wang et al.: times the range of a pixel and squared, they keep the quotients finite."""
TOGETHER = 50
"""So many samples of an image are drawn at a time."""

Bounds = tuple[float, float]


def structural_similarity(images: Tensor, others: Tensor, span: float) -> Tensor:
    """Mean SSIM of images (N, C, H, W) with others, (N,): 1 for equal images; `span` is the range of a pixel.

    The windows are Gaussian, 11 pixels a side or as many as a smaller image has, and only whole windows count. Channels
    are averaged.
    """
    side = min(WINDOW, *images.shape[-2:])
    offsets = torch.arange(side, dtype=torch.float64) - (side - 1) / 2
    bell = torch.exp(-0.5 * (offsets / SPREAD) ** 2)
    window = torch.outer(bell, bell).to(images)
    window = (window / window.sum()).reshape(1, 1, side, side)

    def local(x: Tensor) -> Tensor:
        return conv2d(x.flatten(0, 1).unsqueeze(1), window)

    x, y = images, others
    mean_x, mean_y = local(x), local(y)
    var_x, var_y = local(x * x) - mean_x**2, local(y * y) - mean_y**2
    covariance = local(x * y) - mean_x * mean_y
    first, second = ((k * span) ** 2 for k in STABLE)
    similarity = (2 * mean_x * mean_y + first) * (2 * covariance + second)
    similarity = similarity / ((mean_x**2 + mean_y**2 + first) * (var_x + var_y + second))
    return similarity.flatten(1).mean(1).reshape(len(images), -1).mean(1)


@dataclass(frozen=True, eq=False)
class Success:
    """How often the noise did what the attacker wants, (N,), with the ends of a 95 % interval."""

    rate: Tensor
    samples: int

    @classmethod
    def of(cls, fooled: Tensor) -> Success:
        """From outcomes (samples, N), True where the network was fooled."""
        return cls(fooled.double().mean(0), len(fooled))

    @property
    def low(self) -> Tensor:
        """The lower end of Wilson's interval, (N,)."""
        return wilson_interval(self.rate, self.samples)[0]

    @property
    def high(self) -> Tensor:
        """The upper end of Wilson's interval, (N,)."""
        return wilson_interval(self.rate, self.samples)[1]

    def reaches(self, share: float, errors: float) -> Tensor:
        """Whether the rate is at least `share`, to within `errors` standard errors of such a share, (N,)."""
        return self.rate >= share - errors * (share * (1 - share) / self.samples) ** 0.5


def scores_of(network: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Scores (M, d) of inputs (M, *event), a piece of work (see `memory`) at a time."""
    with full_precision():
        pieces = inputs.split(elements_together("inputs", inputs, inputs[0].numel()))
        return torch.cat(list(map(network, pieces)))


def fooled_margin(scores: Tensor, labels: Tensor, targets: Tensor | None) -> Tensor:
    """The margin that is below 0 exactly where the attacker succeeds, for scores (..., N, d) and classes (N,).

    Without targets it is the label's score less the best other one; with them the best other one less the target's.
    """
    chosen = labels if targets is None else targets
    index = chosen.unsqueeze(-1).expand(*scores.shape[:-1], 1)
    score = scores.gather(-1, index).squeeze(-1)
    best_other = scores.scatter(-1, index, -torch.inf).amax(-1)
    return score - best_other if targets is None else best_other - score


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
    """Scores of samples of N(centre, σ²I) for centres (N, *event), cut to the bounds if there are any.

    They come in batches (samples at a time, N, d). An image's noise depends on the seed and on its index `places` (N,)
    among the images that the caller gave, not on the images beside it nor on the bounds.
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
            draws = [torch.empty(shape, dtype=centres.dtype, device=centres.device).normal_(generator=generator)
                     for generator in generators]  # fmt: skip
            inputs = centres + scale * torch.stack(draws, 1)
            if bounds is not None:
                inputs = inputs.clamp(*bounds)
            yield scores_of(network, inputs.flatten(0, 1)).unflatten(0, (count, len(centres)))
