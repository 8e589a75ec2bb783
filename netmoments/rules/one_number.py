"""The rules for functions of one number: exact for piecewise linear ones, as sums of shifted ReLUs, pairs included.

Expectations of any other function are found by Gauss–Hermite quadrature.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from netmoments.memory import elements_together
from netmoments.normal import density, distribution, standard_deviation, standardize
from netmoments.precision import value_and_slope
from netmoments.relu.covariance import layer_covariance
from netmoments.relu.marginal import excess_moments, expected_relu, nonlinear_variance, open_probability, unit_mean
from netmoments.rules import sketch_launch
from netmoments.rules.base import Local, OneInput, PowerMoments, SketchedLayer, ThirdCumulants, UnitMoments

MOST_KINKS = 4
"""The most kinks of units whose power moments a GPU kernel computes."""
NODES = 64
"""Nodes of the Gauss–Hermite rule: exact for polynomials of degree 127; a kink costs accuracy."""
TERMS = 8
"""The highest order n in Mehler's series Σ aₙaₙ' ρⁿ/n! for the covariance of two units, aₙ = E[f Heₙ]."""


@dataclass(frozen=True, eq=False)
class PiecewiseLinear(OneInput):
    """f(z) = offset + slope·z + Σₖ bendₖ relu(z − kinkₖ), elementwise over n units.

    `offset` and `slope` are (n,), `bends` and `kinks` (K, n): one kink for ReLU, LeakyReLU, PReLU and |z|, two for
    HardTanh and ReLU6. Kinks may be given in any order and are kept sorted.
    """

    is_exact = True

    offset: Tensor
    slope: Tensor
    bends: Tensor
    kinks: Tensor

    def __post_init__(self) -> None:
        if len(self.kinks) > 1:
            kinks, order = self.kinks.sort(0)
            object.__setattr__(self, "kinks", kinks)
            object.__setattr__(self, "bends", self.bends.gather(0, order))

    @cached_property
    def windows(self) -> Tensor:  # type: ignore[override]
        return torch.arange(self.slope.shape[0], device=self.slope.device).unsqueeze(-1)

    def values(self, z: Tensor) -> Tensor:
        z = z.squeeze(-1)
        bent = sum(bend * torch.relu(z - kink) for bend, kink in zip(self.bends, self.kinks, strict=True))
        return self.offset + self.slope * z + bent

    def local(self, mean: Tensor, covariance: Tensor, cumulants: ThirdCumulants | None = None) -> Local:
        m, variance = mean.squeeze(-1), covariance.squeeze((-2, -1))
        s = standard_deviation(variance)
        bends = self._by_kink(self.bends, m)
        shifted = m - self._by_kink(self.kinks, m)
        gates = open_probability(shifted, variance)
        gain = self.slope + (bends * gates).sum(0)
        gaussian = Local(
            mean=self.offset + self.slope * m + (bends * expected_relu(shifted, s.expand_as(shifted))).sum(0),
            variance=(gain * gain * variance + self._nonlinear_variance(shifted, variance)).clamp(min=0),
            gain=gain.unsqueeze(-1),
            curvature=torch.where(
                s > 0, (bends * density(standardize(shifted, s))).sum(0) / torch.where(s > 0, s, 1.0), 0.0
            )[..., None, None],
        )
        return gaussian if cumulants is None else self._skewed(gaussian, m, s, cumulants.kappa.reshape(m.shape))

    @staticmethod
    def _by_kink(numbers: Tensor, units: Tensor) -> Tensor:
        """Numbers of kinks, (K, n), in a shape that broadcasts with numbers of units (..., n): (K, ..., n)."""
        return numbers.reshape(len(numbers), *[1] * (units.dim() - 1), -1)

    def _skewed(self, gaussian: Local, m: Tensor, s: Tensor, gamma: Tensor) -> Local:
        """The moments for a z with skewness γ, to first order: γ/6 s³ d³/dm³ is added to every expectation.

        With h = (m − kink)/s and φ = φ(h) at every kink, f₊, f₋ the slopes on its sides and d = f(kink) − E f:
        −γ/6 s Σ bend hφ to the mean, γ/6 Σ bend (h²−1)φ to the gain, γ/3 s Σ bend φ(s(f₊+f₋) − hd) to the variance.
        """
        h = standardize(m - self._by_kink(self.kinks, m), s)
        bends = self._by_kink(self.bends, m)
        bell = bends * density(h)
        below = (self.kinks.unsqueeze(0) < self.kinks.unsqueeze(1)).to(m.dtype)  # [k, j]: kink j lies below kink k
        slope_before = self._by_kink(self.slope + (below * self.bends).sum(1), m)
        bent = (torch.relu(self.kinks.unsqueeze(1) - self.kinks) * self.bends).sum(1)
        at_kink = self._by_kink(self.offset + self.slope * self.kinks + bent, m) - gaussian.mean
        rise = (bell * (s * (2 * slope_before + bends) - h * at_kink)).sum(0)
        return Local(
            mean=gaussian.mean - gamma / 6 * s * (h * bell).sum(0),
            variance=(gaussian.variance + gamma / 3 * s * rise).clamp(min=0),
            gain=gaussian.gain + (gamma / 6 * ((h * h - 1) * bell).sum(0)).unsqueeze(-1),
            curvature=gaussian.curvature,
        )

    def _nonlinear_variance(self, shifted: Tensor, variance: Tensor) -> Tensor:
        """Var f − gain²s² of each unit: Σ bendₐ bend_b N(hₐ, h_b), N the nonlinear covariance of a unit's own ReLUs.

        For hₐ ≤ h_b (fully correlated) N = s²[Φ(hₐ)Φ(−h_b) − e(hₐ)e(−h_b)], e(h) = hΦ(h) + φ(h).
        """
        bends = self._by_kink(self.bends, variance)
        total = (bends.square() * nonlinear_variance(shifted, variance)).sum(0)
        h = standardize(shifted, standard_deviation(variance))
        for a in range(len(h)):
            for b in range(a):
                low, high = torch.minimum(h[a], h[b]), torch.maximum(h[a], h[b])
                shared = distribution(low) * distribution(-high) - unit_mean(low) * unit_mean(-high)
                total = total + 2 * bends[a] * bends[b] * variance * shared
        return total

    def pairs(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """The nonlinear covariances of all pairs of units, (N, n, n), exactly: means (N, n), covariances (N, n, n).

        Σ bendₐ bend_b (Cov(relu(z − kinkₐ), relu(z' − kink_b)) − ΦₐΦ_b Cov(z, z')).
        """
        kinks, units = self.kinks.shape
        shifted = (mean.unsqueeze(-2) - self.kinks).flatten(-2)
        repeated = covariance.repeat(*[1] * (covariance.dim() - 2), kinks, kinks) if kinks > 1 else covariance
        bend = self.bends.reshape(-1)
        gate = bend * open_probability(shifted, repeated.diagonal(dim1=-2, dim2=-1))
        of_relus = layer_covariance(shifted, repeated)
        nonlinear = of_relus * (bend.unsqueeze(-1) * bend) - repeated * (gate.unsqueeze(-1) * gate.unsqueeze(-2))
        if kinks == 1:
            return nonlinear
        return nonlinear.unflatten(-1, (kinks, units)).unflatten(-3, (kinks, units)).sum((-4, -2))

    def power_moments(self, mean: Tensor, variance: Tensor) -> PowerMoments:
        """Exact: f is a straight line between its kinks, and derivatives in the mean are derivatives of fᵏ.

        E fᵏ is that of the line through f(m), plus what each kink changes of it on its side away from m (`_far_side`):
        next to nothing for a kink far away. All is computed in float64, since φ amplifies a rounding of h by h²:
        moments of dead units are right to 1e-12 of themselves, 1e-6 in float32. With D the derivative in u, t the place
        of a kink in u, v = f(t) and a, b the slopes df/du after and before it, its part of E Dʳfᵏ is the (r − 2)-th
        derivative of what jumps there:

            D²f = (a − b)φ,    D²f² = 2(f′²) + 2v(a − b)φ,    D³f³ = 6f′³ + 6v(a² − b²)φ + 3v²(a − b)φ t, …
        """
        fits = mean.is_cuda and len(self.kinks) <= MOST_KINKS
        if fits and sketch_launch.available(mean.unsqueeze(1), variance, *self._parameters):
            return sketch_launch.power_moments(self._parameters, mean, variance)
        value, slope = self.values(mean.unsqueeze(-1)), self.slope.double()
        bends, kinks = self._by_kink(self.bends, mean), self._by_kink(self.kinks, mean)
        s, away = standard_deviation(variance.double()), mean.double() - kinks
        ahead, step = away <= 0, bends * away  # at a kink, as in torch's ReLU, the slope is the one before it
        right, left = torch.where(ahead, step, 0.0), torch.where(ahead, 0.0, step)
        level = right.cumsum(0) - right - left.flip(0).cumsum(0).flip(0)
        rises = (slope + bends.cumsum(0)) * s
        changed = _far_side(-standardize(away, s), level, rises, rises - bends * s)
        line = (slope + torch.where(ahead, 0.0, bends).sum(0)) * s
        two, zero = line * line, torch.zeros_like(line)
        powers = torch.stack([zero, two, zero, 3 * two * two]) + changed.powers.sum(1)
        slopes = torch.stack([line, zero, line * two, two, zero, line * two]) + changed.slopes.sum(1)
        first, second, third = changed.first.sum(1), changed.second.sum(1), changed.third.sum(1)
        moments = [
            *(powers[:1], slopes[:1], first),
            *(powers[1:2], 2 * slopes[1:2], 2 * slopes[3:4] + second[:1], second[1:]),
            *(powers[2:3], 3 * slopes[2:3], 6 * slopes[4:] + third[:2], third[2:]),
            powers[3:],
        ]
        rows = torch.cat(moments).to(mean.dtype).unbind()
        return PowerMoments(value, rows[:7], rows[7:12], rows[12:17], rows[17])

    @property
    def _parameters(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.offset, self.slope, self.bends, self.kinks

    @property
    def is_relu(self) -> bool:
        return self._is_relu

    @cached_property
    def _is_relu(self) -> bool:
        one_kink_at_zero = len(self.kinks) == 1 and not bool(self.slope.any() or self.offset.any() or self.kinks.any())
        return one_kink_at_zero and bool((self.bends == 1).all())

    def sketch_moments(self, mean: Tensor, covariance: Tensor, probes: int) -> UnitMoments:
        """From means and variances (N, n) of the inputs.

        With m the distance from a kink and h = m/s, a ReLU has the mean mΦ + sφ. Its derivatives are Φ in m and φ in s,
        as if these two factors were constants. The gain is slope + Σ bend Φ, the curvature Σ bend φ/s.
        """
        variance = covariance.flatten(1)  # at a mean of 1e30 its rounding is infinite
        s = standard_deviation(variance.clamp(max=torch.finfo(variance.dtype).max))
        bends, shifted = self.bends.unsqueeze(1), mean - self.kinks.unsqueeze(1)
        with torch.no_grad():
            h = standardize(shifted, s)
            gate, bell = bends * distribution(h), bends * density(h)
            gain = self.slope + gate.sum(0)
            curvature = torch.where(s > 0, bell.sum(0) / torch.where(s > 0, s, 1.0), 0.0)
        expected = self.offset + self.slope * mean + (shifted * gate + s * bell).sum(0)
        return UnitMoments(expected, gain.unsqueeze(-1), curvature.unsqueeze(-1).unsqueeze(-1))

    def has_kernels(self, mean: Tensor, samples: Tensor) -> bool:
        return len(self.kinks) <= 2 and sketch_launch.available(samples, mean, *self._parameters)

    def by_kernels(self, mean: Tensor, samples: Tensor) -> SketchedLayer:
        values, moments, quadratics = sketch_launch.single_inputs(self._parameters, mean, samples)
        pull_back = partial(self.pull_back, moments.gain, inputs=samples.shape[-1])
        return SketchedLayer(moments.mean, values, pull_back, quadratics)


class _KinkChanges(NamedTuple):
    """What each of K kinks adds to expectations of the line through f(m)."""

    powers: Tensor
    """To E of f, …, f⁴, (4, K, N, n)."""
    slopes: Tensor
    """To E of f′, ff′, f²f′, f′², ff′², f′³, (6, K, N, n)."""
    first: Tensor
    """To E Dʳf, r = 2, …, 6, (5, K, N, n)."""
    second: Tensor
    """To E Dʳf², r = 2, 3, 4, without the part 2f′², (3, K, N, n)."""
    third: Tensor
    """To E Dʳf³, r = 2, 3, 4, without the parts 6ff′² and 6f′³, (3, K, N, n)."""


def _far_side(t: Tensor, level: Tensor, high: Tensor, low: Tensor) -> _KinkChanges:
    """What kinks at u = t change on their sides away from u = 0; all arguments are (K, N, n).

    Before a kink f is level + low·u, after it the slope is `high`. At a distance w beyond the kink, away from u = 0, f
    is v + Fw instead of v + Gw, so that fᵏ changes by Σⱼ (k over j) vᵏ⁻ʲ(Fʲ − Gʲ)wʲ: moments of the excess w. The terms
    have one sign for a ReLU.
    """
    bell, sign = density(t), torch.where(t < 0, -1.0, 1.0).to(t)
    w0, w1, w2, w3, w4 = excess_moments(sign * t, bell)
    v, bend = level + low * t, high - low
    two, three, four = bend * (high + low), bend * (high * high + high * low + low * low), high * high + low * low
    one1, two2, three3, four4 = bend * w1, sign * two * w2, three * w3, sign * two * four * w4
    powers = torch.stack(
        [
            one1,
            2 * v * one1 + two2,
            3 * v * (v * one1 + two2) + three3,
            2 * v * (v * (2 * v * one1 + 3 * two2) + 2 * three3) + four4,
        ]
    )
    one0, two0, two1, three1 = sign * bend * w0, sign * two * w0, two * w1, three * w1
    slopes = torch.stack(
        [
            one0,
            v * one0 + two1,
            v * (v * one0 + 2 * two1) + sign * three * w2,
            two0,
            v * two0 + three1,
            sign * three * w0,
        ]
    )
    jump, squared, cubed = bend * bell, two * bell, three * bell
    square, zero = t * t, torch.zeros_like(t)
    hermite = torch.stack([torch.ones_like(t), t, square - 1, t * (square - 3), square * (square - 6) + 3])
    first = jump * hermite
    steps = torch.stack([zero, squared, squared * t])
    second = 2 * (v * first[:3] + steps)
    third = 3 * v * (v * first[:3] + 2 * steps) + torch.stack([zero, zero, 6 * cubed])
    return _KinkChanges(powers, slopes, first, second, third)


def relu(count: int, like: Tensor) -> PiecewiseLinear:
    """max(z, 0)."""
    return one_kink(like.new_zeros(count), like.new_ones(count))


def one_kink(slope: Tensor, bend: Tensor, kink: Tensor | None = None) -> PiecewiseLinear:
    """slope·z + bend·relu(z − kink)."""
    kinks = torch.zeros_like(slope) if kink is None else kink
    return PiecewiseLinear(torch.zeros_like(slope), slope, bend.unsqueeze(0), kinks.unsqueeze(0))


def between(low: Any, high: Any, count: int, like: Tensor) -> PiecewiseLinear:
    """min(max(z, low), high), where one end may be None: low + relu(z − low) − relu(z − high)."""
    flat = like.new_zeros(count)
    ends = [(1.0, low)] if low is not None else []
    ends += [(-1.0, high)] if high is not None else []
    bends = torch.stack([flat + sign for sign, _ in ends])
    kinks = torch.stack([flat + end for _, end in ends])
    if low is None:
        return PiecewiseLinear(flat, flat + 1, bends, kinks)
    return PiecewiseLinear(flat + low, flat, bends, kinks)


@dataclass(frozen=True, eq=False)
class Elementwise(OneInput):
    """y = function(z), applied to each number by itself; `function` takes batches (B, *shape) and keeps their shape.

    Variances of units come from the quadrature, covariances of pairs from a Hermite series up to order `TERMS`.
    """

    function: Callable[[Tensor], Tensor]
    shape: tuple[int, ...]
    """The shape of one image's input, without batch."""
    like: Tensor
    """Any tensor of the right dtype on the right device."""

    @cached_property
    def windows(self) -> Tensor:  # type: ignore[override]
        return torch.arange(int(np.prod(self.shape)), device=self.like.device).unsqueeze(-1)

    def values(self, z: Tensor) -> Tensor:
        flat = z.squeeze(-1)
        return self.function(flat.reshape(-1, *self.shape)).reshape(flat.shape)

    def local(self, mean: Tensor, covariance: Tensor, cumulants: ThirdCumulants | None = None) -> Local:
        m, variance = mean.squeeze(-1), covariance.squeeze((-2, -1))
        s = standard_deviation(variance)
        nodes, weights = self._nodes(m)
        z = (m + s * nodes).reshape(-1, *self.shape)
        value, slope = value_and_slope(self.function, (z,), (torch.ones_like(z),))
        value, slope = value.reshape(len(nodes), *m.shape), slope.reshape(len(nodes), *m.shape)
        second = (weights * slope * nodes).sum(0)
        if cumulants is not None:
            weights = weights * (1 + cumulants.kappa.reshape(m.shape) / 6 * (nodes**3 - 3 * nodes))
        expected = (weights * value).sum(0)
        beyond = value - expected
        curvature = torch.where(s > 0, second / torch.where(s > 0, s, 1.0), 0.0)
        return Local(
            mean=expected,
            variance=(weights * beyond * beyond).sum(0).clamp(min=0),  # the square by itself may overflow
            gain=(weights * slope).sum(0).unsqueeze(-1),
            curvature=curvature[..., None, None],
        )

    def pairs(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """Σₙ₌₂ aₙaₙ' ρⁿ/n! for all pairs of units, (..., n, n): means (..., n), covariances (..., n, n)."""
        s = standard_deviation(covariance.diagonal(dim1=-2, dim2=-1))
        nodes, weights = self._nodes(mean)
        value = self.function((mean + s * nodes).reshape(-1, *self.shape)).reshape(len(nodes), *mean.shape)
        previous, hermite = torch.ones_like(nodes), nodes
        coefficients = []
        for order in range(2, TERMS + 1):
            previous, hermite = hermite, nodes * hermite - (order - 1) * previous
            coefficients.append((weights * hermite * value).sum(0) / math.factorial(order) ** 0.5)
        inverse = 1 / torch.where(s > 0, s, torch.ones_like(s))
        together = elements_together("cache", mean, mean.numel())
        parts = []
        for start in range(0, mean.shape[-1], together):
            rows = slice(start, start + together)
            rho = covariance[..., rows, :] * inverse[..., rows, None] * inverse.unsqueeze(-2)
            parts.append(_power_series([a[..., rows] for a in coefficients], coefficients, rho.clamp(-1, 1)))
        return torch.cat(parts, -2) if len(parts) > 1 else parts[0]

    def power_moments(self, mean: Tensor, variance: Tensor) -> PowerMoments | None:
        """By the same quadrature; None for a subclass with a `local` of its own.

        Each power is multiplied with its weight one factor at a time: by itself it may overflow.
        """
        if type(self).local is not Elementwise.local:
            return None
        s = standard_deviation(variance)
        nodes, weights = self._nodes(mean)
        centre = self.values(mean.unsqueeze(-1))
        value = self.function((mean + s * nodes).reshape(-1, *self.shape)).reshape(len(nodes), *mean.shape) - centre
        weighted = [weights, weights * nodes]  # times the Hermite polynomials
        for order in range(2, 7):
            weighted.append(nodes * weighted[-1] - (order - 1) * weighted[-2])
        sums: tuple[list[Tensor], ...] = [], [], [], []
        for order, product in enumerate(weighted):
            known = sums if order == 0 else sums[:3] if order < 5 else sums[:1]
            for of_power in known:
                product = product * value
                of_power.append(product.sum(0))
        first, second, third, (fourth,) = map(tuple, sums)
        return PowerMoments(centre, first, second, third, fourth)

    def sketch_moments(self, mean: Tensor, covariance: Tensor, probes: int) -> UnitMoments:
        moments = torch.func.vmap(lambda m, s: tuple(self.local(m, s)))(self.gathered(mean), covariance)
        expected, _, gain, curvature = moments
        return UnitMoments(expected, gain.detach(), curvature.detach())

    @staticmethod
    def _nodes(like: Tensor) -> tuple[Tensor, Tensor]:
        """Nodes and weights, (nodes, ..., 1), that broadcast with numbers of units (..., n).

        Those whose weight is below the smallest number of the dtype are left out, as functions may be infinite there.
        """
        nodes, weights = _gauss_hermite(NODES)
        counts = weights >= torch.finfo(like.dtype).tiny
        nodes, weights = nodes[counts].to(like), weights[counts].to(like)
        return nodes.reshape(-1, *[1] * like.dim()), weights.reshape(-1, *[1] * like.dim())


def _power_series(left: list[Tensor], right: list[Tensor], rho: Tensor) -> Tensor:
    """Σₙ leftₙ rightₙ′ ρⁿ for pairs of units, n = 2, 3, …, by Horner's rule: (..., m) and (..., n) to (..., m, n)."""
    total = left[-1].unsqueeze(-1) * right[-1].unsqueeze(-2)
    for a, b in zip(reversed(left[:-1]), reversed(right[:-1]), strict=True):
        total = torch.addcmul(total * rho, a.unsqueeze(-1), b.unsqueeze(-2))
    return total * rho * rho


@cache
def _gauss_hermite(count: int) -> tuple[Tensor, Tensor]:
    """Nodes u and weights w with Σ w f(u) ≈ E f(N(0, 1))."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    return torch.from_numpy(nodes), torch.from_numpy(weights / weights.sum())
