"""Orthant probabilities of many Gaussian vectors at once, by separation of variables.

Genz, "Numerical computation of multivariate normal probabilities" (1992), with the order of variables of Gibson,
Glasbey and Elston (1994), the singular covariances of Genz and Kwong (2000), and the tilt of Botev, "The normal law
under linear restrictions" (2017), which keeps relative accuracy where a probability is tiny. Everything in float64."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from netmoments.normal import distribution

CERTAIN = 40.0
"""Standard deviations at which Φ is 1, and beyond which its derivative underflows."""

BLOCK = 32
"""Rows whose dependence on all earlier variables is one matrix product."""

_LEAST, _MOST = torch.finfo(torch.float64).tiny, 1 - torch.finfo(torch.float64).eps
_REACH = 14.0  # standard deviations that a remainder never exceeds: Φ(−14) = 8e-45
_STEPS = tuple(0.5**k for k in range(6))  # what part of a Newton step to take


class Triangle(NamedTuple):
    """m constraints Σ_g lower[i, g] z_g ≤ limit[i] on independent standard normals z, in solving order.

    Row g is the first to set a bound on z_g given z_1 … z_{g−1}; rows that are functions of earlier ones (singular
    covariance) come last, with no variable of their own.
    """

    limit: Tensor  # (pairs, m)
    lower: Tensor  # (pairs, m, m)

    def remainder(self) -> Tensor:
        """√Σ_{l>g} lower[i, l]²: the standard deviation that row i keeps when z_1 … z_g are known, (pairs, i, g)."""
        later = torch.nn.functional.pad(self.lower[..., 1:].square(), (0, 1))
        return later.flip(-1).cumsum(-1).flip(-1).sqrt_()

    def decisive(self) -> Tensor:
        """Whether z_g all but decides row i: it moves the row by more than what remains can; (pairs, i, g)."""
        return self.lower.abs() > _REACH * self.remainder()

    def of(self, pairs: Tensor) -> Triangle:
        return Triangle(self.limit[pairs], self.lower[pairs])


def orthant_by_separation(limit: Tensor, covariance: Tensor, floor: Tensor, uniform: Tensor) -> Tensor:
    """P(w ≤ limit) for w ~ N(0, covariance): (pairs, m) and (pairs, m, m) to (pairs,).

    `floor` (pairs, m) is the conditional variance up to which wᵢ counts as a function of earlier variables, `uniform`
    (≥ m, points) is `quasi_random`. Accuracy: see `winning_probabilities`; below 1e-300 the result is 0.
    """
    triangle = greedy_triangle(limit, covariance, floor)
    alone = torch.eye(limit.shape[-1], dtype=torch.bool, device=limit.device)
    simple = (triangle.decisive() == alone).all(-1).all(-1)
    weight = limit.new_empty(limit.shape[0], uniform.shape[-1])
    for mine, log_weight in ((simple, _simple_log_weight), (~simple, _stiff_log_weight)):
        if bool(mine.any()):
            weight[mine] = log_weight(triangle.of(mine), uniform)
    return torch.exp(torch.logsumexp(weight, -1) - math.log(weight.shape[-1]))


def _simple_log_weight(triangle: Triangle, uniform: Tensor) -> Tensor:
    """Σ_g log Φ(t_g − μ_g) + μ_g²/2 − μ_g z_g, z_g the uniform quantile of N(μ_g, 1) below t_g: (pairs, points).

    t_g is row g's bound given z_1 … z_{g−1}. The mean of the exponential over the unit cube is the probability,
    for any μ: here `saddle_point_tilt`, which makes it nearly constant.
    """
    own = triangle.lower.diagonal(dim1=-2, dim2=-1)
    limit, lower = triangle.limit / own, triangle.lower / own.unsqueeze(-1)
    tilt = saddle_point_tilt(limit, lower).unsqueeze(-1)
    z = uniform.new_zeros(*limit.shape, uniform.shape[-1])
    weight = torch.zeros_like(z[:, 0])
    for row in range(z.shape[1]):
        start = row - row % BLOCK
        if row == start:
            ahead = slice(row, row + BLOCK)
            settled = limit[:, ahead, None] - lower[:, ahead, :row] @ z[:, :row]
        bound = settled[:, row - start] - (lower[:, row, None, start:row] @ z[:, start:row]).squeeze(1)
        value = distribution(bound - tilt[:, row])
        weight += value.log()
        if row < z.shape[1] - 1:
            z[:, row] = torch.special.ndtri((value * uniform[row]).clamp_(_LEAST, _MOST)).add_(tilt[:, row])
            weight.addcmul_(tilt[:, row], 0.5 * tilt[:, row] - z[:, row])
    return weight


def _stiff_log_weight(triangle: Triangle, uniform: Tensor) -> Tensor:
    """The same where z_g all but decides further rows: it is kept where they can still hold, above and below.

    A row i with lower[i, g] ≠ 0 and remainder r can hold only if lower[i, g] z_g ≤ limit[i] − Σ_{l<g} … + 14 r. Such
    rows (r = 0 for a singular covariance) would otherwise reject most points. They have no part in the tilt, so that
    small probabilities can have a large relative error.
    """
    reach, decisive = _REACH * triangle.remainder(), triangle.decisive()
    tilt = _tilt_of_major_rows(triangle, decisive).unsqueeze(-1)
    z = uniform.new_zeros(*triangle.limit.shape, uniform.shape[-1])
    weight = torch.zeros_like(z[:, 0])
    for g in range(z.shape[1]):
        count = int(decisive[:, :, g].sum(-1).max())
        mine, rows = decisive[:, :, g].sort(dim=-1, descending=True, stable=True)
        mine, rows = mine[:, :count, None], rows[:, :count]
        coefficient = triangle.lower.gather(1, rows.unsqueeze(-1).expand(-1, -1, z.shape[1]))
        room = triangle.limit.gather(1, rows) + reach[:, :, g].gather(1, rows)
        own = coefficient[:, :, g, None]
        bound = (room.unsqueeze(-1) - coefficient[:, :, :g] @ z[:, :g]) / torch.where(mine, own, 1.0)
        infinite = torch.full_like(weight, math.inf).unsqueeze(1)
        above = torch.cat([infinite, torch.where(mine & (own > 0), bound, math.inf)], 1).amin(1)
        below = torch.cat([-infinite, torch.where(mine & (own < 0), bound, -math.inf)], 1).amax(1)
        value, quantile = truncated_normal(below - tilt[:, g], above - tilt[:, g], uniform[g])
        z[:, g] = quantile + tilt[:, g]
        weight += value.log() + tilt[:, g] * (0.5 * tilt[:, g] - z[:, g])
    return weight


def _tilt_of_major_rows(triangle: Triangle, decisive: Tensor) -> Tensor:
    """`saddle_point_tilt` with the rows that an earlier variable all but decides left out."""
    major = ~(decisive.tril(-1).any(-1, keepdim=True)) & decisive.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    own = torch.where(major, triangle.lower.diagonal(dim1=-2, dim2=-1).unsqueeze(-1), 1.0)
    nothing = torch.eye(own.shape[1], dtype=own.dtype, device=own.device)
    limit = torch.where(major, triangle.limit.unsqueeze(-1) / own, CERTAIN).squeeze(-1)
    return saddle_point_tilt(limit, torch.where(major, triangle.lower / own, nothing))


def truncated_normal(below: Tensor, above: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Φ(above) − Φ(below), 0 where above < below, and the uniform quantile of a standard normal between them.

    An interval mostly to the right of 0 is reflected to the left, where Φ has relative accuracy.
    """
    flip = below + above > 0
    left, right = torch.where(flip, -above, below), torch.where(flip, -below, above)
    start = distribution(left)
    value = (distribution(right) - start).clamp_(min=0)
    quantile = torch.special.ndtri((start + uniform * value).clamp_(_LEAST, _MOST))
    return value, torch.where(flip, -quantile, quantile)


def greedy_triangle(limit: Tensor, covariance: Tensor, floor: Tensor) -> Triangle:
    """Cholesky's factor, always taking next the constraint that is least likely to hold given the earlier ones.

    "Given" means with every earlier z at its expectation −`hazard`. A row whose variance falls to `floor` is done.
    """
    rows = limit.shape[-1]
    lower = torch.zeros_like(covariance)
    turn = torch.full_like(limit, rows, dtype=torch.int64)
    variance, expected = covariance.diagonal(dim1=-2, dim2=-1), limit
    waiting = variance > floor
    for step in range(rows):
        spread = torch.where(waiting, variance, 1.0).sqrt()
        height, pivot = torch.where(waiting, expected / spread, math.inf).min(-1, keepdim=True)
        done, at = lower[:, :, :step], pivot.unsqueeze(-1)
        known = (done @ done.gather(1, at.expand(-1, 1, step)).mT).squeeze(-1)
        column = covariance.gather(1, at.expand(-1, 1, rows)).squeeze(1) - known
        column = torch.where(waiting, column / spread.gather(1, pivot), 0.0)
        lower[:, :, step] = column
        variance = variance - column * column
        expected = expected + column * hazard(height)
        turn.scatter_(1, pivot, torch.where(waiting.gather(1, pivot), step, turn.gather(1, pivot)))
        waiting = (waiting & (variance > floor)).scatter(1, pivot, False)
    order = turn.argsort(dim=-1, stable=True)
    return Triangle(limit.gather(1, order), lower.gather(1, order.unsqueeze(-1).expand_as(lower)))


def saddle_point_tilt(limit: Tensor, lower: Tensor) -> Tensor:
    """The shift μ (pairs, m) of z for which the largest weight is smallest (Botev's minimax tilt), of regular rows.

    With L = lower (unit diagonal), h = `hazard` and M = L Lᵀ, the saddle point's equations reduce to
    v = limit + (M − I) h(v), and μ = −(L − I)ᵀ h(v). The Jacobian −[I + (M − I) diag(−h′)] is never singular;
    Newton's method, with the best of six step lengths, takes some 8 steps. Where 50 are not enough μ is 0.
    """
    coupling = lower @ lower.mT
    coupling.diagonal(dim1=-2, dim2=-1).sub_(1)
    start = limit.clamp(max=CERTAIN)
    steps = torch.tensor(_STEPS, dtype=limit.dtype, device=limit.device)
    v, h = start, hazard(start)
    rest = (coupling @ h.unsqueeze(-1)).squeeze(-1)
    for _ in range(50):
        unsolved = ~_solved(rest, start)
        if not bool(unsolved.any()):
            break
        jacobian = coupling * (h * (v + h)).clamp(0, 1).unsqueeze(-2)  # −h′ = h (v + h)
        jacobian.diagonal(dim1=-2, dim2=-1).add_(1)
        step = torch.linalg.solve_ex(jacobian, rest)[0] * unsolved
        trial = v.unsqueeze(-1) + step.unsqueeze(-1) * steps
        slope = hazard(trial)
        left = start.unsqueeze(-1) + coupling @ slope - trial
        best = left.square().sum(1).nan_to_num(nan=math.inf).argmin(-1)[:, None, None].expand(-1, v.shape[1], 1)
        v, h, rest = (x.gather(2, best).squeeze(-1) for x in (trial, slope, left))
    tilt = -(lower.tril(-1).mT @ h.unsqueeze(-1)).squeeze(-1)
    return torch.where(_solved(rest, start), tilt, 0.0)


def _solved(rest: Tensor, limit: Tensor) -> Tensor:
    """Whether the residual of the saddle point's equations is small in every row: (pairs, 1)."""
    return (rest.abs() < 1e-6 * (1 + limit.abs())).all(-1, keepdim=True)


def hazard(x: Tensor) -> Tensor:
    """φ(x)/Φ(x) = −E[z | z ≤ x] for a standard normal z: −x − 1/x as x → −∞, 0 as x → ∞."""
    return math.sqrt(2 / math.pi) / torch.special.erfcx(x * -math.sqrt(0.5))


def quasi_random(dimension: int, count: int, device: torch.device) -> Tensor:
    """`count` scrambled Sobol points of the open unit cube, always the same: (dimension, count). Best a power of 2."""
    points = SobolEngine(dimension, scramble=True, seed=0).draw(count, dtype=torch.float64)
    return points.T.add(0.5 / 2**SobolEngine.MAXBIT).contiguous().to(device)
