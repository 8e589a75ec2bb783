"""The joint Gaussian of all live tensors, carried through the whole network: moments layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from netmoments.gaussian.covariance import Covariance
from netmoments.network.graph import Node, shape_of
from netmoments.normal import standard_deviation
from netmoments.precision import full_precision
from netmoments.progress import Progress
from netmoments.propagate.elementwise import Elementwise
from netmoments.propagate.nonlinearity import Local, Nonlinearity, cholesky_root
from netmoments.propagate.piecewise_linear import PiecewiseLinear
from netmoments.propagate.plan import Plan, Segment
from netmoments.propagate.scores import BentLayer, before_layer, bent_layer, score_covariance, score_weights
from netmoments.propagate.spread import Rows, as_rows, image_rows, random_signs, rows_for, turned_towards
from netmoments.propagate.third_order import ThirdOrder, third_order
from netmoments.propagate.transposed import added

DIRECTION_ELEMENTS = {"cpu": 2**23, "cuda": 2**28}
"""Numbers in one layer's rows that go through an affine part together."""
FEW = 64
"""Directions that give a first idea of what the scores depend on."""


@dataclass
class Joint:
    """Live tensors of N images: their means, (N, n), and how the noise spreads over them, (N, rows, n)."""

    means: dict[Node, Tensor] = field(default_factory=dict)
    spreads: dict[Node, Tensor] = field(default_factory=dict)

    def keep(self, nodes: tuple[Node, ...]) -> None:
        """Forget the rest."""
        self.means = {node: self.means[node] for node in nodes}
        self.spreads = {node: self.spreads[node] for node in nodes}


Beyond = Callable[[Rows, Tensor, Local, Tensor, Tensor], ThirdOrder] | None


def layerwise(plan: Plan, mean: Tensor, covariance: Covariance, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Means (N, k) and covariances (N, k, k) of the chosen scores, (N, k), for images (N, ...).

    Every tensor is a Gaussian with third cumulants, of which all effects are kept that are of first order in them.
    """
    return _carried(plan, mean, covariance, outputs, third_order)


def gaussian_layerwise(plan: Plan, mean: Tensor, covariance: Covariance, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """The same with every tensor taken as Gaussian: what the third cumulants are for."""
    return _carried(plan, mean, covariance, outputs, None)


def _carried(
    plan: Plan, mean: Tensor, covariance: Covariance, outputs: Tensor, beyond: Beyond
) -> tuple[Tensor, Tensor]:
    means = {plan.image: mean.flatten(1)}
    with full_precision(), Progress("layerwise", len(plan.stages) + 1) as progress:
        image = image_rows(covariance, mean).expand(len(mean), -1, -1)
        rows = rows_for(image.shape[1], outputs.shape[1])
        if rows.leading:
            slopes = rough_slopes(plan, means, image, outputs)
            image = turned_towards(image, leading_directions(image, slopes, rows.leading))
        joint = Joint(means, {plan.image: image})
        layers = []
        for place in range(len(plan.stages)):
            layers.append(_through(joint, plan, place, rows, beyond))
            progress.advance(1)
        scores = _moved(plan.last, "value", joint.means).gather(1, outputs)
        spread = _spread(joint, plan.last, rows)
        spread = spread.gather(2, outputs.unsqueeze(1).expand(-1, spread.shape[1], -1)).mT
        every = score_covariance(plan, layers, rows, spread, outputs)
        progress.advance(1)
    return scores, every


@torch.no_grad()
def rough_slopes(plan: Plan, means: dict[Node, Tensor], image: Tensor, outputs: Tensor) -> Tensor:
    """The expected slopes of chosen scores (N, k) in the image, (N, k, n), roughly: from a few directions' spread."""
    few = min(FEW, image.shape[1])
    joint = Joint(dict(means), {plan.image: image[:, :few] * (image.shape[1] / few) ** 0.5})
    gains = []
    for place, stage in enumerate(plan.stages):
        spread = _at_windows(stage.rule, _moved(stage.before, "linear", joint.spreads))
        mean = stage.rule.gathered(_moved(stage.before, "value", joint.means))
        local = stage.rule.local(mean, spread @ spread.mT)
        gains.append(local.gain)
        joint.keep(tuple(node for node in plan.needed_after(place) if node is not stage.output))
        joint.means[stage.output] = local.mean
        joint.spreads[stage.output] = (local.gain.unsqueeze(-2) @ spread).squeeze(-2).mT
    weights = score_weights(plan, outputs, image)
    for stage, gain in zip(reversed(plan.stages), reversed(gains), strict=True):
        weights = added(weights, before_layer(stage, gain, weights.pop(stage.output)))
    return weights[plan.image]


@torch.no_grad()
def leading_directions(image: Tensor, slopes: Tensor, count: int) -> Tensor:
    """The directions of the noise, (N, r, count), that scores with these slopes depend on most, given its rows."""
    along = image @ slopes.mT
    if along.shape[-1] == count:
        return along
    return torch.linalg.svd(along, full_matrices=False).U[..., :count]


def _through(joint: Joint, plan: Plan, place: int, rows: Rows, beyond: Beyond) -> BentLayer:
    """One affine part and nonlinear layer: its output joins the live tensors, what is no longer needed leaves."""
    stage, rule = plan.stages[place], plan.stages[place].rule
    mean = rule.gathered(_moved(stage.before, "value", joint.means))
    spread = _at_windows(rule, _spread(joint, stage.before, rows))
    covariance = _window_covariance(rows, spread)
    local = rule.local(mean, covariance)
    layer = bent_layer(rows, stage, local, mean, spread, covariance)
    found = None
    if beyond is not None and spread.shape[-1] > rows.rank:
        found = beyond(rows, spread, local, covariance, rule.windows >= 0)
        local = rule.local(mean, covariance, found.cumulants)._replace(curvature=local.curvature)
        layer = layer._replace(gain=local.gain)
    joint.keep(tuple(node for node in plan.needed_after(place) if node is not stage.output))
    joint.means[stage.output] = local.mean
    joint.spreads[stage.output] = _spread_after(rows, local, spread, layer.rest, found, place).mT
    return layer


def _spread_after(
    rows: Rows, local: Local, spread: Tensor, rest: Tensor, found: ThirdOrder | None, place: int
) -> Tensor:
    """The output's spread, (N, n, rows): the input's through the gains, and what the nonlinearity adds."""
    gained = (local.gain.unsqueeze(-2) @ spread).squeeze(-2)
    probes = spread[..., rows.probes]
    quadratic = as_rows(probes.mT @ (local.curvature @ probes), rows)
    signs = random_signs(rows.signs, rest.shape[-1], place, rest)
    turns = torch.zeros_like(gained[..., rows.probes]) if found is None else found.turns
    own = torch.cat([quadratic, standard_deviation(rest).unsqueeze(-1) * signs, turns], -1)
    if gained.shape[-1] == rows.rank:
        return torch.cat([gained, own], -1)
    return torch.cat([gained[..., : rows.rank], gained[..., rows.rank :] + own], -1)


def _window_covariance(rows: Rows, spread: Tensor) -> Tensor:
    """S of every window, (..., n, w, w), from its spread.

    The turns T count to first order, C = FTᵀ + TFᵀ. So that S + C is never negative, it is taken as R(I + M/2)²Rᵀ with
    S = RRᵀ and M = R⁻¹CR⁻ᵀ, which is the same to first order.
    """
    products = spread[..., rows.covariance]
    covariance = products @ products.mT
    if spread.shape[-1] == rows.rank:
        return covariance
    half = spread[..., rows.probes] @ spread[..., rows.turns].mT
    root = cholesky_root(covariance)
    half = torch.linalg.solve_triangular(root, half, upper=False)
    half = torch.linalg.solve_triangular(root.mT, half, upper=True, left=False)
    turned = root + root @ (0.5 * (half + half.mT))
    return turned @ turned.mT


def _spread(joint: Joint, segment: Segment, rows: Rows) -> Tensor:
    """How the noise spreads over the output of an affine part, (N, rows, p)."""
    given = {node: joint.spreads[node] for node in segment.sources}
    if len({x.shape[1] for x in given.values()}) == 1:
        return _moved(segment, "linear", given)
    linear = _moved(segment, "linear", {node: x[:, : rows.rank] for node, x in given.items()})
    others = {node: x[:, rows.rank :] for node, x in given.items() if x.shape[1] > rows.rank}
    return torch.cat([linear, _moved(segment, "linear", others)], 1)


def _moved(segment: Segment, function: str, given: dict[Node, Tensor]) -> Tensor:
    """`value` or `linear` of an affine part, for sources (..., n): (..., p)."""
    lead = next(iter(given.values())).shape[:-1]
    if function == "linear" and not segment.steps and len(segment.results) == 1 and segment.results[0] in given:
        return given[segment.results[0]]
    largest = max(shape_of(node).numel() for node in (*segment.sources, *segment.results))
    like = next(iter(given.values()))
    elements = DIRECTION_ELEMENTS.get(like.device.type, DIRECTION_ELEMENTS["cpu"])
    flat = {node: given[node].flatten(0, -2) for node in segment.sources if node in given}
    return segment.batched(function, flat, max(1, elements // largest)).unflatten(0, lead)


def _at_windows(rule: Nonlinearity, spread: Tensor) -> Tensor:
    """What windows look at, (N, n, w, rows), of spreads (N, rows, p)."""
    by_unit = spread.mT.contiguous()
    if isinstance(rule, PiecewiseLinear | Elementwise):
        return by_unit.unsqueeze(-2)
    places = rule.windows
    found = by_unit[:, places.clamp(min=0)]
    return found if bool((places >= 0).all()) else found * (places >= 0).unsqueeze(-1)
