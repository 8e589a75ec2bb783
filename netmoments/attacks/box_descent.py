"""The largest fall of a margin within a box: least max over k of margin(k) for lower ≤ μ ≤ upper and σ in an interval.

Expected margins are close to piecewise linear and their minima close to corners, so the steps are signed: every
coordinate moves by the same share of its interval, downhill, and that share shrinks geometrically. Of several margins a
soft maximum is taken, which hardens as the steps shrink. The best point seen is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from netmoments.attacks.margins import Margins
from netmoments.progress import Progress

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

    def problem(self, chosen: Tensor) -> Corner:
        """One of the R problems of each image, (N,), with R = 1."""
        images = torch.arange(len(chosen), device=chosen.device)
        parts = (self.shift, self.sigma, self.margin, self.gap)
        return Corner(*(part[images, chosen].unsqueeze(1) for part in parts))

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
    with Progress("descending in the box", iterations) as progress:
        for step in range(iterations + 1):
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
            progress.advance(1)
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
    """How far the linearized margin could still fall within the box (Frank and Wolfe's), with the best of weights seen.

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
