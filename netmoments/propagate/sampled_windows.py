"""Samples of what the units of a layer look at, window by window."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from netmoments.propagate.nonlinearity import Nonlinearity

WINDOW_ELEMENTS = {"cpu": 2**22, "cuda": 2**27}
"""Numbers in samples of windows that are looked at together."""


def windows_in_parts(windows: Tensor, samples: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Some windows (m, w) of places in samples (K, p) at a time, and what is there, (some, w, K): 0 at place −1.

    A sample after the other in memory, so that a place is copied in one piece.
    """
    columns = samples.mT.contiguous()
    elements = WINDOW_ELEMENTS.get(samples.device.type, WINDOW_ELEMENTS["cpu"])
    together = max(1, elements // (len(samples) * windows.shape[1]))
    for start in range(0, len(windows), together):
        some = windows[start : start + together]
        found = columns[some.clamp(min=0)]
        yield slice(start, start + together), found if bool((some >= 0).all()) else found * (some >= 0).unsqueeze(-1)


def window_covariance(rule: Nonlinearity, centred: Tensor) -> Tensor:
    """S = Σ_k z_k z_kᵀ / (K − 1) of every window, (n, w, w), from centred samples (K, p)."""
    if rule.width == 1:
        products = rule.gathered(centred).square().sum(0).unsqueeze(-1)
    else:
        products = torch.cat([z @ z.mT for _, z in windows_in_parts(rule.windows, centred)])
    return products / (len(centred) - 1)


def through_gains(rule: Nonlinearity, gain: Tensor, centred: Tensor) -> Tensor:
    """g·z of every unit, (K, n), for gains (n, w) and samples (K, p)."""
    if rule.width == 1:
        return (rule.gathered(centred) * gain).squeeze(-1)
    parts = windows_in_parts(rule.windows, centred)
    return torch.cat([(gain[some].unsqueeze(-2) @ z).squeeze(-2) for some, z in parts]).mT
