"""The rule for max-pooling: moments of the largest of a few jointly Gaussian numbers, with a ReLU or without.

A window with one sure leader is linear. All others are integrated along many quasi-random lines, exactly along each
line (`_line_integrals`). For a sketch, where the errors of many windows average out, `maximum_lines` takes few lines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from netmoments.covariances import cholesky_root
from netmoments.memory import elements_together
from netmoments.normal import density, distribution
from netmoments.rules import sketch_launch
from netmoments.rules.base import (
    Local,
    Nonlinearity,
    SampledUnits,
    SketchedLayer,
    ThirdCumulants,
    UnitMoments,
    joined,
    laid_out,
    normal_points,
    sample_covariance,
    windows_in_parts,
)
from netmoments.rules.maximum_lines import SIZES, largest_of_contenders

FEWEST_POINTS, MOST_POINTS = 512, 4096
"""Bounds on the quasi-random points of a window: the fewer windows a layer has, the less their errors average out.

Those of a flat background do not average out at all: with 64 points the pools of a VGG moved its scores by 0.012
deviations, with 256 by 0.003, with 1024 by 0.001.
"""
ALL_POINTS = 2**18
"""Quasi-random points of all windows of a layer together, where the bounds allow it."""
POINT_SETS = 16
"""Independent sets of points. Windows take them in turn, so that their errors do not add up over a layer."""
DECIDED = {torch.float32: 6.0, torch.float64: 8.5}
"""Standard deviations by which one number must lead all others for its window to count as linear."""
WIDEST, DRAWN = SIZES[-1], 2**26
"""In a sketch, windows with more inputs than that are drawn, so many numbers in all: lines would take much longer."""
_FAR = 40.0
"""|τ|, in standard deviations along a line, at which integrals are cut off."""


@dataclass(frozen=True, eq=False)
class Largest(Nonlinearity):
    """f(z) = max of a window's inputs, and of 0 where a ReLU comes before or after: one function of the window."""

    windows: Tensor
    with_zero: bool
    """Whether 0 is one of the competing numbers."""
    sign: int = 1
    """−1 for the smallest, which is −max(−z)."""
    points: int | None = None
    """Quasi-random points of each window, a power of two; by default the more the fewer windows there are."""
    numbers: Tensor | None = None
    """Which set of points each window takes, (n,), modulo their number; by default they take turns."""

    def clamped(self) -> Largest | None:
        return replace(self, with_zero=True) if self.sign > 0 else None

    @property
    def never_negative(self) -> bool:
        return self.with_zero and self.sign > 0

    def values(self, z: Tensor) -> Tensor:
        z = torch.where(self.windows >= 0, self.sign * z, -torch.inf)
        largest = z.max(-1).values
        return self.sign * (torch.relu(largest) if self.with_zero else largest)

    def local(self, mean: Tensor, covariance: Tensor, cumulants: ThirdCumulants | None = None) -> Local:
        images = mean.shape[:-2]
        flat = cumulants and ThirdCumulants(cumulants.root.flatten(0, -3), cumulants.kappa.flatten(0, -4))
        largest = self._largest(self.sign * mean.reshape(-1, self.width), covariance.flatten(0, -3), flat)
        batch = (*images, self.units)
        return Local(
            self.sign * largest.mean.reshape(batch),
            largest.variance.reshape(batch),
            largest.gain.reshape(*batch, -1),
            self.sign * largest.curvature.reshape(*batch, self.width, self.width),
        )

    @property
    def has_formula(self) -> bool:
        return self.width <= WIDEST

    def in_sketch(self, mean: Tensor, samples: Tensor) -> SketchedLayer:
        """For the widest windows the moments are averages over further inputs, with the covariance of the samples."""
        if self.has_formula:
            return super().in_sketch(mean, samples)
        count, middle = samples.shape[1], mean.detach()
        root = (samples - samples.mean(1, keepdim=True)).detach() / math.sqrt(count - 1)
        draws = min(MOST_POINTS, max(count, DRAWN // self.windows.numel()))
        generator = torch.Generator().manual_seed(self.width)
        white = torch.randn(draws, count, dtype=torch.float64, generator=generator).to(mean)
        together = elements_together("cache", mean, len(mean) * self.windows.numel())
        expected, gain = mean.new_zeros(len(mean), self.units), mean.new_zeros(len(mean), self.units, self.width)
        for part in white.split(together):
            values, leaders = self._led(middle.unsqueeze(1) + part @ root)
            expected += values.sum(1) / draws
            gain += leaders / draws
        change = ((self.gathered(mean) - self.gathered(middle)) * gain).sum(-1)  # 0, with the derivative E ∇f
        values = joined([self.values(self.gathered(part)) for part in samples.split(together, 1)], 1)
        pull_back = partial(self.pull_back, gain, inputs=samples.shape[-1])
        return SketchedLayer(expected + change, values, pull_back, None)

    def _led(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """The units (N, K, n) at samples (N, K, p), and how many of these each input of a window leads, (N, n, w)."""
        z = torch.where(self.windows >= 0, self.sign * self.gathered(samples), -torch.inf)
        largest, leader = z.max(-1)
        counts = (largest > 0).to(z) if self.with_zero else torch.ones_like(largest)
        led = z.new_zeros(len(z), self.units, self.width).scatter_add_(2, leader.mT, counts.mT)
        return self.sign * (torch.relu(largest) if self.with_zero else largest), led

    def observed(self, samples: Tensor) -> SampledUnits:
        columns = laid_out(samples.mT)
        values, covariances = [], []
        for part, z in windows_in_parts(self.windows, columns, self.width * samples.shape[1]):
            missing = (self.windows[part] < 0).unsqueeze(-1)
            present = z.masked_fill(missing, -self.sign * torch.inf) if bool(missing.any()) else z
            extreme = present.amax(-2) if self.sign > 0 else present.amin(-2)
            values.append(self.sign * torch.relu(self.sign * extreme) if self.with_zero else extreme)
            covariances.append(sample_covariance(z))
        return SampledUnits(laid_out(joined(values, 1).mT), joined(covariances, 1), columns.mT)

    def sketch_moments(self, mean: Tensor, covariance: Tensor, probes: int) -> UnitMoments:
        """From a few lines through each window (`maximum_lines`), whose errors average out over a layer's windows."""
        means = self.sign * self.gathered(mean)
        largest = largest_of_contenders(self.windows, means, covariance, probes, with_zero=self.with_zero)
        return UnitMoments(self.sign * largest.mean, largest.gain, self.sign * largest.curvature)

    def has_kernels(self, mean: Tensor, samples: Tensor) -> bool:
        fits = 1 < self.width <= sketch_launch.WIDEST
        return fits and sketch_launch.available(samples, mean)

    def by_kernels(self, mean: Tensor, samples: Tensor) -> SketchedLayer:
        values, moments, quadratics = sketch_launch.largest_of_windows(
            self.windows, self.sign, self.with_zero, mean, samples
        )
        pull_back = partial(self.pull_back, moments.gain, inputs=samples.shape[-1])
        return SketchedLayer(moments.mean, values, pull_back, quadratics)

    def _largest(self, mean: Tensor, covariance: Tensor, cumulants: ThirdCumulants | None) -> Local:
        """The moments of the windows of all images, from means (m, w) and covariances (m, w, w)."""
        present = (self.windows >= 0).expand(len(mean) // self.units, *self.windows.shape).flatten(0, 1)
        contest = _contest(mean.detach(), covariance.detach(), present, with_zero=self.with_zero)
        gain = torch.nn.functional.one_hot(contest.mean.argmax(-1), contest.mean.shape[-1])[:, : self.width].to(mean)
        linear = Local(
            mean=(gain * mean).sum(-1),
            variance=((covariance @ gain.unsqueeze(-1)).squeeze(-1) * gain).sum(-1),
            gain=gain,
            curvature=torch.zeros_like(covariance),
        )
        open_windows = (_contenders(contest, DECIDED[mean.dtype]).sum(-1) > 1).nonzero().squeeze(-1)
        if not len(open_windows):
            return linear
        mean, covariance, present = mean[open_windows], covariance[open_windows], present[open_windows]
        if cumulants is None:
            root, kappa = cholesky_root(covariance), None
        else:
            root, kappa = cumulants.root[open_windows], self.sign * cumulants.kappa[open_windows]
        integrated = self._integrated(mean, covariance, root, kappa, present, open_windows)
        return Local(*[x.index_copy(0, open_windows, y) for x, y in zip(linear, integrated, strict=True)])

    def _integrated(
        self, mean: Tensor, covariance: Tensor, root: Tensor, kappa: Tensor | None, present: Tensor, places: Tensor
    ) -> Local:
        """The moments of the windows at `places`, which are not linear, as many at a time as stay in a cache."""
        within_bounds = max(FEWEST_POINTS, min(MOST_POINTS, ALL_POINTS // self.units))
        count = self.points or 1 << (within_bounds.bit_length() - 1)
        numbers = places % self.units if self.numbers is None else self.numbers[places % self.units]
        sets = torch.stack([normal_points(self.width - 1, count, number) for number in range(POINT_SETS)]).to(mean)
        together = elements_together("cache", mean, (self.width + 1) * count)
        parts = []
        for part in torch.arange(len(mean), device=mean.device).split(together):
            skew = None if kappa is None else kappa[part]
            points = sets[numbers[part] % POINT_SETS]
            inputs = (mean[part], covariance[part], root[part], skew, present[part], points, self.with_zero)
            if torch.is_grad_enabled() and (mean.requires_grad or covariance.requires_grad):
                parts.append(checkpoint(_line_integrals, *inputs, use_reentrant=False))
            else:
                parts.append(_line_integrals(*inputs))
        return Local(*map(torch.cat, zip(*parts, strict=True)))


class _Contest(NamedTuple):
    """The competing numbers of each window, 0 last if it is one of them."""

    mean: Tensor
    covariance: Tensor
    present: Tensor


def _contest(mean: Tensor, covariance: Tensor, present: Tensor, *, with_zero: bool) -> _Contest:
    """The contest of each window; inputs that are not there have the mean −∞."""
    mean = torch.where(present, mean, -torch.inf)
    if not with_zero:
        return _Contest(mean, covariance, present)
    return _Contest(
        torch.nn.functional.pad(mean, (0, 1)),
        torch.nn.functional.pad(covariance, (0, 1, 0, 1)),
        torch.nn.functional.pad(present, (0, 1), value=True),
    )


def _contenders(contest: _Contest, deviations: float) -> Tensor:
    """The leader of each window, and what is less than so many deviations of the difference behind it."""
    leader = contest.mean.max(-1, keepdim=True)
    lead = leader.values - contest.mean
    variance = contest.covariance.diagonal(dim1=-2, dim2=-1)
    row = leader.indices.unsqueeze(-1).expand(-1, 1, variance.shape[-1])
    with_leader = contest.covariance.gather(-2, row).squeeze(-2)
    spread = variance + variance.gather(-1, leader.indices) - 2 * with_leader
    near = contest.present & (lead <= deviations * spread.clamp(min=0).sqrt()) & (spread > 0)
    return near.scatter(-1, leader.indices, True)


def _line_integrals(
    mean: Tensor,
    covariance: Tensor,
    root: Tensor,
    kappa: Tensor | None,
    present: Tensor,
    points: Tensor,
    with_zero: bool,
) -> Local:
    """Moments of the largest of each of n windows, by exact integrals along lines through points (n, P, w − 1).

    With z = m + R(τ, u) and u a quasi-random point, the inputs are b + a·τ along a line. In the order of their slopes,
    input i is the largest between the breaks tᵢ and tᵢ₊₁. The moments of τ between these, p of order 0, e of order 1
    and r of order 2, have closed forms, the density being φ(τ)·(1 + a polynomial of the cumulants):

        E f = Σ b p + a e,  E f² = Σ b²p + 2ab e + a²r,  E ∂f/∂zᵢ = pᵢ,  E ∇²f = E[∇f (τ, u)ᵀ] R⁻¹ (Stein, Gaussian).
    """
    lines = _ordered_lines(mean, covariance, root, present, with_zero)
    start = lines.base.unsqueeze(-1) + lines.turn @ points.mT
    between = _between(_breaks(lines.slope, start), None if kappa is None else _polynomial(kappa, points))
    start, slope = start - lines.centre[:, None, None], lines.slope.unsqueeze(-1)
    first = (start * between.p + slope * between.e).sum(-2).mean(-1)
    second = start * (start * between.p + 2 * slope * between.e) + slope.square() * between.r
    variance = second.sum(-2).mean(-1) - first.square()
    along = between.plain_e.mean(-1, keepdim=True)
    across = torch.cat([along, (between.plain_p @ points) / points.shape[-2]], -1)
    width = mean.shape[-1]
    gain = between.p.mean(-1).gather(-1, lines.back)[:, :width]
    across = across.gather(-2, lines.back.unsqueeze(-1).expand_as(across))[:, :width]
    curvature = torch.linalg.solve(root, across, left=False)
    return Local(first + lines.centre, variance.clamp(min=0), gain, 0.5 * (curvature + curvature.mT))


class _Lines(NamedTuple):
    """The c competing numbers of each of n windows as lines slope·τ + base + turn·u, in the order of their slopes."""

    slope: Tensor
    """(n, c)."""
    base: Tensor
    """(n, c)."""
    turn: Tensor
    """(n, c, w − 1)."""
    back: Tensor
    """The position in that order of each input, then of 0 if it competes, (n, c)."""
    centre: Tensor
    """The largest mean, (n,), which is subtracted before squaring, against rounding."""


def _ordered_lines(mean: Tensor, covariance: Tensor, root: Tensor, present: Tensor, with_zero: bool) -> _Lines:
    """The lines of each window; an input that is not there lies too low ever to lead."""
    variance = covariance.detach().diagonal(dim1=-2, dim2=-1)
    reach = variance.amax(-1).sqrt() * 4 + mean.detach().abs().amax(-1)
    centre = torch.where(present, mean.detach(), -torch.inf).amax(-1)
    base = torch.where(present, mean, -_FAR * reach.unsqueeze(-1))
    root = torch.where(present.unsqueeze(-1), root, 0.0)
    if with_zero:
        base, root = torch.nn.functional.pad(base, (0, 1)), torch.nn.functional.pad(root, (0, 0, 0, 1))
        centre = centre.clamp(min=0)
    order = root[..., 0].argsort(-1)
    root = root.gather(-2, order.unsqueeze(-1).expand_as(root))
    return _Lines(root[..., 0], base.gather(-1, order), root[..., 1:], order.argsort(-1), centre)


def _breaks(slope: Tensor, start: Tensor) -> Tensor:
    """The t at which the largest of c lines start + slope·t changes, (n, c − 1, P), cut to ±`_FAR`.

    Slopes (n, c) rise; starts are (n, c, P). The lines from i on are above all before them beyond
    tᵢ = min over j ≥ i of max over k < i of the crossing of lines k and j. Line i never leads if tᵢ = tᵢ₊₁.
    """
    least = 1e-12 * slope.detach().abs().amax(-1) + 1e-18  # parallel lines cross far away, on the correct side
    lines = start.unbind(1)
    after = [torch.full_like(line, -_FAR) for line in lines]
    breaks = []
    for i in range(1, len(lines)):
        for j in range(i, len(lines)):
            steeper = torch.maximum(slope[:, j] - slope[:, i - 1], least).unsqueeze(-1)
            after[j] = torch.maximum(after[j], (lines[i - 1] - lines[j]) / steeper)
        breaks.append(reduce(torch.minimum, after[i:]))
    return torch.stack(breaks, 1).clamp(max=_FAR)


def _polynomial(kappa: Tensor, points: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """κ/6 times the third Hermite polynomials of (τ, u), as Σ cₙ Heₙ(τ): c₀ … c₃, (n, 1, P) or (n, 1, 1)."""
    rest = points[..., : kappa.shape[-1] - 1]
    single = kappa[:, 0, 0, 0].reshape(-1, 1, 1) / 6
    double = 0.5 * (rest @ kappa[:, 0, 0, 1:].unsqueeze(-1)).mT
    mixed, others = kappa[:, 0, 1:, 1:], kappa[:, 1:, 1:, 1:]
    square = ((rest @ mixed) * rest).sum(-1) - mixed.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    twice = (rest.unsqueeze(-2) * rest.unsqueeze(-1)).flatten(-2)
    cubic = ((twice @ others.flatten(1, 2)) * rest).sum(-1)
    cubic = cubic - 3 * (rest @ others.diagonal(dim1=1, dim2=2).sum(-1).unsqueeze(-1)).squeeze(-1)
    return (cubic / 6).unsqueeze(-2), (0.5 * square).unsqueeze(-2), double, single


class _Between(NamedTuple):
    """E[τⁿ; tᵢ < τ < tᵢ₊₁] for n = 0, 1, 2 with the density of the cumulants, and for n = 0, 1 with the normal one."""

    p: Tensor
    e: Tensor
    r: Tensor
    plain_p: Tensor
    plain_e: Tensor


def _between(breaks: Tensor, polynomial: tuple[Tensor, Tensor, Tensor, Tensor] | None) -> _Between:
    """The moments of τ in the c intervals before, between and after breaks (n, c − 1, P): (n, c, P) each.

    They follow from ∫ Heₙφ = −Heₙ₋₁φ, the products of τ and τ² with He₁, He₂, He₃ being sums of Hermite polynomials.
    """
    phi, below, square = density(breaks), distribution(breaks), breaks * breaks
    h0, h1 = _falls(phi), _falls(breaks * phi)
    p = torch.diff(torch.cat([torch.zeros_like(below[:, :1]), below, torch.ones_like(below[:, :1])], 1), dim=1)
    if polynomial is None:
        return _Between(p, h0, p + h1, p, h0)
    c0, c1, c2, c3 = polynomial
    h2, h3 = _falls((square - 1) * phi), _falls(breaks * (square - 3) * phi)
    h4 = _falls(((square - 6) * square + 3) * phi)
    constant = 1 + c0
    return _Between(
        p=constant * p + c1 * h0 + c2 * h1 + c3 * h2,
        e=constant * h0 + c1 * (p + h1) + c2 * (h2 + 2 * h0) + c3 * (h3 + 3 * h1),
        r=constant * (p + h1) + c1 * (h2 + 3 * h0) + c2 * (h3 + 5 * h1 + 2 * p) + c3 * (h4 + 7 * h2 + 6 * h0),
        plain_p=p,
        plain_e=h0,
    )


def _falls(at_breaks: Tensor) -> Tensor:
    """g(tᵢ) − g(tᵢ₊₁), (n, c, P), from values of g at the breaks; g is 0 at ±∞."""
    return -torch.diff(torch.nn.functional.pad(at_breaks, (0, 0, 1, 1)), dim=1)
