"""Orthant probabilities of many Gaussian vectors at once, by separation of variables.

Genz, "Numerical computation of multivariate normal probabilities" (1992), with the order of variables of Gibson,
Glasbey and Elston (1994), the singular covariances of Genz and Kwong (2000), and the tilt of Botev, "The normal law
under linear restrictions" (2017), which keeps relative accuracy where a probability is tiny. Everything in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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
_STEPS = tuple(0.5**k for k in range(6))  # what part of a Newton step to take


class Triangle(NamedTuple):
    """m constraints on independent standard normals z, in solving order and scaled.

    Row i, with v = variable[i], is  z_v ≤ limit[i] − Σ_{g<v} lower[i, g] z_g,  or ≥ where sign[i] is −1.
    A covariance of full rank gives one row a variable (`final` everywhere), with sign +1.
    """

    limit: Tensor  # (pairs, m)
    lower: Tensor  # (pairs, m, m), with 1 at [i, variable[i]]
    sign: Tensor  # (pairs, m), ±1
    variable: Tensor  # (pairs, m)
    final: Tensor  # (pairs, m), whether this is the last row of its variable

    def of(self, pairs: Tensor) -> Triangle:
        return Triangle(*(x[pairs] for x in self))


def orthant_by_separation(limit: Tensor, covariance: Tensor, floor: Tensor, uniform: Tensor) -> Tensor:
    """P(w ≤ limit) for w ~ N(0, covariance): (pairs, m) and (pairs, m, m) to (pairs,).

    `floor` (pairs, m) is the conditional variance up to which wᵢ counts as a function of earlier variables, `uniform`
    (≥ m, points) is `quasi_random`. The relative error for m = 9 and 2048 points is around 3e-4 (worst 4e-3), however
    small the probability; below 1e-300 the result is 0. Singular covariances go without the tilt: the same accuracy
    for probabilities above 1e-3 or so, no promise in the tails.
    """
    triangle = greedy_triangle(limit, covariance, floor)
    regular = triangle.final.all(-1)
    weight = limit.new_empty(limit.shape[0], uniform.shape[-1])
    for mine, log_weight in ((regular, _regular_log_weight), (~regular, _singular_log_weight)):
        if bool(mine.any()):
            weight[mine] = log_weight(triangle.of(mine), uniform)
    return torch.exp(torch.logsumexp(weight, -1) - math.log(weight.shape[-1]))


def _regular_log_weight(triangle: Triangle, uniform: Tensor) -> Tensor:
    """Σ_g log Φ(t_g − μ_g) + μ_g²/2 − μ_g z_g, z_g the uniform quantile of N(μ_g, 1) below t_g: (pairs, points).

    t_g is row g's bound given z_1 … z_{g−1}. The mean of the exponential over the unit cube is the probability,
    for any μ: here `saddle_point_tilt`, which makes it nearly constant.
    """
    tilt = saddle_point_tilt(triangle.limit, triangle.lower).unsqueeze(-1)
    z = uniform.new_zeros(*triangle.limit.shape, uniform.shape[-1])
    weight = torch.zeros_like(z[:, 0])
    for row, bound in _bounds(triangle, z, BLOCK):
        value = distribution(bound - tilt[:, row])
        weight += value.log()
        if row < z.shape[1] - 1:
            z[:, row] = torch.special.ndtri((value * uniform[row]).clamp_(_LEAST, _MOST)).add_(tilt[:, row])
            weight.addcmul_(tilt[:, row], 0.5 * tilt[:, row] - z[:, row])
    return weight


def _singular_log_weight(triangle: Triangle, uniform: Tensor) -> Tensor:
    """Σ_g log[Φ(above_g) − Φ(below_g)], between all bounds that rows set on z_g given z_1 … z_{g−1}."""
    z = uniform.new_zeros(*triangle.limit.shape, uniform.shape[-1])
    weight = torch.zeros_like(z[:, 0])
    below, above = torch.full_like(weight, -math.inf), torch.full_like(weight, math.inf)
    for row, bound in _bounds(triangle, z, 1):
        upper, final = triangle.sign[:, row, None] > 0, triangle.final[:, row, None]
        above = torch.where(upper, torch.minimum(above, bound), above)
        below = torch.where(upper, below, torch.maximum(below, bound))
        variable = triangle.variable[:, row]
        value, quantile = truncated_normal(below, above, uniform[variable])
        weight += torch.where(final, value.log(), 0.0)
        draw = torch.where(final, quantile, 0.0).unsqueeze(1)
        z.scatter_(1, variable[:, None, None].expand(draw.shape), draw)
        below, above = torch.where(final, -math.inf, below), torch.where(final, math.inf, above)
    return weight


def _bounds(triangle: Triangle, z: Tensor, block: int) -> Iterator[tuple[int, Tensor]]:
    """Each row's limit − Σ_g lower[row, g] z_g with the z (pairs, m, points) that its reader has filled in so far.

    Variables before the row's block are taken together; they must be final when the block begins.
    """
    for row in range(z.shape[1]):
        start = row - row % block
        if row == start:
            ahead = slice(row, row + block)
            settled = triangle.limit[:, ahead, None] - triangle.lower[:, ahead, :row] @ z[:, :row]
        yield row, settled[:, row - start] - (triangle.lower[:, row, None, start:row] @ z[:, start:row]).squeeze(1)


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

    "Given" means with every earlier z at its expectation −`hazard`. Rows whose variance falls to `floor` at a step
    belong to that step's variable.
    """
    rows = limit.shape[-1]
    lower = torch.zeros_like(covariance)
    variable = torch.full_like(limit, rows - 1, dtype=torch.int64)
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
        solved = waiting & (variance <= floor).scatter(1, pivot, True)
        variable = torch.where(solved, step, variable)
        waiting = waiting & ~solved
    return _in_solving_order(limit, lower, variable)


def _in_solving_order(limit: Tensor, lower: Tensor, variable: Tensor) -> Triangle:
    """Rows sorted by the variable that they bound, and divided by its coefficient."""
    variable, order = variable.sort(dim=-1, stable=True)
    lower = lower.gather(1, order.unsqueeze(-1).expand_as(lower))
    own = lower.gather(2, variable.unsqueeze(-1)).squeeze(-1)
    final = torch.ones_like(variable, dtype=torch.bool)
    final[:, :-1] = variable[:, 1:] != variable[:, :-1]
    return Triangle(limit.gather(1, order) / own, lower / own.unsqueeze(-1), own.sign(), variable, final)


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
        if bool((_worst(rest, v) < 1e-6).all()):
            break
        jacobian = coupling * (h * (v + h)).clamp(0, 1).unsqueeze(-2)  # −h′ = h (v + h)
        jacobian.diagonal(dim1=-2, dim2=-1).add_(1)
        trial = v.unsqueeze(-1) + torch.linalg.solve_ex(jacobian, rest)[0].unsqueeze(-1) * steps
        slope = hazard(trial)
        left = start.unsqueeze(-1) + coupling @ slope - trial
        best = left.square().sum(1).nan_to_num(nan=math.inf).argmin(-1)[:, None, None].expand(-1, v.shape[1], 1)
        v, h, rest = (x.gather(2, best).squeeze(-1) for x in (trial, slope, left))
    tilt = -(lower.tril(-1).mT @ h.unsqueeze(-1)).squeeze(-1)
    return torch.where((_worst(rest, v) < 1e-3).unsqueeze(-1), tilt, 0.0)


def _worst(rest: Tensor, v: Tensor) -> Tensor:
    """The residual of the saddle point's equations, relative to their solution: (pairs,)."""
    return rest.abs().amax(-1) / (1 + v.abs().amax(-1))


def hazard(x: Tensor) -> Tensor:
    """φ(x)/Φ(x) = −E[z | z ≤ x] for a standard normal z: −x − 1/x as x → −∞, 0 as x → ∞."""
    return math.sqrt(2 / math.pi) / torch.special.erfcx(x * -math.sqrt(0.5))


def quasi_random(dimension: int, count: int, device: torch.device) -> Tensor:
    """`count` scrambled Sobol points of the open unit cube, always the same: (dimension, count). Best a power of 2."""
    points = SobolEngine(dimension, scramble=True, seed=0).draw(count, dtype=torch.float64)
    return points.T.add(0.5 / 2**SobolEngine.MAXBIT).contiguous().to(device)
