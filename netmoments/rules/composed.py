"""Rules for what normalisation, gates and attention are composed of: squares, products, roots, softmax, norms.

A normalisation layer is a square, a mean, a reciprocal root and a product; attention is two sums of products with a
softmax between them. Squares and sums of products are quadratic: their moments under a Gaussian are exact (Isserlis
1918), and with third cumulants exact to first order in them. All others are approximate. `OneSigned`, for roots,
reciprocals and logarithms, states its error; `OfRows` and `OfWindows` average over quasi-random points.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from netmoments.covariances import cholesky_root
from netmoments.memory import elements_together
from netmoments.normal import standard_deviation
from netmoments.precision import value_and_slope
from netmoments.rules.base import (
    Local,
    Nonlinearity,
    OneInput,
    PowerMoments,
    ThirdCumulants,
    UnitMoments,
    normal_points,
)
from netmoments.rules.one_number import Elementwise

FEWEST_POINTS, MOST_POINTS = 512, 8192
"""Bounds on the quasi-random points of a row or window; a sketch takes the fewest."""
ALL_POINTS = 2**18
"""Quasi-random points of all rows or windows of a layer together, where the bounds allow it."""
MOST_SKEWED = 1.0
"""Third cumulants of a size √Σκ² beyond this are scaled down to it: see `points_of`."""
MOST_SPREAD = 0.6
"""The largest coefficient of variation |s/m| of an input of `OneSigned`; larger ones are cut to it."""
LEAST_ROOT = 0.05
"""The least ∛(z/m) of an input z of `OneSigned` with mean m; smaller ones, further in its tail, are cut to it."""


@dataclass(frozen=True, eq=False)
class Squared(OneInput):
    """f(z) = z²: all moments and all pairs are exact."""

    windows: Tensor
    """The one input of each unit, (n, 1)."""

    def values(self, z: Tensor) -> Tensor:
        return z.squeeze(-1).square()

    def local(self, mean: Tensor, covariance: Tensor, cumulants: ThirdCumulants | None = None) -> Local:
        """E z² = m² + s², Var z² = 4m²s² + 2s⁴ + 4mκ, κ the third cumulant of z."""
        m, variance = mean.squeeze(-1), covariance.squeeze((-2, -1))
        of_square = 4 * m.square() * variance + 2 * variance.square()
        if cumulants is not None:
            kappa = cumulants.kappa.reshape(m.shape) * cumulants.root.reshape(m.shape) ** 3
            of_square = (of_square + 4 * m * kappa).clamp(min=0)
        return Local(m.square() + variance, of_square, 2 * mean, torch.full_like(covariance, 2.0))

    def pairs(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """2c², the nonlinear part of Cov(z², z'²) = 4mm'c + 2c²."""
        return 2 * covariance.square()

    def power_moments(self, mean: Tensor, variance: Tensor) -> PowerMoments:
        """Exact, from g = z² − m² = au + bu² with a = 2ms and b = s², by moments of u up to the eighth."""
        a, b, zero = 2 * mean * standard_deviation(variance), variance, torch.zeros_like(mean)
        n, v = a.square(), b.square()
        return PowerMoments(
            centre=mean.square(),
            first=(b, a, 2 * b, zero, zero, zero, zero),
            second=(n + 3 * v, 6 * a * b, 2 * n + 12 * v, 12 * a * b, 24 * v),
            third=(
                b * (9 * n + 15 * v), a * (3 * n + 45 * v), b * (36 * n + 90 * v), a * (6 * n + 180 * v),
                b * (72 * n + 360 * v),
            ),
            fourth=3 * n**2 + 90 * n * v + 105 * v**2,
        )  # fmt: skip

    def sketch_moments(self, mean: Tensor, covariance: Tensor, probes: int) -> UnitMoments:
        return _local_of_images(self, mean, covariance)


@dataclass(frozen=True, eq=False)
class SumOfProducts(Nonlinearity):
    """f(z) = Σₖ zₖz'ₖ + offset for windows that hold z, then z': products of two tensors, elementwise or of matrices.

    With g = (m', m) and H the matrix that swaps z and z', E f = m·m' + tr Cov(z, z') and
    Var f = gᵀSg + ½ tr(HSHS) + Σ gₐH_bc κ_abc.
    """

    windows: Tensor
    """(n, 2d) for sums of d products."""
    offset: Tensor | None = None
    """A constant that is added, (n,)."""

    @cached_property
    def terms(self) -> int:
        """d, the products in each sum."""
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
        return _local_of_images(self, mean, covariance)

    def _shifted(self, y: Tensor) -> Tensor:
        return y if self.offset is None else y + self.offset


@dataclass(frozen=True, eq=False)
class OneSigned(Elementwise):
    """y = function(z) for inputs that never reach 0: roots, reciprocals, logarithms.

    A Gaussian would cross 0. The inputs are therefore given a Gamma distribution with their mean and variance, which
    sums of squares nearly have: z = m(1 − c²/9 + cu/3)³ with c = s/m and u normal (Wilson and Hilferty 1931), and
    Gauss–Hermite quadrature in u. A skewness other than Gamma's, 2c, is taken into account to first order. For 1/√z of
    a true Gamma variable the mean is off by 7e-7 of a deviation at c = 0.1, by 2e-4 at c = 0.3 and by 3e-3 at c = 0.5,
    the variance by 3e-5, 3e-3 and 5e-2. c is cut to `MOST_SPREAD`, so that moments which may not exist stay finite.
    """

    def local(self, mean: Tensor, covariance: Tensor, cumulants: ThirdCumulants | None = None) -> Local:
        """The moments by quadrature, with a gain and a curvature that explain f by z, not by u.

        With γ the skewness, z = m + s(u + γ/6 (u² − 1)) + … and f = E f + a₁u + ½a₂(u² − 1) + … in the same u. Gain g
        and curvature H solve a₁ = s(g + Hsγ/3), a₂ = s(gγ/3 + Hs). To first order in γ they are E f′ and E f″, which
        need not exist themselves.
        """
        m, s = mean.squeeze(-1), standard_deviation(covariance.squeeze((-2, -1)))
        nodes, weights = self._nodes(m)
        spread = _spread(m, s)
        z, slope_of_z = _like_gamma(m, spread, nodes)
        inputs = z.reshape(-1, *self.shape)
        value, slope = value_and_slope(self.function, (inputs,), (torch.ones_like(inputs),))
        value, slope = value.reshape(z.shape), slope.reshape(z.shape) * slope_of_z
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
        """The Hermite series in u, from its second term, of f − gain·z, the part of f that is not linear in z."""
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
    """The coefficient of variation c = s/m, with the sign of m, cut to ±`MOST_SPREAD`."""
    return (deviation / torch.where(mean == 0, 1.0, mean)).clamp(-MOST_SPREAD, MOST_SPREAD)


def _like_gamma(mean: Tensor, spread: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """z = m(1 − c²/9 + cu/3)³, nearly Gamma for normal u and of the sign of its mean, and dz/d(su)."""
    root = 1 - spread.square() / 9 + spread * u / 3
    cut_root = root.clamp(min=LEAST_ROOT)
    return mean * cut_root**3, torch.where(root > LEAST_ROOT, cut_root.square(), 0.0)


@dataclass(frozen=True, eq=False)
class OfRows(Nonlinearity):
    """A function from rows of w numbers to rows of w numbers: each result is a unit whose window is the whole row.

    Expectations are averages over quasi-random points, whose first two moments are exact for rows of less than a
    quarter as many numbers as points. Third cumulants move the points, u → u + κ[u, u]/6, which is right to first
    order.
    """

    rows: Tensor
    """The places of each row's numbers, (g, w), the same in input and output. Every place is in exactly one row."""
    points: int = field(default=0, kw_only=True)
    """Quasi-random points for each row; 0 for `points_for`, the more the fewer rows there are."""

    @cached_property
    def windows(self) -> Tensor:  # type: ignore[override]
        windows = self.rows.new_empty(self.rows.numel(), self.rows.shape[1])
        windows[self.rows.reshape(-1)] = self.rows.repeat_interleave(self.rows.shape[1], 0)
        return windows

    @cached_property
    def position(self) -> Tensor:
        """The position of each unit in its row, (n,)."""
        order = torch.arange(self.rows.shape[1], device=self.rows.device).expand_as(self.rows)
        return torch.empty_like(self.rows.reshape(-1)).scatter_(0, self.rows.reshape(-1), order.reshape(-1))

    @abstractmethod
    def of_rows(self, z: Tensor) -> Tensor:
        """The function itself, from (..., w) to (..., w)."""

    @abstractmethod
    def slopes(self, z: Tensor, position: Tensor | None) -> Tensor:
        """E ∇fᵢ from points (m, P, w) of m rows: (m, w, w) for all units; (m, w) for one of each row, by position."""

    @abstractmethod
    def bends(self, z: Tensor) -> Tensor:
        """E ∇²fᵢ of all units from points (m, P, w) of m rows: (m, w, w, w)."""

    def values(self, z: Tensor) -> Tensor:
        return self.of_rows(z).gather(-1, self.position.expand(z.shape[:-1]).unsqueeze(-1)).squeeze(-1)

    def local(self, mean: Tensor, covariance: Tensor, cumulants: ThirdCumulants | None = None) -> Local:
        batch, numbers_each = mean.shape[:-1], self._count * self.width
        if cumulants is not None:
            position = self.position.expand(batch).reshape(-1)
            inputs = (position, *_flat(mean, cumulants.root, cumulants.kappa))
            expected, variance, gain = _in_parts(self._units, inputs, numbers_each)
            curvature = torch.zeros_like(covariance)  # callers take the curvature of the Gaussian, without cumulants
            return Local(expected.reshape(batch), variance.reshape(batch), gain.reshape(mean.shape), curvature)
        first = self.rows[:, 0]
        inputs = _flat(mean[..., first, :], cholesky_root(covariance[..., first, :, :]))
        by_row = _in_parts(self._rows, inputs, numbers_each)
        order = self.rows.reshape(-1).argsort()
        by_unit = (x.reshape(-1, self.units, *x.shape[2:])[:, order] for x in by_row)
        return Local(*(x.reshape(*batch, *x.shape[2:]) for x in by_unit))

    @property
    def _count(self) -> int:
        """Quasi-random points for each row."""
        return self.points or points_for(len(self.rows))

    def _rows(self, mean: Tensor, root: Tensor) -> tuple[Tensor, ...]:
        """Mean, variance, gain and curvature of all units of rows (m, w)."""
        z = points_of(self._count, mean, root)
        value = self.of_rows(z)
        expected = value.mean(-2)
        variance = (value - expected.unsqueeze(-2)).square().mean(-2)
        return expected, variance, self.slopes(z, None), self.bends(z)

    def _units(self, position: Tensor, mean: Tensor, root: Tensor, kappa: Tensor) -> tuple[Tensor, ...]:
        """Mean, variance and gain of one unit of each row (m, w), given by its position, with third cumulants."""
        z = points_of(self._count, mean, root, kappa)
        value = self.of_rows(z).gather(-1, position[:, None, None].expand(-1, z.shape[-2], 1)).squeeze(-1)
        expected = value.mean(-1)
        variance = (value - expected.unsqueeze(-1)).square().mean(-1)
        return expected, variance, self.slopes(z, position)

    def sketch_moments(self, mean: Tensor, covariance: Tensor, probes: int) -> UnitMoments:
        return _local_of_images(replace(self, points=FEWEST_POINTS), mean, covariance)


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
        p_unit = p.gather(-1, position[:, None, None].expand(-1, p.shape[-2], 1))
        return (-_products(p_unit, p).squeeze(-2)).scatter_add(-1, position.unsqueeze(-1), p_unit.mean(-2))

    def bends(self, z: Tensor) -> Tensor:
        p = z.softmax(-1)
        crossed = torch.diag_embed(_products(p, p))  # [i, a, b] = δ_ab E[pᵢpₐ]
        turned = crossed.transpose(-3, -2)  # [i, a, b] = δᵢ_b E[pₐpᵢ]
        triple = 2 * _triple_products(p, 1.0)
        return torch.diag_embed(torch.diag_embed(p.mean(-2))) - turned - turned.mT - crossed + triple


@dataclass(frozen=True, eq=False)
class NormalisedRows(OfRows):
    """f(z)ᵢ = aᵢ cᵢ/√(v + ε) + bᵢ, c being z less its mean and v the mean of c²: layer, group and instance norms.

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
        scaled = c * r**3 / z.shape[-1]
        mean_r = r.mean(-2)
        if position is None:
            return self._by_input(torch.diag_embed(mean_r.expand(-1, z.shape[-1])) - _products(c, scaled))
        c_unit = c.gather(-1, position[:, None, None].expand(-1, c.shape[-2], 1))
        slope = -_products(c_unit, scaled).squeeze(-2)
        return self._by_input(slope.scatter_add(-1, position.unsqueeze(-1), mean_r))

    def bends(self, z: Tensor) -> Tensor:
        c, r = self._centred(z)
        w = z.shape[-1]
        t = (c * r**3).mean(-2) / w
        identity = torch.eye(w, dtype=z.dtype, device=z.device)
        crossed = t[..., :, None, None] * identity  # [i, a, b] = δ_ab tᵢ
        turned = crossed.transpose(-3, -2)  # [i, a, b] = δᵢ_b tₐ
        bend = 3 / w**2 * _triple_products(c, r**5) - crossed - turned - turned.mT
        return self._by_input(self._by_input(bend).mT)

    def _centred(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """c and r."""
        c = z - z.mean(-1, keepdim=True)
        return c, (c.square().mean(-1, keepdim=True) + self.eps).rsqrt()

    @staticmethod
    def _by_input(slope: Tensor) -> Tensor:
        """A derivative by c as one by z."""
        return slope - slope.mean(-1, keepdim=True)


@dataclass(frozen=True, eq=False)
class OfWindows(Nonlinearity):
    """Any smooth function of each window, averaged over quasi-random points as in `OfRows`.

    E ∇²f follows from the gradient by Stein's identity.
    """

    windows: Tensor
    points: int = field(default=0, kw_only=True)
    """Quasi-random points for each window; 0 for `points_for`, the more the fewer windows there are."""

    @abstractmethod
    def values(self, z: Tensor) -> Tensor:
        """f itself, from (..., w) to (...); places beyond a window hold 0."""

    def local(self, mean: Tensor, covariance: Tensor, cumulants: ThirdCumulants | None = None) -> Local:
        if cumulants is None:
            inputs = _flat(mean, cholesky_root(covariance))
        else:
            inputs = _flat(mean, cumulants.root, cumulants.kappa)
        moments = _in_parts(self._windows, inputs, self._count * self.width)
        return Local(*(x.reshape(*mean.shape[:-1], *x.shape[1:]) for x in moments))

    @property
    def _count(self) -> int:
        """Quasi-random points for each window."""
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
        return _local_of_images(replace(self, points=FEWEST_POINTS), mean, covariance)


class LogSumExp(OfWindows):
    """f(z) = log Σ exp zᵢ."""

    def values(self, z: Tensor) -> Tensor:
        return z.logsumexp(-1)


@dataclass(frozen=True, eq=False)
class PowerSum(OfWindows):
    """f(z) = (Σ|zᵢ|ᵖ)^(1/p), or the same of relu(zᵢ): Lp pools and vector norms."""

    power: float
    """p ≥ 1."""
    with_zero: bool = False
    """Whether a ReLU of each input comes first."""

    def values(self, z: Tensor) -> Tensor:
        size = z.relu() if self.with_zero else z.abs()
        largest = size.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(z.dtype).tiny)
        return largest.squeeze(-1) * ((size / largest) ** self.power).sum(-1) ** (1 / self.power)

    def clamped(self) -> PowerSum:
        return replace(self, with_zero=True)


def points_of(count: int, mean: Tensor, root: Tensor, kappa: Tensor | None = None) -> Tensor:
    """Quasi-random points z = m + Ru, (m, P, w), for windows with means (m, w) and roots (m, w, w) of covariances.

    Third cumulants κ (m, q, q, q) move u by κ[u, u]/6, less its mean: the third moments are then κ to first order, the
    first and second as before. A κ larger than `MOST_SKEWED`, where first order means nothing (behind a normalisation,
    whose results lie near a sphere), is scaled down to that size.
    """
    u = normal_points(mean.shape[-1], count).to(mean)
    if kappa is None:
        return mean.unsqueeze(-2) + u @ root.mT
    size = torch.linalg.vector_norm(kappa.detach(), dim=(-3, -2, -1), keepdim=True)
    q, kappa = kappa.shape[-1], kappa * (MOST_SKEWED / size.clamp(min=MOST_SKEWED))
    first = u[:, :q]
    products = (first.unsqueeze(-1) * first.unsqueeze(-2)).flatten(1) - torch.eye(q).to(u).flatten()
    moved = products @ kappa.flatten(-2).mT / 6
    return mean.unsqueeze(-2) + u @ root.mT + moved @ root[..., :q].mT


def points_for(windows: int) -> int:
    """How many quasi-random points each of so many windows has: a power of two."""
    return 1 << (max(FEWEST_POINTS, min(MOST_POINTS, ALL_POINTS // windows)).bit_length() - 1)


def _flat(mean: Tensor, root: Tensor, kappa: Tensor | None = None) -> tuple[Tensor, ...]:
    """The windows of all images in one dimension: means (m, w), roots (m, w, w) and cumulants (m, q, q, q), if any."""
    flat = mean.reshape(-1, mean.shape[-1]), root.reshape(-1, *root.shape[-2:])
    return flat if kappa is None else (*flat, kappa.reshape(-1, *kappa.shape[-3:]))


def _in_parts(
    work: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...], numbers_each: int
) -> tuple[Tensor, ...]:
    """`work(*inputs)`, a few windows at a time; each window takes `numbers_each` numbers of memory."""
    together = elements_together("cache", inputs[-1], numbers_each)
    parts = [work(*part) for part in zip(*(x.split(together) for x in inputs), strict=True)]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def _products(first: Tensor, second: Tensor) -> Tensor:
    """E[abᵀ] from points (m, P, ·): (m, ·, ·)."""
    return first.mT @ second / first.shape[-2]


def _triple_products(c: Tensor, weight: Tensor | float) -> Tensor:
    """E[weight cᵢcₐc_b] from points (m, P, w): (m, w, w, w)."""
    return torch.stack([_products(c * c_i.unsqueeze(-1) * weight, c) for c_i in c.unbind(-1)], -3)


def _local_of_images(rule: Nonlinearity, mean: Tensor, covariance: Tensor) -> UnitMoments:
    """The moments for a sketch, from one call of `local` for all images."""
    expected, _, gain, curvature = rule.local(rule.gathered(mean), covariance)
    return UnitMoments(expected, gain.detach(), curvature.detach())
