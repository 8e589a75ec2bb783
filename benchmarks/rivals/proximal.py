"""Isotropic total variation and the proximal maps of ‖·‖₁ and ‖·‖₁ + TV in a box and a diagonal metric."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

Shrink = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(point y, weight w, metric s) → argmin_z Σᵢ (zᵢ − yᵢ)²/(2sᵢ) + w·penalty(z) in a box."""


def differences(mu: Tensor) -> Tensor:
    """Dμ: forward differences down and to the right, zero in the last row and column, (2, N, C, H, W)."""
    down = pad(mu[..., 1:, :] - mu[..., :-1, :], (0, 0, 0, 1))
    right = pad(mu[..., :, 1:] - mu[..., :, :-1], (0, 1))
    return torch.stack([down, right])


def differences_transposed(flow: Tensor) -> Tensor:
    """Dᵀp, (N, C, H, W); what p has in the last row (down) and the last column (right) does not count."""
    down, right = flow[0][..., :-1, :], flow[1][..., :, :-1]
    return pad(down, (0, 0, 1, 0)) - pad(down, (0, 0, 0, 1)) + pad(right, (1, 0)) - pad(right, (0, 1))


def length(flow: Tensor) -> Tensor:
    """(p_down² + p_right²)^½ at every pixel; its derivative is not used."""
    return torch.hypot(flow[0], flow[1])


def total_variation(mu: Tensor) -> Tensor:
    """Σ over channels and pixels of |Dμ|, (N,)."""
    return length(differences(mu)).sum((1, 2, 3))


def soft(point: Tensor, threshold: Tensor) -> Tensor:
    """sign(y)·max(|y| − threshold, 0)."""
    return point - point.clamp(-threshold, threshold)


def l1_in_box(lower: Tensor, upper: Tensor) -> Shrink:
    """Penalty ‖z‖₁: soft threshold w·s, then the box; exact, for each pixel is on its own."""

    def shrink(point: Tensor, weight: Tensor, metric: Tensor) -> Tensor:
        return soft(point, weight * metric).clamp(lower, upper)

    return shrink


def l1_tv_in_box(lower: Tensor, upper: Tensor, iterations: int = 20) -> Shrink:
    """Penalty ‖z‖₁ + TV(z): accelerated projected ascent on the dual of TV, warm from call to call.

    max over |p| ≤ w of min over z of Σᵢ(zᵢ − yᵢ)²/(2sᵢ) + w‖z‖₁ + ⟨p, Dz⟩, whose inner minimum is at
    z = clip(soft(y − s·Dᵀp, w·s)). Unlike a prox of TV followed by a soft threshold this converges to the prox of the
    sum, box included. Steps are 1/(4(s + s′)), s′ the larger of the neighbours' (Pock, Chambolle 2011); 1/8 at s = 1.
    """
    memory: list[Tensor] = []

    def shrink(point: Tensor, weight: Tensor, metric: Tensor) -> Tensor:
        steps = dual_steps(metric.expand_as(point))
        flow = inside(weight * memory.pop(), weight) if memory else torch.zeros_like(differences(point))
        moved = flow
        for k in range(iterations):
            before = flow
            z = soft(point - metric * differences_transposed(moved), weight * metric).clamp(lower, upper)
            flow = inside(moved + steps * differences(z), weight)
            moved = flow + k / (k + 3) * (flow - before)
        memory.append(flow / weight.clamp_min(torch.finfo(weight.dtype).tiny))
        return soft(point - metric * differences_transposed(flow), weight * metric).clamp(lower, upper)

    return shrink


def inside(flow: Tensor, radius: Tensor) -> Tensor:
    """p scaled to |p| ≤ radius at every pixel."""
    return flow * (radius / torch.maximum(length(flow), radius).clamp_min(torch.finfo(flow.dtype).tiny))


def dual_steps(metric: Tensor) -> Tensor:
    """1/(4(s + s′)), s′ the larger s of the pixels below and to the right."""
    below = pad(metric[..., 1:, :], (0, 0, 0, 1))
    right = pad(metric[..., :, 1:], (0, 1))
    return 0.25 / (metric + torch.maximum(below, right))
