"""The largest fall of a margin within a box: least max over k of margin(k) for lower ≤ μ ≤ upper and σ in an interval.

Expected margins are close to piecewise linear and their minima close to corners, so the steps are signed: every
coordinate moves by the same share of its interval, downhill, and that share shrinks geometrically. Of several margins a
soft maximum is taken, which hardens as the steps shrink. The best point seen is kept."""

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
from netmoments.checks import describe, require_count, require_positive
from netmoments.gaussian import random_seed
from netmoments.progress import progress_bar

FIRST, LAST = 0.5, 1e-3
"""Steps as shares of half the box."""
SOFT, HARD = 0.3, 1e-3
"""Temperatures of the maximum as shares of the margin at the start."""
MEMORY = 0.75
"""Of the slope, from step to step."""


@dataclass(frozen=True, eq=False)
class Box:
    """Coordinates between `lower` and `upper`, (N, m), and σ above `least` and up to `most`, (N,)."""

    lower: Tensor
    upper: Tensor
    least: Tensor
    most: Tensor


@dataclass(frozen=True, eq=False)
class Corner:
    """The best found: μ (N, R, m), σ (N, R), the largest margin there (N, R), and how much lower it might be."""

    shift: Tensor
    sigma: Tensor
    margin: Tensor
    gap: Tensor

    def where(self, kept: Tensor, other: Corner) -> Corner:
        """This for the images that are kept, (N,), the other for the rest."""
        pairs = (
            (self.shift, other.shift),
            (self.sigma, other.sigma),
            (self.margin, other.margin),
            (self.gap, other.gap),
        )
        return Corner(*(torch.where(kept.reshape(-1, *(1,) * (a.dim() - 1)), a, b) for a, b in pairs))


def descend_in_box(margins: Margins, box: Box, shift: Tensor, sigma: Tensor, iterations: int) -> Corner:
    """From a start (N, R, m), (N, R) inside the box."""
    lower, upper = box.lower.unsqueeze(1), box.upper.unsqueeze(1)
    half = (upper - lower) / 2
    least, most = box.least.unsqueeze(1), box.most.unsqueeze(1)
    scale = margins.at(shift, sigma).amax(-1, keepdim=True).abs().clamp(min=1e-6)
    best = shift, sigma, torch.full_like(sigma, torch.inf)
    memory, memory_sigma = torch.zeros_like(shift), torch.zeros_like(sigma)
    with progress_bar("descending in the box", iterations) as show:
        for step in range(iterations + 1):
            show(step)
            done = step / max(iterations, 1)
            here = margins.with_slopes(shift, sigma)
            best = _better(best, (shift, sigma, here.value.amax(-1)))
            weights = torch.softmax(here.value / (scale * SOFT * (HARD / SOFT) ** done), -1)
            slope = here.pulled(weights)
            memory = MEMORY * memory + slope / slope.abs().sum(-1, keepdim=True).clamp(min=1e-30)
            slope_sigma = here.by_sigma(weights)
            memory_sigma = MEMORY * memory_sigma + slope_sigma.sign()
            share = FIRST * (LAST / FIRST) ** done
            shift = torch.clamp(shift - share * half * memory.sign(), min=lower, max=upper)
            sigma = torch.clamp(sigma - share * most / 2 * memory_sigma.sign(), min=least, max=most)
    return Corner(*best, _gap(margins, box, *best[:2], scale * HARD))


Best = tuple[Tensor, Tensor, Tensor]


def _better(best: Best, now: Best) -> Best:
    lower = now[2] < best[2]
    return (
        torch.where(lower.unsqueeze(-1), now[0], best[0]),
        torch.where(lower, now[1], best[1]),
        torch.where(lower, now[2], best[2]),
    )


def _gap(margins: Margins, box: Box, shift: Tensor, sigma: Tensor, temperature: Tensor) -> Tensor:
    """How far the linearized margin could still fall within the box (Frank and Wolfe 1956), for the best weights seen.

    For weights y ≥ 0 with sum 1: max margin − min over the box of Σ y(k)(margin(k) + ∇margin(k)·(v − μ)) ≥ 0.
    """
    here = margins.with_slopes(shift, sigma)
    weights = torch.softmax(here.value / temperature, -1)
    slope = here.pulled(weights)
    lower, upper = box.lower.unsqueeze(1), box.upper.unsqueeze(1)
    fall = torch.maximum(slope * (shift - lower), slope * (shift - upper)).sum(-1)
    slope_sigma = here.by_sigma(weights)
    least, most = box.least.unsqueeze(1), box.most.unsqueeze(1)
    fall_sigma = torch.maximum(slope_sigma * (sigma - least), slope_sigma * (sigma - most))
    return here.value.amax(-1) - (weights * here.value).sum(-1) + fall + fall_sigma


SMALLEST = 1e-3
"""Of the largest σ: what stands for "above 0"."""


@dataclass(frozen=True, kw_only=True)
class BoxAttack(Attack):
    """Settings of the attacks within a box.

    Args:
        beta: |μ| stays below this, in the units of the images; 30 grey levels by default.
        largest_sigma: σ stays below this; √2 grey levels by default.
        wanted: the share of samples that must be fooled, else the network itself is followed for `polish` steps.
        iterations: on the formula.
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
        found = descend_in_box(formula.margins(pairs), box, start, sigma, self.iterations)
        every = torch.arange(len(found.margin), device=found.margin.device).unsqueeze(1)
        rival = every, found.margin.argmin(1, keepdim=True)
        pairs, corner = ClassPairs(pairs.larger[rival], pairs.smaller[rival]), entries(found, rival)
        own = NetworkMargins(subjects.model.network, subjects.images, *pairs, free)
        corner, taken = self._followed_on(subjects, own, box, corner)
        expected = formula.margins(pairs)
        at_rest = [margins.at(start[:, :1], sigma[:, :1]).amax(-1) for margins in (expected, own)]
        drop = torch.where(taken.unsqueeze(1) > 0, at_rest[1], at_rest[0]) - corner.margin
        return Solved(
            mu=_on_images(corner.shift.squeeze(1), free, subjects.images),
            sigma=corner.sigma.squeeze(1),
            towards=pairs.smaller[:, 0, 0],
            gamma=torch.zeros_like(corner.margin.squeeze(1)),
            margin=expected.at(corner.shift, corner.sigma).amax(-1).squeeze(1),
            feasible=corner.margin.squeeze(1) < 0,
            polished=taken * self.polish,
            iterations=self.iterations + taken * self.polish,
            gap=(corner.gap / drop.clamp(min=1e-12)).squeeze(1).clamp(min=0),
        )

    def _followed_on(self, subjects: Subjects, own: NetworkMargins, box: Box, corner: Corner) -> tuple[Corner, Tensor]:
        """The network's own margins made smaller, where too few samples are fooled and it helps; and where tried."""

        def share(found: Corner) -> Tensor:
            centres, sigma = own.shifted(found.shift).squeeze(1), found.sigma.squeeze(1)
            seen = noisy_scores(subjects.model.network, centres, sigma, subjects.places, self.samples, self.seed + 1)
            fooled = [fooled_margin(scores, subjects.labels, subjects.targets) < 0 for scores in seen]
            return torch.cat(fooled).double().mean(0)

        before = share(corner)
        taken = torch.zeros_like(subjects.labels)
        if not self.polish or bool((before >= self.wanted).all()):
            return corner, taken
        further = descend_in_box(own, box, corner.shift, corner.sigma, self.polish)
        tried = before < self.wanted
        helps = tried & (share(further) > before)
        return corner.where(~helps, further), tried.to(taken.dtype)

    def _as_asked(self, success: Success, sampled: Sampled) -> Tensor:
        return success.reaches(self.wanted, 2.0)

    def _free_box(self, subjects: Subjects) -> tuple[Tensor | None, Box]:
        """Which coordinates are free, (N, m), all if None; and their box."""
        return None, self._whole_box(subjects)

    def _whole_box(self, subjects: Subjects) -> Box:
        most = subjects.lower.new_full((len(subjects.lower),), self.most_noise)
        lower, upper = subjects.lower.clamp(min=-self.reach), subjects.upper.clamp(max=self.reach)
        return Box(lower, upper, SMALLEST * most, most)


@dataclass(frozen=True, kw_only=True)
class Targeted(BoxAttack):
    """The paper's opt1: every other class's expected score as far below the target's as |μ| ≤ β and σ² ≤ 2 allow.

    See `BoxAttack` and `Attack` for the settings; it needs targets.

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
    """The paper's opt2: the label's expected score below a rival's by changing the mean of few pixels.

    Args:
        percent: α, the share of the pixels, chosen at random for each image by the seed; in (0, 100].
        mask: instead, the pixels that may change, True in a tensor that broadcasts to the images.

    All channels of a pixel change. The noise σ is on every pixel, as the paper's covariance has it. β is 75 grey levels
    by default. See `BoxAttack` and `Attack` for the rest.

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
            given = "neither" if self.percent is None else "both"
            raise ValueError(f"PixelSupport: give percent= (of the pixels) or mask= (the pixels), got {given}")
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
        most = int(support.sum(1).max())
        free = torch.topk(support.to(torch.uint8), most, dim=1).indices.sort(1).values
        inside = support.gather(1, free)
        whole = self._whole_box(subjects)
        lower, upper = (end.gather(1, free) * inside for end in (whole.lower, whole.upper))
        return free, replace(whole, lower=lower, upper=upper)

    def _support(self, subjects: Subjects) -> Tensor:
        """The pixels that may change, (N, C, H, W)."""
        images = subjects.images
        if self.mask is not None:
            mask = self.mask.to(images.device)
            if mask.dim() == 4 and len(mask) > 1:  # one for each of the given images, some of which were skipped
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
    """Shifts (N, m) of the free coordinates as images."""
    whole = shift if free is None else torch.zeros_like(images.flatten(1)).scatter_(1, free, shift)
    return whole.reshape(images.shape)
