"""Attacks within a box: the largest of the margins is made as small as lower ≤ μ ≤ upper and an interval for σ allow.

`descend_in_box` is the solver. Expected margins are close to piecewise linear and their minima close to corners of the
box, so only the signs of slopes matter: every coordinate moves downhill by the same share of its interval, and that
share shrinks geometrically. The maximum of several margins is softened, less and less as the steps shrink. The best
point seen is kept. `Targeted` and `PixelSupport` are the attacks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from netmoments.attacks.base import Attack, Sampled, Solved, Subjects, entries
from netmoments.attacks.evaluation import Success, fooled_margin, noisy_scores
from netmoments.attacks.margins import ClassPairs, Margins, NetworkMargins
from netmoments.attacks.result import AttackResult
from netmoments.checks import describe, random_seed, require_count, require_positive
from netmoments.progress import progress_bar

FIRST, LAST = 0.5, 1e-3
"""The first and the last step, as shares of half the box."""
SOFT, HARD = 0.3, 1e-3
"""The first and the last temperature of the softened maximum, as shares of the margin at the start."""
MEMORY = 0.75
"""Slopes are summed over the steps, an earlier sum weighted by this."""
SMALLEST = 1e-3
"""The least σ as a share of the largest; it stands for "above 0"."""


@dataclass(frozen=True, eq=False)
class Box:
    """Coordinates from `lower` to `upper`, (N, m) each, and σ from `least` to `most`, (N,) each."""

    lower: Tensor
    upper: Tensor
    least: Tensor
    most: Tensor


@dataclass(frozen=True, eq=False)
class Corner:
    """The best point found in a box: μ (N, R, m), σ (N, R), the largest margin there and its `_gap`, (N, R) each."""

    shift: Tensor
    sigma: Tensor
    margin: Tensor
    gap: Tensor

    def where(self, kept: Tensor, other: Corner) -> Corner:
        """This corner for images where `kept` (N,) is True, the other for the rest."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Corner(*(torch.where(kept.reshape(-1, *(1,) * (mine.dim() - 1)), mine, its) for mine, its in pairs))


def descend_in_box(margins: Margins, box: Box, shift: Tensor, sigma: Tensor, iterations: int) -> Corner:
    """The least largest margin that signed steps find, from a start (N, R, m) and (N, R) inside the box."""
    lower, upper = box.lower.unsqueeze(1), box.upper.unsqueeze(1)
    half = (upper - lower) / 2
    least, most = box.least.unsqueeze(1), box.most.unsqueeze(1)
    scale = margins.at(shift, sigma).amax(-1, keepdim=True).abs().clamp(min=1e-6)
    best = shift, sigma, torch.full_like(sigma, torch.inf)
    slopes, sigma_slopes = torch.zeros_like(shift), torch.zeros_like(sigma)
    with progress_bar("descending in the box", iterations) as show:
        for step in range(iterations + 1):
            show(step)
            done = step / max(iterations, 1)
            here = margins.with_slopes(shift, sigma)
            best = _better(best, (shift, sigma, here.value.amax(-1)))
            weights = torch.softmax(here.value / (scale * SOFT * (HARD / SOFT) ** done), -1)
            slope = here.weighted_gradient(weights)
            slopes = MEMORY * slopes + slope / slope.abs().sum(-1, keepdim=True).clamp(min=1e-30)
            sigma_slopes = MEMORY * sigma_slopes + here.weighted_sigma_slope(weights).sign()
            share = FIRST * (LAST / FIRST) ** done
            shift = torch.clamp(shift - share * half * slopes.sign(), min=lower, max=upper)
            sigma = torch.clamp(sigma - share * most / 2 * sigma_slopes.sign(), min=least, max=most)
    return Corner(*best, _gap(margins, box, *best[:2], scale * HARD))


Point = tuple[Tensor, Tensor, Tensor]
"""Shift, σ and the largest margin there."""


def _better(best: Point, new: Point) -> Point:
    lower = new[2] < best[2]
    return (
        torch.where(lower.unsqueeze(-1), new[0], best[0]),
        torch.where(lower, new[1], best[1]),
        torch.where(lower, new[2], best[2]),
    )


def _gap(margins: Margins, box: Box, shift: Tensor, sigma: Tensor, temperature: Tensor) -> Tensor:
    """How far the largest margin, linearized, could still fall within the box (Frank and Wolfe 1956), (N, R).

    For weights y ≥ 0 with sum 1 it is max margin − min over the box of Σ y(k)(margin(k) + ∇margin(k)·(v − μ)) ≥ 0; here
    y = softmax(margins/temperature).
    """
    here = margins.with_slopes(shift, sigma)
    weights = torch.softmax(here.value / temperature, -1)
    slope = here.weighted_gradient(weights)
    lower, upper = box.lower.unsqueeze(1), box.upper.unsqueeze(1)
    fall = torch.maximum(slope * (shift - lower), slope * (shift - upper)).sum(-1)
    sigma_slope = here.weighted_sigma_slope(weights)
    least, most = box.least.unsqueeze(1), box.most.unsqueeze(1)
    sigma_fall = torch.maximum(sigma_slope * (sigma - least), sigma_slope * (sigma - most))
    return here.value.amax(-1) - (weights * here.value).sum(-1) + fall + sigma_fall


@dataclass(frozen=True, kw_only=True)
class BoxAttack(Attack):
    """Settings of the attacks within a box.

    Args:
        beta: |μ| is at most this, in the units of the images; 30 grey levels by default.
        largest_sigma: σ is at most this; √2 grey levels by default.
        wanted: the share of samples that must be fooled; where fewer are, the network itself is followed for `polish`
            steps.
        iterations: steps on the formula.
    """

    beta: float | None = None
    largest_sigma: float | None = None
    wanted: float = 0.9
    iterations: int = 200

    _grey_levels: ClassVar[float] = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        caller = type(self).__name__
        require_positive(caller, "beta", self.reach, "0.1, in the units of the images")
        require_positive(caller, "largest_sigma", self.most_noise, "0.01, in the units of the images")
        if not isinstance(self.wanted, int | float) or not 0 < self.wanted <= 1:
            raise ValueError(f"{caller}: wanted must be a share of samples in (0, 1], got {self.wanted!r}")
        require_count(caller, "iterations", self.iterations, least=1)

    @property
    def reach(self) -> float:
        """β."""
        return self._grey_levels * self.grey_level if self.beta is None else self.beta

    @property
    def most_noise(self) -> float:
        """The largest σ."""
        return math.sqrt(2) * self.grey_level if self.largest_sigma is None else self.largest_sigma

    def _solved(self, subjects: Subjects) -> Solved:
        pairs = subjects.class_pairs(self.rivals)
        free, box = self._free_box(subjects)
        formula = self._formula(subjects, free)
        sigma = (box.most / 2).unsqueeze(1).expand(-1, pairs.larger.shape[1])
        start = torch.zeros_like(box.lower).unsqueeze(1).expand(-1, pairs.larger.shape[1], -1)
        corner = descend_in_box(formula.margins(pairs), box, start, sigma, self.iterations)
        images = torch.arange(len(corner.margin), device=corner.margin.device).unsqueeze(1)
        best = images, corner.margin.argmin(1, keepdim=True)
        pairs, corner = ClassPairs(pairs.larger[best], pairs.smaller[best]), entries(corner, best)
        margins = NetworkMargins(subjects.model.network, subjects.images, *pairs, free)
        corner, followed = self._followed_on(subjects, margins, box, corner)
        expected = formula.margins(pairs)
        at_rest = [each.at(start[:, :1], sigma[:, :1]).amax(-1) for each in (expected, margins)]
        drop = torch.where(followed.unsqueeze(1) > 0, at_rest[1], at_rest[0]) - corner.margin
        return Solved(
            mu=_on_images(corner.shift.squeeze(1), free, subjects.images),
            sigma=corner.sigma.squeeze(1),
            towards=pairs.smaller[:, 0, 0],
            gamma=torch.zeros_like(corner.margin.squeeze(1)),
            margin=expected.at(corner.shift, corner.sigma).amax(-1).squeeze(1),
            feasible=corner.margin.squeeze(1) < 0,
            polished=followed * self.polish,
            iterations=self.iterations + followed * self.polish,
            gap=(corner.gap / drop.clamp(min=1e-12)).squeeze(1).clamp(min=0),
        )

    def _followed_on(
        self, subjects: Subjects, margins: NetworkMargins, box: Box, corner: Corner
    ) -> tuple[Corner, Tensor]:
        """The corner after steps on the network's own margins, and where these were made, (N,), as 0 or 1.

        They are made where too few samples are fooled, and kept where they fool more.
        """

        def fooled_share(point: Corner) -> Tensor:
            centres, sigma = margins.shifted(point.shift).squeeze(1), point.sigma.squeeze(1)
            noise = (subjects.model.network, centres, sigma, subjects.places, self.samples, self.seed + 1)
            fooled = [fooled_margin(scores, subjects.labels, subjects.targets) < 0 for scores in noisy_scores(*noise)]
            return torch.cat(fooled).double().mean(0)

        before = fooled_share(corner)
        tried = before < self.wanted
        if not self.polish or not bool(tried.any()):
            return corner, torch.zeros_like(subjects.labels)
        further = descend_in_box(margins, box, corner.shift, corner.sigma, self.polish)
        helps = tried & (fooled_share(further) > before)
        return corner.where(~helps, further), tried.to(subjects.labels.dtype)

    def _fooled_as_asked(self, success: Success, sampled: Sampled) -> Tensor:
        return success.reaches(self.wanted, 2.0)

    def _free_box(self, subjects: Subjects) -> tuple[Tensor | None, Box]:
        """The free coordinates, (N, m), or None for all; and their box."""
        return None, self._whole_box(subjects)

    def _whole_box(self, subjects: Subjects) -> Box:
        most = subjects.lower.new_full((len(subjects.lower),), self.most_noise)
        lower, upper = subjects.lower.clamp(min=-self.reach), subjects.upper.clamp(max=self.reach)
        return Box(lower, upper, SMALLEST * most, most)


@dataclass(frozen=True, kw_only=True)
class Targeted(BoxAttack):
    """The paper's opt1: every other class's expected score as far below the target's as |μ| ≤ β and σ² ≤ 2 allow.

    It needs targets. See `BoxAttack` and `Attack` for the settings.

    >>> from netmoments import zoo
    >>> digits, image = zoo.pretrained("digits"), torch.zeros(1, 1, 8, 8)
    >>> result = Targeted(beta=0.5, samples=100, polish=4)(digits, image, digits(image).argmax(1), targets=3)
    >>> result.mu.shape, bool(result.mu.abs().max() <= 0.5)
    (torch.Size([1, 1, 8, 8]), True)
    """

    def __call__(self, network: Any, images: Tensor, labels: Any, targets: Any = None) -> AttackResult:
        if targets is None:
            raise ValueError("Targeted: give targets=, the classes that the images are to be taken for")
        return super().__call__(network, images, labels, targets)


@dataclass(frozen=True, kw_only=True)
class PixelSupport(BoxAttack):
    """The paper's opt2: the label's expected score is brought below a rival's by changing the mean of few pixels.

    Args:
        percent: α, the percentage of pixels that may change, in (0, 100]; the seed chooses them at random for each
            image.
        mask: instead of `percent`, a boolean tensor that broadcasts to the images, True for pixels that may change.

    With `percent` all channels of a chosen pixel may change. The noise σ is on every pixel, as the paper's covariance
    has it. β is 75 grey levels by default. See `BoxAttack` and `Attack` for the rest.

    >>> from netmoments import zoo
    >>> digits, image = zoo.pretrained("digits"), torch.zeros(1, 1, 8, 8)
    >>> result = PixelSupport(percent=25, samples=100, polish=4)(digits, image, digits(image).argmax(1))
    >>> int((result.mu != 0).sum()) <= 16  # of 64 pixels
    True
    """

    percent: float | None = None
    mask: Tensor | None = field(default=None, compare=False)

    _grey_levels: ClassVar[float] = 75.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.percent is None) == (self.mask is None):
            which = "neither" if self.percent is None else "both"
            raise ValueError(f"PixelSupport: give percent= (of the pixels) or mask= (the pixels), got {which}")
        if self.percent is not None and (
            isinstance(self.percent, bool) or not isinstance(self.percent, int | float) or not 0 < self.percent <= 100
        ):
            raise ValueError(f"PixelSupport: percent must be in (0, 100], got {self.percent!r}")
        if self.mask is not None and (not isinstance(self.mask, Tensor) or self.mask.dtype != torch.bool):
            raise TypeError(f"PixelSupport: mask must be a boolean tensor, got {describe(self.mask)}")

    def __call__(self, network: Any, images: Tensor, labels: Any, targets: Any = None) -> AttackResult:
        if self.mask is not None and self.mask.dim() == 4 and len(self.mask) not in (1, len(images)):
            raise ValueError(
                f"PixelSupport: mask must broadcast to the images, one for all or one for each of {len(images)}, got "
                f"{describe(self.mask)}"
            )
        return super().__call__(network, images, labels, targets)

    def _free_box(self, subjects: Subjects) -> tuple[Tensor | None, Box]:
        support = self._support(subjects).flatten(1)
        most = int(support.sum(1).max())  # images with fewer get further coordinates, of which the box allows only 0
        free = torch.topk(support.to(torch.uint8), most, dim=1).indices.sort(1).values
        allowed = support.gather(1, free)
        box = self._whole_box(subjects)
        lower, upper = (end.gather(1, free) * allowed for end in (box.lower, box.upper))
        return free, replace(box, lower=lower, upper=upper)

    def _support(self, subjects: Subjects) -> Tensor:
        """The pixels that may change, (N, C, H, W)."""
        images = subjects.images
        if self.mask is not None:
            mask = self.mask.to(images.device)
            if mask.dim() == 4 and len(mask) > 1:  # one for each image that the caller gave, of which some were skipped
                mask = mask[subjects.places]
            try:
                support = mask.expand(images.shape)
            except RuntimeError:
                raise ValueError(
                    f"PixelSupport: mask must broadcast to images of shape {tuple(images.shape)}, got "
                    f"{describe(self.mask)}"
                ) from None
            if not bool(support.flatten(1).any(1).all()):
                raise ValueError("PixelSupport: mask has no pixel that may change for at least one image")
            return support
        assert self.percent is not None
        pixels = images.shape[-2] * images.shape[-1]
        count = max(1, round(pixels * self.percent / 100))
        chosen = torch.zeros(len(images), pixels, dtype=torch.bool)
        for row, place in zip(chosen, subjects.places.tolist(), strict=True):
            generator = torch.Generator().manual_seed(random_seed(self.seed, "pixel support", place))
            row[torch.randperm(pixels, generator=generator)[:count]] = True
        return chosen.reshape(-1, 1, *images.shape[-2:]).expand(images.shape).to(images.device)


def _on_images(shift: Tensor, free: Tensor | None, images: Tensor) -> Tensor:
    """Shifts (N, m) of the free coordinates as shifts of whole images."""
    flat = shift if free is None else torch.zeros_like(images.flatten(1)).scatter_(1, free, shift)
    return flat.reshape(images.shape)
