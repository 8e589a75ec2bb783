"""Layerwise moments with covariances as products of rows, for layers too large for a matrix of covariances.

To second order in the noise ε of the image a tensor is mean + Fᵀε + ½(Q[ε, ε] − tr Q) + rest. It is carried as its
factor: rows of numbers, one for each of a few hundred uncorrelated sources of variance 1, whose products are the
tensor's covariances (`FactorLayout`). An affine part of the network acts on rows as it acts on inputs, without its
offset. Only layers that are small enough for exact pairs have matrices of their own size squared.

The third cumulants of such a polynomial in ε are κ(x, y, z) = Q_x[f_y, f_z] + Q_y[f_x, f_z] + Q_z[f_x, f_y]. They
change the moments of the next nonlinear layer by an Edgeworth correction of first order (McCullagh, "Tensor Methods in
Statistics", 1987).

After the last layer, a pass back through the network adds up what every nonlinear layer contributes to the covariance
of the scores (`score_covariance`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from netmoments.covariances import Covariance, cholesky_root, whitened
from netmoments.network.graph import Node, shape_of
from netmoments.normal import standard_deviation
from netmoments.precision import full_precision
from netmoments.progress import progress_bar
from netmoments.propagate.directions import (
    Directions,
    FactorLayout,
    as_matrices,
    as_rows,
    colours,
    inner_product_weights,
    random_normals,
    random_signs,
    signs_of_colours,
)
from netmoments.propagate.plan import Plan, Stage
from netmoments.propagate.segments import Segment
from netmoments.rules.base import Local, Nonlinearity, ThirdCumulants

PAIRED = 48
"""Colours of the noise, at most; each gives a direction, and all pairs of these are followed through the network. Noise
of no more directions than this is followed exactly."""
SIGNS = 64
"""Rows of random signs (Hutchinson 1990) for the rest, which is neither linear nor quadratic."""
MOST_DIRECTIONS = 9
"""Directions of a window along which third cumulants are kept: those of largest curvature, or all if it has no more."""
ROUGH_DIRECTIONS = 64
"""Random sums of the noise's directions, from which `rough_slopes` estimates what the scores depend on."""
MOST_LEADING = 16
"""Leading directions, at most, which are followed beside the colours; never more than there are scores."""
FEWEST_SCORED, MOST_SCORED = 128, 256
"""Bounds on S, the number of the noise's directions of which all pairs count in the scores' quadratic part (the rank,
if that is smaller). The chance error is √2/S of that part."""
SCORE_WORK = 2**33
"""S exceeds the fewest only as far as S², times the numbers in the windows of all layers, stays within this."""
SCORES_NUMBERS = 2**24
"""The matrices of the quadratic parts of all scores have so many numbers at most, or S is `MANY_SCORED`: for more than
256 scores S is less than for few."""
MANY_SCORED = 48
"""S for thousands of scores."""
MIXED = 32
"""Random sums of all rows but the linear ones, which count in the scores' quadratic part beside the S directions."""


MOST_TURNED = 0.3
"""Turns are the first term of a series, and feed the next layer's. Up to a share of 0.25 in the deviations of a layer
they made means and variances of all networks that were tried better; from 0.35 on, in recurrent networks at large
noise, they grew on from step to step, and left variances twice as large as they are."""


class Need(NamedTuple):
    """The layer that needs most memory for one image, and the bytes it needs."""

    layer: str
    bytes: int


class ThirdOrder(NamedTuple):
    """The skewness of a layer's windows, and what it does to the output."""

    cumulants: ThirdCumulants
    turns: Tensor
    """What the units' curvature then adds to the output's linear part, Σᵢⱼ Hᵢⱼ Qᵢfⱼ, (..., n, K)."""


class CurvedLayer(NamedTuple):
    """A nonlinear layer of N images on the way forward: what the pass back to the scores needs to know of it."""

    stage: Stage
    gain: Tensor
    """(N, n, w)."""
    curvature: Tensor
    """(N, n, w, w)."""
    directions: Tensor
    """`Sums.scored`, (N, n, w, S + `MIXED`): the windows' rows in which the scores' quadratic part is formed."""
    rest: Tensor
    """The variance of what is neither linear nor quadratic, (N, n)."""
    pairs: Tensor | None
    """The exact covariances of everything that is not linear, (N, n, n), for layers that have them."""

    def quadratic(self, weights: Tensor) -> Tensor:
        """M_i[k, l] = Σ_u a_iu H_u[f_k, f_l] for m scores with weights a (N, m, n): (N, m, S + `MIXED`, ·)."""
        curved = (self.curvature @ self.directions).flatten(1, 2)
        count = curved.shape[-1]
        # filled one by one: small results kept among large temporary ones would leave holes everywhere in memory
        matrices = weights.new_empty(*weights.shape[:2], count, count)
        for score, of_score in enumerate(weights.unbind(1)):
            matrices[:, score] = (self.directions * of_score[..., None, None]).flatten(1, 2).mT @ curved
        return matrices


class Sums(NamedTuple):
    """Sums of the rows of a layer's input, at its windows.

    They are formed for the input as a whole, which is less work, because windows share most of it.
    """

    followed: Tensor
    """Linear rows along the K directions of which all pairs are followed, (N, n, w, K)."""
    others: Tensor
    """The same with the other signs (see `Directions`)."""
    scored: Tensor
    """Linear rows along the directions of the scores, and random sums of all other rows, (N, n, w, S + `MIXED`)."""
    mixed: tuple[Tensor, ...]
    """`mixed_sums`, (N, n, w, signs) each; empty if there are linear rows only."""

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
    """The live tensors of N images: their means, (N, n), and their factors, (N, rows, n)."""

    turned: Tensor
    """The largest share that turns had in the deviations of any layer so far, (N,)."""
    means: dict[Node, Tensor] = field(default_factory=dict)
    factors: dict[Node, Tensor] = field(default_factory=dict)

    def advance(self, plan: Plan, place: int, mean: Tensor, factor: Tensor) -> None:
        """Add the output of stage number `place`, and drop what no later stage needs."""
        output = plan.stages[place].output
        kept = [node for node in plan.needed[place + 1] if node is not output]
        self.means = {node: self.means[node] for node in kept} | {output: mean}
        self.factors = {node: self.factors[node] for node in kept} | {output: factor}


def need_of(plan: Plan, rank: int, itemsize: int, scores: int) -> Need:
    """The most memory that any layer needs for one image with noise of `rank` directions, or the pass back of scores.

    A layer with p inputs and n units of w inputs holds the factor of its input three times (in parts, joined, by unit),
    twice more by window (gathered, and masked where windows are smaller), and the factor of its output twice. To these
    come matrices of all pairs of directions, for the output and for third cumulants if there are any, and four squares
    where pairs are exact. What a layer keeps for the pass back is added to the layers after it. In that pass every
    score has weights on all units of a layer, and matrices of all pairs of S directions, a few times each.
    """
    layout, scored = layout_for(_event(plan), rank, MOST_LEADING), scored_directions(plan, rank, scores)
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
    matrices = 5 * (scored + MIXED) ** 2 + 4 * max(plan.sizes.values()) + 4 * scores
    back = Need("the scores", itemsize * (kept + scores * matrices))
    return max(worst, back, key=lambda need: need.bytes)


def numbers_carried(plan: Plan) -> int:
    """How many numbers the rows of all stages have together, for one image whose noise has full rank."""
    rows = layout_for(_event(plan), plan.sizes[plan.image], MOST_LEADING).total
    return sum(rows * passage.after for passage in plan.passages[:-1])


def carried(plan: Plan, mean: Tensor, covariance: Covariance, outputs: Tensor, skewed: bool) -> tuple[Tensor, Tensor]:
    """Carry images (N, ...) with noise through a network as rows: means (N, k) and covariances (N, k, k) of scores.

    `outputs` (N, k) are the indices of the scores. Unless tensors may be `skewed`, every one is taken as Gaussian, and
    so it is for images where corrections for skewed tensors turn out not to be small (`MOST_TURNED`).
    """
    scores, covariances, turned = _carried(plan, mean, covariance, outputs, skewed)
    for place in (turned > MOST_TURNED).nonzero().flatten().tolist():
        image = slice(place, place + 1)
        again = _carried(plan, mean[image], covariance.entries(image), outputs[image], False)
        where = torch.tensor([place], device=mean.device)
        scores, covariances = scores.index_copy(0, where, again[0]), covariances.index_copy(0, where, again[1])
    return scores, covariances


def _carried(
    plan: Plan, mean: Tensor, covariance: Covariance, outputs: Tensor, skewed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`carried` for better or worse: means and covariances of the scores, and `Joint.turned`, (N,)."""
    means = {plan.image: mean.flatten(1)}
    with full_precision(), progress_bar("layerwise", len(plan.stages) + 1) as show:
        image = covariance.root().mT.expand(len(mean), -1, -1)
        directions = directions_for(plan, means, image, outputs)
        layout = directions.layout
        joint = Joint(mean.new_zeros(len(mean)), means, {plan.image: image})
        layers = []
        for place in range(len(plan.stages)):
            show(place)
            layers.append(_through(joint, plan, place, directions, skewed))
        scores = plan.last.values(joint.means).gather(1, outputs)
        factor = _factor_after(joint, plan.last, layout)
        factor = factor.gather(2, outputs.unsqueeze(1).expand(-1, factor.shape[1], -1)).mT
        covariances = score_covariance(plan, layers, directions, factor, outputs)
    return scores, covariances, joint.turned


@torch.no_grad()
def rough_slopes(plan: Plan, means: dict[Node, Tensor], image: Tensor, outputs: Tensor) -> Tensor:
    """A rough estimate, (N, k, n), of the expected slopes of scores with indices (N, k) in the image.

    The image's factor is replaced by `ROUGH_DIRECTIONS` random sums of its rows, and every tensor taken as Gaussian.
    """
    few = random_signs(ROUGH_DIRECTIONS, image.shape[1], 0, image).mT @ image
    joint = Joint(image.new_zeros(len(image)), dict(means), {plan.image: few})
    gains = []
    for place, stage in enumerate(plan.stages):
        value, rows = stage.before.values(joint.means), stage.before.linears(joint.factors)
        mean, factor = stage.rule.gathered(value), stage.rule.rows_at_windows(rows)
        local = stage.rule.local(mean, factor @ factor.mT)
        gains.append(local.gain)
        joint.advance(plan, place, local.mean, (local.gain.unsqueeze(-2) @ factor).squeeze(-2).mT)
    weights = plan.score_weights(outputs, image)
    for stage, gain in zip(reversed(plan.stages), reversed(gains), strict=True):
        weights = stage.pull_back(gain, weights.pop(stage.output), weights)
    return weights[plan.image]


@torch.no_grad()
def directions_for(plan: Plan, means: dict[Node, Tensor], image: Tensor, outputs: Tensor) -> Directions:
    """The directions to follow for images with factors (N, r, n), and scores with indices (N, k)."""
    layout = layout_for(_event(plan), image.shape[1], outputs.shape[1])
    colour = colours(_event(plan), layout.rank, PAIRED)
    signs = signs_of_colours(colour, image.dtype, image.device)
    scored = scored_directions(plan, layout.rank, outputs.shape[1])
    identity = torch.eye(layout.rank, dtype=image.dtype, device=image.device).expand(len(image), -1, -1)
    if not layout.leading:
        return Directions.of(layout, identity[..., :0], signs, identity)
    along = image @ rough_slopes(plan, means, image, outputs).mT
    if along.shape[-1] > layout.leading:
        along = torch.linalg.svd(along, full_matrices=False).U[..., : layout.leading]
    along = along / torch.linalg.vector_norm(along, dim=(1, 2), keepdim=True).clamp(min=1e-30)
    others = random_normals(layout.rank, scored - layout.leading, image.dtype, image.device)
    basis = torch.linalg.qr(torch.cat([along, others.expand(len(image), -1, -1)], -1)).Q
    leading = basis[..., : layout.leading]
    return Directions.of(layout, leading, signs, identity if scored == layout.rank else basis)


def _through(joint: Joint, plan: Plan, place: int, directions: Directions, skewed: bool) -> CurvedLayer:
    """Take the live tensors through stage number `place`: its affine part, then its nonlinear layer."""
    stage, rule = plan.stages[place], plan.stages[place].rule
    value, rows = stage.before.values(joint.means), _factor_after(joint, stage.before, directions.layout)
    mean, factor = rule.gathered(value), rule.rows_at_windows(rows)
    layout, sums = directions.layout, Sums.of(directions, rule, rows)
    covariance = _window_covariance(layout, factor, sums)
    local = rule.local(mean, covariance)
    layer = curved_layer(layout, stage, local, mean, factor, sums, covariance)
    third = None
    if skewed and factor.shape[-1] > layout.rank:
        third = third_order(layout, factor, sums, local, covariance, rule.windows >= 0)
        local = rule.local(mean, covariance, third.cumulants)._replace(curvature=local.curvature)
        layer = layer._replace(gain=local.gain)
    output = _output_factor(layout, local, factor, sums, layer, third, place)
    if third is not None:
        joint.turned = torch.maximum(joint.turned, _share_of_turns(layout, output.detach()))
    joint.advance(plan, place, local.mean, output.mT)
    return layer


def _share_of_turns(layout: FactorLayout, factor: Tensor) -> Tensor:
    """How much of the deviations of a layer's n units are turns, on average over them: (N,), from (N, n, rows)."""
    size = torch.linalg.vector_norm(factor, dim=(1, 2)).clamp(min=torch.finfo(factor.dtype).tiny)
    return torch.linalg.vector_norm(factor[..., layout.turns], dim=(1, 2)) / size


def curved_layer(
    layout: FactorLayout, stage: Stage, local: Local, mean: Tensor, factor: Tensor, sums: Sums, covariance: Tensor
) -> CurvedLayer:
    """What is kept of a layer: from its units' moments, and its windows' means, factors, sums and covariances."""
    beyond_linear = local.variance - local.linear_variance(covariance)
    rest = (beyond_linear - local.quadratic_variance(covariance)).clamp(min=0)
    pairs = None
    if stage.rule.has_pairs:
        alone = factor.squeeze(-2)  # units that look at one number each
        square = alone @ alone.mT
        if factor.shape[-1] > layout.rank:
            half = sums.followed.squeeze(-2) @ alone[..., layout.turns].mT
            square = square + half + half.mT
        square = torch.diagonal_scatter(square, covariance.flatten(-3), dim1=-2, dim2=-1)
        pairs = stage.rule.pairs(mean.squeeze(-1), square)
        pairs = torch.diagonal_scatter(pairs, beyond_linear, dim1=-2, dim2=-1)
    return CurvedLayer(stage, local.gain, local.curvature, sums.scored, rest, pairs)


def _output_factor(
    layout: FactorLayout,
    local: Local,
    factor: Tensor,
    sums: Sums,
    layer: CurvedLayer,
    third: ThirdOrder | None,
    place: int,
) -> Tensor:
    """The output's factor, (N, n, rows): the input's through the gains, plus the rows that the nonlinearity adds."""
    gained = (local.gain.unsqueeze(-2) @ factor).squeeze(-2)
    quadratic = _quadratic_rows(local.curvature, sums, factor[..., layout.turns])
    rest = random_signs(layout.signs, layer.rest.shape[-1], place, layer.rest)
    rest = standard_deviation(layer.rest).unsqueeze(-1) * rest
    no_turns = gained.new_zeros(*gained.shape[:-1], layout.paired)
    if gained.shape[-1] == layout.rank:
        return torch.cat([gained, quadratic, rest, no_turns], -1)
    mixed = mixed_rows(layout, local, factor, sums.mixed)
    added = [quadratic, rest + mixed, no_turns if third is None else third.turns]
    return torch.cat([gained[..., : layout.rank], gained[..., layout.rank :] + torch.cat(added, -1)], -1)


def _quadratic_rows(curvature: Tensor, sums: Sums, turns: Tensor) -> Tensor:
    """The quadratic rows that units make of linear ones by their curvature, from the windows' sums and turns."""
    followed = sums.followed + turns if turns.shape[-1] else sums.followed
    curved = curvature @ followed
    diagonal = (curved * sums.others).sum(-2)
    return as_rows(torch.diagonal_scatter(curved.mT @ followed, diagonal, dim1=-2, dim2=-1))


MIXED_SEEDS = (1001, 2002, 3003)
"""Seeds of the signs in `mixed_sums`: for the linear rows, and two for the others."""


def mixed_sums(layout: FactorLayout, rows: Tensor) -> tuple[Tensor, ...]:
    """Sums of rows (..., rows) with random signs, (..., signs) each: one of linear rows, two of the others."""
    linear, others = rows[..., : layout.rank], rows[..., layout.rank :]
    parts = zip((linear, others, others), MIXED_SEEDS, strict=True)
    return tuple(part @ random_signs(layout.signs, part.shape[-1], seed, part) for part, seed in parts)


def mixed_rows(layout: FactorLayout, local: Local, factor: Tensor, sums: tuple[Tensor, ...]) -> Tensor:
    """Rows (..., n, signs) for what curvature makes of rows beyond the linear ones.

    Their products for any two units are tr(HLH'N) + ½ tr(HNH'N) on average. L and N are the covariances, between the
    windows of the two, of the linear rows and of all others. This is ½ tr(HSH'S) with S = L + N, less ½ tr(HLH'L),
    which the quadratic rows have. One row is νᵀH(λ + ν'/√2), where λ is a sum of the linear rows, and ν and ν' are sums
    of the others, with random signs: these are `sums`, the `mixed_sums` of the factor. The signs are the same in all
    layers, so that layers which make something of the same rows are correlated as they should be. Rows are scaled so
    that every unit has its `mixed_variance`.
    """
    first, second, third = sums
    rows = ((local.curvature @ second) * (first + 0.5**0.5 * third)).sum(-2)
    squares = rows.square().sum(-1)
    bends = squares > torch.finfo(squares.dtype).eps ** 2 * squares.detach().amax(-1, keepdim=True)
    scale = torch.where(bends, mixed_variance(layout, local, factor) / torch.where(bends, squares, 1.0), 0.0)
    return rows * standard_deviation(scale).unsqueeze(-1)


def mixed_variance(layout: FactorLayout, local: Local, factor: Tensor) -> Tensor:
    """The exact variance of `mixed_rows`, (..., n): ½ tr(HSHS) − ½ tr(HLHL), with S the window's whole covariance."""
    if factor.shape[-1] == layout.rank:
        return torch.zeros_like(local.variance)
    linear, others = factor[..., : layout.rank], factor[..., layout.rank :]
    curved, bent = local.curvature @ (linear @ linear.mT), local.curvature @ (others @ others.mT)
    return ((curved + 0.5 * bent) * bent.mT).sum((-2, -1)).clamp(min=0)


def _window_covariance(layout: FactorLayout, factor: Tensor, sums: Sums) -> Tensor:
    """The covariance of every window, (..., n, w, w), from its factor.

    It is S + C: S are the products of all rows, and C = FTᵀ + TFᵀ because the turns T belong to the linear rows F. So
    that no variance is negative, it is computed as R(I + M/2)²Rᵀ with S = RRᵀ and M = R⁻¹CR⁻ᵀ, which is the same to
    first order.
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
    """The factor of an affine segment's results, (N, rows, p). Of its sources, the image has linear rows only."""
    factors = {node: joint.factors[node] for node in segment.sources}
    counts = [x.shape[1] for x in factors.values()]
    if min(counts) == max(counts):
        return segment.linears(factors)
    linear = segment.linears({node: x[:, : layout.rank] for node, x in factors.items()})
    others = {node: x[:, layout.rank :] for node, x in factors.items() if x.shape[1] > layout.rank}
    return torch.cat([linear, segment.linears(others)], 1)


def third_order(
    layout: FactorLayout, factor: Tensor, sums: Sums, local: Local, covariance: Tensor, present: Tensor
) -> ThirdOrder:
    """Third cumulants of a layer's windows, and the turns of its output.

    The windows have factors (..., n, w, rows) with their sums, and covariances (..., n, w, w); `local` are the units'
    Gaussian moments, and `present` (n, w) says which places belong to a window.
    """
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
    """The covariance of scores, (N, k, k), from their factors (N, k, rows) and output indices (N, k).

    Let a be the weights of a score on a layer's units: the product of the gains behind that layer. To second order the
    score is its linear part, a quadratic part ½(M[ε, ε] − tr M) with M = Σ a H[f, f] over all units of all layers, and
    a rest. The covariance is the sum of (F + T)(F + T)ᵀ, ½⟨M, M'⟩ and Σ a a' rest. Layers with exact pairs have those
    in place of their own part of ½⟨M, M'⟩.
    """
    layout = directions.layout
    linear = factor[..., : layout.rank]
    total = linear @ linear.mT
    if factor.shape[-1] > layout.rank:
        half, turns = directions.half_turns(factor), factor[..., layout.turns]
        total = total + half + half.mT + turns @ turns.mT
    weights = plan.score_weights(outputs, factor)
    all_exact = len(layers) == 1 and layers[0].pairs is not None
    quadratic: Tensor | None = None  # M of all layers so far
    for layer in reversed(layers):
        on_units = weights.pop(layer.stage.output)
        own = None if all_exact else layer.quadratic(on_units)
        if layer.pairs is None:
            total = total + (on_units * layer.rest.unsqueeze(1)) @ on_units.mT
        else:
            total = total + on_units @ layer.pairs @ on_units.mT
            total = total if own is None else total - _half_products(own, layout)
        quadratic = own if quadratic is None or own is None else quadratic + own
        weights = layer.stage.pull_back(layer.gain, on_units, weights)
    if quadratic is not None:
        total = total + _half_products(quadratic, layout)
    return 0.5 * (total + total.mT)


def _half_products(matrices: Tensor, layout: FactorLayout) -> Tensor:
    """½⟨M, M'⟩ for all pairs of matrices (N, k, S + `MIXED`, ·): (N, k, k).

    Each random sum of rows counts as one direction more, in pairs with every other but not with itself: products of a
    sum with itself are not those of the rows.
    """
    linear = inner_product_weights(layout.rank, layout.leading, matrices.shape[-1] - MIXED, matrices)
    weights = torch.nn.functional.pad(linear, (0, MIXED, 0, MIXED), value=MIXED / (MIXED - 1))
    weights[-MIXED:, -MIXED:].fill_diagonal_(0.0)
    across = linear[:1, -1:] if layout.leading else linear.diagonal()[:1]
    weights[:-MIXED, -MIXED:] = weights[-MIXED:, :-MIXED] = across
    if layout.leading:
        weights[: layout.leading, -MIXED:] = weights[-MIXED:, : layout.leading] = 1.0
    return 0.5 * (matrices * weights).flatten(2) @ matrices.flatten(2).mT


def layout_for(event: tuple[int, ...], rank: int, scores: int) -> FactorLayout:
    """The layout for noise of `rank` directions of an event, and so many scores."""
    coloured = int(colours(event, rank, PAIRED).max()) + 1
    leading = min(scores, MOST_LEADING, rank - coloured)
    return FactorLayout.of(rank, coloured + leading, SIGNS, leading)


def scored_directions(plan: Plan, rank: int, scores: int) -> int:
    """S, how many directions of the noise count in the quadratic part of so many scores: as many as their work and
    memory allow.
    """
    in_windows = sum(stage.rule.windows.numel() for stage in plan.stages)
    of_one = max(FEWEST_SCORED, min(MOST_SCORED, math.isqrt(SCORE_WORK // max(1, in_windows))))
    return min(rank, max(MANY_SCORED, min(of_one, math.isqrt(SCORES_NUMBERS // scores))))


def _event(plan: Plan) -> tuple[int, ...]:
    """The shape of an image."""
    return tuple(shape_of(plan.image)[1:])
