"""Rows: the covariance of all live tensors as products of rows, with third cumulants, through every layer.

To second order in the noise ε of the image a tensor is mean + Fᵀε + ½(Q[ε, ε] − tr Q) + rest. Its third cumulants are
those of a Gaussian's second-order polynomial, κ(x, y, z) = Q_x[f_y, f_z] + Q_y[f_x, f_z] + Q_z[f_x, f_y]; they change
the moments of the next nonlinear layer by an Edgeworth correction of first order (McCullagh, "Tensor Methods in
Statistics", 1987).

Nothing of the size of a layer squared is formed. A tensor is carried as its factor F, one row for each of some
uncorrelated numbers of variance 1, with the covariance FᵀF: see `FactorLayout`. Rows pass through an affine part of a
network like inputs do, without its offset. The covariance of the scores is then what every nonlinear layer adds to it,
in a pass back through the network.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from netmoments.covariances import Covariance
from netmoments.network.graph import Node, shape_of
from netmoments.normal import standard_deviation
from netmoments.precision import full_precision
from netmoments.progress import progress_bar
from netmoments.propagate.directions import (
    Directions,
    FactorLayout,
    as_factors,
    as_matrices,
    colours,
    inner_product_weights,
    random_normals,
    random_signs,
    signs_of_colours,
)
from netmoments.propagate.plan import Plan, Segment, Stage
from netmoments.rules.base import Local, Nonlinearity, ThirdCumulants, cholesky_root, whitened

PAIRED = 48
"""Directions of the noise of which all pairs are followed through the network, at most; all if it has no more."""
SIGNS = 64
"""Rows of random signs (Hutchinson 1990) for what is neither linear nor quadratic."""
MOST_DIRECTIONS = 9
"""Directions of a window whose third cumulants are kept, those of largest curvature; all of a 3×3 window's."""
ROUGH_DIRECTIONS = 64
"""Random sums of the noise's directions that give a first idea of what the scores depend on."""
MOST_LEADING = 16
"""Directions that the scores depend on most, of which pairs with those are followed; no more than there are scores."""
FEWEST_SCORED, MOST_SCORED = 128, 256
"""Directions of the noise of which all pairs count in the scores' quadratic part; all of them if it has no more. Their
chance error is √2/K of that part."""
SCORE_WORK = 2**33
"""Pairs of these, times the numbers in the windows of all layers, for more than the fewest."""
MIXED = 32
"""Random sums of the rows that are not linear, for their part in it."""


class Need(NamedTuple):
    """The layer that takes most memory for one image, and how many bytes."""

    layer: str
    bytes: int


class ThirdOrder(NamedTuple):
    """What the windows of a layer have beyond a Gaussian."""

    cumulants: ThirdCumulants
    turns: Tensor
    """What their curvature adds to the output's linear part, Σᵢⱼ Hᵢⱼ Qᵢfⱼ, (..., n, K)."""


class CurvedLayer(NamedTuple):
    """A nonlinear layer that the noise of N images has gone through."""

    stage: Stage
    gain: Tensor
    """(N, n, w)."""
    curvature: Tensor
    """(N, n, w, w)."""
    directions: Tensor
    """Rows of the windows' factors: along those of the scores, and sums of others, (N, n, w, S + `MIXED`)."""
    rest: Tensor
    """The variance of what is neither linear nor quadratic, (N, n)."""
    pairs: Tensor | None
    """The covariances of all that is not linear, (N, n, n), where they are exact."""

    def quadratic(self, weights: Tensor) -> Tensor:
        """M_i[k, l] = Σ_u a_iu H_u[f_k, f_l] for weights a (N, r, n), along the directions: (N, r, S + `MIXED`, ·)."""
        curved = (self.curvature @ self.directions).flatten(1, 2)
        found = []
        for own in weights.unbind(1):
            found.append((self.directions * own[..., None, None]).flatten(1, 2).mT @ curved)
        return torch.stack(found, 1)


class Sums(NamedTuple):
    """Sums of the rows of what a layer's windows look at: taken of its input, as windows share most of that."""

    followed: Tensor
    """Of the linear rows, along the K directions of which all pairs are followed, (N, n, w, K)."""
    others: Tensor
    """The same with the other signs."""
    scored: Tensor
    """Along those of the scores, and with random signs of the rows that are not linear, (N, n, w, S + `MIXED`)."""
    mixed: tuple[Tensor, ...]
    """For `mixed_rows`, (N, n, w, signs) each; none of linear rows alone."""

    @classmethod
    def of(cls, directions: Directions, rule: Nonlinearity, rows: Tensor) -> Sums:
        """From the factor (N, rows, p) of the layer's input."""
        layout, by_number = directions.layout, rows.mT
        linear, beyond = by_number[..., : layout.rank], by_number[..., layout.rank :]
        along = directions.for_scores(linear)
        if beyond.shape[-1]:
            along = torch.cat([along, beyond @ random_signs(MIXED, beyond.shape[-1], 0, beyond)], -1)
            mixed = mixed_sums(layout, by_number)
        else:
            along, mixed = torch.nn.functional.pad(along, (0, MIXED)), ()
        parts = directions.followed(linear), directions.with_other_signs(linear), along, *mixed
        first, second, scored, *others = (rule.rows_at_windows(part.mT) for part in parts)
        return cls(first, second, scored, tuple(others))


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


Beyond = Callable[[FactorLayout, Tensor, Sums, Local, Tensor, Tensor], ThirdOrder] | None
"""What is computed beyond Gaussian tensors, if anything."""


def need_of(plan: Plan, rank: int, itemsize: int) -> Need:
    """The most memory that any layer takes for one image, `rank` being the noise's.

    A layer with p inputs and n units of w inputs works on its input's factor (in parts, put together, and by unit), by
    window and once more with places beyond it masked, on the output's twice, on matrices of pairs of directions for the
    output, and for third cumulants where there are any, and on four squares where pairs are exact. What is kept for the
    pass back is counted with the layers that come after it.
    """
    layout, scored = layout_for(_event(plan), rank, MOST_LEADING), scored_directions(plan, rank)
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
        sums = 2 * layout.paired + scored + MIXED + 3 * layout.signs
        factors += sums * (2 * p + n * w)
        matrices = layout.paired**2 * n * (2 + 2 * skewed)
        own = n * w * (scored + w + 1) + squares
        needed = itemsize * (kept + live + factors + matrices + 4 * squares + own)
        if needed > worst.bytes:
            worst = Need(stage.name, needed)
        kept += own
    return worst


def numbers_carried(plan: Plan) -> int:
    """How many numbers the rows of all stages have together, for one image with noise of every direction."""
    rows = layout_for(_event(plan), plan.sizes[plan.image], MOST_LEADING).total
    return sum(rows * passage.after for passage in plan.passages[:-1])


def carried(plan: Plan, mean: Tensor, covariance: Covariance, outputs: Tensor, beyond: Beyond) -> tuple[Tensor, Tensor]:
    """Means (N, k) and covariances (N, k, k) of the scores with indices `outputs` (N, k), for images (N, ...).

    Without `beyond` every tensor is taken as Gaussian.
    """
    means = {plan.image: mean.flatten(1)}
    with full_precision(), progress_bar("layerwise", len(plan.stages) + 1) as show:
        image = covariance.root().mT.expand(len(mean), -1, -1)
        directions = directions_for(plan, means, image, outputs)
        layout = directions.layout
        joint = Joint(means, {plan.image: image})
        layers = []
        for place in range(len(plan.stages)):
            show(place)
            layers.append(_through(joint, plan, place, directions, beyond))
        scores = plan.last.values(joint.means).gather(1, outputs)
        factor = _factor_after(joint, plan.last, layout)
        factor = factor.gather(2, outputs.unsqueeze(1).expand(-1, factor.shape[1], -1)).mT
        every = score_covariance(plan, layers, directions, factor, outputs)
    return scores, every


@torch.no_grad()
def rough_slopes(plan: Plan, means: dict[Node, Tensor], image: Tensor, outputs: Tensor) -> Tensor:
    """The expected slopes of chosen scores (N, k) in the image, (N, k, n), roughly: from sums of rows of its factor."""
    few = random_signs(ROUGH_DIRECTIONS, image.shape[1], 0, image).mT @ image
    joint = Joint(dict(means), {plan.image: few})
    gains = []
    for place, stage in enumerate(plan.stages):
        value, rows = stage.before.values(joint.means), stage.before.linears(joint.factors)
        mean, factor = stage.rule.gathered(value), stage.rule.rows_at_windows(rows)
        local = stage.rule.local(mean, factor @ factor.mT)
        gains.append(local.gain)
        joint.after(plan, place, local.mean, (local.gain.unsqueeze(-2) @ factor).squeeze(-2).mT)
    weights = plan.score_weights(outputs, image)
    for stage, gain in zip(reversed(plan.stages), reversed(gains), strict=True):
        weights = stage.pull_back(gain, weights.pop(stage.output), weights)
    return weights[plan.image]


@torch.no_grad()
def directions_for(plan: Plan, means: dict[Node, Tensor], image: Tensor, outputs: Tensor) -> Directions:
    """For an image's mean and factor (N, r, n), and scores with indices (N, k)."""
    layout = layout_for(_event(plan), image.shape[1], outputs.shape[1])
    colour = colours(_event(plan), layout.rank, PAIRED)
    signs = signs_of_colours(colour, image.dtype, image.device)
    scored = scored_directions(plan, layout.rank)
    every = torch.eye(layout.rank, dtype=image.dtype, device=image.device).expand(len(image), -1, -1)
    if not layout.leading:
        return Directions.of(layout, every[..., :0], signs, every)
    along = image @ rough_slopes(plan, means, image, outputs).mT
    if along.shape[-1] > layout.leading:
        along = torch.linalg.svd(along, full_matrices=False).U[..., : layout.leading]
    along = along / torch.linalg.vector_norm(along, dim=(1, 2), keepdim=True).clamp(min=1e-30)
    others = random_normals(layout.rank, scored - layout.leading, image.dtype, image.device)
    basis = torch.linalg.qr(torch.cat([along, others.expand(len(image), -1, -1)], -1)).Q
    leading = basis[..., : layout.leading]
    return Directions.of(layout, leading, signs, every if scored == layout.rank else basis)


def _through(joint: Joint, plan: Plan, place: int, directions: Directions, beyond: Beyond) -> CurvedLayer:
    """One affine part and nonlinear layer."""
    stage, rule = plan.stages[place], plan.stages[place].rule
    value, rows = stage.before.values(joint.means), _factor_after(joint, stage.before, directions.layout)
    mean, factor = rule.gathered(value), rule.rows_at_windows(rows)
    layout, sums = directions.layout, Sums.of(directions, rule, rows)
    covariance = _window_covariance(layout, factor, sums)
    local = rule.local(mean, covariance)
    layer = curved_layer(layout, stage, local, mean, factor, sums, covariance)
    found = None
    if beyond is not None and factor.shape[-1] > layout.rank:
        found = beyond(layout, factor, sums, local, covariance, rule.windows >= 0)
        local = rule.local(mean, covariance, found.cumulants)._replace(curvature=local.curvature)
        layer = layer._replace(gain=local.gain)
    joint.after(plan, place, local.mean, _output_factor(layout, local, factor, sums, layer, found, place).mT)
    return layer


def curved_layer(
    layout: FactorLayout, stage: Stage, local: Local, mean: Tensor, factor: Tensor, sums: Sums, covariance: Tensor
) -> CurvedLayer:
    """From the Gaussian moments of a layer's units, and their windows' means, factors, sums and covariances."""
    beyond_linear = local.variance - local.linear_variance(covariance)
    rest = (beyond_linear - local.quadratic_variance(covariance)).clamp(min=0)
    pairs = None
    if stage.rule.has_pairs:
        alone = factor.squeeze(-2)  # units that look at one number each
        every = alone @ alone.mT
        if factor.shape[-1] > layout.rank:
            half = sums.followed.squeeze(-2) @ alone[..., layout.turns].mT
            every = every + half + half.mT
        every = torch.diagonal_scatter(every, covariance.flatten(-3), dim1=-2, dim2=-1)
        pairs = stage.rule.pairs(mean.squeeze(-1), every)
        assert pairs is not None
        pairs = torch.diagonal_scatter(pairs, beyond_linear, dim1=-2, dim2=-1)
    return CurvedLayer(stage, local.gain, local.curvature, sums.scored, rest, pairs)


def _output_factor(
    layout: FactorLayout,
    local: Local,
    factor: Tensor,
    sums: Sums,
    layer: CurvedLayer,
    found: ThirdOrder | None,
    place: int,
) -> Tensor:
    """The output's factor, (N, n, rows): the input's through the gains, and what the nonlinearity adds."""
    gained = (local.gain.unsqueeze(-2) @ factor).squeeze(-2)
    quadratic = _bent(local.curvature, sums, factor[..., layout.turns])
    rest = random_signs(layout.signs, layer.rest.shape[-1], place, layer.rest)
    rest = standard_deviation(layer.rest).unsqueeze(-1) * rest
    none = gained.new_zeros(*gained.shape[:-1], layout.paired)
    if gained.shape[-1] == layout.rank:
        return torch.cat([gained, quadratic, rest, none], -1)
    own = [quadratic, rest + mixed_rows(layout, local, factor, sums.mixed), none if found is None else found.turns]
    return torch.cat([gained[..., : layout.rank], gained[..., layout.rank :] + torch.cat(own, -1)], -1)


def _bent(curvature: Tensor, sums: Sums, turns: Tensor) -> Tensor:
    """The quadratic rows that units' curvatures make of the linear ones, from windows' sums and turns."""
    followed = sums.followed + turns if turns.shape[-1] else sums.followed
    curved = curvature @ followed
    own = (curved * sums.others).sum(-2)
    return as_factors(torch.diagonal_scatter(curved.mT @ followed, own, dim1=-2, dim2=-1))


MIXED_SEEDS = (1001, 2002, 3003)
"""Of the signs of `mixed_rows`: one set each for linear rows, for the others, and for these once more."""


def mixed_sums(layout: FactorLayout, rows: Tensor) -> tuple[Tensor, ...]:
    """Sums of rows (..., rows) with random signs, (..., signs) each: of linear ones, and twice of the others."""
    linear, others = rows[..., : layout.rank], rows[..., layout.rank :]
    parts = zip((linear, others, others), MIXED_SEEDS, strict=True)
    return tuple(part @ random_signs(layout.signs, part.shape[-1], seed, part) for part, seed in parts)


def mixed_rows(layout: FactorLayout, local: Local, factor: Tensor, sums: tuple[Tensor, ...]) -> Tensor:
    """Rows (..., n, signs) whose products are tr(HLH'N) + ½ tr(HNH'N) of any two units, on average.

    L and N are the covariances of linear rows and of the others between what two units look at: ½ tr(HSH'S) of
    S = L + N, less the part of which all pairs of directions are followed. A row is νᵀH(λ + ν'/√2), of sums λ of the
    linear rows and ν, ν' of the others with random signs. The signs are the same for all layers, so that what one layer
    makes goes together with what another makes of the same rows. The sums are
    `mixed_sums` of the factor. Scaled so that every unit has its `mixed_variance`.
    """
    first, second, third = sums
    rows = ((local.curvature @ second) * (first + 0.5**0.5 * third)).sum(-2)
    own = rows.square().sum(-1)
    bends = own > torch.finfo(own.dtype).eps ** 2 * own.detach().amax(-1, keepdim=True)
    share = torch.where(bends, mixed_variance(layout, local, factor) / torch.where(bends, own, 1.0), 0.0)
    return rows * standard_deviation(share).unsqueeze(-1)


def mixed_variance(layout: FactorLayout, local: Local, factor: Tensor) -> Tensor:
    """½ tr(HSHS) − ½ tr(HLHL), S = L + what is not linear: what a unit's bend makes of rows of which no pairs are
    followed, (..., n): the variance of `mixed_rows`.
    """
    if factor.shape[-1] == layout.rank:
        return torch.zeros_like(local.variance)
    linear, others = factor[..., : layout.rank], factor[..., layout.rank :]
    curved, bent = local.curvature @ (linear @ linear.mT), local.curvature @ (others @ others.mT)
    return ((curved + 0.5 * bent) * bent.mT).sum((-2, -1)).clamp(min=0)


def _window_covariance(layout: FactorLayout, factor: Tensor, sums: Sums) -> Tensor:
    """S of every window, (..., n, w, w), from its factor.

    The turns T go with the linear rows, C = FTᵀ + TFᵀ beyond the products of all rows. So that S + C is never negative,
    it is taken as R(I + M/2)²Rᵀ with S = RRᵀ and M = R⁻¹CR⁻ᵀ, which is the same to first order.
    """
    covariance = factor @ factor.mT
    if factor.shape[-1] == layout.rank:
        return covariance
    half = sums.followed @ factor[..., layout.turns].mT
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


def third_order(
    layout: FactorLayout, factor: Tensor, sums: Sums, local: Local, covariance: Tensor, present: Tensor
) -> ThirdOrder:
    """From windows' factors (..., n, w, rows), their sums, their Gaussian moments and covariances (..., n, w, w)."""
    q = min(factor.shape[-2], MOST_DIRECTIONS)
    root, inverse = whitened(covariance, local.curvature, present, q)
    axes = inverse[..., :q, :]
    along, other = (axes @ (part + factor[..., layout.turns]) for part in (sums.followed, sums.others))
    matrices = as_matrices(axes @ factor[..., layout.quadratic], layout.paired)
    alone = matrices.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    applied = matrices @ along.mT.unsqueeze(-3) + alone * (other - along).mT.unsqueeze(-3)  # Q_a f_c
    bends = along.unsqueeze(-3) @ applied
    bends = 0.5 * (bends + bends.mT)
    curvature = root[..., :q].mT @ local.curvature @ root[..., :q]
    turns = (curvature.unsqueeze(-2) * applied).sum((-3, -1))
    kappa = bends + bends.transpose(-3, -2) + bends.transpose(-3, -1)  # Q_a[b, c] + Q_b[a, c] + Q_c[a, b]
    return ThirdOrder(ThirdCumulants(root, kappa), turns)


def score_covariance(
    plan: Plan, layers: list[CurvedLayer], directions: Directions, factor: Tensor, outputs: Tensor
) -> Tensor:
    """Cov of chosen scores, (N, k, k), from their factors (N, k, rows) and output indices (N, k).

    With a the weights of a score on a layer's units, by the expected slopes behind it, the score is its linear part, a
    quadratic part ½(M[ε, ε] − tr M) with M = Σ a H[f, f] over all units of all layers, and what is beyond: Cov is the
    sum of (F + T)(F + T)ᵀ, ½⟨M, M'⟩, and Σ a a' rest. Layers with exact pairs have those in place of their own part
    of ½⟨M, M'⟩.
    """
    layout = directions.layout
    linear = factor[..., : layout.rank]
    total = linear @ linear.mT
    if factor.shape[-1] > layout.rank:
        half, turns = directions.half_turns(factor), factor[..., layout.turns]
        total = total + half + half.mT + turns @ turns.mT
    weights = plan.score_weights(outputs, factor)
    alone = len(layers) == 1 and layers[0].pairs is not None
    matrices: list[Tensor] = []
    for layer in reversed(layers):
        own = weights.pop(layer.stage.output)
        if not alone:
            matrices.append(layer.quadratic(own))
        if layer.pairs is None:
            total = total + (own * layer.rest.unsqueeze(1)) @ own.mT
        else:
            total = total + own @ layer.pairs @ own.mT
            total = total if alone else total - _half_products(matrices[-1], layout)
        weights = layer.stage.pull_back(layer.gain, own, weights)
    if matrices:
        total = total + _half_products(torch.stack(matrices).sum(0), layout)
    return 0.5 * (total + total.mT)


def _half_products(matrices: Tensor, layout: FactorLayout) -> Tensor:
    """½⟨M, M'⟩ of matrices (N, k, S + `MIXED`, ·): (N, k, k).

    Sums of other rows, s with E ssᵀ = the rows' products, count as one direction each, but not with themselves: the
    products of a sum with itself are not those of the rows.
    """
    linear = inner_product_weights(layout.rank, layout.leading, matrices.shape[-1] - MIXED, matrices)
    weights = torch.nn.functional.pad(linear, (0, MIXED, 0, MIXED), value=MIXED / (MIXED - 1))
    weights[-MIXED:, -MIXED:].fill_diagonal_(0.0)
    alone = linear[:1, -1:] if layout.leading else linear.diagonal()[:1]
    weights[:-MIXED, -MIXED:] = weights[-MIXED:, :-MIXED] = alone
    if layout.leading:
        weights[: layout.leading, -MIXED:] = weights[-MIXED:, : layout.leading] = 1.0
    return 0.5 * (matrices * weights).flatten(2) @ matrices.flatten(2).mT


def layout_for(event: tuple[int, ...], rank: int, scores: int) -> FactorLayout:
    """For noise of so many directions of an event, and so many scores."""
    coloured = int(colours(event, rank, PAIRED).max()) + 1
    leading = min(scores, MOST_LEADING, rank - coloured)
    return FactorLayout.of(rank, coloured + leading, SIGNS, leading)


def scored_directions(plan: Plan, rank: int) -> int:
    """How many directions of the noise count in the scores' quadratic part: as many as their work allows."""
    seen = sum(stage.rule.windows.numel() for stage in plan.stages)
    return min(rank, max(FEWEST_SCORED, min(MOST_SCORED, math.isqrt(SCORE_WORK // max(1, seen)))))


def _event(plan: Plan) -> tuple[int, ...]:
    """The shape of an image."""
    return tuple(shape_of(plan.image)[1:])
