"""The joint Gaussian of all live tensors, carried through the whole network: moments layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from netmoments.gaussian.covariance import Covariance
from netmoments.network.graph import Node, shape_of
from netmoments.precision import full_precision
from netmoments.progress import Progress
from netmoments.propagate.elementwise import Elementwise
from netmoments.propagate.nonlinearity import Local, Nonlinearity
from netmoments.propagate.piecewise_linear import PiecewiseLinear
from netmoments.propagate.plan import Plan, Segment
from netmoments.propagate.third_order import Passed, Path, ThirdOrder, third_order

TILE_ELEMENTS = {"cpu": 2**24, "cuda": 2**28}
"""Covariances of pairs of inputs that are held at a time."""
DIRECTION_ELEMENTS = {"cpu": 2**23, "cuda": 2**28}
"""Numbers in one layer's directions that go through an affine part together."""


@dataclass
class Joint:
    """Tensors that are jointly Gaussian: x = mean + Fᵀε + e, with ε ~ N(0, I) the noise of the image.

    Cov(x, y) = FₓᵀF_y + N_xy: the first part is linear in the noise and keeps its rank r; the second is what nonlinear
    layers added.
    """

    means: dict[Node, Tensor] = field(default_factory=dict)
    """(1, ...)."""
    factors: dict[Node, Tensor] = field(default_factory=dict)
    """F, (r, n)."""
    residuals: dict[tuple[Node, Node], Tensor] = field(default_factory=dict)
    """N, (n, m), for both orders of a pair; nothing for the image, which has none."""

    def add_pair(self, x: Node, y: Node, block: Tensor) -> None:
        self.residuals[x, y] = block
        if x is not y:
            self.residuals[y, x] = block.mT

    def keep(self, nodes: tuple[Node, ...]) -> None:
        """Forget the rest."""
        self.means = {node: self.means[node] for node in nodes}
        self.factors = {node: self.factors[node] for node in nodes}
        self.residuals = {pair: block for pair, block in self.residuals.items() if set(pair) <= set(nodes)}


@dataclass(frozen=True, eq=False)
class PreActivation:
    """The input z of a nonlinear layer: mean (p,), factor (r, p), and residual covariances."""

    mean: Tensor
    factor: Tensor
    residual: Tensor | None
    """(p, p)."""
    with_sources: dict[Node, Tensor]
    """N between each live tensor and z, (m, p)."""

    def windows(self, rule: Nonlinearity) -> tuple[Tensor, Tensor]:
        """Means (n, w) and covariances (n, w, w) of the units' windows."""
        factor = rule.gathered(self.factor).movedim(0, -1)
        covariance = factor @ factor.mT
        if self.residual is not None:
            rows = rule.windows.clamp(min=0)
            present = rule.windows >= 0
            own = self.residual[rows.unsqueeze(-1), rows.unsqueeze(-2)]
            covariance = covariance + own * (present.unsqueeze(-1) & present.unsqueeze(-2))
        return rule.gathered(self.mean), covariance

    def between_windows(self, rule: Nonlinearity, some: Tensor, others: Tensor) -> Tensor:
        """Cov of the inputs of units: (a, w, b, w), zero beyond the windows."""
        rows, columns = rule.windows[some], rule.windows[others]
        cross = self.covariance(rows.clamp(min=0).reshape(-1), columns.clamp(min=0).reshape(-1))
        cross = cross.reshape(len(some), rule.width, len(others), rule.width)
        if bool((rule.windows >= 0).all()):
            return cross
        return cross * (rows >= 0)[:, :, None, None] * (columns >= 0)

    def covariance(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Cov(z[rows], z[columns])."""
        product = self.factor[:, rows].mT @ self.factor[:, columns]
        return product if self.residual is None else product + self.residual[rows.unsqueeze(-1), columns]


def layerwise(plan: Plan, mean: Tensor, covariance: Covariance, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (k,) and covariance (k, k) of the chosen scores for one image, mean (1, ...).

    Every tensor is a Gaussian with third cumulants, of which all effects are kept that are of first order in them.
    """
    return _carried(plan, mean, covariance, rows, third_order)


def gaussian_layerwise(plan: Plan, mean: Tensor, covariance: Covariance, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The same with every tensor taken as Gaussian: what the third cumulants are for."""
    return _carried(plan, mean, covariance, rows, None)


Beyond = Callable[..., ThirdOrder] | None


def _carried(plan: Plan, mean: Tensor, covariance: Covariance, rows: Tensor, beyond: Beyond) -> tuple[Tensor, Tensor]:
    joint = Joint()
    joint.means[plan.image] = mean
    joint.factors[plan.image] = root = covariance.root().mT
    passed: list[Passed] = []
    with full_precision(), Progress("layerwise", len(plan.stages)) as progress:
        for place in range(len(plan.stages)):
            passed.append(_through(joint, plan, place, passed, root, beyond))
            progress.advance(1)
        scores = _pre_activation(joint, plan.last, ())
        every = scores.covariance(rows, rows)
    return scores.mean[rows], 0.5 * (every + every.mT)


def _through(joint: Joint, plan: Plan, place: int, passed: list[Passed], root: Tensor, beyond: Beyond) -> Passed:
    """One affine part and nonlinear layer: the joint Gaussian with its output, and without what is no longer needed."""
    stage, rule = plan.stages[place], plan.stages[place].rule
    live = tuple(node for node in plan.needed_after(place) if node is not stage.output)
    z = _pre_activation(joint, stage.before, live)
    mean, covariance = z.windows(rule)
    local = rule.local(mean, covariance)
    found = None
    if passed and beyond is not None:
        largest = max(shape_of(node).numel() for earlier in plan.stages for node in earlier.before.results)
        together = max(1, _elements(root, DIRECTION_ELEMENTS) // largest)
        path = Path(plan, passed, root, stage.before)
        found = beyond(path, rule, local, z.factor, covariance, live, together)
        local = rule.local(mean, covariance, found.cumulants)
    joint.keep(live)
    joint.means[stage.output] = local.mean.reshape(shape_of(stage.output))
    factor = _gained(rule, local, z.factor)
    joint.factors[stage.output] = factor = factor if found is None else factor.index_add(1, found.curved, found.turns)
    for node in live:
        if node is not plan.image:
            block = _with_live(z, rule, local, joint.factors[node].shape[1], node)
            if found is not None:
                block = block.index_add(1, found.curved, found.crossed_live[node].mT)
            joint.add_pair(node, stage.output, block)
    residual = _residual(z, rule, local)
    if found is not None:
        residual = _with_crossed(residual, found.crossed, found.curved)
    own = local.variance - factor.square().sum(0)
    joint.add_pair(stage.output, stage.output, torch.diagonal_scatter(residual, own))
    return Passed(stage, local)


def _with_live(z: PreActivation, rule: Nonlinearity, local: Local, size: int, node: Node) -> Tensor:
    """N between a live tensor and the output, (m, n); none comes through z where that is affine in the image."""
    if node not in z.with_sources:
        return z.mean.new_zeros(size, rule.units)
    return _gained(rule, local, z.with_sources[node])


def _pre_activation(joint: Joint, segment: Segment, live: tuple[Node, ...]) -> PreActivation:
    """z, the output of an affine part, with its covariances with the live tensors and with itself."""
    mean = segment.value(joint.means)
    factor = _linear(segment, {node: joint.factors[node] for node in segment.sources})
    with_sources = {}
    for other in dict.fromkeys((*segment.sources, *live)):
        blocks = {node: joint.residuals[other, node] for node in segment.sources if (other, node) in joint.residuals}
        if blocks:
            with_sources[other] = _linear(segment, blocks)
    own = {node: with_sources[node].mT for node in segment.sources if node in with_sources}
    residual = _linear(segment, own) if own else None
    return PreActivation(mean, factor, residual, {node: with_sources[node] for node in live if node in with_sources})


def _linear(segment: Segment, directions: dict[Node, Tensor]) -> Tensor:
    """The linear part of a segment on rows of directions (B, n) of its sources: (B, p)."""
    if not segment.steps and len(segment.results) == 1 and segment.results[0] in directions:
        return directions[segment.results[0]]
    largest = max(shape_of(node).numel() for node in (*segment.sources, *segment.results))
    elements = _elements(next(iter(directions.values())), DIRECTION_ELEMENTS)
    return segment.batched("linear", directions, max(1, elements // largest))


def _gained(rule: Nonlinearity, local: Local, rows: Tensor) -> Tensor:
    """Covariances (B, p) of something with z turned into covariances (B, n) with y, by the expected slopes."""
    if rule.width == 1:
        return rows * local.gain.squeeze(-1)
    return (rule.gathered(rows) * local.gain).sum(-1)


def _residual(z: PreActivation, rule: Nonlinearity, local: Local) -> Tensor:
    """N of different units of the output, (n, n): z's own through the gains, plus what the nonlinearity adds."""
    if z.residual is None:
        total = z.mean.new_zeros(rule.units, rule.units)
    else:
        total = _gained(rule, local, _gained(rule, local, z.residual).mT)
    curved = local.curvature.detach().flatten(1).any(-1).nonzero().squeeze(-1)
    if not len(curved):
        return total
    if isinstance(rule, PiecewiseLinear | Elementwise):
        pairs = rule.restricted(curved).pairs(z.mean[curved], z.covariance(curved, curved))
    else:
        pairs = _all_bent_pairs(z, rule, local, curved)
    return total.index_put((curved.unsqueeze(-1), curved), pairs, accumulate=True)


def _with_crossed(residual: Tensor, rows: Tensor, curved: Tensor) -> Tensor:
    """N plus rows (k, n) of some units, and their transpose."""
    every = torch.arange(len(residual), device=curved.device)
    once = residual.index_put((curved.unsqueeze(-1), every), rows, accumulate=True)
    return once.mT.index_put((curved.unsqueeze(-1), every), rows, accumulate=True).mT


def _all_bent_pairs(z: PreActivation, rule: Nonlinearity, local: Local, curved: Tensor) -> Tensor:
    """`_bent_pairs` of all curved units, (k, k), strip by strip, each pair once."""
    tile = max(1, _elements(z.mean, TILE_ELEMENTS) // (rule.width**2 * len(curved)))
    strips = []
    for start in range(0, len(curved), tile):
        some = curved[start : start + tile]
        strip = _kept_small(_bent_pairs, z, rule, local, some, curved[start:])
        strips.append(torch.nn.functional.pad(strip, (start, 0)))
    upper = torch.cat(strips).triu()
    return upper + upper.triu(1).mT


def _bent_pairs(z: PreActivation, rule: Nonlinearity, local: Local, some: Tensor, others: Tensor) -> Tensor:
    """½ tr(H_X C H_Y Cᵀ) for windows X among `some` and Y among `others`, C being the cross-covariance of their inputs.

    It is the second term of the Hermite series of their covariance; gᵀCg is the first.
    """
    cross = z.between_windows(rule, some, others)
    left = torch.einsum("aij,ajbk->aibk", local.curvature[some], cross)
    right = torch.einsum("aibk,bkl->aibl", cross, local.curvature[others])
    return 0.5 * (left * right).sum((1, 3))


def _kept_small(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """A part of a large computation, of which autograd keeps nothing: it is done again in the backward pass."""
    return checkpoint(function, *inputs, use_reentrant=False) if torch.is_grad_enabled() else function(*inputs)


def _elements(like: Tensor, by_device: dict[str, int]) -> int:
    return by_device.get(like.device.type, by_device["cpu"])
