"""The largest of a few jointly Gaussian numbers: its mean, variance, expected gradient and curvature."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from netmoments.normal import density, distribution
from netmoments.propagate.nonlinearity import Local, Nonlinearity, ThirdCumulants, whitened

FEWEST_POINTS, MOST_POINTS = 256, 4096
"""Quasi-random points a window: the fewer windows a layer has, the less their errors average out."""
ALL_POINTS = 2**18
"""Points of all windows of a layer together, between those bounds."""
POINT_SETS = 16
"""Independent sets of them, taken in turn by the windows, so that their errors do not add up over a layer."""
DECIDED = {torch.float32: 6.0, torch.float64: 8.5}
"""Deviations by which one number must lead all others for its window to count as linear."""
CHUNK_ELEMENTS = {"cpu": 2**21, "cuda": 2**26}
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

    def clamped(self) -> Largest:
        """The same followed by a ReLU."""
        if self.sign < 0:
            raise ValueError("the smallest of a window and 0 is not a maximum")
        return replace(self, with_zero=True)

    def values(self, z: Tensor) -> Tensor:
        z = torch.where(self.windows >= 0, self.sign * z, -torch.inf)
        largest = z.max(-1).values
        return self.sign * (torch.relu(largest) if self.with_zero else largest)

    def local(self, mean: Tensor, covariance: Tensor, cumulants: ThirdCumulants | None = None) -> Local:
        found = self._largest(self.sign * mean, covariance, cumulants)
        return Local(self.sign * found.mean, found.variance, found.gain, self.sign * found.curvature)

    def undecided(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """Windows of which not one input (or 0) leads all others by `DECIDED` deviations: (n,) of booleans."""
        return self.contenders(mean, covariance, DECIDED[mean.dtype]).sum(-1) > 1

    def contenders(self, mean: Tensor, covariance: Tensor, deviations: float) -> Tensor:
        """The leading input of each window, and those less than so many deviations behind: (n, w), a column more for 0.

        Inputs that differ from the leading one by a constant cannot overtake it.
        """
        contest = _contest(self.sign * mean, covariance, self.windows >= 0, with_zero=self.with_zero)
        best = contest.mean.max(-1, keepdim=True)
        lead = best.values - contest.mean
        own = contest.covariance.diagonal(dim1=-2, dim2=-1)
        winner = best.indices.unsqueeze(-1)
        with_winner = contest.covariance.gather(-2, winner.expand(-1, 1, own.shape[-1])).squeeze(-2)
        spread = own + own.gather(-1, best.indices) - 2 * with_winner
        near = contest.present & (lead <= deviations * spread.clamp(min=0).sqrt()) & (spread > 0)
        return near.scatter(-1, best.indices, True)

    def _largest(self, mean: Tensor, covariance: Tensor, cumulants: ThirdCumulants | None) -> Local:
        contest = _contest(mean.detach(), covariance.detach(), self.windows >= 0, with_zero=self.with_zero)
        winner = contest.mean.argmax(-1)
        gain = torch.nn.functional.one_hot(winner, contest.mean.shape[-1])[:, : self.width].to(mean.dtype)
        certain = Local(
            mean=(gain * mean).sum(-1),
            variance=((covariance @ gain.unsqueeze(-1)).squeeze(-1) * gain).sum(-1),
            gain=gain,
            curvature=torch.zeros_like(covariance),
        )
        open_windows = self.undecided(self.sign * mean.detach(), covariance.detach()).nonzero().squeeze(-1)
        if not len(open_windows):
            return certain
        if cumulants is None:
            some = covariance[open_windows]
            root, _ = whitened(some, some, self.windows[open_windows] >= 0, self.width)
            kappa = None
        else:
            root, kappa = cumulants.root[open_windows], self.sign * cumulants.kappa[open_windows]
        sampled = self._integrated(mean[open_windows], covariance[open_windows], root, kappa, open_windows)
        return Local(*(base.index_copy(0, open_windows, own) for base, own in zip(certain, sampled, strict=True)))

    def _integrated(
        self, mean: Tensor, covariance: Tensor, root: Tensor, kappa: Tensor | None, places: Tensor
    ) -> Local:
        """The undecided windows, some at a time, each set of points for those of its own."""
        count = self.points or _point_count(len(places))
        sizes = (self.width + 1) ** 2 * count
        together = max(1, CHUNK_ELEMENTS.get(mean.device.type, CHUNK_ELEMENTS["cpu"]) // sizes)
        sets = (places if self.numbers is None else self.numbers[places]) % POINT_SETS
        order, parts = [], []
        for group in range(POINT_SETS):
            mine = (sets == group).nonzero().squeeze(-1)
            points = _points(self.width - 1, count, group).to(mean)
            for some in mine.split(together):
                present = self.windows[places[some]] >= 0
                skew = None if kappa is None else kappa[some]
                inputs = (mean[some], covariance[some], root[some], skew, present, points, self.with_zero)
                if torch.is_grad_enabled() and (mean.requires_grad or covariance.requires_grad):
                    parts.append(checkpoint(_line_integrals, *inputs, use_reentrant=False))
                else:
                    parts.append(_line_integrals(*inputs))
                order.append(some)
        back = torch.cat(order).argsort()
        return Local(*(torch.cat(part)[back] for part in zip(*parts, strict=True)))


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


def _line_integrals(
    mean: Tensor,
    covariance: Tensor,
    root: Tensor,
    kappa: Tensor | None,
    present: Tensor,
    points: Tensor,
    with_zero: bool,
) -> Local:
    """Moments of the largest, by exact integrals along lines through quasi-random points.

    With z = m + R(τ, u), u the points, the inputs are b + a·τ on a line: a maximum of straight lines, of which number i
    is the largest between the crossings lo and hi. The moments of τ between them, p (of order 0), e (1) and r (2), are
    closed forms, the density being φ(τ)·(1 + cumulants' polynomial):

        E f = Σ b p + a e,  E f² = Σ b²p + 2ab e + a²r,  E ∂f/∂zᵢ = pᵢ,  E ∇²f = E[∇f (τ, u)ᵀ] R⁻¹ (Stein, Gaussian).
    """
    width = mean.shape[-1]
    slope, start = root[..., 0], mean.unsqueeze(-2) + points @ root[..., 1:].mT
    reach = covariance.detach().diagonal(dim1=-2, dim2=-1).amax(-1).sqrt() * 4 + mean.detach().abs().amax(-1)
    start = torch.where(present.unsqueeze(-2), start, -_FAR * reach[:, None, None])
    slope = torch.where(present, slope, 0.0)
    if with_zero:
        slope, start = (torch.nn.functional.pad(x, (0, 1)) for x in (slope, start))
    centre = torch.where(present, mean.detach(), -torch.inf).amax(-1)
    centre = centre.clamp(min=0) if with_zero else centre
    ends = _crossings(slope, start)
    between = _normal_between(*ends) if kappa is None else _between(*ends, *_polynomial(kappa, points))
    start = start - centre[:, None, None]
    slope = slope.unsqueeze(-2)
    first = (start * between.p + slope * between.e).sum(-1).mean(-1)
    second = start.square() * between.p + 2 * slope * start * between.e + slope.square() * between.r
    variance = second.sum(-1).mean(-1) - first.square()
    gain = between.p[..., :width].mean(-2)
    along = between.plain_e[..., :width].mean(-2).unsqueeze(-1)
    lines = torch.cat([along, (between.plain_p[..., :width].mT @ points) / len(points)], -1)
    curvature = torch.linalg.solve(root, lines, left=False)
    return Local(first + centre, variance.clamp(min=0), gain, 0.5 * (curvature + curvature.mT))


def _polynomial(kappa: Tensor, points: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """κ/6 times the third Hermite polynomials of (τ, u), as Σ cₙ Heₙ(τ): c₀ … c₃, (n, points, 1) or (n, 1, 1)."""
    rest = points[:, : kappa.shape[-1] - 1]
    single = kappa[:, 0, 0, 0].reshape(-1, 1, 1) / 6
    double = 0.5 * (kappa[:, 0, 0, 1:] @ rest.mT).unsqueeze(-1)
    mixed = kappa[:, 0, 1:, 1:]
    square = torch.einsum("nab,pa,pb->np", mixed, rest, rest) - mixed.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    others = kappa[:, 1:, 1:, 1:]
    cubic = torch.einsum("nabc,pa,pb,pc->np", others, rest, rest, rest) - 3 * torch.einsum("naab,pb->np", others, rest)
    return (cubic / 6).unsqueeze(-1), (0.5 * square).unsqueeze(-1), double, single


class _Between(NamedTuple):
    """E[τⁿ; lo < τ < hi] for n = 0, 1, 2 with the density of the cumulants, and for n = 0, 1 with the normal one."""

    p: Tensor
    e: Tensor
    r: Tensor
    plain_p: Tensor
    plain_e: Tensor


def _normal_between(low: Tensor, high: Tensor) -> _Between:
    """The same without cumulants: ∫ φ, ∫ τφ = φ(lo) − φ(hi), ∫ τ²φ = ∫ φ + lo·φ(lo) − hi·φ(hi)."""
    at_low, at_high = density(low), density(high)
    p, e = distribution(high) - distribution(low), at_low - at_high
    return _Between(p, e, p + low * at_low - high * at_high, p, e)


def _between(low: Tensor, high: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> _Between:
    """From ∫ Heₙφ = −Heₙ₋₁φ and the products of τ and τ² with He₁, He₂, He₃ as sums of Hermite polynomials."""

    def ends(x: Tensor) -> tuple[Tensor, ...]:
        phi, square = density(x), x * x
        first, second, third = x * phi, (square - 1) * phi, x * (square - 3) * phi
        return phi, first, second, third, ((square - 6) * square + 3) * phi

    lows, highs = ends(low), ends(high)
    h0, h1, h2, h3, h4 = (a - b for a, b in zip(lows, highs, strict=True))
    p = distribution(high) - distribution(low)
    return _Between(
        p=(1 + c0) * p + c1 * h0 + c2 * h1 + c3 * h2,
        e=(1 + c0) * h0 + c1 * (p + h1) + c2 * (h2 + 2 * h0) + c3 * (h3 + 3 * h1),
        r=(1 + c0) * (p + h1) + c1 * (h2 + 3 * h0) + c2 * (h3 + 5 * h1 + 2 * p) + c3 * (h4 + 7 * h2 + 6 * h0),
        plain_p=p,
        plain_e=h0,
    )


def _crossings(slope: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Between which t each of the lines start + slope·t is above all others, cut to ±40; the same t if nowhere.

    Slopes (n, c), the same for all of a window's points, starts (n, points, c). In the order of the slopes a line is
    above those before it after it has crossed them, and above those behind it until then.
    """
    order = slope.argsort(-1)
    ordered = slope.gather(-1, order)
    lines = start.gather(-1, order.unsqueeze(-2).expand_as(start)).unbind(-1)
    least = 1e-12 * slope.detach().abs().amax(-1) + 1e-18  # parallel lines cross far away, on the right side
    low = [torch.full_like(line, -_FAR) for line in lines]
    high = [torch.full_like(line, _FAR) for line in lines]
    for j in range(len(lines)):
        for i in range(j):
            steeper = torch.maximum(ordered[:, j] - ordered[:, i], least).unsqueeze(-1)
            cross = (lines[i] - lines[j]) / steeper
            low[j] = torch.maximum(low[j], cross)
            high[i] = torch.minimum(high[i], cross)
    lows = torch.stack(low, -1).clamp(max=_FAR)
    highs = torch.maximum(lows, torch.stack(high, -1))
    back = order.argsort(-1).unsqueeze(-2).expand_as(start)
    return lows.gather(-1, back), highs.gather(-1, back)


def _point_count(windows: int) -> int:
    """A power of two."""
    wanted = max(FEWEST_POINTS, min(MOST_POINTS, ALL_POINTS // windows))
    return 1 << (wanted.bit_length() - 1)


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
