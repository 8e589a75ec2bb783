"""The largest of a window among those that have a chance: the same moments for less work where windows are wide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from netmoments.propagate.largest import Largest
from netmoments.propagate.nonlinearity import Local

CHANCE = 4.0
"""Deviations behind the leading input beyond which an input is left out: it would be the largest once in 30,000."""
SIZES = (1, 2, 3, 4, 6)
"""Windows with at most so many contenders are treated together."""


def local_among_contenders(rule: Largest, mean: Tensor, covariance: Tensor) -> Local:
    """`rule.local`, each window without the inputs that are `CHANCE` deviations behind."""
    contenders = rule.contenders(mean.detach(), covariance.detach(), CHANCE)[:, : rule.width]
    nothing = mean.new_zeros(rule.units)
    found = Local(nothing, nothing, torch.zeros_like(mean), torch.zeros_like(covariance))
    for units, size in _by_size(contenders):
        kept, order = contenders[units].to(torch.int8).sort(dim=-1, descending=True, stable=True)
        kept, order = kept[:, :size] > 0, order[:, :size]
        windows = torch.where(kept, rule.windows[units].gather(-1, order), -1)
        narrow = replace(rule, windows=windows, numbers=units)
        pick = torch.nn.functional.one_hot(order, rule.width).to(mean) * kept.unsqueeze(-1)
        own = narrow.local((pick @ mean[units].unsqueeze(-1)).squeeze(-1), pick @ covariance[units] @ pick.mT)
        gain = (own.gain.unsqueeze(-2) @ pick).squeeze(-2)
        wide = Local(own.mean, own.variance, gain, pick.mT @ own.curvature @ pick)
        found = Local(*(every.index_copy(0, units, part) for every, part in zip(found, wide, strict=True)))
    return found


def _by_size(contenders: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Units that have about as many contenders, and how many at most."""
    count, least = contenders.sum(-1), -1
    for size in (*(size for size in SIZES if size < contenders.shape[-1]), contenders.shape[-1]):
        units = ((count > least) & (count <= size)).nonzero().squeeze(-1)
        least = size
        if len(units):
            yield units, size
