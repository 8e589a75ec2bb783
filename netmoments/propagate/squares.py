"""Layerwise moments with covariances as square matrices, and cumulants that say how far a layer's input is Gaussian.

The square is the covariance of all live tensors. An affine part of the network acts on its rows and then on its
columns. A nonlinear layer has exact means, variances and covariances of pairs for a Gaussian input; to these come
Edgeworth's corrections of first order in the input's third (and fourth) cumulants. With Fᵣ = E[f Heᵣ(u)], the input's
standardized cumulants λ and its correlations ρ,

    E yᵢ        += λ_iii/6 F₃ + λ_iiii/24 F₄,
    Cov(yᵢ, yⱼ) += ½λ_iij Σᵣ Fᵢ,₂₊ᵣ Fⱼ,₁₊ᵣ ρʳ/r! + λ_iii/6 Σᵣ Fᵢ,₃₊ᵣ Fⱼ,ᵣ ρʳ/r! + ¼λ_iijj Fᵢ,₂ Fⱼ,₂,

the first two terms of the covariance also with i and j exchanged. `cumulants` keeps the cumulants.

Nothing here makes the host wait for a value, so that on a GPU a whole pass is recorded as one graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from netmoments.covariances import Covariance, whitened
from netmoments.memory import elements_together
from netmoments.normal import standard_deviation
from netmoments.precision import full_precision
from netmoments.progress import progress_bar
from netmoments.propagate.cumulants import Cumulants, FourthCumulants, FourthOrder, OwnCumulants
from netmoments.propagate.plan import Plan
from netmoments.propagate.rows import MOST_DIRECTIONS, Need
from netmoments.propagate.segments import Passage
from netmoments.rules.base import Local, Nonlinearity, PowerMoments, ThirdCumulants

MOST_CENTRES = 4096
"""Centres at any place in the network, at most: units of all earlier layers whose cumulants are followed."""
CENTRES_WORK = 2**37
"""The number of centres times the square of the joint tensor's size is at most this."""
MOST_SHARED = 2.5
"""Squares are not worthwhile if more units than this look at each number, on average over a layer; 2.25 do in pools of
3×3 with steps of 2."""
SERIES = 4
"""Terms of the Hermite series of covariances, where a rule has no exact pairs."""


class DenseJoint(NamedTuple):
    """The joint distribution of P numbers of N images."""

    mean: Tensor
    """(N, P)."""
    covariance: Tensor
    """(N, P, P)."""
    cumulants: Cumulants


class SquareLayout(NamedTuple):
    """What is carried if a plan goes by squares, and what that takes; see `layout_of`."""

    followed: tuple[int, ...]
    """How many units of each stage are followed, which is to say that they become centres of cumulants."""
    fourth: bool
    """Whether fourth cumulants are kept: if all units before the last layer look at one number and are followed."""
    largest: Need
    """The stage that needs most memory for one image, and how many numbers (not bytes): in the squares before and after
    it, in those of its units, and in the rows of centres."""
    worthwhile: bool
    """Whether squares know more than rows.

    At least half the units of every layer must be followed: where fewer are, rows know as much. And units must not
    share most of their windows, as those of a softmax or a normalisation do: their covariances are far from the first
    terms of the series."""
    numbers: int
    """How many numbers all stages together carry for one image, in squares and in the rows of centres."""


def layout_of(plan: Plan) -> SquareLayout:
    """Find which units are followed, and what the squares then take. `plan.once(layout_of)` keeps it."""
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
    """How many units of each stage are followed: all, or as many as their work allows.

    At a stage with P numbers in its joint tensor, the centres of all earlier stages times P² must be within
    `CENTRES_WORK`. Every stage gets an equal share of what the later ones allow; the last has no use for centres.
    """
    sizes = [max(passage.before, passage.after) for passage in plan.passages[:-1]]
    allowed = [min(MOST_CENTRES, CENTRES_WORK // size**2) for size in sizes]
    counts, used = [0] * len(allowed), 0
    for place, stage in enumerate(plan.stages[:-1]):
        directions = min(stage.rule.width, MOST_DIRECTIONS)
        later = range(place + 1, len(allowed))
        share = max(0, min((allowed[after] - used) // (after - place) for after in later))
        counts[place] = min(stage.rule.units, share // directions)
        used += counts[place] * directions
    return tuple(counts)


def need_of(plan: Plan, itemsize: int) -> Need:
    """The most memory that any stage needs for one image."""
    layer, numbers = plan.once(layout_of).largest
    return Need(layer, itemsize * numbers)


def carried(
    plan: Plan, mean: Tensor, covariance: Covariance, outputs: Tensor, followed: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Carry images (N, ...) with noise through a network as squares: means (N, k) and covariances (N, k, k) of scores.

    `outputs` (N, k) are the indices of the scores, `followed` says how many units of each stage are followed, by
    default as many as their work allows; with none anywhere, the input of every layer is taken as Gaussian.
    """
    layout = plan.once(layout_of)
    followed, fourth = (layout.followed, layout.fourth) if followed is None else (followed, False)
    flat, (*passages, last) = mean.flatten(1), plan.passages
    with full_precision(), progress_bar("layerwise", len(plan.passages)) as show:
        dense = covariance.dense().expand(len(flat), -1, -1)
        joint = DenseJoint(flat, dense, Cumulants.none(flat, fourth=fourth))
        for place, (passage, stage, count) in enumerate(zip(passages, plan.stages, followed, strict=True)):
            show(place)
            joint = DenseJoint(*through_segment(joint, passage), joint.cumulants.through(passage.linears))
            joint = through_layer(joint, stage.rule, stage.before.size, count)
        scores, square = through_segment(joint, last)
    rows = square.gather(1, outputs.unsqueeze(-1).expand(-1, -1, square.shape[-1]))
    chosen = rows.gather(2, outputs.unsqueeze(1).expand(-1, outputs.shape[1], -1))
    return scores.gather(1, outputs), 0.5 * (chosen + chosen.mT)


def through_segment(joint: DenseJoint, passage: Passage) -> tuple[Tensor, Tensor]:
    """Mean (N, P′) and covariance A Σ Aᵀ (N, P′, P′) after an affine part."""
    return passage.values(joint.mean), passage.linears(passage.linears(joint.covariance).mT)


def through_layer(joint: DenseJoint, rule: Nonlinearity, inputs: int, followed: int) -> DenseJoint:
    """Apply a nonlinear layer to the first `inputs` numbers; `followed` of its units become centres."""
    variance = joint.covariance[:, :inputs, :inputs].diagonal(dim1=-2, dim2=-1).clamp(min=0)
    power = rule.power_moments(joint.mean[:, :inputs], variance) if rule.width == 1 else None
    if power is None:
        return _through_windows(joint, rule, inputs, followed)
    return _Units(joint, rule, inputs, power).output(followed)


MOST_SKEW, MOST_KURTOSIS = 10.0, 100.0
"""Limits on λ_iii and λ_iiii of a unit's input, about those of an event that happens in 1 % of cases. Beyond them the
corrections are larger than what they correct, and the input is taken as Gaussian. A unit that sees only dead ones would
have 10²⁰."""


class _Units:
    """A layer of n units that look at one number each, with known moments of their powers.

    Named as in the formulas above: λ_iii is `lambda_iii`, Fᵣ is `power.first[r]`; all are (N, n) or (N, n, n), but
    `kappa_uu` is (N, n, P), with all numbers.
    """

    def __init__(self, joint: DenseJoint, rule: Nonlinearity, n: int, power: PowerMoments) -> None:
        self.joint, self.rule, self.n, self.power = joint, rule, n, power
        self.square = _no_negative_variance(joint.covariance[:, :n, :n])
        variance = self.square.diagonal(dim1=-2, dim2=-1)
        self.s = standard_deviation(variance)
        self.per_deviation = torch.where(self.s > 0, 1 / torch.where(self.s > 0, self.s, 1.0), 0.0)
        # one factor after the other: their product may overflow
        rho = self.square * self.per_deviation.unsqueeze(-1) * self.per_deviation.unsqueeze(-2)
        self.rho = _without_diagonal(rho.clamp(-1, 1))
        self.kappa_uu = self.lambda_iii = self.lambda_iij = None
        self.fourths: FourthCumulants | None = None
        self.lambda_iiii: Tensor | None = None
        cumulants = joint.cumulants
        self.per_variance = self.per_deviation.square().clamp(max=torch.finfo(self.s.dtype).max)
        if cumulants.rows.numel():
            kappa_iij, self.fourths = cumulants.kappa_iij(n), cumulants.fourths(n)
            tame = (kappa_iij.diagonal(dim1=-2, dim2=-1) * self.per_variance * self.per_deviation).abs() < MOST_SKEW
            if self.fourths is not None:
                tame = tame & ((self.fourths.own * self.per_variance * self.per_variance).abs() < MOST_KURTOSIS)
            self.per_variance = torch.where(tame, self.per_variance, 0.0)
            self.kappa_uu = kappa_iij * self.per_variance.unsqueeze(-1)  # κ(uᵢ, uᵢ, ·) with all numbers
            self.lambda_iij = self.kappa_uu[..., :n] * self.per_deviation.unsqueeze(-2)
            self.lambda_iii = self.lambda_iij.diagonal(dim1=-2, dim2=-1)
        if self.fourths is not None:
            self.lambda_iiii = self.fourths.own * self.per_variance * self.per_variance
            self.lambda_iijj = self.standardized_iijj(self.fourths.pairs)

    def standardized_iijj(self, pairs: Tensor) -> Tensor:
        """λ_iijj of cumulants κ_iijj (N, n, n); for units that hardly vary it is 0, not 0 · ∞."""
        return pairs * self.per_variance.unsqueeze(-1) * self.per_variance.unsqueeze(-2)

    def correction(self, moments: tuple[Tensor, ...], order: int) -> Tensor:
        """λ_iii/6 Fᵣ₊₃ + λ_iiii/24 Fᵣ₊₄, what cumulants add to Fᵣ for r = `order`, as far as moments are known."""
        if self.lambda_iii is None or order + 3 >= len(moments):
            return torch.zeros_like(moments[0])
        total = self.lambda_iii * moments[order + 3] * (1 / 6)
        if self.lambda_iiii is not None and order + 4 < len(moments):
            total = torch.addcmul(total, self.lambda_iiii, moments[order + 4], value=1 / 24)
        return total

    def output(self, followed: int) -> DenseJoint:
        """The joint distribution after the layer, with so many of its units as further centres."""
        n, first, second = self.n, self.power.first, self.power.second
        others = self.joint.covariance[:, :n, n:]
        mean_correction = self.correction(first, 0)
        self.mean = first[0] + mean_correction  # less f(m), as all moments here
        self.slope = first[1] + self.correction(first, 1)
        self.bend = first[2] + self.correction(first, 2)
        gain = self.slope * self.per_deviation
        variance = second[0] - first[0].square() + self.correction(second, 0) - 2 * first[0] * mean_correction
        self.covariance = torch.diagonal_scatter(self.pair_covariances(), variance.clamp(min=0), dim1=-2, dim2=-1)
        across = gain.unsqueeze(-1) * others
        if self.kappa_uu is not None:
            across = across + 0.5 * first[2].unsqueeze(-1) * self.kappa_uu[..., n:]
        covariance = _joined(self.covariance, across, self.joint.covariance[:, n:, n:])
        mean = torch.cat([self.power.centre + self.mean, self.joint.mean[:, n:]], -1)
        factor = torch.cat([gain, torch.ones_like(self.joint.mean[:, n:])], -1)[:, None, None]
        cumulants = self.joint.cumulants.through(lambda rows: rows * factor)
        if followed:
            cumulants = self.with_centres(cumulants, followed)
        return DenseJoint(mean, covariance, cumulants)

    def pair_covariances(self) -> Tensor:
        """Covariances of the outputs, (N, n, n); the diagonal means nothing."""
        first, rho = self.power.first, self.rho
        gain = first[1] * self.per_deviation
        if self.rule.has_pair_formula:
            beyond = self.rule.pairs(self.joint.mean[:, : self.n], self.square)
            total = beyond + self.square * (gain.unsqueeze(-1) * gain.unsqueeze(-2))
        else:
            total = _series(first[1 : SERIES + 1], first[1 : SERIES + 1], rho)
        if self.lambda_iij is None or self.lambda_iii is None:
            return total
        half = 0.5 * self.lambda_iij * _series(first[2:4], first[1:3], rho, start=0)
        skewed = tuple(self.lambda_iii / 6 * moment for moment in first[4:6])
        half = half + _series(skewed, first[1:3], rho)
        total = total + half + half.mT
        if self.fourths is not None:
            total = total + 0.25 * self.lambda_iijj * (first[2].unsqueeze(-1) * first[2].unsqueeze(-2))
        return total

    def with_centres(self, before: Cumulants, count: int) -> Cumulants:
        """The cumulants with `count` units of this layer as further centres: all in order, or those of largest bend."""
        n = self.n
        chosen = None if count == n else self.bend.detach().abs().topk(count, dim=-1).indices
        others = _picked(self.joint.covariance[:, :n, n:] * self.per_deviation.unsqueeze(-1), chosen)
        along = torch.cat([self.slope.unsqueeze(-2) * _picked(self.rho, chosen), others], -1)
        bent = 0.5 * _picked(self.bend, chosen).unsqueeze(-1) * along
        beyond = torch.cat([self.beyond_trees(chosen), self.beyond_trees_with_others(others, chosen)], -1)
        fourth = None if before.fourth is None else self.fourth_order(before.fourth)
        new = torch.stack([_one_each(chosen, along, n), along, bent, beyond], 1)
        return Cumulants(torch.cat([before.rows, new], 2), fourth)

    @cached_property
    def variance_slope(self) -> Tensor:
        """c₂′ = dVar f/du."""
        return self.power.second[1] - 2 * self.power.first[0] * self.power.first[1]

    @cached_property
    def variance_share(self) -> Tensor:
        """What a change of the input's variance does to the variance of f, beyond the slope squared."""
        return 0.5 * self.power.second[2] - self.power.first[0] * self.power.first[2] - self.slope.square()

    def beyond_trees(self, chosen: Tensor | None) -> Tensor:
        """κ(yₐ, yₐ, y_b) of chosen units a beyond the trees and what earlier centres give, (N, count, n).

        It is Cov(f², f′) − 2 E f Cov(f, f′), the first by its series, with f′ for unit b. The entries of a = b are a
        third, because ½P(e, e, x) counts them three times.
        """
        first = self.power.first
        second = tuple(_picked(moment, chosen) for moment in self.power.second)
        mean, slope, rho = _picked(self.mean, chosen), _picked(self.slope, chosen), _picked(self.rho, chosen)
        total = _series(second[1:5], first[1:5], rho) - 2 * mean.unsqueeze(-1) * _picked(self.covariance, chosen)
        total = total - self.bend.unsqueeze(-2) * (slope.unsqueeze(-1) * rho).square()
        kappa_aaa = self.power.third[0] - 3 * first[0] * self.power.second[0] + 2 * first[0] ** 3
        if self.lambda_iii is not None and self.lambda_iij is not None:
            share = (0.5 * second[2] - slope.square()).unsqueeze(-1)
            by_aab = share * _picked(self.lambda_iij, chosen) * self.slope.unsqueeze(-2)
            by_bba = 0.5 * second[1].unsqueeze(-1) * first[2].unsqueeze(-2) * _picked(self.lambda_iij.mT, chosen)
            skewed = (second[4] * _picked(self.lambda_iii, chosen) / 6).unsqueeze(-1) * first[1].unsqueeze(-2)
            skewed = skewed + second[1].unsqueeze(-1) * (first[4] * self.lambda_iii / 6).unsqueeze(-2)
            total = total + by_aab + by_bba + skewed * rho
            kappa_aaa = kappa_aaa + self.correction(self.power.third, 0)
            kappa_aaa = kappa_aaa - 3 * first[0] * self.correction(self.power.second, 0)
            kappa_aaa = kappa_aaa + self.correction(first, 0) * (6 * first[0] ** 2 - 3 * self.power.second[0])
            kappa_aaa = kappa_aaa - self.slope**3 * self.lambda_iii
        if self.fourths is not None:
            total = total + 0.25 * self.lambda_iijj * second[2].unsqueeze(-1) * first[2].unsqueeze(-2)
        if chosen is None:
            return torch.diagonal_scatter(total, kappa_aaa / 3, dim1=-2, dim2=-1)
        places = chosen.unsqueeze(-1)
        return total.scatter(-1, places, (_picked(kappa_aaa, chosen) / 3).unsqueeze(-1))

    def beyond_trees_with_others(self, others: Tensor, chosen: Tensor | None) -> Tensor:
        """κ(y, y, ·) beyond the trees with the numbers beside the layer, (N, count, P − n).

        `others` are the covariances of these numbers with the standardized inputs u.
        """
        total = _picked(self.variance_slope, chosen).unsqueeze(-1) * others
        if self.kappa_uu is not None:
            third = _picked(self.kappa_uu[..., self.n :], chosen)
            total = total + _picked(self.variance_share, chosen).unsqueeze(-1) * third
        return total

    def fourth_order(self, before: FourthOrder) -> FourthOrder:
        """What fourth cumulants need of the centres before this layer, and then of all its units."""
        _, first, second, third, fourth = self.power
        mean, square, cube = first[0], second[0], third[0]
        own = OwnCumulants(
            third_bend=first[3] + self.correction(first, 3),
            variance_bend=second[2] - 2 * first[1].square() - 2 * mean * first[2],
            skew_slope=third[1] - 3 * first[1] * square - 3 * mean * second[1] + 6 * mean.square() * first[1],
            fourth=fourth - 4 * mean * cube - 3 * square.square() + 12 * mean.square() * square - 6 * mean**4,
        )
        slope, share, bend = self.variance_slope, self.variance_share, own.variance_bend
        of_pairs = _series((slope, bend), (slope, bend), self.rho)
        e, v, _, x = self.joint.cumulants.rows[..., : self.n].unbind(1)
        along, response, beyond = (part * self.per_deviation.unsqueeze(-2) for part in (v, e, x))
        with_earlier = slope.unsqueeze(-2) * beyond
        if self.fourths is not None and self.lambda_iij is not None:
            mixed = slope.unsqueeze(-1) * share.unsqueeze(-2) * self.lambda_iij.mT
            by_slope = share.unsqueeze(-1) * self.slope.square().unsqueeze(-2)
            mixed = mixed + by_slope * self.standardized_iijj(self.fourths.by_one)
            of_pairs = of_pairs + mixed + mixed.mT + share.unsqueeze(-1) * share.unsqueeze(-2) * self.lambda_iijj
            with_earlier = with_earlier + ((share * self.per_variance).unsqueeze(-1) * self.fourths.with_centres).mT
        return FourthOrder(
            OwnCumulants(*(torch.cat(pair, 1) for pair in zip(before.own, own, strict=True))),
            _joined(before.between, along, self.rho),
            _joined(before.variances, with_earlier, _without_diagonal(of_pairs)),
            _joined(before.responses, torch.zeros_like(response), torch.zeros_like(self.rho), response.mT),
        )


def _through_windows(joint: DenseJoint, rule: Nonlinearity, inputs: int, followed: int) -> DenseJoint:
    """A layer known by gains and curvatures: Cov = gᵀCg′ + ½ tr(HCH′Cᵀ) between units, with their own variances."""
    windows = _Windows(joint, rule, inputs)
    square = _no_negative_variance(joint.covariance[:, :inputs, :inputs])
    beyond = rule.pairs(joint.mean[:, :inputs], square) if rule.has_pair_formula else windows.quadratic_pairs()
    of_units = windows.gained_rows(windows.gained_rows(square).mT) + beyond
    across = windows.gained_rows(joint.covariance[:, inputs:, :inputs]).mT
    if windows.turned is not None:
        half = 0.5 * windows.gained_rows(windows.turned[..., :inputs])
        of_units, across = of_units + half + half.mT, across + 0.5 * windows.turned[..., inputs:]
    least = of_units.diagonal(dim1=-2, dim2=-1)  # of two terms; less would be no covariance
    of_units = torch.diagonal_scatter(of_units, torch.maximum(windows.local.variance, least), dim1=-2, dim2=-1)
    covariance = _joined(of_units, across, joint.covariance[:, inputs:, inputs:])
    mean = torch.cat([windows.local.mean, joint.mean[:, inputs:]], -1)
    cumulants = joint.cumulants.through(windows.through)._replace(fourth=None)
    if followed:
        cumulants = windows.with_centres(cumulants, followed)
    return DenseJoint(mean, covariance, cumulants)


class _Windows:
    """The windows of a layer under a joint distribution: their units' moments, and how these bend along directions."""

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
        """The q directions t = axes·(z − m) of each window along which it bends most, (N, n, q, w)."""
        turn = root[..., : self.directions]
        self.bend = turn.mT @ self.local.curvature @ turn
        """E ∇²f along these directions, (N, n, q, q)."""
        self.turned: Tensor | None = None
        """Σ bendₖₗ κ(tₖ, tₗ, ·) with all P numbers, (N, n, P); None without centres."""
        centres = joint.cumulants.rows.shape[2]
        if centres:
            rows = [part.mT.contiguous() for part in joint.cumulants.rows[..., :inputs].unbind(1)]
            numbers_each = len(mean) * centres * self.directions * max(self.directions, rule.width)
            parts = []
            for units in self.units_in_parts(numbers_each):
                along = [self.along_axes(part, units) for part in rows]
                parts.append(joint.cumulants.of_windows(along, self.bend[:, units]))
            kappa, self.turned = (torch.cat(part, 1) for part in zip(*parts, strict=True))
            skewed = rule.local(mean, covariance, ThirdCumulants(root, kappa))
            self.local = Local(skewed.mean, skewed.variance, skewed.gain, self.local.curvature)

    def units_in_parts(self, numbers_each: int) -> list[slice]:
        """All units, as many at a time as make a piece of work if each takes so many numbers."""
        together = elements_together("pass", self.joint.mean, numbers_each)
        return [slice(start, start + together) for start in range(0, self.rule.units, together)]

    def along_axes(self, columns: Tensor, units: slice) -> Tensor:
        """Columns (N, p, R) along the directions of m chosen units: (N, m, q, R)."""
        return self.axes[:, units] @ columns[:, self.places[units]]

    def gained_rows(self, rows: Tensor) -> Tensor:
        """Rows (N, ..., p) of the layer's input as rows (N, ..., n) of its output, by the gains."""
        total = torch.zeros_like(rows[..., :1])
        gain = self.local.gain.reshape(len(rows), *[1] * (rows.dim() - 2), *self.local.gain.shape[1:])
        for place in range(self.rule.width):
            total = total + gain[..., place] * rows[..., self.places[:, place]]
        return total

    def through(self, rows: Tensor) -> Tensor:
        """Rows (N, ..., P) of the joint tensor, with the output in the input's place."""
        return torch.cat([self.gained_rows(rows[..., : self.inputs]), rows[..., self.inputs :]], -1)

    def quadratic_pairs(self) -> Tensor:
        """½ tr(HCH′Cᵀ) of all pairs of units, (N, n, n), as far as H is along the directions."""
        square, q = self.joint.covariance[:, : self.inputs, : self.inputs], self.directions
        all_units, parts = slice(None), []
        for units in self.units_in_parts(len(square) * q * (2 * self.places.numel() + self.inputs)):
            rows = self.along_axes(square, units)  # (N, m, q, p)
            bent = (self.bend[:, units] @ rows).flatten(1, 2)
            plain = self.along_axes(rows.flatten(1, 2).mT, all_units)  # (N, n, q, mq)
            products = (self.bend @ plain) * self.along_axes(bent.mT, all_units)
            parts.append(0.5 * products.unflatten(-1, (-1, q)).sum((2, 4)))
        return torch.cat(parts, -1)

    def with_centres(self, before: Cumulants, count: int) -> Cumulants:
        """The cumulants with the directions of `count` units as further centres: of those that bend most."""
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
    """The rows (N, m, ...) of chosen units (N, m), from those of all units (N, n, ...); all of them for None."""
    if chosen is None:
        return rows
    index = chosen.reshape(*chosen.shape, *[1] * (rows.dim() - 2)).expand(-1, -1, *rows.shape[2:])
    return rows.gather(1, index)


def _one_each(chosen: Tensor | None, like: Tensor, units: int) -> Tensor:
    """Rows (N, m, P) with a 1 at the place of the chosen unit each, and 0 elsewhere."""
    places = torch.arange(units, device=like.device).expand(len(like), -1) if chosen is None else chosen
    return torch.zeros_like(like).scatter(-1, places.unsqueeze(-1), 1.0)


def _series(left: tuple[Tensor, ...], right: tuple[Tensor, ...], rho: Tensor, start: int = 1) -> Tensor:
    """Σᵣ leftᵣ rightᵣ ρʳ/r! for all pairs of units, (N, n, n), by Horner's rule; r counts from `start`, 0 or 1."""
    total: Tensor | None = None
    for place in reversed(range(len(left))):
        one, other = left[place].unsqueeze(-1), right[place].unsqueeze(-2)
        scale = 1 / math.factorial(start + place)
        total = scale * one * other if total is None else torch.addcmul(total * rho, one, other, value=scale)
    assert total is not None
    return total * rho if start else total


def _joined(first: Tensor, across: Tensor, last: Tensor, back: Tensor | None = None) -> Tensor:
    """A matrix (N, a + b, a + b) of four blocks: symmetric, unless the one below the diagonal is given, `back`."""
    if not across.shape[-1] or not across.shape[-2]:
        return last if across.shape[-1] else first
    below = across.mT if back is None else back
    return torch.cat([torch.cat([first, across], -1), torch.cat([below, last], -1)], -2)


def _positive(covariance: Tensor) -> Tensor:
    """Covariances of windows (..., w, w) without negative eigenvalues, which corrections of first order may leave."""
    fixed = covariance.detach()
    failed = torch.linalg.cholesky_ex(fixed + torch.diag_embed(1e-6 * fixed.diagonal(dim1=-2, dim2=-1))).info > 0
    values, vectors = torch.linalg.eigh(fixed)
    mended = (vectors * values.clamp(min=0).unsqueeze(-2)) @ vectors.mT
    return covariance + torch.where(failed[..., None, None], mended - fixed, 0.0)


def _no_negative_variance(square: Tensor) -> Tensor:
    """The covariance with variances of at least 0: corrections of first order may make them negative."""
    variance = square.diagonal(dim1=-2, dim2=-1)
    return torch.diagonal_scatter(square, variance.clamp(min=0), dim1=-2, dim2=-1)


def _without_diagonal(square: Tensor) -> Tensor:
    """The matrices (N, n, n) with 0 on the diagonal."""
    return torch.diagonal_scatter(square, torch.zeros_like(square[..., 0]), dim1=-2, dim2=-1)
