"""The largest of a few jointly Gaussian numbers: its mean, variance, expected gradient and curvature."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from netmoments.memory import elements_together
from netmoments.normal import density, distribution
from netmoments.rules import sketch_launch
from netmoments.rules.base import Local, Nonlinearity, SketchedLayer, ThirdCumulants, cholesky_root
from netmoments.rules.maximum_lines import largest_of_contenders
from netmoments.rules.sampled import SampledUnits, UnitMoments, joined, laid_out, sample_covariance, windows_in_parts

FEWEST_POINTS, MOST_POINTS = 512, 4096
"""Quasi-random points a window: the fewer windows a layer has, the less their errors average out. Those of a flat
background do not average out at all: with 64 points the pools of a VGG moved its scores by 0.012 deviations, with 256
by 0.003, with 1024 by 0.001."""
ALL_POINTS = 2**18
"""Points of all windows of a layer together, between those bounds."""
POINT_SETS = 16
"""Independent sets of them, taken in turn by the windows, so that their errors do not add up over a layer."""
DECIDED = {torch.float32: 6.0, torch.float64: 8.5}
"""Deviations by which one number must lead all others for its window to count as linear."""
_FAR = 40.0


@dataclass(frozen=True, eq=False)
class Largest(Nonlinearity):
    """f(z) = max of a window's inputs, and of 0 where a ReLU comes before or after: one function of the window."""

    windows: Tensor
    with_zero: bool
    sign: int = 1
    """−1 for the smallest: −max(−z)."""
    points: int | None = None
    """Quasi-random points a window, a power of two; by default the more the fewer windows there are."""
    numbers: Tensor | None = None
    """Which of the sets of points each window takes, (n,), modulo their number; by default by its place."""

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
        found = self._largest(self.sign * mean.reshape(-1, self.width), covariance.flatten(0, -3), flat)
        batch = (*images, self.units)
        return Local(
            self.sign * found.mean.reshape(batch),
            found.variance.reshape(batch),
            found.gain.reshape(*batch, -1),
            self.sign * found.curvature.reshape(*batch, self.width, self.width),
        )

    def observed(self, samples: Tensor) -> SampledUnits:
        columns = laid_out(samples.mT)
        values, covariances = [], []
        for some, z in windows_in_parts(self.windows, columns, self.width * samples.shape[1]):
            missing = (self.windows[some] < 0).unsqueeze(-1)
            seen = z.masked_fill(missing, -self.sign * torch.inf) if bool(missing.any()) else z
            extreme = seen.amax(-2) if self.sign > 0 else seen.amin(-2)
            values.append(self.sign * torch.relu(self.sign * extreme) if self.with_zero else extreme)
            covariances.append(sample_covariance(z))
        return SampledUnits(laid_out(joined(values, 1).mT), joined(covariances, 1), columns.mT)

    def sketch_moments(self, mean: Tensor, covariance: Tensor, probes: int) -> UnitMoments:
        """By a few lines through each window, which average out over a layer's many windows."""
        windows = self.sign * self.gathered(mean)
        found = largest_of_contenders(self.windows, windows, covariance, probes, with_zero=self.with_zero)
        return UnitMoments(self.sign * found.mean, found.gain, self.sign * found.curvature)

    def has_kernels(self, mean: Tensor, samples: Tensor) -> bool:
        fits = 1 < self.width <= sketch_launch.WIDEST
        return fits and sketch_launch.available(samples, mean)

    def by_kernels(self, mean: Tensor, samples: Tensor) -> SketchedLayer:
        values, moments, quadratics = sketch_launch.largest_of_windows(
            self.windows, self.sign, self.with_zero, mean, samples
        )
        back = partial(self.pull_back, moments.gain, inputs=samples.shape[-1])
        return SketchedLayer(moments.mean, values, back, quadratics)

    def _largest(self, mean: Tensor, covariance: Tensor, cumulants: ThirdCumulants | None) -> Local:
        """The windows of all images, one after the other: means (m, w), covariances (m, w, w)."""
        own = self.windows >= 0
        present = own.expand(len(mean) // self.units, *own.shape).flatten(0, 1)
        contest = _contest(mean.detach(), covariance.detach(), present, with_zero=self.with_zero)
        gain = torch.nn.functional.one_hot(contest.mean.argmax(-1), contest.mean.shape[-1])[:, : self.width].to(mean)
        certain = Local(
            mean=(gain * mean).sum(-1),
            variance=((covariance @ gain.unsqueeze(-1)).squeeze(-1) * gain).sum(-1),
            gain=gain,
            curvature=torch.zeros_like(covariance),
        )
        open_windows = (_contenders(contest, DECIDED[mean.dtype]).sum(-1) > 1).nonzero().squeeze(-1)
        if not len(open_windows):
            return certain
        mean, covariance, present = mean[open_windows], covariance[open_windows], present[open_windows]
        if cumulants is None:
            root, kappa = cholesky_root(covariance), None
        else:
            root, kappa = cumulants.root[open_windows], self.sign * cumulants.kappa[open_windows]
        integrated = self._integrated(mean, covariance, root, kappa, present, open_windows)
        return Local(*[base.index_copy(0, open_windows, own) for base, own in zip(certain, integrated, strict=True)])

    def _integrated(
        self, mean: Tensor, covariance: Tensor, root: Tensor, kappa: Tensor | None, present: Tensor, places: Tensor
    ) -> Local:
        """The undecided windows, some at a time, each with one of the sets of points."""
        wanted = max(FEWEST_POINTS, min(MOST_POINTS, ALL_POINTS // self.units))
        count = self.points or 1 << (wanted.bit_length() - 1)
        numbers = places % self.units if self.numbers is None else self.numbers[places % self.units]
        sets = torch.stack([_points(self.width - 1, count, number) for number in range(POINT_SETS)]).to(mean)
        together = elements_together("cache", mean, (self.width + 1) * count)
        parts = []
        for some in torch.arange(len(mean), device=mean.device).split(together):
            skew = None if kappa is None else kappa[some]
            points = sets[numbers[some] % POINT_SETS]
            inputs = (mean[some], covariance[some], root[some], skew, present[some], points, self.with_zero)
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
    mean = torch.where(present, mean, -torch.inf)
    if not with_zero:
        return _Contest(mean, covariance, present)
    return _Contest(
        torch.nn.functional.pad(mean, (0, 1)),
        torch.nn.functional.pad(covariance, (0, 1, 0, 1)),
        torch.nn.functional.pad(present, (0, 1), value=True),
    )


def _contenders(contest: _Contest, deviations: float) -> Tensor:
    best = contest.mean.max(-1, keepdim=True)
    lead = best.values - contest.mean
    own = contest.covariance.diagonal(dim1=-2, dim2=-1)
    winner = best.indices.unsqueeze(-1)
    with_winner = contest.covariance.gather(-2, winner.expand(-1, 1, own.shape[-1])).squeeze(-2)
    spread = own + own.gather(-1, best.indices) - 2 * with_winner
    near = contest.present & (lead <= deviations * spread.clamp(min=0).sqrt()) & (spread > 0)
    return near.scatter(-1, best.indices, True)


def _line_integrals(
    mean: Tensor,
    covariance: Tensor,
    root: Tensor,
    kappa: Tensor | None,
    present: Tensor,
    points: Tensor,
    with_zero: bool,
) -> Local:
    """Moments of the largest, by exact integrals along lines through quasi-random points (n, P, w − 1).

    With z = m + R(τ, u), u the points, the inputs are b + a·τ on a line: a maximum of straight lines, of which, in the
    order of their slopes, number i is the largest between the breaks tᵢ and tᵢ₊₁. The moments of τ between them, p (of
    order 0), e (1) and r (2), are closed forms, the density being φ(τ)·(1 + cumulants' polynomial):

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
    """What competes in each window, in the order of the slopes: slope·τ + base + turn·u."""

    slope: Tensor
    """(n, c)."""
    base: Tensor
    """(n, c)."""
    turn: Tensor
    """(n, c, w − 1)."""
    back: Tensor
    """Where each is in that order, (n, c): the inputs, then 0 if it is one of them."""
    centre: Tensor
    """The largest mean, (n,): what is taken off before squares, against rounding."""


def _ordered_lines(mean: Tensor, covariance: Tensor, root: Tensor, present: Tensor, with_zero: bool) -> _Lines:
    own = covariance.detach().diagonal(dim1=-2, dim2=-1)
    reach = own.amax(-1).sqrt() * 4 + mean.detach().abs().amax(-1)
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
    """Where the largest of lines start + slope·t changes, (n, c − 1, P), cut to ±40: from line i − 1 to i, or at once
    to a later one, where its break is the same. Slopes (n, c) in rising order, starts (n, c, P).

    Lines i and beyond are above all before them from tᵢ = min over j ≥ i of max over k < i of the crossing of k and j.
    """
    least = 1e-12 * slope.detach().abs().amax(-1) + 1e-18  # parallel lines cross far away, on the right side
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
    """From ∫ Heₙφ = −Heₙ₋₁φ and the products of τ and τ² with He₁, He₂, He₃ as sums of Hermite polynomials.

    From breaks (n, c − 1, P) to (n, c, P): before the first, between, after the last.
    """
    phi, below, square = density(breaks), distribution(breaks), breaks * breaks
    h0, h1 = _falls(phi), _falls(breaks * phi)
    p = torch.diff(torch.cat([torch.zeros_like(below[:, :1]), below, torch.ones_like(below[:, :1])], 1), dim=1)
    if polynomial is None:
        return _Between(p, h0, p + h1, p, h0)
    c0, c1, c2, c3 = polynomial
    h2, h3 = _falls((square - 1) * phi), _falls(breaks * (square - 3) * phi)
    h4 = _falls(((square - 6) * square + 3) * phi)
    more = 1 + c0
    return _Between(
        p=more * p + c1 * h0 + c2 * h1 + c3 * h2,
        e=more * h0 + c1 * (p + h1) + c2 * (h2 + 2 * h0) + c3 * (h3 + 3 * h1),
        r=more * (p + h1) + c1 * (h2 + 3 * h0) + c2 * (h3 + 5 * h1 + 2 * p) + c3 * (h4 + 7 * h2 + 6 * h0),
        plain_p=p,
        plain_e=h0,
    )


def _falls(at_breaks: Tensor) -> Tensor:
    """g(tᵢ) − g(tᵢ₊₁), (n, c, P), of a function that is 0 at both ends, given at the breaks."""
    return -torch.diff(torch.nn.functional.pad(at_breaks, (0, 0, 1, 1)), dim=1)


@cache
def _points(dimension: int, count: int, number: int) -> Tensor:
    """One of the fixed sets of standard normal points, (count, dimension): scrambled Sobol, antithetic.

    They are transformed to have second moments of exactly 1 and 0.
    """
    if dimension == 0:
        return torch.zeros(1, 0, dtype=torch.float64)
    engine = torch.quasirandom.SobolEngine(dimension, scramble=True, seed=number)
    uniform = engine.draw(count // 2, dtype=torch.float64).clamp(1e-12, 1 - 1e-12)
    half = torch.special.ndtri(uniform)
    normal = torch.cat([half, -half])
    if dimension < count // 4:
        root = torch.linalg.cholesky(normal.mT @ normal / len(normal))
        normal = torch.linalg.solve_triangular(root, normal.mT, upper=False).mT
    return normal
