"""The largest of many windows, each among those of its inputs that have a chance: less work where windows are wide."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from netmoments.propagate.few_lines import LargestMoments, direction_sets, expected_largest, windows_together
from netmoments.propagate.largest import Largest
from netmoments.propagate.sampled_windows import joined

CHANCE = 3.5
"""Deviations behind the leading input beyond which an input is left out: it would be the largest once in 4,000."""
SIZES = (2, 4, 6, 9, 16, 32)
"""Windows with at most so many contenders are treated together."""
FRAMES, MOST_FRAMES = 2**13, 256
"""Frames of lines for all windows of an image together: the fewer there are, the less their errors average out."""


class Windows(NamedTuple):
    """M windows of w inputs."""

    mean: Tensor
    """(w, M)."""
    covariance: Tensor
    """(w, w, M)."""
    present: Tensor
    """Which of the places are inputs, (w, M)."""
    numbers: Tensor
    """Which of the sets of directions each takes, (M,), modulo their number."""

    def chosen(self, which: Tensor) -> Windows:
        return Windows(*(x.index_select(-1, which) for x in self))

    def reordered(self, order: Tensor, kept: Tensor) -> Windows:
        """The inputs in another order, (c, M), those that are not kept left out."""
        rows = self.covariance.gather(0, order.unsqueeze(1).expand(-1, self.covariance.shape[1], -1))
        both = rows.gather(1, order.expand(len(order), *order.shape))
        return Windows(self.mean.gather(0, order), both, kept, self.numbers)


def largest_of_contenders(rule: Largest, mean: Tensor, covariance: Tensor, probes: int) -> LargestMoments:
    """The moments (N, n), (N, n, w), (N, n, w, w) from means (N, n, w) and covariances (N, n, w, w) of the windows."""
    images, units, _ = mean.shape
    windows = Windows(
        rule.sign * mean.flatten(0, 1).mT,
        covariance.flatten(0, 1).permute(1, 2, 0).contiguous(),
        (rule.windows >= 0).mT.repeat(1, images),
        torch.arange(units, device=mean.device).repeat(images),
    )
    found = _narrowed(windows, frames_for(units, probes), rule.with_zero)
    gain, curvature = found.gain.mT, rule.sign * found.curvature.permute(2, 0, 1)
    every = (rule.sign * found.mean, gain.contiguous(), curvature.contiguous())
    return LargestMoments(*(x.unflatten(0, (images, units)) for x in every))


def frames_for(units: int, probes: int) -> int:
    """How many frames of lines each of so many windows gets."""
    return min(max(1, FRAMES // units, probes // 64), MOST_FRAMES)


def _in_parts(windows: Windows, frames: int, with_zero: bool) -> LargestMoments:
    """`expected_largest`, some windows at a time."""
    directions = direction_sets(len(windows.mean), frames).to(windows.mean)
    together = windows_together(windows.mean, len(directions), len(windows.mean))
    parts = []
    for start in range(0, windows.mean.shape[-1], together):
        some = Windows(*(x[..., start : start + together] for x in windows))
        own = directions.index_select(-1, some.numbers % directions.shape[-1])
        parts.append(expected_largest(some.mean, some.covariance, some.present, own, with_zero=with_zero))
    return LargestMoments(*(joined(part, -1) for part in zip(*parts, strict=True)))


def _narrowed(windows: Windows, frames: int, with_zero: bool) -> LargestMoments:
    """The same, each window without the inputs that are `CHANCE` deviations behind; many have only a leader left."""
    behind = deviations_behind(windows, with_zero=with_zero)
    near = behind <= CHANCE
    gain = near & (behind == behind.amin(0))
    expected, gain = (gain * windows.mean).sum(0), gain.to(windows.mean.dtype)
    curvature = torch.zeros_like(windows.covariance, requires_grad=False)
    width = len(near)
    for which, size in _by_size(near.sum(0), _is_open(windows, near, with_zero=with_zero), width):
        some = windows.chosen(which)
        if size == width:
            own = _in_parts(some, frames, with_zero)
        else:
            distance, order = (x[:size] for x in behind.index_select(-1, which).sort(0))
            own = _in_parts(some.reordered(order, distance <= CHANCE), frames, with_zero).placed(order, width)
        expected = expected.index_copy(0, which, own.mean)
        gain.index_copy_(1, which, own.gain)
        curvature.index_copy_(2, which, own.curvature)
    return LargestMoments(expected, gain, curvature)


@torch.no_grad()
def deviations_behind(windows: Windows, *, with_zero: bool) -> Tensor:
    """How far each input is behind the leading one (or 0), in deviations of their difference, (w, M); 0 for the leader.

    Infinitely far if there is no such input, or its difference from the leader does not vary.
    """
    mean = torch.where(windows.present, windows.mean, -torch.inf)
    lead, leader = mean.max(0, keepdim=True)
    own = windows.covariance.diagonal(dim1=0, dim2=1).mT
    with_leader = windows.covariance.gather(0, leader.unsqueeze(1).expand(1, *own.shape)).squeeze(0)
    spread = own + own.gather(0, leader) - 2 * with_leader
    if with_zero:
        spread = torch.where(lead < 0, own, spread)
        lead = lead.clamp(min=0)
    varies = spread > 0
    distance = torch.where(varies, (lead - mean) / torch.where(varies, spread, 1.0).sqrt(), torch.inf)
    return distance.scatter(0, leader, torch.where(lead > mean.gather(0, leader), distance.gather(0, leader), 0.0))


@torch.no_grad()
def _is_open(windows: Windows, near: Tensor, *, with_zero: bool) -> Tensor:
    """Windows with more than one contender, 0 among them, (M,)."""
    count = near.sum(0)
    if not with_zero:
        return count > 1
    mean = torch.where(windows.present, windows.mean, -torch.inf)
    lead, leader = mean.max(0, keepdim=True)
    deviation = windows.covariance.diagonal(dim1=0, dim2=1).mT.gather(0, leader).clamp(min=0).sqrt()
    zero = (lead <= CHANCE * deviation).squeeze(0)
    return (count > 1) | (zero & (count > 0) & (deviation > 0).squeeze(0))


def _by_size(count: Tensor, is_open: Tensor, width: int) -> Iterator[tuple[Tensor, int]]:
    """Open windows that have about as many contenders, and how many at most."""
    least = 0
    for size in (*(size for size in SIZES if size < width), width):
        which = (is_open & (count > least) & (count <= size)).nonzero().squeeze(-1)
        least = size
        if len(which):
            yield which, size
