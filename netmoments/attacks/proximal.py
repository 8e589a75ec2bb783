"""The exact proximal steps of the sparse and smooth problem."""

from __future__ import annotations

import torch
from torch import Tensor


def shrink_into_box(value: Tensor, threshold: Tensor | float, lower: Tensor, upper: Tensor) -> Tensor:
    """argmin over lower ≤ m ≤ upper of threshold·|m| + (m − value)²/2: soft thresholding, then the box.

    Exact where lower ≤ 0 ≤ upper: the function is convex in each pixel, so the nearest point of the box to the free
    minimum is the minimum in it. What is below the threshold is exactly zero.
    """
    return torch.clamp(torch.nn.functional.relu(value - threshold) - torch.nn.functional.relu(-value - threshold),
                       min=lower, max=upper)  # fmt: skip


def into_unit_discs(pair: Tensor) -> Tensor:
    """The nearest pairs (2, ...) of length at most 1: the dual of a sum of lengths."""
    return pair / pair.pow(2).sum(0).sqrt().clamp(min=1)
