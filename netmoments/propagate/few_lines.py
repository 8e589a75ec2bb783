"""The largest of a few jointly Gaussian numbers from a few lines each: for sketches, which average over many windows.

Windows come last, (..., M), so that every step is one operation on long rows.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from netmoments.propagate.nonlinearity import FLOOR

MOST_SETS, SET_ELEMENTS = 1024, 2**22
"""Sets of directions, taken in turn by a layer's windows, so that their errors do not add up; numbers in all sets."""
LINE_ELEMENTS = {"cpu": 2**18, "cuda": 2**27}
"""Numbers that are worked on together: on a CPU what fits its caches."""
FAR = 40.0
"""Deviations, beyond which nothing happens."""


class LargestMoments(NamedTuple):
    """Of M windows of w inputs."""

    mean: Tensor
    """E f, (M,), differentiable in what it is computed from."""
    gain: Tensor
    """E ∇f, (w, M), without gradient."""
    curvature: Tensor
    """E ∇²f, (w, w, M), without gradient."""

    def placed(self, order: Tensor, width: int) -> LargestMoments:
        """The inputs at places (w, M) among more of them, of which the others do not matter."""
        gain = self.gain.new_zeros(width, order.shape[-1]).scatter_(0, order, self.gain)
        places = (order.unsqueeze(1) * width + order).flatten(0, 1)
        wide = self.gain.new_zeros(width * width, order.shape[-1]).scatter_(0, places, self.curvature.flatten(0, 1))
        return LargestMoments(self.mean, gain, wide.unflatten(0, (width, width)))


def expected_largest(
    mean: Tensor, covariance: Tensor, present: Tensor, directions: Tensor, *, with_zero: bool
) -> LargestMoments:
    """f = max of w Gaussian numbers, and of 0 where it is one of them, by exact integrals along lines through the mean.

    Means (w, M), covariances (w, w, M), which of a window's places are inputs (w, M), unit directions v (P, w, M):
    orthonormal frames, each in a random position. With S = RRᵀ and s = Rv the inputs on a line are m + s·t, and t has
    the density ½χ_w(|t|). Input i is the largest between two crossings; with p, e the moments of order 0 and 1 of t
    between them, averaged over the lines,

        E f = Σ m p + s e,   E ∂f/∂zᵢ = pᵢ,   E ∇²f = E[∇f (t v)ᵀ] R⁻¹  (Stein),

    without bias, and exact for functions of up to the third degree in the direction. As f is continuous, E f changes
    with m and s by p and e alone: crossings need no derivative.
    """
    width = len(mean)
    floor = FLOOR[mean.dtype] * _mean_variance(covariance.detach(), present) + 1e-30
    root = _cholesky(covariance, floor)
    slope = torch.where(present, _along(root, directions), 0.0)
    start = torch.where(present, mean, -_reach(mean, covariance))
    if with_zero:
        start, slope = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (start, slope))
    with torch.no_grad():
        p, e = _moments_of_turns(start.expand_as(slope), slope, width)
        centre = start.amax(0)
        tilted = [(e[:, :width] * directions[:, d : d + 1]).mean(0) for d in range(width)]
        curvature = _divided(tilted, [column.detach() for column in root])
        probability = p.mean(0)
    expected = ((start - centre) * probability).sum(0) + (slope * e).sum(1).mean(0) + centre
    return LargestMoments(expected, probability[:width], 0.5 * (curvature + curvature.transpose(0, 1)))


def _mean_variance(covariance: Tensor, present: Tensor) -> Tensor:
    return covariance.diagonal(dim1=0, dim2=1).sum(-1) / present.sum(0)


def _reach(mean: Tensor, covariance: Tensor) -> Tensor:
    """Below which no input of a window comes: there lie those that a window does not have."""
    deviation = covariance.detach().diagonal(dim1=0, dim2=1).amax(-1).sqrt()
    return FAR * (4 * deviation + mean.detach().abs().amax(0))


def _cholesky(covariance: Tensor, floor: Tensor) -> list[Tensor]:
    """Columns of R, RRᵀ = S + floor, each from the diagonal on: (w, M), (w − 1, M), …, (1, M)."""
    columns: list[Tensor] = []
    rest = covariance
    while len(rest):
        pivot = torch.maximum(rest[0, :1] + floor, floor).sqrt()
        below = rest[1:, 0] / pivot
        columns.append(torch.cat([pivot, below]))
        rest = torch.addcmul(rest[1:, 1:], below.unsqueeze(1), below, value=-1)
    return columns


def _divided(columns: list[Tensor], root: list[Tensor]) -> Tensor:
    """X with X R = L, (w, w, M), from the columns of L, (w, M) each, and of R as `_cholesky` gives them."""
    found: list[Tensor] = []
    for j in reversed(range(len(root))):
        column = columns[j]
        for later, own in enumerate(reversed(found), start=1):
            column = column - own * root[j][later]
        found.append(column / root[j][0])
    return torch.stack(found[::-1], 1)


def _along(root: list[Tensor], directions: Tensor) -> Tensor:
    """s = Rv, (P, w, M)."""
    rows = [directions[:, 0] * root[0][i] for i in range(len(root))]
    for j, column in enumerate(root[1:], start=1):
        for i in range(j, len(root)):
            rows[i] = torch.addcmul(rows[i], directions[:, j], column[i - j])
    return torch.stack(rows, 1)


def _moments_of_turns(start: Tensor, slope: Tensor, degrees: int) -> tuple[Tensor, Tensor]:
    """p = P(start + slope·t is the largest) and e = E[t; it is] of each of c lines, (P, c, M), |t| ~ χ."""
    ordered, order = slope.sort(1)
    below, beyond = _radial(_crossings(start.gather(1, order), ordered), degrees)
    lines, count, windows = slope.shape
    ends = slope.new_zeros(2, lines, count + 1, windows)  # F and ∫ τ dF at −∞, the crossings and +∞
    ends[0, :, 1:-1], ends[0, :, -1], ends[1, :, 1:-1] = below, 1.0, beyond
    p, e = ends[0, :, 1:] - ends[0, :, :-1], ends[1, :, :-1] - ends[1, :, 1:]
    return torch.empty_like(p).scatter_(1, order, p), torch.empty_like(e).scatter_(1, order, e)


def _crossings(start: Tensor, slope: Tensor) -> Tensor:
    """Of lines start + slope·t, in the order of their slopes, the c − 1 places from which on a later one leads.

    Line i is above all later ones until the first of its crossings with them; the largest of these ends up to i is
    where the first i lines have had their turn. (P, c − 1, M), cut to ±`FAR`.
    """
    least = 1e-12 * slope.abs().amax(1, keepdim=True) + 1e-18  # parallel lines cross far away, on the right side
    ends: list[Tensor] = []
    for i in range(slope.shape[1] - 1):
        steeper = torch.maximum(slope[:, i + 1 :] - slope[:, i : i + 1], least)
        end = ((start[:, i : i + 1] - start[:, i + 1 :]) / steeper).amin(1)
        ends.append(torch.maximum(end, ends[-1]) if ends else end)
    return torch.stack(ends, 1).clamp(-FAR, FAR) if ends else slope[:, :0]


def _radial(t: Tensor, degrees: int) -> tuple[Tensor, Tensor]:
    """F(t) and ∫_t^∞ τ dF for the density ½χ_w(|t|), w the degrees of freedom.

    With C_w the distribution of χ_w, F = ½ + ½ sign(t) C_w(|t|), and the other is ½ E χ_w (1 − C_{w+1}(|t|)).
    """
    square = t * t
    bell = torch.exp(-0.5 * square)
    own, next_one = (_odd_chi(t, square, bell, count) for count in (degrees, degrees + 1))
    return own.mul_(0.5).add_(0.5), next_one.abs_().sub_(1).mul_(-0.5 * average_radius(degrees))


def average_radius(degrees: int) -> float:
    """E χ_w."""
    return math.sqrt(2) * math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2))


def _odd_chi(t: Tensor, square: Tensor, bell: Tensor, degrees: int) -> Tensor:
    """sign(t) C_w(|t|), by C_w(x) = C_{w−2}(x) − x^{w−2} exp(−x²/2) / (2^{w/2−1} Γ(w/2)).

    It starts from C_1 = erf(x/√2) or C_2 = 1 − exp(−x²/2).
    """
    if degrees % 2:
        total, power = torch.erf(t * math.sqrt(0.5)), t * bell
    else:
        total, power = torch.copysign(1 - bell, t), torch.copysign(square * bell, t)
    for count in range(4 - degrees % 2, degrees + 1, 2):
        total.sub_(power, alpha=math.exp((1 - count / 2) * math.log(2) - math.lgamma(count / 2)))
        if count < degrees:
            power.mul_(square)
    return total


def windows_together(like: Tensor, lines: int, width: int) -> int:
    """So many windows that what is in work at a time is `LINE_ELEMENTS`."""
    return max(1, LINE_ELEMENTS.get(like.device.type, LINE_ELEMENTS["cpu"]) // (lines * (width + 1)))


@cache
def direction_sets(width: int, frames: int) -> Tensor:
    """Sets of orthonormal frames in random positions, (frames · width, width, sets), in float64: always the same."""
    sets = max(1, min(MOST_SETS, SET_ELEMENTS // (frames * width * width)))
    generator = torch.Generator().manual_seed(width)
    normal = torch.randn(sets, frames, width, width, dtype=torch.float64, generator=generator)
    q, r = torch.linalg.qr(normal)
    turned = q * torch.sign(r.diagonal(dim1=-2, dim2=-1)).unsqueeze(-2)
    return turned.reshape(sets, frames * width, width).permute(1, 2, 0).contiguous()
