"""How far from Gaussian the input of a nonlinear layer is: the third cumulants that earlier layers gave it.

To second order in the noise ε of the image a tensor is mean + Fᵀε + ½ Q[ε, ε]. Its third cumulants are those of a
Gaussian's second-order polynomial, κ(x, y, z) = Q_x[f_y, f_z] + Q_y[f_x, f_z] + Q_z[f_x, f_y], and Q[f, f'] is the
second derivative of the network along two directions of the noise, each nonlinear layer being taken as its expected
slope and curvature: one pass for each direction, and one for each pair of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from netmoments.network.graph import Node
from netmoments.propagate.nonlinearity import Local, Nonlinearity, ThirdCumulants, whitened
from netmoments.propagate.plan import Plan, Segment, Stage

MOST_DIRECTIONS = 4
"""Of a window: those of largest curvature; all of a 2×2 window's."""
CLOSED = 1e-6
"""Units with smaller expected slopes are taken as closed: what they look at does not matter."""


class Passed(NamedTuple):
    """A nonlinear layer that the noise has gone through, with its expected slopes and curvatures."""

    stage: Stage
    local: Local


class ThirdOrder(NamedTuple):
    """What a layer's input has beyond a Gaussian, for its curved units."""

    cumulants: ThirdCumulants
    turn: Tensor
    """What it adds to the expected slopes, (n, w): S⁻¹ Σᵢⱼ Hᵢⱼ Qᵢ[fⱼ, ·], as if Qᵢfⱼ lay among the window's own f."""
    crossed: Tensor
    """½ Σᵢⱼ Hᵢⱼ Q_y[fᵢ, fⱼ] for windows of `curved` and all outputs y (k, n): a unit's bend against what others bring."""
    curved: Tensor
    """Which units, (k,)."""


class Path(NamedTuple):
    """The way from the image to a layer's input."""

    plan: Plan
    passed: list[Passed]
    image_factor: Tensor
    before: Segment

    def second_derivatives(self, directions: Tensor) -> Tensor:
        """Of z along pairs of directions (B, q, r) of the noise: (B, pairs, p), the pairs as in `_pairs`."""
        count, q, _ = directions.shape
        left, right = _pairs(q)
        first: dict[Node, Tensor] = {self.plan.image: (directions @ self.image_factor).flatten(0, 1)}
        second: dict[Node, Tensor] = {}
        for stage, local in self.passed:
            slopes = stage.rule.gathered(_moved(stage.before, first)).unflatten(0, (count, q))
            bent = torch.einsum("bqnw,nwv->bqnv", slopes, local.curvature)
            curved = (bent[:, left] * slopes[:, right]).sum(-1).flatten(0, 1)
            if any(node in second for node in stage.before.sources):
                earlier = stage.rule.gathered(_moved(stage.before, second))
                curved = curved + (earlier * local.gain).sum(-1)
            first[stage.output] = (slopes * local.gain).sum(-1).flatten(0, 1)
            second[stage.output] = curved
        return _moved(self.before, second).unflatten(0, (count, len(left)))


def third_order(
    path: Path, rule: Nonlinearity, local: Local, factor: Tensor, covariance: Tensor, together: int
) -> ThirdOrder:
    """The third cumulants of every unit's window, given its Gaussian moments, z's factor (r, p) and window covariances.

    `together` is how many directions go through the network at a time.
    """
    q = min(rule.width, MOST_DIRECTIONS)
    root, inverse = whitened(covariance, local.curvature, rule.windows >= 0)
    curvature = root[..., :q].mT @ local.curvature @ root[..., :q]
    relevant = local.curvature.detach().flatten(1).any(-1) & (local.gain.detach().abs().amax(-1) > CLOSED)
    curved = relevant.nonzero().squeeze(-1)
    bends = covariance.new_zeros(rule.units, q, q, q)
    crossed = []
    left, right = _pairs(q)
    for some in curved.split(max(1, together // (q * (q + 3) // 2))) if len(curved) else ():
        axes = inverse[some, :q]
        fields = path.second_derivatives(_directions(rule, factor, some, axes))
        along = _at_windows(rule, fields, some)
        bends = bends.index_copy(0, some, _symmetric(torch.einsum("baw,bpw->bap", axes, along), q))
        weight = curvature[some][:, left, right] * torch.tensor(
            [1.0 if b == c else 2.0 for b, c in zip(left, right, strict=True)]
        ).to(curvature)
        field = torch.einsum("bk,bkp->bp", weight, fields)
        crossed.append(0.5 * (rule.gathered(field) * local.gain).sum(-1))
    turn = torch.einsum("nab,nabc,ncw->nw", curvature, bends, inverse[:, :q])
    rows = torch.cat(crossed) if crossed else covariance.new_zeros(0, rule.units)
    return ThirdOrder(ThirdCumulants(root, _cumulants(bends)), turn, rows, curved)


def _directions(rule: Nonlinearity, factor: Tensor, some: Tensor, axes: Tensor) -> Tensor:
    """f of the combinations `axes` (B, q, w) of the inputs of some units: (B, q, r)."""
    present = (rule.windows[some] >= 0).to(factor.dtype)
    picked = factor[:, rule.windows[some].clamp(min=0)] * present
    return torch.einsum("bqw,rbw->bqr", axes, picked)


def _at_windows(rule: Nonlinearity, fields: Tensor, some: Tensor) -> Tensor:
    """Fields (B, pairs, p), one set for each unit, at that unit's own window: (B, pairs, w)."""
    window = rule.windows[some]
    index = window.clamp(min=0).unsqueeze(1).expand(-1, fields.shape[1], -1)
    return fields.gather(-1, index) * (window >= 0).unsqueeze(1)


def _pairs(q: int) -> tuple[list[int], list[int]]:
    """All pairs b ≤ c of q directions."""
    every = [(b, c) for b in range(q) for c in range(b, q)]
    return [b for b, _ in every], [c for _, c in every]


def _symmetric(pairs: Tensor, q: int) -> Tensor:
    """(B, q, pairs) to (B, q, q, q), symmetric in the last two."""
    left, right = _pairs(q)
    full = pairs.new_zeros(*pairs.shape[:-1], q, q)
    full[..., left, right] = pairs
    full[..., right, left] = pairs
    return full


def _cumulants(bends: Tensor) -> Tensor:
    """κ_abc = Q_a[b, c] + Q_b[a, c] + Q_c[a, b]."""
    return bends + bends.permute(0, 2, 1, 3) + bends.permute(0, 3, 2, 1)


def _moved(segment: Segment, given: dict[Node, Tensor]) -> Tensor:
    directions = {node: given[node] for node in segment.sources if node in given}
    return segment.batched("linear", directions, len(next(iter(directions.values()))))
