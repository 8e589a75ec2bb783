"""The largest of a few jointly Gaussian numbers, from integrals along a few random lines through each window's mean.

This is the fast, unbiased estimate for sketches, where the errors of many windows average out; `maximum` has the
accurate one. It is spherical–radial integration with randomly rotated orthonormal frames (Genz and Monahan 1998), exact
along each line. Inputs that have next to no chance of being the largest are left out first.

Windows are the last dimension of all tensors, (..., M), so that every step is one operation on long rows.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from netmoments.covariances import FLOOR
from netmoments.memory import elements_together
from netmoments.rules.base import joined

CHANCE = 3.5
"""An input so many standard deviations behind the leading one is left out: it would be the largest once in 4,000."""
SIZES = (2, 4, 6, 9, 16, 32)
"""Windows are sorted into groups by their number of contenders; these are the most that a window of each group has."""
FRAMES, MOST_FRAMES = 2**13, 256
"""Frames of lines for all windows of an image together, and for one window at most.

The fewer windows an image has, the less their errors average out, and the more frames each gets.
"""
MOST_SETS, SET_ELEMENTS = 1024, 2**22
"""The most sets of directions, and the most numbers in all sets.

A layer's windows take the sets in turn, so that their errors do not add up.
"""
FAR = 40.0
"""|t|, in standard deviations along a line, at which integrals are cut off."""


class LargestMoments(NamedTuple):
    """The moments of the largest input of each of M windows of w inputs."""

    mean: Tensor
    """E f, (M,), differentiable in the means and covariances of the inputs."""
    gain: Tensor
    """E ∇f, (w, M), without gradient."""
    curvature: Tensor
    """E ∇²f, (w, w, M), without gradient."""

    def placed(self, order: Tensor, width: int) -> LargestMoments:
        """The same moments for wider windows, with these inputs at places (w, M) and others that do not matter."""
        gain = self.gain.new_zeros(width, order.shape[-1]).scatter_(0, order, self.gain)
        places = (order.unsqueeze(1) * width + order).flatten(0, 1)
        curvature = self.gain.new_zeros(width * width, order.shape[-1])
        curvature.scatter_(0, places, self.curvature.flatten(0, 1))
        return LargestMoments(self.mean, gain, curvature.unflatten(0, (width, width)))


class Windows(NamedTuple):
    """M windows of w inputs."""

    mean: Tensor
    """(w, M)."""
    covariance: Tensor
    """(w, w, M)."""
    present: Tensor
    """Which of the places are inputs, (w, M)."""
    numbers: Tensor
    """Which set of directions each window takes, (M,), modulo their number."""

    def chosen(self, which: Tensor) -> Windows:
        """The windows with these indices."""
        return Windows(*(x.index_select(-1, which) for x in self))

    def reordered(self, order: Tensor, kept: Tensor) -> Windows:
        """Windows of the inputs `order`, (c, M), of which only those that are `kept` are present."""
        rows = self.covariance.gather(0, order.unsqueeze(1).expand(-1, self.covariance.shape[1], -1))
        covariance = rows.gather(1, order.expand(len(order), *order.shape))
        return Windows(self.mean.gather(0, order), covariance, kept, self.numbers)


def largest_of_contenders(
    windows: Tensor, mean: Tensor, covariance: Tensor, probes: int, *, with_zero: bool
) -> LargestMoments:
    """The moments of the largest input of each window: (N, n), (N, n, w) and (N, n, w, w).

    `windows` (n, w) hold places, −1 for no input; their inputs have means (N, n, w) and covariances (N, n, w, w). With
    zero, 0 is one of the competing numbers.
    """
    images, units, _ = mean.shape
    flat = Windows(
        mean.flatten(0, 1).mT,
        covariance.flatten(0, 1).permute(1, 2, 0).contiguous(),
        (windows >= 0).mT.repeat(1, images),
        torch.arange(units, device=mean.device).repeat(images),
    )
    moments = _narrowed(flat, frames_for(units, probes), with_zero)
    parts = (moments.mean, moments.gain.mT.contiguous(), moments.curvature.permute(2, 0, 1).contiguous())
    return LargestMoments(*(x.unflatten(0, (images, units)) for x in parts))


@cache
def frames_for(units: int, probes: int) -> int:
    """How many frames of lines each of so many windows gets, in a sketch of so many probes."""
    return min(max(1, FRAMES // units, probes // 64), MOST_FRAMES)


def _narrowed(windows: Windows, frames: int, with_zero: bool) -> LargestMoments:
    """The moments without the inputs that are `CHANCE` deviations behind: in many windows only the leader is left."""
    behind, count, is_open = _standing(windows, with_zero)
    gain = (behind <= CHANCE) & (behind == behind.amin(0))
    expected, gain = (gain * windows.mean).sum(0), gain.to(windows.mean.dtype)
    curvature = torch.zeros_like(windows.covariance, requires_grad=False)
    width, least = len(behind), 0
    for size in [size for size in SIZES if size < width] + [width]:
        which = (is_open & (count > least) & (count <= size)).nonzero().squeeze(-1)
        least = size
        if not len(which):
            continue
        group = windows.chosen(which)
        if size == width:
            moments = _in_parts(group, frames, with_zero)
        else:
            distance, order = (x[:size] for x in behind.index_select(-1, which).sort(0))
            moments = _in_parts(group.reordered(order, distance <= CHANCE), frames, with_zero).placed(order, width)
        expected = expected.index_copy(0, which, moments.mean)
        gain.index_copy_(1, which, moments.gain)
        curvature.index_copy_(2, which, moments.curvature)
    return LargestMoments(expected, gain, curvature)


@torch.no_grad()
def _standing(windows: Windows, with_zero: bool) -> tuple[Tensor, Tensor, Tensor]:
    """How each window's contest stands: how far inputs are behind, how many are contenders, whether it is open.

    The first is (w, M): how far each input is behind the leading one, or behind 0, in deviations of their difference; 0
    for the leader; infinite where there is no input or the difference does not vary. The second counts the contenders,
    (M,). The third, (M,), is whether there are two or more, 0 among them.
    """
    mean = torch.where(windows.present, windows.mean, -torch.inf)
    lead, leader = mean.max(0, keepdim=True)
    variance = windows.covariance.diagonal(dim1=0, dim2=1).mT
    with_leader = windows.covariance.gather(0, leader.unsqueeze(1).expand(1, *variance.shape)).squeeze(0)
    spread = variance + variance.gather(0, leader) - 2 * with_leader
    zero: Tensor | int = 0
    if with_zero:
        deviation = variance.gather(0, leader).clamp(min=0).sqrt()
        zero = ((lead <= CHANCE * deviation) & (deviation > 0)).squeeze(0)
        spread = torch.where(lead < 0, variance, spread)
        lead = lead.clamp(min=0)
    varies = spread > 0
    distance = torch.where(varies, (lead - mean) / torch.where(varies, spread, 1.0).sqrt(), torch.inf)
    of_leader = torch.where(lead > mean.gather(0, leader), distance.gather(0, leader), 0.0)
    behind = distance.scatter(0, leader, of_leader)
    count = (behind <= CHANCE).sum(0)
    return behind, count, (count > 0) & (count + zero > 1)


def _in_parts(windows: Windows, frames: int, with_zero: bool) -> LargestMoments:
    """`expected_largest`, as many windows at a time as stay in a cache."""
    directions = direction_sets(len(windows.mean), frames).to(windows.mean)
    together = elements_together("cache", windows.mean, 2 * len(directions) * (len(windows.mean) + 1))
    parts = []
    for start in range(0, windows.mean.shape[-1], together):
        part = Windows(*(x[..., start : start + together] for x in windows))
        turned = directions.index_select(-1, part.numbers % directions.shape[-1])
        parts.append(expected_largest(part.mean, part.covariance, part.present, turned, with_zero=with_zero))
    return LargestMoments(*(joined(part, -1) for part in zip(*parts, strict=True)))


@cache
def direction_sets(width: int, frames: int) -> Tensor:
    """Sets of orthonormal frames in random positions, (frames · width, width, sets), in float64: always the same."""
    sets = max(1, min(MOST_SETS, SET_ELEMENTS // (frames * width * width)))
    generator = torch.Generator().manual_seed(width)
    normal = torch.randn(sets, frames, width, width, dtype=torch.float64, generator=generator)
    q, r = torch.linalg.qr(normal)
    turned = q * torch.sign(r.diagonal(dim1=-2, dim2=-1)).unsqueeze(-2)
    return turned.reshape(sets, frames * width, width).permute(1, 2, 0).contiguous()


def expected_largest(
    mean: Tensor, covariance: Tensor, present: Tensor, directions: Tensor, *, with_zero: bool
) -> LargestMoments:
    """The moments of f = max of w Gaussian numbers (and of 0, with zero), by exact integrals along lines.

    Takes means m (w, M), covariances S (w, w, M), which places are inputs (w, M), and unit directions v (P, w, M) that
    form orthonormal frames in random positions. With S = RRᵀ and s = Rv the inputs on a line through the mean are
    m + s·t, and t has the density ½χ_w(|t|). Input i is the largest between two crossings; with p and e the moments of
    order 0 and 1 of t between them, averaged over the lines,

        E f = Σ m p + s e,   E ∂f/∂zᵢ = pᵢ,   E ∇²f = E[∇f (t v)ᵀ] R⁻¹  (Stein),

    without bias, and exactly for functions of up to the third degree in the direction. As f is continuous, the
    derivative of E f in m and s needs p and e only, not the derivatives of the crossings.
    """
    width = len(mean)
    variances = covariance.detach().diagonal(dim1=0, dim2=1)
    floor = FLOOR[mean.dtype] * (variances.sum(-1) / present.sum(0)) + 1e-30
    root = _cholesky(covariance, floor)
    slope = torch.where(present, _along(root, directions), 0.0)
    reach = FAR * (4 * variances.amax(-1).sqrt() + mean.detach().abs().amax(0))
    start = torch.where(present, mean, -reach)  # a missing input is placed too low ever to lead
    if with_zero:
        start, slope = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (start, slope))
    with torch.no_grad():
        p, e = _moments_while_leading(start.expand_as(slope), slope, width)
        centre = start.amax(0)
        tilted = [(e[:, :width] * directions[:, d : d + 1]).mean(0) for d in range(width)]
        curvature = _divided(tilted, [column.detach() for column in root])
        probability = p.mean(0)
    expected = ((start - centre) * probability).sum(0) + (slope * e).sum(1).mean(0) + centre
    return LargestMoments(expected, probability[:width], 0.5 * (curvature + curvature.transpose(0, 1)))


def _cholesky(covariance: Tensor, floor: Tensor) -> list[Tensor]:
    """The columns of R with RRᵀ = S + floor·I, each from the diagonal down: (w, M), (w − 1, M), …, (1, M)."""
    columns: list[Tensor] = []
    rest = covariance
    while len(rest):
        pivot = torch.maximum(rest[0, :1] + floor, floor).sqrt()
        below = rest[1:, 0] / pivot
        columns.append(torch.cat([pivot, below]))
        rest = torch.addcmul(rest[1:, 1:], below.unsqueeze(1), below, value=-1)
    return columns


def _divided(columns: list[Tensor], root: list[Tensor]) -> Tensor:
    """X with X R = L, (w, w, M), from the columns of L, (w, M) each, and those of R as `_cholesky` gives them."""
    solved: list[Tensor] = []  # columns of X, the last first
    for j in reversed(range(len(root))):
        column = columns[j]
        for offset, later in enumerate(reversed(solved), start=1):
            column = column - later * root[j][offset]
        solved.append(column / root[j][0])
    return torch.stack(solved[::-1], 1)


def _along(root: list[Tensor], directions: Tensor) -> Tensor:
    """s = Rv, (P, w, M), from the columns of R as `_cholesky` gives them."""
    rows = [directions[:, 0] * root[0][i] for i in range(len(root))]
    for j, column in enumerate(root[1:], start=1):
        for i in range(j, len(root)):
            rows[i] = torch.addcmul(rows[i], directions[:, j], column[i - j])
    return torch.stack(rows, 1)


def _moments_while_leading(start: Tensor, slope: Tensor, degrees: int) -> tuple[Tensor, Tensor]:
    """p = P(start + slope·t is the largest) and e = E[t; it is the largest] of each of c lines, (P, c, M), |t| ~ χ."""
    ordered, order = slope.sort(1)
    below, beyond = _radial(_crossings(start.gather(1, order), ordered), degrees)
    lines, count, windows = slope.shape
    ends = slope.new_zeros(2, lines, count + 1, windows)  # F and ∫ τ dF at −∞, the crossings and +∞
    ends[0, :, 1:-1], ends[0, :, -1], ends[1, :, 1:-1] = below, 1.0, beyond
    p, e = ends[0, :, 1:] - ends[0, :, :-1], ends[1, :, :-1] - ends[1, :, 1:]
    return torch.empty_like(p).scatter_(1, order, p), torch.empty_like(e).scatter_(1, order, e)


def _crossings(start: Tensor, slope: Tensor) -> Tensor:
    """The t at which the leader of c lines start + slope·t changes, (P, c − 1, M), cut to ±`FAR`.

    The lines are in the order of their slopes. Line i is above all later ones until the first of its crossings with
    them. From the largest such end of the lines up to i on, a line later than i leads.
    """
    least = 1e-12 * slope.abs().amax(1, keepdim=True) + 1e-18  # parallel lines cross far away, on the correct side
    ends: list[Tensor] = []
    for i in range(slope.shape[1] - 1):
        steeper = torch.maximum(slope[:, i + 1 :] - slope[:, i : i + 1], least)
        end = ((start[:, i : i + 1] - start[:, i + 1 :]) / steeper).amin(1)
        ends.append(torch.maximum(end, ends[-1]) if ends else end)
    return torch.stack(ends, 1).clamp(-FAR, FAR) if ends else slope[:, :0]


def _radial(t: Tensor, degrees: int) -> tuple[Tensor, Tensor]:
    """F(t) and ∫_t^∞ τ dF for the distribution F with density ½χ_w(|t|), w the degrees of freedom.

    With C_w the distribution of χ_w, F = ½ + ½ sign(t) C_w(|t|), and the integral is ½ E χ_w (1 − C_{w+1}(|t|)).
    """
    square = t * t
    bell = torch.exp(-0.5 * square)
    chi, chi_next = (_odd_chi(t, square, bell, count) for count in (degrees, degrees + 1))
    return chi.mul_(0.5).add_(0.5), chi_next.abs_().sub_(1).mul_(-0.5 * average_radius(degrees))


@cache
def average_radius(degrees: int) -> float:
    """E χ_w = √2 Γ((w + 1)/2) / Γ(w/2)."""
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
