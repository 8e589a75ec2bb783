"""What normalisation, gates and attention are made of: squares, products, functions of positive numbers, softmax.

A normalisation layer is a square, a mean, a reciprocal root and a product; attention is two sums of products with a
softmax between them. Squares and (sums of) products are quadratic, so that their moments under a Gaussian are exact
(Isserlis 1918), and with third cumulants exact to first order in them. The others have an error that their classes
state.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from netmoments.memory import elements_together
from netmoments.normal import standard_deviation
from netmoments.precision import value_and_slope
from netmoments.rules.base import Local, Nonlinearity, OneInput, PowerMoments, ThirdCumulants, cholesky_root
from netmoments.rules.sampled import UnitMoments, normal_points
from netmoments.rules.smooth import Elementwise

FEWEST_POINTS, MOST_POINTS = 512, 8192
"""Quasi-random points of a row or window: a sketch takes the fewest."""
MOST_SKEWED = 1.0
"""The largest size √Σκ² of third cumulants that moves points as far as it says."""
ALL_POINTS = 2**18
"""Points of all rows or windows of a layer together, between those bounds."""
MOST_SPREAD = 0.6
"""Deviations of what must not reach 0, in parts of the mean, at most."""
LEAST_ROOT = 0.05
"""Below this part of its cube root at the mean it is cut off."""


@dataclass(frozen=True, eq=False)
class Squared(OneInput):
    """f(z) = z²: all moments and all pairs are exact."""

    windows: Tensor
    """Each unit's own input, (n, 1)."""

    def values(self, z: Tensor) -> Tensor:
        return z.squeeze(-1).square()

    def local(self, mean: Tensor, covariance: Tensor, cumulants: ThirdCumulants | None = None) -> Local:
        """E z² = m² + s², Var z² = 4m²s² + 2s⁴ + 4mκ, κ the third cumulant of z."""
        m, variance = mean.squeeze(-1), covariance.squeeze((-2, -1))
        own = 4 * m.square() * variance + 2 * variance.square()
        if cumulants is not None:
            kappa = cumulants.kappa.reshape(m.shape) * cumulants.root.reshape(m.shape) ** 3
            own = (own + 4 * m * kappa).clamp(min=0)
        return Local(m.square() + variance, own, 2 * mean, torch.full_like(covariance, 2.0))

    def pairs(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """Cov(z², z'²) = 4mm'c + 2c²: the second part."""
        return 2 * covariance.square()

    def power_moments(self, mean: Tensor, variance: Tensor) -> PowerMoments:
        """Of g = z² − m² = au + bu², a = 2ms and b = s²: moments of powers of u up to the eighth."""
        a, b, none = 2 * mean * standard_deviation(variance), variance, torch.zeros_like(mean)
        n, v = a.square(), b.square()
        return PowerMoments(
            centre=mean.square(),
            first=(b, a, 2 * b, none, none, none, none),
            second=(n + 3 * v, 6 * a * b, 2 * n + 12 * v, 12 * a * b, 24 * v),
            third=(
                b * (9 * n + 15 * v), a * (3 * n + 45 * v), b * (36 * n + 90 * v), a * (6 * n + 180 * v),
                b * (72 * n + 360 * v),
            ),
            fourth=3 * n**2 + 90 * n * v + 105 * v**2,
        )  # fmt: skip

    def sketch_moments(self, mean: Tensor, covariance: Tensor, probes: int) -> UnitMoments:
        return _together(self, mean, covariance)


@dataclass(frozen=True, eq=False)
class SumOfProducts(Nonlinearity):
    """f(z) = Σₖ zₖz'ₖ + offset, a window being z and then z': products of two tensors, and of matrices.

    With g = (m', m) and H the matrix that swaps z and z', E f = m·m' + tr Cov(z, z') and
    Var f = gᵀSg + ½ tr(HSHS) + Σ gₐH_bc κ_abc.
    """

    windows: Tensor
    """(n, 2d)."""
    offset: Tensor | None = None
    """(n,), what is added."""

    @cached_property
    def terms(self) -> int:
        return self.width // 2

    def values(self, z: Tensor) -> Tensor:
        return self._shifted((z[..., : self.terms] * z[..., self.terms :]).sum(-1))

    def local(self, mean: Tensor, covariance: Tensor, cumulants: ThirdCumulants | None = None) -> Local:
        d = self.terms
        expected = (mean[..., :d] * mean[..., d:]).sum(-1)
        expected = expected + covariance[..., :d, d:].diagonal(dim1=-2, dim2=-1).sum(-1)
        gain = mean.roll(d, -1)
        swapped = covariance.roll(d, -2)
        variance = ((covariance @ gain.unsqueeze(-1)).squeeze(-1) * gain).sum(-1)
        variance = variance + 0.5 * (swapped * swapped.mT).sum((-2, -1))
        if cumulants is not None:
            root = cumulants.root[..., : cumulants.kappa.shape[-1]]
            slope = (gain.unsqueeze(-2) @ root).squeeze(-2)
            bend = root.mT @ root.roll(d, -2)
            skew = (cumulants.kappa * bend.unsqueeze(-3)).sum((-2, -1))
            variance = (variance + (skew * slope).sum(-1)).clamp(min=0)
        swap = torch.eye(2 * d, dtype=mean.dtype, device=mean.device).roll(d, 0)
        return Local(self._shifted(expected), variance, gain, swap.expand(covariance.shape))

    def sketch_moments(self, mean: Tensor, covariance: Tensor, probes: int) -> UnitMoments:
        return _together(self, mean, covariance)

    def _shifted(self, y: Tensor) -> Tensor:
        return y if self.offset is None else y + self.offset


@dataclass(frozen=True, eq=False)
class OneSigned(Elementwise):
    """y = function(z) of numbers that never reach 0: roots, reciprocals, logarithms.

    A Gaussian would take them across 0. They are taken to have Gamma's distribution with the right mean and variance,
    as sums of squares nearly have, by z = m(1 − c²/9 + cu/3)³ with c = s/m and u normal (Wilson and Hilferty 1931), and
    Gauss–Hermite quadrature in u; another skewness than Gamma's, 2c, counts to first order. For 1/√z of Gamma's z
    itself the mean is off by 7e-7 of a deviation at c = 0.1, by 2e-4 at c = 0.3 and by 3e-3 at c = 0.5, the variance by
    3e-5, 3e-3 and 5e-2. Above `MOST_SPREAD` c is taken as that: moments that may not exist stay finite.
    """

    def local(self, mean: Tensor, covariance: Tensor, cumulants: ThirdCumulants | None = None) -> Local:
        """With γ the skewness, z = m + s(u + γ/6 (u² − 1)) + … and f = E f + a₁u + ½a₂(u² − 1) + … of the same u.

        Gain g and curvature H are those with which z gives f: a₁ = s(g + Hsγ/3), a₂ = s(gγ/3 + Hs). To first order in γ
        they are E f′ and E f″, which need not exist.
        """
        m, s = mean.squeeze(-1), standard_deviation(covariance.squeeze((-2, -1)))
        nodes, weights = self._nodes(m)
        spread = _spread(m, s)
        z, rate = _like_gamma(m, spread, nodes)
        at = z.reshape(-1, *self.shape)
        value, slope = value_and_slope(self.function, (at,), (torch.ones_like(at),))
        value, slope = value.reshape(z.shape), slope.reshape(z.shape) * rate
        skew = 2 * spread
        second = (weights * slope * nodes).sum(0)
        if cumulants is not None:
            kappa = cumulants.kappa.reshape(m.shape).clamp(-2 * MOST_SPREAD, 2 * MOST_SPREAD)
            weights = weights * (1 + (kappa - skew) / 6 * (nodes**3 - 3 * nodes))
            skew = kappa
        expected = (weights * value).sum(0)
        gain = ((weights * slope).sum(0) - second * skew / 3) / (1 - skew.square() / 9)
        bend = second - gain * skew / 3
        return Local(
            mean=expected,
            variance=(weights * (value - expected).square()).sum(0).clamp(min=0),
            gain=gain.unsqueeze(-1),
            curvature=torch.where(s > 0, bend / torch.where(s > 0, spread * m, 1.0), 0.0)[..., None, None],
        )

    def pairs(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """The Hermite series in u, from its second term, of f less what is linear in z."""
        variance = covariance.diagonal(dim1=-2, dim2=-1)
        s = standard_deviation(variance)
        safe = torch.where(s > 0, s, 1.0)
        rho = covariance / safe.unsqueeze(-1) / safe.unsqueeze(-2)
        gain = self.local(mean.unsqueeze(-1), variance[..., None, None]).gain.squeeze(-1)

        def function(u: Tensor) -> Tensor:
            z, _ = _like_gamma(mean, _spread(mean, s), u.reshape(-1, *mean.shape))
            return (self.function(z.reshape(-1, *self.shape)).reshape(z.shape) - gain * z).reshape(u.shape)

        return Elementwise(function, tuple(mean.shape[-1:]), self.like).pairs(torch.zeros_like(mean), rho)


def _spread(mean: Tensor, deviation: Tensor) -> Tensor:
    """c = s/m, of the sign of m, at most `MOST_SPREAD` in size."""
    return (deviation / torch.where(mean == 0, 1.0, mean)).clamp(-MOST_SPREAD, MOST_SPREAD)


def _like_gamma(mean: Tensor, spread: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of the sign of their mean, nearly of Gamma's distribution for normal u, and their slope in su."""
    root = 1 - spread.square() / 9 + spread * u / 3
    kept = root.clamp(min=LEAST_ROOT)
    return mean * kept**3, torch.where(root > LEAST_ROOT, kept.square(), 0.0)


@dataclass(frozen=True, eq=False)
class OfRows(Nonlinearity):
    """A function of rows of w numbers that gives as many, each of them a unit that looks at the whole row.

    By quasi-random points whose first two moments are exact. Third cumulants move the points, u → u + κ[u, u]/6, which
    is right to first order.
    """

    rows: Tensor
    """The places of every row's numbers, (g, w), in the input and in the output: each place in one row."""
    points: int = field(default=0, kw_only=True)
    """For each row; by default the more the fewer rows there are."""

    @cached_property
    def windows(self) -> Tensor:  # type: ignore[override]
        every = self.rows.new_empty(self.rows.numel(), self.rows.shape[1])
        every[self.rows.reshape(-1)] = self.rows.repeat_interleave(self.rows.shape[1], 0)
        return every

    @cached_property
    def position(self) -> Tensor:
        """Which of its row each unit is, (n,)."""
        order = torch.arange(self.rows.shape[1], device=self.rows.device).expand_as(self.rows)
        return torch.empty_like(self.rows.reshape(-1)).scatter_(0, self.rows.reshape(-1), order.reshape(-1))

    @abstractmethod
    def of_rows(self, z: Tensor) -> Tensor:
        """The function itself, (..., w) to (..., w)."""

    @abstractmethod
    def slopes(self, z: Tensor, position: Tensor | None) -> Tensor:
        """E ∇fᵢ of all units of rows known from points (m, P, w), (m, w, w), or of one each, by position: (m, w)."""

    @abstractmethod
    def bends(self, z: Tensor) -> Tensor:
        """E ∇²fᵢ of all units of rows known from points (m, P, w): (m, w, w, w)."""

    def values(self, z: Tensor) -> Tensor:
        return self.of_rows(z).gather(-1, self.position.expand(z.shape[:-1]).unsqueeze(-1)).squeeze(-1)

    def local(self, mean: Tensor, covariance: Tensor, cumulants: ThirdCumulants | None = None) -> Local:
        batch, each = mean.shape[:-1], self._count * self.width
        if cumulants is not None:
            position = self.position.expand(batch).reshape(-1)
            inputs = (position, *_flat(mean, cumulants.root, cumulants.kappa))
            expected, variance, gain = _in_parts(self._units, inputs, each)
            curvature = torch.zeros_like(covariance)  # that of a Gaussian is asked for without cumulants
            return Local(expected.reshape(batch), variance.reshape(batch), gain.reshape(mean.shape), curvature)
        first = self.rows[:, 0]
        found = _in_parts(self._rows, _flat(mean[..., first, :], cholesky_root(covariance[..., first, :, :])), each)
        order = self.rows.reshape(-1).argsort()
        by_unit = (part.reshape(-1, self.units, *part.shape[2:])[:, order] for part in found)
        return Local(*(part.reshape(*batch, *part.shape[2:]) for part in by_unit))

    @property
    def _count(self) -> int:
        return self.points or points_for(len(self.rows))

    def _rows(self, mean: Tensor, root: Tensor) -> tuple[Tensor, ...]:
        """Mean, variance, gain and curvature of all units of rows (m, w)."""
        z = points_of(self._count, mean, root)
        value = self.of_rows(z)
        expected = value.mean(-2)
        variance = (value - expected.unsqueeze(-2)).square().mean(-2)
        return expected, variance, self.slopes(z, None), self.bends(z)

    def _units(self, position: Tensor, mean: Tensor, root: Tensor, kappa: Tensor) -> tuple[Tensor, ...]:
        """Mean, variance and gain of one unit of each row (m, w), by its position in it, with third cumulants."""
        z = points_of(self._count, mean, root, kappa)
        value = self.of_rows(z).gather(-1, position[:, None, None].expand(-1, z.shape[-2], 1)).squeeze(-1)
        expected = value.mean(-1)
        variance = (value - expected.unsqueeze(-1)).square().mean(-1)
        return expected, variance, self.slopes(z, position)

    def sketch_moments(self, mean: Tensor, covariance: Tensor, probes: int) -> UnitMoments:
        return _together(replace(self, points=FEWEST_POINTS), mean, covariance)


class Softmax(OfRows):
    """f(z)ᵢ = pᵢ = exp zᵢ / Σⱼ exp zⱼ.

    ∇pᵢ = pᵢ(eᵢ − p) and ∇²pᵢ = pᵢ(eᵢeᵢᵀ − eᵢpᵀ − peᵢᵀ + 2ppᵀ − diag p): means sum to 1, and gains to 0, to rounding.
    """

    def of_rows(self, z: Tensor) -> Tensor:
        return z.softmax(-1)

    def slopes(self, z: Tensor, position: Tensor | None) -> Tensor:
        p = z.softmax(-1)
        if position is None:
            return torch.diag_embed(p.mean(-2)) - _products(p, p)
        own = p.gather(-1, position[:, None, None].expand(-1, p.shape[-2], 1))
        return (-_products(own, p).squeeze(-2)).scatter_add(-1, position.unsqueeze(-1), own.mean(-2))

    def bends(self, z: Tensor) -> Tensor:
        p = z.softmax(-1)
        crossed = torch.diag_embed(_products(p, p))  # [i, a, b] = δ_ab E[pᵢpₐ]
        own = crossed.transpose(-3, -2)
        return torch.diag_embed(torch.diag_embed(p.mean(-2))) - own - own.mT - crossed + 2 * _triple_products(p, 1.0)


@dataclass(frozen=True, eq=False)
class NormalisedRows(OfRows):
    """f(z)ᵢ = aᵢ cᵢ/√(v + ε) + bᵢ with c = z less its mean and v the mean of c²: layer, group and instance norms.

    With r = 1/√(v + ε), ∂fᵢ/∂cₐ = δᵢₐr − cᵢcₐr³/w and ∂²fᵢ = −r³(δᵢₐc_b + δᵢ_bcₐ + δₐ_bcᵢ)/w + 3cᵢcₐc_b r⁵/w².
    """

    eps: float
    scale: Tensor
    """a, (n,)."""
    shift: Tensor
    """b, (n,)."""

    def of_rows(self, z: Tensor) -> Tensor:
        c, r = self._centred(z)
        return c * r

    def values(self, z: Tensor) -> Tensor:
        return super().values(z) * self.scale + self.shift

    def local(self, mean: Tensor, covariance: Tensor, cumulants: ThirdCumulants | None = None) -> Local:
        expected, variance, gain, curvature = super().local(mean, covariance, cumulants)
        a = self.scale
        return Local(a * expected + self.shift, a**2 * variance, a[:, None] * gain, a[:, None, None] * curvature)

    def slopes(self, z: Tensor, position: Tensor | None) -> Tensor:
        c, r = self._centred(z)
        turned = c * r**3 / z.shape[-1]
        level = r.mean(-2)
        if position is None:
            return self._less_mean(torch.diag_embed(level.expand(-1, z.shape[-1])) - _products(c, turned))
        own = c.gather(-1, position[:, None, None].expand(-1, c.shape[-2], 1))
        slope = -_products(own, turned).squeeze(-2)
        return self._less_mean(slope.scatter_add(-1, position.unsqueeze(-1), level))

    def bends(self, z: Tensor) -> Tensor:
        c, r = self._centred(z)
        w = z.shape[-1]
        turned = (c * r**3).mean(-2) / w
        one = torch.eye(w, dtype=z.dtype, device=z.device)
        crossed = turned[..., :, None, None] * one  # [i, a, b] = δ_ab tᵢ
        own = crossed.transpose(-3, -2)
        bent = 3 / w**2 * _triple_products(c, r**5) - crossed - own - own.mT
        return self._less_mean(self._less_mean(bent).mT)

    def _centred(self, z: Tensor) -> tuple[Tensor, Tensor]:
        c = z - z.mean(-1, keepdim=True)
        return c, (c.square().mean(-1, keepdim=True) + self.eps).rsqrt()

    @staticmethod
    def _less_mean(slope: Tensor) -> Tensor:
        """A derivative in c as one in z."""
        return slope - slope.mean(-1, keepdim=True)


@dataclass(frozen=True, eq=False)
class OfWindows(Nonlinearity):
    """Any smooth function of a window's numbers, by the same points; E ∇²f from the gradient by Stein's identity."""

    windows: Tensor
    points: int = field(default=0, kw_only=True)
    """For each window; by default the more the fewer windows there are."""

    @abstractmethod
    def values(self, z: Tensor) -> Tensor:
        """f itself, from (..., w) to (...); numbers beyond a window are 0."""

    def local(self, mean: Tensor, covariance: Tensor, cumulants: ThirdCumulants | None = None) -> Local:
        if cumulants is None:
            inputs = _flat(mean, cholesky_root(covariance))
        else:
            inputs = _flat(mean, cumulants.root, cumulants.kappa)
        found = _in_parts(self._windows, inputs, self._count * self.width)
        return Local(*(part.reshape(*mean.shape[:-1], *part.shape[1:]) for part in found))

    @property
    def _count(self) -> int:
        return self.points or points_for(self.units)

    def _windows(self, mean: Tensor, root: Tensor, kappa: Tensor | None = None) -> tuple[Tensor, ...]:
        """Mean, variance, gain and curvature of windows (m, w)."""
        value, back = torch.func.vjp(self.values, points_of(self._count, mean, root, kappa))[:2]
        (slope,) = back(torch.ones_like(value))
        expected = value.mean(-1)
        variance = (value - expected.unsqueeze(-1)).square().mean(-1)
        across = _products(slope, normal_points(mean.shape[-1], self._count).to(mean).expand_as(slope))
        bend = torch.linalg.solve(root, across, left=False)
        return expected, variance, slope.mean(-2), 0.5 * (bend + bend.mT)

    def sketch_moments(self, mean: Tensor, covariance: Tensor, probes: int) -> UnitMoments:
        return _together(replace(self, points=FEWEST_POINTS), mean, covariance)


class LogSumExp(OfWindows):
    """f(z) = log Σ exp zᵢ."""

    def values(self, z: Tensor) -> Tensor:
        return z.logsumexp(-1)


@dataclass(frozen=True, eq=False)
class PowerSum(OfWindows):
    """f(z) = (Σ|zᵢ|ᵖ)^(1/p), with a ReLU of every number before it or without: Lp pools."""

    power: float
    with_zero: bool = False

    def values(self, z: Tensor) -> Tensor:
        size = z.relu() if self.with_zero else z.abs()
        largest = size.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(z.dtype).tiny)
        return largest.squeeze(-1) * ((size / largest) ** self.power).sum(-1) ** (1 / self.power)

    def clamped(self) -> PowerSum:
        return replace(self, with_zero=True)


def points_of(count: int, mean: Tensor, root: Tensor, kappa: Tensor | None = None) -> Tensor:
    """Points m + Ru of windows (m, w) with roots (m, w, w): (m, P, w).

    Third cumulants κ (m, q, q, q) move u by κ[u, u]/6: the moments of third order are then κ to first order, and those
    of first and second as before. Of a κ larger than `MOST_SKEWED` (numbers that lie near a sphere, behind a
    normalisation) only so much counts: the first order means nothing there.
    """
    u = normal_points(mean.shape[-1], count).to(mean)
    if kappa is None:
        return mean.unsqueeze(-2) + u @ root.mT
    size = torch.linalg.vector_norm(kappa.detach(), dim=(-3, -2, -1), keepdim=True)
    few, kappa = kappa.shape[-1], kappa * (MOST_SKEWED / size.clamp(min=MOST_SKEWED))
    first = u[:, :few]
    twice = (first.unsqueeze(-1) * first.unsqueeze(-2)).flatten(1) - torch.eye(few).to(u).flatten()
    moved = twice @ kappa.flatten(-2).mT / 6
    return mean.unsqueeze(-2) + u @ root.mT + moved @ root[..., :few].mT


def points_for(windows: int) -> int:
    """How many points each of so many windows has, a power of two."""
    return 1 << (max(FEWEST_POINTS, min(MOST_POINTS, ALL_POINTS // windows)).bit_length() - 1)


def _flat(mean: Tensor, root: Tensor, kappa: Tensor | None = None) -> tuple[Tensor, ...]:
    """Windows of all images one after the other."""
    given = mean.reshape(-1, mean.shape[-1]), root.reshape(-1, *root.shape[-2:])
    return given if kappa is None else (*given, kappa.reshape(-1, *kappa.shape[-3:]))


def _in_parts(work: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...], each: int) -> tuple[Tensor, ...]:
    """`work(*inputs)` for some windows at a time, of which each takes so many numbers."""
    together = elements_together("cache", inputs[-1], each)
    parts = [work(*some) for some in zip(*(x.split(together) for x in inputs), strict=True)]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def _products(first: Tensor, second: Tensor) -> Tensor:
    """E[abᵀ] from points (m, P, ·): (m, ·, ·)."""
    return first.mT @ second / first.shape[-2]


def _triple_products(c: Tensor, weight: Tensor | float) -> Tensor:
    """E[weight cᵢcₐc_b] from points (m, P, w): (m, w, w, w)."""
    return torch.stack([_products(c * one.unsqueeze(-1) * weight, c) for one in c.unbind(-1)], -3)


def _together(rule: Nonlinearity, mean: Tensor, covariance: Tensor) -> UnitMoments:
    """The moments of all images at once, for a sketch."""
    expected, _, gain, curvature = rule.local(rule.gathered(mean), covariance)
    return UnitMoments(expected, gain.detach(), curvature.detach())
