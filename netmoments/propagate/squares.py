"""Squares: the covariance of all live tensors as a matrix, with cumulants beyond it, through every layer of a network.

A tensor's covariance passes an affine part by its rows and then by its columns. A nonlinear layer has exact means,
variances and covariances of pairs under a Gaussian, and corrections of first order in the third (and fourth) cumulants
of its input, Edgeworth's: with Fᵣ = E[f Heᵣ(u)], λ the standardized cumulants and ρ the correlations of the input,

    E yᵢ        += λ_iii/6 F₃ + λ_iiii/24 F₄,
    Cov(yᵢ, yⱼ) += ½λ_iij Σᵣ Fᵢ,₂₊ᵣ Fⱼ,₁₊ᵣ ρʳ/r! + λ_iii/6 Σᵣ Fᵢ,₃₊ᵣ Fⱼ,ᵣ ρʳ/r! + ¼λ_iijj Fᵢ,₂ Fⱼ,₂,

the first two also with i and j exchanged.

Nothing here waits for a value, so that a pass is recorded on a GPU as one graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from netmoments.covariances import Covariance
from netmoments.memory import elements_together
from netmoments.normal import standard_deviation
from netmoments.precision import full_precision
from netmoments.progress import progress_bar
from netmoments.propagate.cumulants import Cumulants, FourthCumulants, FourthOrder, OwnCumulants
from netmoments.propagate.plan import Passage, Plan
from netmoments.propagate.rows import MOST_DIRECTIONS, Need
from netmoments.rules.base import Local, Nonlinearity, PowerMoments, ThirdCumulants, whitened

MOST_CENTRES = 4096
"""Units of all layers whose third cumulants are followed, at most."""
CENTRES_WORK = 2**37
"""So many that they, times the square of the joint tensor's size, are no more than this."""
MOST_SHARED = 2.5
"""Units that look at a number, on average over a layer; 2.25 for pools of 3×3 with steps of 2."""
SERIES = 4
"""Terms of the Hermite series of covariances where a rule has no exact pairs."""


class DenseJoint(NamedTuple):
    """The joint distribution of P numbers of N images."""

    mean: Tensor
    """(N, P)."""
    covariance: Tensor
    """(N, P, P)."""
    cumulants: Cumulants


class SquareLayout(NamedTuple):
    """What carrying squares through a plan is like; see `layout_of`."""

    followed: tuple[int, ...]
    """Of how many units of each stage cumulants are followed."""
    fourth: bool
    """Whether fourth cumulants are kept: of layers with known own moments, all units of which are followed."""
    largest: Need
    """The stage that takes most memory for one image, were a number one byte: squares before and after, and of its
    units; rows of centres."""
    worthwhile: bool
    """Whether squares know more than rows.

    The cumulants of at least half the units of every layer must be followed: where they are not, rows know as much.
    Units must not share most of their windows, as those of a softmax or a normalisation do, all of whose covariances
    are far from their first terms."""
    numbers: int
    """How many numbers all stages together carry, for one image: of the square and of the rows of centres."""


def layout_of(plan: Plan) -> SquareLayout:
    """The units that are followed, and what follows from that; `plan.once(layout_of)` finds it once."""
    stages, followed = plan.stages, followed_units(plan)
    earlier = list(zip(stages[:-1], followed[:-1], strict=True))
    fourth = all(stage.rule.width == 1 and stage.rule.units == count for stage, count in earlier)
    worthwhile = all(2 * count >= stage.rule.units for stage, count in earlier)
    worthwhile &= all(stage.rule.windows.numel() <= MOST_SHARED * stage.before.size for stage in stages)
    largest, centres, carried = Need("the scores", plan.last.size**2), 0, 0
    for passage, stage, count in zip(plan.passages, stages, followed, strict=False):
        before, after, n, w = passage.before, passage.after, stage.rule.units, stage.rule.width
        squares = before * before + 2 * before * after + 2 * after * after + 6 * n * n + (2 * n * after if w > 1 else 0)
        squares += n * w * w * 4
        rows = 12 * centres * after + (8 * centres * centres if fourth else 0)
        largest = max(largest, Need(stage.name, squares + rows), key=lambda need: need.bytes)
        carried += after * (after + 4 * centres)
        centres += count * min(w, MOST_DIRECTIONS)
    return SquareLayout(followed, fourth, largest, worthwhile, carried)


def followed_units(plan: Plan) -> tuple[int, ...]:
    """Of how many units of each stage third cumulants are followed: all, or as many as their work allows.

    Before a stage with P numbers in its joint tensor there may be so many centres that they, times P², are no more than
    `CENTRES_WORK`; the layers before it share them, and the last has no use for any.
    """
    sizes = [max(passage.before, passage.after) for passage in plan.passages[:-1]]
    most = [min(MOST_CENTRES, CENTRES_WORK // size**2) for size in sizes]
    counts, used = [0] * len(most), 0
    for place, stage in enumerate(plan.stages[:-1]):
        directions = min(stage.rule.width, MOST_DIRECTIONS)
        later = range(place + 1, len(most))
        share = max(0, min((most[after] - used) // (after - place) for after in later))
        counts[place] = min(stage.rule.units, share // directions)
        used += counts[place] * directions
    return tuple(counts)


def need_of(plan: Plan, itemsize: int) -> Need:
    """The most memory that a stage takes for one image."""
    layer, numbers = plan.once(layout_of).largest
    return Need(layer, itemsize * numbers)


def carried(
    plan: Plan, mean: Tensor, covariance: Covariance, outputs: Tensor, followed: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Means (N, k) and covariances (N, k, k) of the scores with indices `outputs` (N, k), for images (N, ...).

    So many units of each stage are followed as is said, by default as their work allows; with none of any, what enters
    a layer is taken for Gaussian.
    """
    layout = plan.once(layout_of)
    followed, fourth = (layout.followed, layout.fourth) if followed is None else (followed, False)
    flat = mean.flatten(1)
    dense = covariance.dense().expand(len(flat), -1, -1)
    joint = DenseJoint(flat, dense, Cumulants.none(flat, fourth=fourth))
    *passages, last = plan.passages
    with full_precision(), progress_bar("layerwise", len(plan.passages)) as show:
        for place, (passage, stage, count) in enumerate(zip(passages, plan.stages, followed, strict=True)):
            show(place)
            joint = DenseJoint(*through_segment(joint, passage), joint.cumulants.through(passage.linears))
            joint = through_layer(joint, stage.rule, stage.before.size, count)
        scores, square = through_segment(joint, last)
    rows = square.gather(1, outputs.unsqueeze(-1).expand(-1, -1, square.shape[-1]))
    every = rows.gather(2, outputs.unsqueeze(1).expand(-1, outputs.shape[1], -1))
    return scores.gather(1, outputs), 0.5 * (every + every.mT)


def through_segment(joint: DenseJoint, passage: Passage) -> tuple[Tensor, Tensor]:
    """Mean (N, P′) and covariance (N, P′, P′) after an affine part: A Σ Aᵀ by its rows, and then by its columns."""
    return passage.values(joint.mean), passage.linears(passage.linears(joint.covariance).mT)


def through_layer(joint: DenseJoint, rule: Nonlinearity, inputs: int, followed: int) -> DenseJoint:
    """A nonlinear layer on the first `inputs` numbers, of which so many units are followed as centres."""
    variance = joint.covariance[:, :inputs, :inputs].diagonal(dim1=-2, dim2=-1).clamp(min=0)
    power = rule.power_moments(joint.mean[:, :inputs], variance) if rule.width == 1 else None
    if power is None:
        return _through_windows(joint, rule, inputs, followed)
    return _Units(joint, rule, inputs, power).output(followed)


MOST_SKEW, MOST_KURTOSIS = 10.0, 100.0
"""Of a unit's input, as something has that happens in 1 % of cases: beyond, the terms that they bring are larger than
what they correct, and the input is taken for Gaussian. A unit that sees none but dead ones would have 10²⁰."""


class _Units:
    """A layer of units that look at one number each, with known moments of their powers."""

    def __init__(self, joint: DenseJoint, rule: Nonlinearity, n: int, power: PowerMoments) -> None:
        self.joint, self.rule, self.n, self.power = joint, rule, n, power
        self.square = _no_negative_variance(joint.covariance[:, :n, :n])
        variance = self.square.diagonal(dim1=-2, dim2=-1)
        self.s = standard_deviation(variance)
        self.inverse = torch.where(self.s > 0, 1 / torch.where(self.s > 0, self.s, 1.0), 0.0)
        rho = self.square * self.inverse.unsqueeze(-1) * self.inverse.unsqueeze(-2)  # one by one: both may be huge
        self.rho = _without_diagonal(rho.clamp(-1, 1))
        self.third = self.skew = self.twice = None
        self.spread: FourthCumulants | None = None
        self.kurtosis: Tensor | None = None
        cumulants = joint.cumulants
        self.per_variance = self.inverse.square().clamp(max=torch.finfo(self.s.dtype).max)
        if cumulants.rows.numel():
            third, self.spread = cumulants.with_another(n), cumulants.fourths(n)
            tame = (third.diagonal(dim1=-2, dim2=-1) * self.per_variance * self.inverse).abs() < MOST_SKEW
            if self.spread is not None:
                tame = tame & ((self.spread.own * self.per_variance * self.per_variance).abs() < MOST_KURTOSIS)
            self.per_variance = torch.where(tame, self.per_variance, 0.0)
            self.third = third * self.per_variance.unsqueeze(-1)  # of uᵢ, uᵢ with all numbers
            self.twice = self.third[..., :n] * self.inverse.unsqueeze(-2)
            self.skew = self.twice.diagonal(dim1=-2, dim2=-1)
        if self.spread is not None:
            self.kurtosis = self.spread.own * self.per_variance * self.per_variance
            self.movement = self.each_by_variance(self.spread.pairs)

    def each_by_variance(self, pairs: Tensor) -> Tensor:
        """κ_iijj (N, n, n) of units as those of u; of units that hardly vary it is 0, not 0 · ∞."""
        return pairs * self.per_variance.unsqueeze(-1) * self.per_variance.unsqueeze(-2)

    def corrected(self, moments: tuple[Tensor, ...], order: int) -> Tensor:
        """λ_iii/6 Fᵣ₊₃ + λ_iiii/24 Fᵣ₊₄: what cumulants add to Fᵣ, as far as these are known."""
        if self.skew is None or order + 3 >= len(moments):
            return torch.zeros_like(moments[0])
        total = self.skew * moments[order + 3] * (1 / 6)
        if self.kurtosis is not None and order + 4 < len(moments):
            total = torch.addcmul(total, self.kurtosis, moments[order + 4], value=1 / 24)
        return total

    def output(self, followed: int) -> DenseJoint:
        n, first, second = self.n, self.power.first, self.power.second
        others = self.joint.covariance[:, :n, n:]
        moved = self.corrected(first, 0)
        self.mean = first[0] + moved  # less f(m), as all moments here
        self.slope = first[1] + self.corrected(first, 1)
        self.bend = first[2] + self.corrected(first, 2)
        gain = self.slope * self.inverse
        variance = second[0] - first[0].square() + self.corrected(second, 0) - 2 * first[0] * moved
        self.covariance = torch.diagonal_scatter(self.pairs(), variance.clamp(min=0), dim1=-2, dim2=-1)
        across = gain.unsqueeze(-1) * others
        if self.third is not None:
            across = across + 0.5 * first[2].unsqueeze(-1) * self.third[..., n:]
        covariance = _joined(self.covariance, across, self.joint.covariance[:, n:, n:])
        mean = torch.cat([self.power.centre + self.mean, self.joint.mean[:, n:]], -1)
        factor = torch.cat([gain, torch.ones_like(self.joint.mean[:, n:])], -1)[:, None, None]
        cumulants = self.joint.cumulants.through(lambda rows: rows * factor)
        if followed:
            cumulants = self.with_centres(cumulants, followed)
        return DenseJoint(mean, covariance, cumulants)

    def pairs(self) -> Tensor:
        """Covariances of the outputs, but for the diagonal."""
        first, rho = self.power.first, self.rho
        gain = first[1] * self.inverse
        if self.rule.has_pair_formula:
            beyond = self.rule.pairs(self.joint.mean[:, : self.n], self.square)
            assert beyond is not None
            total = beyond + self.square * (gain.unsqueeze(-1) * gain.unsqueeze(-2))
        else:
            total = _series(first[1 : SERIES + 1], first[1 : SERIES + 1], rho)
        if self.twice is None or self.skew is None:
            return total
        half = 0.5 * self.twice * _series(first[2:4], first[1:3], rho, start=0)
        skewed = tuple(self.skew / 6 * moment for moment in first[4:6])
        half = half + _series(skewed, first[1:3], rho)
        total = total + half + half.mT
        if self.spread is not None:
            total = total + 0.25 * self.movement * (first[2].unsqueeze(-1) * first[2].unsqueeze(-2))
        return total

    def with_centres(self, before: Cumulants, count: int) -> Cumulants:
        """With units of this layer as centres: all of them in their order, or those of largest bend."""
        n = self.n
        chosen = None if count == n else self.bend.detach().abs().topk(count, dim=-1).indices
        others = _picked(self.joint.covariance[:, :n, n:] * self.inverse.unsqueeze(-1), chosen)
        along = torch.cat([self.slope.unsqueeze(-2) * _picked(self.rho, chosen), others], -1)
        bent = 0.5 * _picked(self.bend, chosen).unsqueeze(-1) * along
        own = torch.cat([self.own_thirds(chosen), self.own_thirds_with_others(others, chosen)], -1)
        fourth = None if before.fourth is None else self.fourth_order(before.fourth)
        new = torch.stack([_one_each(chosen, along, n), along, bent, own], 1)
        return Cumulants(torch.cat([before.rows, new], 2), fourth)

    @cached_property
    def variance_slope(self) -> Tensor:
        """c₂′ = dVar f/du."""
        return self.power.second[1] - 2 * self.power.first[0] * self.power.first[1]

    @cached_property
    def variance_share(self) -> Tensor:
        """What a change of the input's variance does to that of f, beyond the slope squared."""
        return 0.5 * self.power.second[2] - self.power.first[0] * self.power.first[2] - self.slope.square()

    def own_thirds(self, chosen: Tensor | None) -> Tensor:
        """κ(yₐ, yₐ, y_b) of chosen a beyond the trees and what earlier centres give; a third of κ(y, y, y) for a = b.

        κ = Cov(f², f′) − 2 E f Cov(f, f′), the first by its series. (N, count, n).
        """
        first = self.power.first
        second = tuple(_picked(moment, chosen) for moment in self.power.second)
        mean, slope, rho = _picked(self.mean, chosen), _picked(self.slope, chosen), _picked(self.rho, chosen)
        total = _series(second[1:5], first[1:5], rho) - 2 * mean.unsqueeze(-1) * _picked(self.covariance, chosen)
        total = total - self.bend.unsqueeze(-2) * (slope.unsqueeze(-1) * rho).square()
        alone = self.power.third[0] - 3 * first[0] * self.power.second[0] + 2 * first[0] ** 3
        if self.skew is not None and self.twice is not None:
            given = (0.5 * second[2] - slope.square()).unsqueeze(-1)
            twice = given * _picked(self.twice, chosen) * self.slope.unsqueeze(-2)
            once = 0.5 * second[1].unsqueeze(-1) * first[2].unsqueeze(-2) * _picked(self.twice.mT, chosen)
            skewed = (second[4] * _picked(self.skew, chosen) / 6).unsqueeze(-1) * first[1].unsqueeze(-2)
            skewed = skewed + second[1].unsqueeze(-1) * (first[4] * self.skew / 6).unsqueeze(-2)
            total = total + twice + once + skewed * rho
            alone = alone + self.corrected(self.power.third, 0) - 3 * first[0] * self.corrected(self.power.second, 0)
            alone = alone + self.corrected(first, 0) * (6 * first[0] ** 2 - 3 * self.power.second[0])
            alone = alone - self.slope**3 * self.skew
        if self.spread is not None:
            total = total + 0.25 * self.movement * second[2].unsqueeze(-1) * first[2].unsqueeze(-2)
        if chosen is None:
            return torch.diagonal_scatter(total, alone / 3, dim1=-2, dim2=-1)
        places = chosen.unsqueeze(-1)
        return total.scatter(-1, places, (_picked(alone, chosen) / 3).unsqueeze(-1))

    def own_thirds_with_others(self, others: Tensor, chosen: Tensor | None) -> Tensor:
        """κ(y, y, ·) with the numbers beside the layer, likewise, from their covariances with u: (N, count, P − n)."""
        total = _picked(self.variance_slope, chosen).unsqueeze(-1) * others
        if self.third is not None:
            third = _picked(self.third[..., self.n :], chosen)
            total = total + _picked(self.variance_share, chosen).unsqueeze(-1) * third
        return total

    def fourth_order(self, before: FourthOrder) -> FourthOrder:
        """Of the centres before, and of this layer's."""
        _, first, second, third, fourth = self.power
        mean, square, cube = first[0], second[0], third[0]
        own = OwnCumulants(
            third_bend=first[3] + self.corrected(first, 3),
            variance_bend=second[2] - 2 * first[1].square() - 2 * mean * first[2],
            skew_slope=third[1] - 3 * first[1] * square - 3 * mean * second[1] + 6 * mean.square() * first[1],
            fourth=fourth - 4 * mean * cube - 3 * square.square() + 12 * mean.square() * square - 6 * mean**4,
        )
        slope, share, bend = self.variance_slope, self.variance_share, own.variance_bend
        together = _series((slope, bend), (slope, bend), self.rho)
        e, v, _, x = self.joint.cumulants.rows[..., : self.n].unbind(1)
        along, response, beyond = (part * self.inverse.unsqueeze(-2) for part in (v, e, x))
        moved = slope.unsqueeze(-2) * beyond
        if self.spread is not None and self.twice is not None:
            mixed = slope.unsqueeze(-1) * share.unsqueeze(-2) * self.twice.mT
            passed = share.unsqueeze(-1) * self.slope.square().unsqueeze(-2)
            mixed = mixed + passed * self.each_by_variance(self.spread.by_one)
            together = together + mixed + mixed.mT + share.unsqueeze(-1) * share.unsqueeze(-2) * self.movement
            moved = moved + ((share * self.per_variance).unsqueeze(-1) * self.spread.with_centres).mT
        return FourthOrder(
            OwnCumulants(*(torch.cat(pair, 1) for pair in zip(before.own, own, strict=True))),
            _joined(before.between, along, self.rho),
            _joined(before.variances, moved, _without_diagonal(together)),
            _joined(before.responses, torch.zeros_like(response), torch.zeros_like(self.rho), response.mT),
        )


def _through_windows(joint: DenseJoint, rule: Nonlinearity, inputs: int, followed: int) -> DenseJoint:
    """A layer known by its gains and curvatures: Cov = gᵀCg′ + ½ tr(HCH′Cᵀ), each unit's own variance as it is."""
    look = _Windows(joint, rule, inputs)
    square = _no_negative_variance(joint.covariance[:, :inputs, :inputs])
    beyond = rule.pairs(joint.mean[:, :inputs], square) if rule.has_pair_formula else look.quadratic_pairs()
    assert beyond is not None
    own = look.gained_rows(look.gained_rows(square).mT) + beyond
    across = look.gained_rows(joint.covariance[:, inputs:, :inputs]).mT
    if look.turned is not None:
        half = 0.5 * look.gained_rows(look.turned[..., :inputs])
        own, across = own + half + half.mT, across + 0.5 * look.turned[..., inputs:]
    least = own.diagonal(dim1=-2, dim2=-1)  # of two terms; less would be no covariance
    own = torch.diagonal_scatter(own, torch.maximum(look.local.variance, least), dim1=-2, dim2=-1)
    covariance = _joined(own, across, joint.covariance[:, inputs:, inputs:])
    mean = torch.cat([look.local.mean, joint.mean[:, inputs:]], -1)
    cumulants = joint.cumulants.through(look.through)._replace(fourth=None)
    if followed:
        cumulants = look.with_centres(cumulants, followed)
    return DenseJoint(mean, covariance, cumulants)


class _Windows:
    """What the units of a layer look at, of a square."""

    def __init__(self, joint: DenseJoint, rule: Nonlinearity, inputs: int) -> None:
        self.joint, self.rule, self.inputs = joint, rule, inputs
        self.places, self.present = rule.windows.clamp(min=0), rule.windows >= 0
        both = self.present.unsqueeze(-1) & self.present.unsqueeze(-2)
        covariance = _positive(joint.covariance[:, self.places.unsqueeze(-1), self.places.unsqueeze(-2)] * both)
        mean = joint.mean[:, :inputs][:, self.places] * self.present
        self.local = rule.local(mean, covariance)
        self.directions = min(rule.width, MOST_DIRECTIONS)
        root, inverse = whitened(covariance, self.local.curvature, self.present, self.directions)
        self.axes = inverse[..., : self.directions, :] * self.present.unsqueeze(-2)
        """Of the directions t = axes·(z − m) of each window, (N, n, q, w)."""
        turn = root[..., : self.directions]
        self.bend = turn.mT @ self.local.curvature @ turn
        """E ∇²f along them, (N, n, q, q)."""
        self.turned: Tensor | None = None
        centres = joint.cumulants.rows.shape[2]
        if centres:
            rows = [part.mT.contiguous() for part in joint.cumulants.rows[..., :inputs].unbind(1)]
            each = len(mean) * centres * self.directions * max(self.directions, rule.width)
            parts = []
            for some in self.in_parts(each):
                seen = [self.along_axes(part, some) for part in rows]
                parts.append(joint.cumulants.of_windows(seen, self.bend[:, some]))
            kappa, self.turned = (torch.cat(part, 1) for part in zip(*parts, strict=True))
            skewed = rule.local(mean, covariance, ThirdCumulants(root, kappa))
            self.local = Local(skewed.mean, skewed.variance, skewed.gain, self.local.curvature)

    def in_parts(self, each: int) -> list[slice]:
        """All units, so many at a time that `each` numbers of every one of them are a piece."""
        together = elements_together("pass", self.joint.mean, each)
        return [slice(start, start + together) for start in range(0, self.rule.units, together)]

    def along_axes(self, columns: Tensor, units: slice) -> Tensor:
        """Columns (N, p, R) along the directions of some units: (N, m, q, R)."""
        return self.axes[:, units] @ columns[:, self.places[units]]

    def gained_rows(self, rows: Tensor) -> Tensor:
        """Rows (N, ..., p) of the input as rows (N, ..., n) of the output."""
        total = torch.zeros_like(rows[..., :1])
        gain = self.local.gain.reshape(len(rows), *[1] * (rows.dim() - 2), *self.local.gain.shape[1:])
        for place in range(self.rule.width):
            total = total + gain[..., place] * rows[..., self.places[:, place]]
        return total

    def through(self, rows: Tensor) -> Tensor:
        """Rows (N, ..., P) of the joint tensor, with the output in the input's place."""
        return torch.cat([self.gained_rows(rows[..., : self.inputs]), rows[..., self.inputs :]], -1)

    def quadratic_pairs(self) -> Tensor:
        """½ tr(HCH′Cᵀ) of all pairs of units, (N, n, n), along the directions."""
        square, q = self.joint.covariance[:, : self.inputs, : self.inputs], self.directions
        every, parts = slice(None), []
        for some in self.in_parts(len(square) * q * (2 * self.places.numel() + self.inputs)):
            rows = self.along_axes(square, some)  # (N, m, q, p)
            bent = (self.bend[:, some] @ rows).flatten(1, 2)
            plain = self.along_axes(rows.flatten(1, 2).mT, every)  # (N, n, q, mq)
            products = (self.bend @ plain) * self.along_axes(bent.mT, every)
            parts.append(0.5 * products.unflatten(-1, (-1, q)).sum((2, 4)))
        return torch.cat(parts, -1)

    def with_centres(self, before: Cumulants, count: int) -> Cumulants:
        """With the directions of units as centres: of all, or of those of largest curvature."""
        chosen = self.bend.detach().square().sum((-2, -1)).topk(count, dim=-1).indices  # (N, m)
        images = torch.arange(len(chosen), device=chosen.device).unsqueeze(-1)
        axes, bend, places = self.axes[images, chosen], self.bend[images, chosen], self.places[chosen]
        rows = axes @ self.joint.covariance[images.unsqueeze(-1), places]  # (N, m, q, P)
        along = self.through(rows.flatten(1, 2))
        bent = self.through((0.5 * bend @ rows).flatten(1, 2))
        response = _one_each(chosen.repeat_interleave(self.directions, dim=-1), along, self.rule.units)
        new = torch.stack([response, along, bent, torch.zeros_like(along)], 1)
        return Cumulants(torch.cat([before.rows, new], 2), None)


def _picked(rows: Tensor, chosen: Tensor | None) -> Tensor:
    """Those of chosen units (N, m), of (N, n, ...); all of them for None."""
    if chosen is None:
        return rows
    index = chosen.reshape(*chosen.shape, *[1] * (rows.dim() - 2)).expand(-1, -1, *rows.shape[2:])
    return rows.gather(1, index)


def _one_each(chosen: Tensor | None, like: Tensor, units: int) -> Tensor:
    """1 at every chosen unit, (N, m, P), in rows like these."""
    places = torch.arange(units, device=like.device).expand(len(like), -1) if chosen is None else chosen
    return torch.zeros_like(like).scatter(-1, places.unsqueeze(-1), 1.0)


def _series(left: tuple[Tensor, ...], right: tuple[Tensor, ...], rho: Tensor, start: int = 1) -> Tensor:
    """Σᵣ leftᵣ rightᵣ ρʳ/r! of all pairs of units, r from `start`, 0 or 1: (N, n) each to (N, n, n). Horner's rule."""
    total: Tensor | None = None
    for place in reversed(range(len(left))):
        one, other = left[place].unsqueeze(-1), right[place].unsqueeze(-2)
        scale = 1 / math.factorial(start + place)
        total = scale * one * other if total is None else torch.addcmul(total * rho, one, other, value=scale)
    assert total is not None
    return total * rho if start else total


def _joined(first: Tensor, across: Tensor, last: Tensor, back: Tensor | None = None) -> Tensor:
    """The matrix of four blocks, (N, a + b, a + b), symmetric unless what is below is given: (N, b, a)."""
    if not across.shape[-1] or not across.shape[-2]:
        return last if across.shape[-1] else first
    below = across.mT if back is None else back
    return torch.cat([torch.cat([first, across], -1), torch.cat([below, last], -1)], -2)


def _positive(covariance: Tensor) -> Tensor:
    """Windows' covariances (..., w, w) without negative eigenvalues, which corrections of first order may leave."""
    own = covariance.detach()
    failed = torch.linalg.cholesky_ex(own + torch.diag_embed(1e-6 * own.diagonal(dim1=-2, dim2=-1))).info > 0
    values, vectors = torch.linalg.eigh(own)
    mended = (vectors * values.clamp(min=0).unsqueeze(-2)) @ vectors.mT
    return covariance + torch.where(failed[..., None, None], mended - own, 0.0)


def _no_negative_variance(square: Tensor) -> Tensor:
    """The same with variances of at least 0: corrections of first order may make them less."""
    own = square.diagonal(dim1=-2, dim2=-1)
    return torch.diagonal_scatter(square, own.clamp(min=0), dim1=-2, dim2=-1)


def _without_diagonal(square: Tensor) -> Tensor:
    return torch.diagonal_scatter(square, torch.zeros_like(square[..., 0]), dim1=-2, dim2=-1)
