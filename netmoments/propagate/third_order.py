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

from netmoments.network.graph import Node, shape_of
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
    """What a layer's input has beyond a Gaussian, for its k curved units."""

    cumulants: ThirdCumulants
    curved: Tensor
    """Which units, (k,)."""
    turns: Tensor
    """What it adds to the output's factor, (r, k): Σᵢⱼ Hᵢⱼ Qᵢfⱼ."""
    crossed: Tensor
    """½ Σᵢⱼ Hᵢⱼ Q_y[fᵢ, fⱼ] against all outputs y, (k, n): the bend of a unit with what others bring along."""
    crossed_live: dict[Node, Tensor]
    """The same against live tensors, (k, m)."""


class Path(NamedTuple):
    """The way from the image to a layer's input."""

    plan: Plan
    passed: list[Passed]
    image_factor: Tensor
    before: Segment

    def second_derivatives(self, directions: Tensor, left: list[int], right: list[int]) -> dict[Node, Tensor]:
        """Of all layers' outputs along pairs, left and right, of directions (B, q, r) of the noise: (B·pairs, m)."""
        count, q, _ = directions.shape
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
        return second

    def at_input(self, second: dict[Node, Tensor]) -> Tensor:
        """Second derivatives of the layer's input z, from those of its sources: (B·pairs, p)."""
        if self.starts_linear:
            like = next(iter(second.values()))
            return like.new_zeros(len(like), sum(shape_of(node).numel() for node in self.before.results))
        return _moved(self.before, second)

    @property
    def starts_linear(self) -> bool:
        """Whether the layer's input is affine in the image: no nonlinear layer lies before it."""
        return not any(stage.output in self.before.sources for stage, _ in self.passed)


def third_order(
    path: Path,
    rule: Nonlinearity,
    local: Local,
    factor: Tensor,
    covariance: Tensor,
    live: tuple[Node, ...],
    together: int,
) -> ThirdOrder:
    """The third cumulants of every unit's window, given its Gaussian moments, z's factor (r, p) and window covariances.

    `together` is how many directions go through the network at a time.
    """
    q = min(rule.width, MOST_DIRECTIONS)
    root, inverse = whitened(covariance, local.curvature, rule.windows >= 0, q)
    curvature = root[..., :q].mT @ local.curvature @ root[..., :q]
    relevant = local.curvature.detach().flatten(1).any(-1) & (local.gain.detach().abs().amax(-1) > CLOSED)
    curved = relevant.nonzero().squeeze(-1)
    behind = {stage.output: stage.rule.units for stage, _ in path.passed if stage.output in live}
    bends = covariance.new_zeros(rule.units, q, q, q)
    turns = [factor.new_zeros(0, len(factor))]
    crossed = [factor.new_zeros(0, rule.units)]
    crossed_live = {node: [factor.new_zeros(0, size)] for node, size in behind.items()}
    left, right = _pairs(q)
    for some in curved.split(max(1, together // (q * (q + 3) // 2))) if len(curved) else ():
        axes, bent = inverse[some, :q], curvature[some]
        directions = _directions(rule, factor, some, axes)
        second = path.second_derivatives(directions, left, right)
        fields = path.at_input(second).unflatten(0, (len(some), len(left)))
        along = torch.einsum("baw,bpw->bap", axes, _at_windows(rule, fields, some))
        bends = bends.index_copy(0, some, _symmetric(along, q))
        turns.append(_turns(path, rule, directions, bent, axes, some))
        weights = 0.5 * _twice_off_diagonal(bent, left, right)
        crossed.append((rule.gathered(torch.einsum("bk,bkp->bp", weights, fields)) * local.gain).sum(-1))
        for node, rows in crossed_live.items():
            rows.append(torch.einsum("bk,bkm->bm", weights, second[node].unflatten(0, (len(some), len(left)))))
    return ThirdOrder(
        ThirdCumulants(root, _cumulants(bends)),
        curved,
        torch.cat(turns).mT,
        torch.cat(crossed),
        {node: torch.cat(rows) for node, rows in crossed_live.items()},
    )


def _turns(path: Path, rule: Nonlinearity, directions: Tensor, curvature: Tensor, axes: Tensor, some: Tensor) -> Tensor:
    """Σ_bc H_bc Q_b f_c of some units, (B, r): the gradient in ε of Σ_bc H_bc Q_b[f_c, ε], which is linear in it."""
    q = directions.shape[1]
    if path.starts_linear:
        return torch.zeros_like(directions[:, 0])
    keep = torch.is_grad_enabled()
    with torch.enable_grad():
        noise = torch.zeros_like(directions[:, :1]).requires_grad_()
        second = path.second_derivatives(torch.cat([directions, noise], 1), list(range(q)), [q] * q)
        fields = path.at_input(second).unflatten(0, (len(some), q))
        along = torch.einsum("bpw,bcw->bpc", axes, _at_windows(rule, fields, some))
        (slope,) = torch.autograd.grad((along * curvature).sum(), noise, create_graph=keep)
    return slope.squeeze(1)


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


def _twice_off_diagonal(matrix: Tensor, left: list[int], right: list[int]) -> Tensor:
    """The entries of symmetric matrices (B, q, q) at pairs b ≤ c, with weights that sum over all: (B, pairs)."""
    weight = torch.tensor([1.0 if b == c else 2.0 for b, c in zip(left, right, strict=True)])
    return matrix[:, left, right] * weight.to(matrix)


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
