"""Layer by layer: the joint distribution of all live tensors, as a Gaussian with third cumulants, through a network.

To second order in the noise ε of the image a tensor is mean + Fᵀε + ½(Q[ε, ε] − tr Q) + rest. Its third cumulants are
those of a Gaussian's second-order polynomial, κ(x, y, z) = Q_x[f_y, f_z] + Q_y[f_x, f_z] + Q_z[f_x, f_y]; they change
the moments of the next nonlinear layer by an Edgeworth correction of first order (McCullagh, "Tensor Methods in
Statistics", 1987). Nothing of the size of a layer squared is formed: `factors` says what is carried instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from netmoments.covariances import Covariance
from netmoments.memory import gigabytes, memory_limit
from netmoments.network.graph import Node
from netmoments.normal import standard_deviation
from netmoments.precision import full_precision
from netmoments.progress import Progress
from netmoments.propagate.factors import (
    FactorLayout,
    as_factors,
    image_factors,
    layout_for,
    random_signs,
    turned_towards,
    weighted_matrices,
)
from netmoments.propagate.plan import Plan, Segment
from netmoments.propagate.score_covariance import SCORE_PAIRED, CurvedLayer, curved_layer, score_covariance
from netmoments.rules.base import Local, ThirdCumulants, cholesky_root, whitened

MOST_DIRECTIONS = 9
"""Directions of a window whose third cumulants are kept, those of largest curvature; all of a 3×3 window's."""
ROUGH_DIRECTIONS = 64
"""Directions of the noise that give a first idea of what the scores depend on."""
IMAGES_TOGETHER = {"cpu": 1, "cuda": 32}
"""Images whose noise goes through a network together, at most: more do not pay."""


class Need(NamedTuple):
    """The layer that takes most memory for one image, and how many bytes."""

    layer: str
    bytes: int


class ThirdOrder(NamedTuple):
    """What the windows of a layer have beyond a Gaussian."""

    cumulants: ThirdCumulants
    turns: Tensor
    """What their curvature adds to the output's linear part, (..., n, K): Σᵢⱼ Hᵢⱼ Qᵢfⱼ."""


@dataclass
class Joint:
    """Live tensors of N images: their means, (N, n), and their factors, (N, rows, n)."""

    means: dict[Node, Tensor] = field(default_factory=dict)
    factors: dict[Node, Tensor] = field(default_factory=dict)

    def after(self, plan: Plan, place: int, mean: Tensor, factor: Tensor) -> None:
        """The output of a layer joins, what is no longer needed leaves."""
        output = plan.stages[place].output
        kept = [node for node in plan.needed[place + 1] if node is not output]
        self.means = {node: self.means[node] for node in kept} | {output: mean}
        self.factors = {node: self.factors[node] for node in kept} | {output: factor}


Beyond = Callable[[FactorLayout, Tensor, Local, Tensor, Tensor], ThirdOrder] | None
"""What is computed beyond Gaussian tensors, if anything."""


def layerwise(
    plan: Plan,
    mean: Tensor,
    covariance: Covariance,
    outputs: Tensor,
    memory_budget: int | None = None,
    caller: str = "layerwise",
) -> tuple[Tensor, Tensor]:
    """Means (N, k) and covariances (N, k, k) of the scores with indices `outputs` (N, k), for images (N, ...).

    Every tensor is a Gaussian with third cumulants, of which all effects are kept that are of first order in them.
    Images go together as the memory allows; what does not fit for one is an error, before anything is computed.
    """
    fitting = require_fitting(plan, covariance, mean, memory_budget, caller)
    if not plan.last.sources:
        constant = plan.last.value({})[outputs]
        return constant, constant.new_zeros(*outputs.shape, outputs.shape[1])
    together = min(fitting, IMAGES_TOGETHER.get(mean.device.type, 1))
    parts = []
    with Progress("images", len(mean)) as progress:
        for start in range(0, len(mean), together):
            some = slice(start, start + together)
            parts.append(carried(plan, mean[some], covariance.entries(some), outputs[some], third_order))
            progress.advance(len(mean[some]))
    means, covariances = zip(*parts, strict=True)
    return torch.cat(means), torch.cat(covariances)


def require_fitting(plan: Plan, covariance: Covariance, like: Tensor, memory_budget: int | None, caller: str) -> int:
    """How many images fit the memory there is for what is carried; an error if not even one does."""
    need, limit = need_of(plan, covariance.rank, like.element_size()), memory_limit(like.device, memory_budget)
    if need.bytes > limit:
        raise ValueError(
            f'{caller}: method="layerwise" needs {gigabytes(need.bytes)} for the covariances at {need.layer}, but '
            f'{gigabytes(limit)} is the limit; raise memory_budget=, or use method="sketch" (any size) or "sampling"'
        )
    return limit // need.bytes


def need_of(plan: Plan, rank: int, itemsize: int) -> Need:
    """The most memory that any layer takes for one image, `rank` being the noise's.

    A layer with p inputs and n units of w inputs works on its input's factor (in parts, put together, and by unit), by
    window and once more with places beyond it masked, on the output's twice, on matrices of pairs of directions for the
    output, and for third cumulants where there are any, and on four squares where pairs are exact. What is kept for the
    pass back is counted with the layers that come after it.
    """
    layout = layout_for(rank, 1)
    kept, worst = 0, Need("the scores", itemsize * rank * plan.sizes[plan.image])
    for place, stage in enumerate(plan.stages):
        n, w, p = stage.rule.units, stage.rule.width, stage.before.size
        squares = n * n if stage.rule.has_pairs else 0
        live = before = 0
        for node in plan.needed[place]:
            rows = layout.rank if node is plan.image else layout.total
            live += rows * plan.sizes[node]
            before = max(before, rows if node in stage.before.sources else 0)
        skewed = min(w, MOST_DIRECTIONS) if before > layout.rank else 0
        factors = before * (3 * p + (2 * n * w if w > 1 else 0)) + 2 * layout.total * n
        matrices = layout.paired**2 * n * (2 + 2 * skewed)
        own = n * w * (min(layout.rank, SCORE_PAIRED) + w + 1) + squares
        needed = itemsize * (kept + live + factors + matrices + 4 * squares + own)
        if needed > worst.bytes:
            worst = Need(stage.name, needed)
        kept += own
    return worst


def carried(plan: Plan, mean: Tensor, covariance: Covariance, outputs: Tensor, beyond: Beyond) -> tuple[Tensor, Tensor]:
    """`layerwise` of images that go together; without `beyond` every tensor is taken as Gaussian."""
    means = {plan.image: mean.flatten(1)}
    with full_precision(), Progress("layerwise", len(plan.stages) + 1) as progress:
        image = image_factors(covariance, mean).expand(len(mean), -1, -1)
        layout = layout_for(image.shape[1], outputs.shape[1])
        if layout.leading:
            slopes = rough_slopes(plan, means, image, outputs)
            image = turned_towards(image, leading_directions(image, slopes, layout.leading))
        joint = Joint(means, {plan.image: image})
        layers = []
        for place in range(len(plan.stages)):
            layers.append(_through(joint, plan, place, layout, beyond))
            progress.advance(1)
        scores = plan.last.values(joint.means).gather(1, outputs)
        factor = _factor_after(joint, plan.last, layout)
        factor = factor.gather(2, outputs.unsqueeze(1).expand(-1, factor.shape[1], -1)).mT
        every = score_covariance(plan, layers, layout, factor, outputs)
        progress.advance(1)
    return scores, every


@torch.no_grad()
def rough_slopes(plan: Plan, means: dict[Node, Tensor], image: Tensor, outputs: Tensor) -> Tensor:
    """The expected slopes of chosen scores (N, k) in the image, (N, k, n), roughly: from a few rows of its factor."""
    few = min(ROUGH_DIRECTIONS, image.shape[1])
    joint = Joint(dict(means), {plan.image: image[:, :few] * (image.shape[1] / few) ** 0.5})
    gains = []
    for place, stage in enumerate(plan.stages):
        factor = stage.rule.rows_at_windows(stage.before.linears(joint.factors))
        mean = stage.rule.gathered(stage.before.values(joint.means))
        local = stage.rule.local(mean, factor @ factor.mT)
        gains.append(local.gain)
        joint.after(plan, place, local.mean, (local.gain.unsqueeze(-2) @ factor).squeeze(-2).mT)
    weights = plan.score_weights(outputs, image)
    for stage, gain in zip(reversed(plan.stages), reversed(gains), strict=True):
        weights = stage.pull_back(gain, weights.pop(stage.output), weights)
    return weights[plan.image]


@torch.no_grad()
def leading_directions(image: Tensor, slopes: Tensor, count: int) -> Tensor:
    """The directions of the noise, (N, r, count), that scores with these slopes depend on most, given its factor."""
    along = image @ slopes.mT
    if along.shape[-1] == count:
        return along
    return torch.linalg.svd(along, full_matrices=False).U[..., :count]


def _through(joint: Joint, plan: Plan, place: int, layout: FactorLayout, beyond: Beyond) -> CurvedLayer:
    """One affine part and nonlinear layer."""
    stage, rule = plan.stages[place], plan.stages[place].rule
    mean = rule.gathered(stage.before.values(joint.means))
    factor = rule.rows_at_windows(_factor_after(joint, stage.before, layout))
    covariance = _window_covariance(layout, factor)
    local = rule.local(mean, covariance)
    layer = curved_layer(layout, stage, local, mean, factor, covariance)
    found = None
    if beyond is not None and factor.shape[-1] > layout.rank:
        found = beyond(layout, factor, local, covariance, rule.windows >= 0)
        local = rule.local(mean, covariance, found.cumulants)._replace(curvature=local.curvature)
        layer = layer._replace(gain=local.gain)
    joint.after(plan, place, local.mean, _output_factor(layout, local, factor, layer, found, place).mT)
    return layer


def _output_factor(
    layout: FactorLayout, local: Local, factor: Tensor, layer: CurvedLayer, found: ThirdOrder | None, place: int
) -> Tensor:
    """The output's factor, (N, n, rows): the input's through the gains, and what the nonlinearity adds."""
    gained = (local.gain.unsqueeze(-2) @ factor).squeeze(-2)
    followed = factor[..., layout.followed]
    quadratic = as_factors(followed.mT @ (local.curvature @ followed), layout)
    signs = random_signs(layout.signs, layer.rest.shape[-1], place, layer.rest)
    turns = torch.zeros_like(gained[..., layout.followed]) if found is None else found.turns
    own = torch.cat([quadratic, standard_deviation(layer.rest).unsqueeze(-1) * signs, turns], -1)
    if gained.shape[-1] == layout.rank:
        return torch.cat([gained, own], -1)
    return torch.cat([gained[..., : layout.rank], gained[..., layout.rank :] + own], -1)


def _window_covariance(layout: FactorLayout, factor: Tensor) -> Tensor:
    """S of every window, (..., n, w, w), from its factor.

    The turns T count to first order, C = FTᵀ + TFᵀ. So that S + C is never negative, it is taken as R(I + M/2)²Rᵀ with
    S = RRᵀ and M = R⁻¹CR⁻ᵀ, which is the same to first order.
    """
    products = factor[..., layout.covariance]
    covariance = products @ products.mT
    if factor.shape[-1] == layout.rank:
        return covariance
    half = factor[..., layout.followed] @ factor[..., layout.turns].mT
    root = cholesky_root(covariance)
    half = torch.linalg.solve_triangular(root, half, upper=False)
    half = torch.linalg.solve_triangular(root.mT, half, upper=True, left=False)
    turned = root + root @ (0.5 * (half + half.mT))
    return turned @ turned.mT


def _factor_after(joint: Joint, segment: Segment, layout: FactorLayout) -> Tensor:
    """The factor of what an affine part gives, (N, rows, p); the image has linear rows only."""
    given = {node: joint.factors[node] for node in segment.sources}
    counts = [x.shape[1] for x in given.values()]
    if min(counts) == max(counts):
        return segment.linears(given)
    linear = segment.linears({node: x[:, : layout.rank] for node, x in given.items()})
    others = {node: x[:, layout.rank :] for node, x in given.items() if x.shape[1] > layout.rank}
    return torch.cat([linear, segment.linears(others)], 1)


def third_order(layout: FactorLayout, factor: Tensor, local: Local, covariance: Tensor, present: Tensor) -> ThirdOrder:
    """From windows' factors (..., n, w, rows), their Gaussian moments and covariances (..., n, w, w)."""
    q = min(factor.shape[-2], MOST_DIRECTIONS)
    root, inverse = whitened(covariance, local.curvature, present, q)
    axes = inverse[..., :q, :]
    along = axes @ factor[..., layout.followed]
    towards = weighted_matrices(axes @ factor[..., layout.quadratic], layout) @ along.mT.unsqueeze(-3)
    bends = along.unsqueeze(-3) @ towards
    curvature = root[..., :q].mT @ local.curvature @ root[..., :q]
    turns = (curvature.unsqueeze(-2) * towards).sum((-3, -1))
    kappa = bends + bends.transpose(-3, -2) + bends.transpose(-3, -1)  # Q_a[b, c] + Q_b[a, c] + Q_c[a, b]
    return ThirdOrder(ThirdCumulants(root, kappa), turns)
