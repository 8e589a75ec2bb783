"""Moments from pairs of samples, streamed: sums that give unbiased estimates with control variates and their errors.

Samples come in pairs y₊ = f(m + δ), y₋ = f(m − δ), or of two independent samples. Of each only two numbers matter,
about a centre a near the mean:

    e = (y₊ + y₋)/2 − a          even in δ: all that the mean of f sees of the noise
    o = (y₊ − y₋)/2              odd in δ
    t = o oᵀ + e eᵀ              E t = Cov f + (μ − a)(μ − a)ᵀ, for mirrored and for independent pairs

A linear function ℓ = S δ with known covariance R = S Σ Sᵀ is the control of both (Glynn and Szechtman, "Some new
perspectives on the method of control variates", 2002), with its own odd and even part, which for mirrored pairs are ℓ
and 0:

    of tᵢⱼ       u = ℓℓᵀ of both samples, averaged, whose mean is Rᵢⱼ; for mirrored pairs also u², with the mean
                 RᵢᵢRⱼⱼ + 2Rᵢⱼ², which sees the tails of outputs that are not Gaussian
    of eᵢ        u = ℓᵢ² and u² for mirrored pairs, else u = (ℓ₊ + ℓ₋)/2, whose mean is 0

Which pairs are better? y² has the term 2ℓ·(even part), which no linear control explains and which a mirrored pair does
not have: mirrored ones for variances. But they see the even part, the noise of the mean, once instead of twice:
independent ones for means, unless little is even. `adaptive` takes some of both.

Pairs are dealt to folds. The coefficients used in a fold are fitted on the others (cross-fitting, Chernozhukov et al.
2018), so each fold's estimate is unbiased whatever the control. All of it, the fits, the estimates and the variances of
what is left, follows from sums over the pairs of each fold, so that memory does not grow with the samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from netmoments.sampling.rare_events import WIDE_PAIRS, left_by_a_line, unseen_spread, wide_spread

FOLDS = 4
SHRINKING = 1000
"""Pairs at which the slope on u² has half its weight."""
MOST_SHARE = 1.0
"""Errors of variances of more than this are only made larger as if they were this."""
HEAVY = 10.0
"""How much larger stated errors are for being badly known: see `_mean_with_error`."""
ROUNDING = 16
"""Units in the last place of an output's mean, up to which it is taken not to vary."""
HALF_SHARE = 0.5
"""Of the tolerance: low precision is used if its correction is known to within this."""


class PairEstimate(NamedTuple):
    """Means (E, d), covariances (E, d, d) or variances (E, d), and the squares of their standard errors."""

    mean: Tensor
    second: Tensor
    mean_error_squared: Tensor
    second_error_squared: Tensor

    @property
    def variance(self) -> Tensor:
        return self.second if self.second.dim() == 2 else self.second.diagonal(dim1=-2, dim2=-1)

    @property
    def variance_error_squared(self) -> Tensor:
        return (
            self.second_error_squared
            if self.second_error_squared.dim() == 2
            else self.second_error_squared.diagonal(dim1=-2, dim2=-1)
        )


def allowing_for_skewness(found: PairEstimate) -> PairEstimate:
    """The same with larger errors where variances are known badly: few samples have seen the tails of their squares.

    An estimated variance v with error r·v is skewed: too small more often than too large, nearly symmetric in its
    logarithm. Two standard errors up are then v·e^{2r}, so that one is taken as (e^{2r} − 1)/2 of v, and covariances in
    proportion. That is r for small ones (0.0101 for 0.01), 0.41 for 0.3.
    """
    share = (found.variance_error_squared.sqrt() / found.variance.clamp(min=0)).nan_to_num(0.0).clamp(max=MOST_SHARE)
    factor = torch.where(share > 0, torch.expm1(2 * share) / (2 * share), 1.0)
    squared = factor.unsqueeze(-1) * factor.unsqueeze(-2) if found.second.dim() == 3 else factor**2
    return PairEstimate(found.mean, found.second, found.mean_error_squared, found.second_error_squared * squared)


def allowing_for_the_unseen(found: PairEstimate, samples: Tensor, wide: Tensor | None = None) -> PairEstimate:
    """The same with larger errors, for what that many samples, (E,), cannot have shown.

    One more sample that control and mean know nothing of, and that is off by the output's own deviation, moves the mean
    by 1/n of that, and the variance by √2/n of itself: where the control explains every sample, nothing else is left to
    judge its error by. Samples at wider noise, if there are any, count among these n; and variances of what is left
    are at least `unseen_spread` of theirs (2, E, d). An event that is rarer, or larger, than both is not covered.
    """
    deviation = found.variance.clamp(min=0).sqrt()
    each = deviation / (samples if wide is None else samples + 2 * WIDE_PAIRS).unsqueeze(-1)
    mean_error_squared, second_error_squared, squares = (
        found.mean_error_squared,
        found.second_error_squared,
        each * deviation,
    )
    products = found.second.dim() == 3
    if products:
        squares = each.unsqueeze(-1) * deviation.unsqueeze(-2)
    if wide is not None:
        of_mean, of_second = 2 * unseen_spread(wide, samples) / samples.unsqueeze(-1)
        if products:
            of_second = (of_second.unsqueeze(-1) * of_second.unsqueeze(-2)).sqrt()
        mean_error_squared, second_error_squared = (
            torch.maximum(mean_error_squared, of_mean),
            torch.maximum(second_error_squared, of_second),
        )
    return found._replace(
        mean_error_squared=mean_error_squared + each.square(),
        second_error_squared=second_error_squared + 2 * squares.square(),
    )


def relative_errors(estimate: PairEstimate, dtype: torch.dtype) -> Tensor:
    """The tolerance that an estimate meets, (E,): errors of means in standard deviations, errors of variances relative
    and by √2, the larger of their averages over the outputs.

    What an output varies by within the rounding of its values, in `dtype`, counts as that rounding.
    """
    rounding = ROUNDING * torch.finfo(dtype).eps * estimate.mean.abs()
    deviation = torch.maximum(estimate.variance.clamp(min=0).sqrt(), rounding)
    mean, second = estimate.mean_error_squared.sqrt(), estimate.variance_error_squared.sqrt()
    mean = torch.where(mean > 0, mean / deviation, 0.0).mean(-1)
    second = torch.where(second > 0, second / deviation**2, 0.0).mean(-1)
    return torch.maximum(mean, second / math.sqrt(2))


class Standing(NamedTuple):
    """Where the sampling of E inputs stands; all but the estimate are on the host."""

    estimate: PairEstimate
    reached: Tensor
    """The tolerance that each input meets, (E,)."""
    pairs: Tensor
    """How many there are of each input, (E,)."""
    infinite: int
    """Samples that gave no numbers."""
    told: Tensor
    """Other numbers that were asked for."""


class PairSums:
    """What pairs of samples of E inputs say of d outputs: sums of mirrored pairs, of independent ones, or of both.

    The sums of a kind are (E, FOLDS, m), in float64; `block_sums` has the m numbers. `known` is R, the covariance or
    the variances of ℓ, None without a control; `costs` are those of `pair_costs`, for two kinds together; `correction`
    are the numbers of a `CorrectionSums`, where the sums are of low precision.
    """

    def __init__(
        self, centre: Tensor, dtype: torch.dtype, products: bool, known: Tensor | None, costs: Tensor | None = None
    ) -> None:
        self.centre = centre
        """About which all sums are, (E, d): float64, of values that the samples' dtype has."""
        self.dtype, self.products, self.known, self.costs = dtype, products, known, costs
        self.correction: tuple[Tensor, ...] = ()
        self.wide: Tensor | None = None
        """What samples at wider noise show, `wide_spread`."""
        self.heavy = HEAVY
        """How much larger errors are for being badly known; 0 for those of plain samples."""
        self.sums: dict[bool, Tensor] = {}
        """By whether the pairs are mirrored."""
        self.wins = torch.zeros_like(centre)
        """How often each output was the largest, (E, d)."""
        self.bad = centre.new_zeros(1 + centre.shape[1], dtype=torch.int64)
        """How many samples were not finite, and how often each output was not."""

    def add(self, mirrored: bool, where: Tensor | None, sums: Tensor, wins: Tensor, bad: Tensor) -> None:
        """Count in what `block_sums` gave for pairs of one kind, of the A entries with these indices, or of all."""
        if mirrored not in self.sums:
            self.sums[mirrored] = self.centre.new_zeros(len(self.centre), *sums.shape[1:])
        if where is None:
            self.sums[mirrored] += sums
            self.wins += wins
        else:
            self.sums[mirrored].index_add_(0, where, sums)
            self.wins.index_add_(0, where, wins)
        self.bad += bad

    def standing(self, replayed: Callable[..., tuple[Tensor, ...]], *also: Tensor) -> Standing:
        """The estimates so far and the tolerance they meet; the host waits once, and is told other numbers as well.

        The work is done by `replayed` (see `FastNetwork.replayed`).
        """
        work = partial(estimated, self.products, self.dtype, self.heavy)
        sums = self.sums.get(True), self.sums.get(False)
        *found, errors = replayed(
            ("estimate", self.products, self.heavy), work, self.centre, *sums, self.known, self.costs, self.wide,
            *self.correction,
        )  # fmt: skip
        pairs = [each[..., 0].sum(1) for each in sums if each is not None]
        told = torch.cat([errors, sum(pairs[1:], pairs[0]), self.bad[:1].double(), *also]).cpu()
        entries = len(errors)
        reached, done, infinite, others = told.split([entries, entries, 1, len(told) - 2 * entries - 1])
        return Standing(PairEstimate(*found), reached, done.long(), int(infinite), others)


def estimated(
    products: bool,
    dtype: torch.dtype,
    heavy: float,
    centre: Tensor,
    mirrored: Tensor | None,
    independent: Tensor | None,
    known: Tensor | None,
    costs: Tensor | None,
    wide: Tensor | None,
    *correction: Tensor,
) -> tuple[Tensor, ...]:
    """The numbers of a `PairEstimate` from sums of one or both kinds (see `PairSums`), and the tolerance it meets.

    Its errors and that tolerance allow for what is badly known, or may not have been seen; the errors for skewness too.
    """
    kinds = [
        of_one_kind(centre, sums, known, products, kind, heavy)
        for kind, sums in ((True, mirrored), (False, independent))
        if sums is not None
    ]
    found = kinds[0]
    if mirrored is not None and independent is not None and costs is not None:
        counts = mirrored[..., 0].sum(1), independent[..., 0].sum(1)
        both = combined(kinds[0], kinds[1], *pair_weights(costs, *counts))
        found = chosen(counts[1] > 0, both, found)  # entries that need no more have none of the second kind
    if correction:
        found = corrected(found, centre, *correction)
    pairs = torch.stack([each[..., 0].sum(1) for each in (mirrored, independent) if each is not None]).sum(0)
    found = allowing_for_the_unseen(found, 2 * pairs, wide)
    return *allowing_for_skewness(found), relative_errors(found, dtype)


def first_sums(
    products: bool,
    mirrored: bool,
    tolerance: float,
    slopes: Tensor | None,
    wide: Tensor | None,
    deviations: Tensor,
    first: Tensor,
    second: Tensor,
    *low: Tensor,
) -> tuple[Tensor, ...]:
    """Of a first few pairs: the centre, the sums about it, costs, decisions; the correction of low precision, if any.

    From values (p, E, d), exact and if there are any in low precision, what `lines` takes, and `wide_spread`. The
    decisions are the share of pairs to be mirrored; whether low precision is used, as its correction is known well
    enough; and whether its values were all numbers. If it is not used, the sums are of exact values and the correction
    is 0.
    """
    centre = ((first + second) / 2).mean(0).double()
    control = lines(slopes, deviations, None)
    found = block_sums(first, second, control, centre, products)
    costs, share = centre.new_ones(2, 2), centre.new_zeros(1)
    if mirrored:
        costs = pair_costs(first, second, None if control is None else control[0], wide)
        share = mirrored_share(costs)
    if not low:
        return centre, *found, costs, share
    rough = CorrectionSums(centre, (first, second), (low[0], low[1]), products)
    left = relative_errors(rough.alone(centre, (first, second), products), first.dtype)
    used = (left <= HALF_SHARE * tolerance).all()
    in_low = block_sums(low[0], low[1], control, centre, products)
    sums = (torch.where(used, one, other) for one, other in zip(in_low, found, strict=True))
    decisions = torch.cat([share, torch.stack([used, in_low[2][0] == 0]).double()])
    parts = (rough.even, rough.even_error, rough.target, rough.target_error)
    return centre, *sums, costs, decisions, *(torch.where(used, part, 0.0) for part in parts)


def spread_of_wide(slopes: Tensor | None, deviations: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
    """`wide_spread` of mirrored pairs with these deviations, from values (p, E, d) of both samples."""
    control = lines(slopes, deviations, None)
    return (wide_spread(first, second, None if control is None else control[0]),)


def lines(slopes: Tensor | None, deviations: Tensor, others: Tensor | None) -> tuple[Tensor, Tensor | None] | None:
    """The control ℓ = S δ of both samples, (p, A, d), for deviations (p, A, n) and slopes (A, d, n), None without.

    Where there are no `others`, the second ones are −ℓ, of mirrored pairs, and None here.
    """
    if slopes is None:
        return None
    first = torch.matmul(deviations.movedim(0, 1), slopes.mT).movedim(0, 1)
    return first, None if others is None else torch.matmul(others.movedim(0, 1), slopes.mT).movedim(0, 1)


def block_sums(
    first: Tensor, second: Tensor, control: tuple[Tensor, Tensor | None] | None, centre: Tensor, products: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums (A, FOLDS, m) of p pairs, a multiple of FOLDS; how often each output was the largest, (A, d); how many
    samples are not finite, and how often each output is not, (1 + d).

    From values (p, A, d) of both samples, ℓ of both as `lines` gives it, and the centre (A, d). The m numbers are Σ of
    1; of e, e u, e u², u, u², u³, u⁴ for the control u of e; of e eᵀ, t, t², t u, t u², u, u², u³, u⁴ for that of t,
    powers and products of these matrices being elementwise. What is not used is 0.
    """
    outputs = first.shape[-1]
    both = torch.cat([first, second])
    infinite = ~torch.isfinite(both)
    bad = torch.cat([infinite.any(-1).sum().reshape(1), infinite.flatten(0, -2).sum(0)])
    winners = both.argmax(-1).mT
    wins = torch.zeros(first.shape[1], outputs, dtype=torch.float64, device=first.device)
    wins.scatter_add_(1, winners, torch.ones_like(winners, dtype=torch.float64))
    dtype = torch.float64 if products else first.dtype  # float32 is exact enough for the sums of a block

    def dealt(x: Tensor) -> Tensor:
        return x.movedim(0, 1).to(dtype).unflatten(1, (FOLDS, -1))

    def summed(x: Tensor) -> Tensor:
        return x.sum(2).double()

    def total(*factors: Tensor) -> Tensor:
        """Σ over pairs of the sum of x xᵀ, or of the squares."""
        x = factors[0] if len(factors) == 1 else torch.cat(factors, 2)
        return (x.mT @ x).flatten(2) if products else summed(x**2)

    first, second = (dealt(x - centre.to(x.dtype)) for x in (first, second))
    even, odd = (first + second) / 2, (first - second) / 2
    count = torch.full_like(even[:, :, 0, :1], even.shape[2], dtype=torch.float64)
    root = math.sqrt(2)
    of_values = [total(even), total(odd, even), total(odd**2, even**2, root * odd * even)]
    if control is None:
        nothing = torch.zeros_like(of_values[0])
        means = [summed(even), *6 * [nothing[..., :outputs]]]
        return torch.cat([count, *means, *of_values, *6 * [nothing]], -1), wins, bad
    line = dealt(control[0])
    if control[1] is None:
        square = line**2
        powers = [square, square**2, square**3, square**4]
        of_lines = [total(odd * line, even * line), total(odd * square, even * square)]
        of_lines += [total(line), total(square), total(square * line), total(square**2)]
    else:
        other = dealt(control[1])
        line_even, line_odd = (line + other) / 2, (line - other) / 2
        nothing, none = torch.zeros_like(of_values[0]), torch.zeros_like(line)
        powers = [line_even, line_even**2, none, none]
        of_lines = [total(odd * line_odd, odd * line_even, even * line_odd, even * line_even), nothing]
        of_lines += [total(line_odd, line_even), total(line_odd**2, line_even**2, root * line_odd * line_even)]
        of_lines += [nothing, nothing]
    means = [summed(x) for x in (even, even * powers[0], even * powers[1], *powers)]
    return torch.cat([count, *means, *of_values, *of_lines], -1), wins, bad


def of_one_kind(
    centre: Tensor, sums: Tensor, known: Tensor | None, products: bool, mirrored: bool, heavy: float = 0.0
) -> PairEstimate:
    """The estimate from the sums (E, FOLDS, m) of mirrored pairs, or of independent ones, about a centre (E, d).

    Means and products go through the same regression, side by side. Their squared errors are right on average, or
    larger where they are badly known themselves: see `_mean_with_error` for `heavy`.
    """
    numbers = sums.shape[-1] - 1  # 7d + 9d², or 16d
    outputs = round((math.sqrt(49 + 36 * numbers) - 7) / 18) if products else numbers // 16
    sizes = [1] + 7 * [outputs] + 9 * [outputs**2 if products else outputs]
    counts, *parts = sums.split(sizes, -1)
    (even, even_u, even_w, *mean_control), (even_even, target, target_target, target_u, target_w, *control) = (
        parts[:7],
        parts[7:],
    )
    step = outputs + 1 if products else 1  # of each output with itself, among all products

    def own(product: Tensor) -> Tensor:
        return product[..., ::step]

    def crossed(each: Tensor) -> Tensor:
        return (each.unsqueeze(-1) * each.unsqueeze(-2)).flatten(1) if products else each**2

    def beside(mean: Tensor, product: Tensor) -> Tensor:
        return torch.cat([mean, product], -1)

    expected = None
    if known is not None:
        flat = known.reshape(len(known), -1)
        each = own(flat)
        if mirrored:
            expected = beside(each, flat), beside(3 * each**2, crossed(each) + 2 * flat**2)
        else:  # the second ones are not used
            expected = beside(torch.zeros_like(each), flat), beside(each, flat)
    value, error = _controlled(
        counts, beside(even, target), beside(own(even_even), target_target), beside(even_u, target_u),
        beside(even_w, target_w), _Control(*map(beside, mean_control, control)), expected, heavy,
    )  # fmt: skip
    mean, second = value[:, :outputs], value[:, outputs:]
    mean_error_squared, second_error_squared = error[:, :outputs], error[:, outputs:]
    # what an estimated mean costs: (μ − a)(μ − a)ᵀ from pairs of different pairs
    count, total, squares = counts.sum(1), even.sum(1), even_even.sum(1)
    different = count * (count - 1)
    spread = squares / count
    second = second - (crossed(total) - squares) / different
    second_error_squared = second_error_squared + (crossed(own(spread)) + spread**2) / different
    shape = (-1, outputs, outputs) if products else (-1, outputs)
    return PairEstimate(centre + mean, second.reshape(shape), mean_error_squared, second_error_squared.reshape(shape))


def combined(one: PairEstimate, other: PairEstimate, of_mean: Tensor, of_second: Tensor) -> PairEstimate:
    """Two independent estimates as one, the first with the weights (E,) in means and in products.

    The weights must not come from the errors of these estimates: large variances have large errors, so that weights by
    them would make variances too small.
    """
    of_mean = of_mean.unsqueeze(-1)
    of_second = of_second.reshape(-1, *(1,) * (one.second.dim() - 1))
    return PairEstimate(
        of_mean * one.mean + (1 - of_mean) * other.mean,
        of_second * one.second + (1 - of_second) * other.second,
        of_mean**2 * one.mean_error_squared + (1 - of_mean) ** 2 * other.mean_error_squared,
        of_second**2 * one.second_error_squared + (1 - of_second) ** 2 * other.second_error_squared,
    )


def chosen(where: Tensor, one: PairEstimate, other: PairEstimate) -> PairEstimate:
    """One estimate for the inputs where that is so, (E,), and another for the rest."""

    def pick(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(where.reshape(-1, *(1,) * (a.dim() - 1)), a, b)

    return PairEstimate(
        pick(one.mean, other.mean), pick(one.second, other.second),
        pick(one.mean_error_squared, other.mean_error_squared),
        pick(one.second_error_squared, other.second_error_squared),
    )  # fmt: skip


def pair_costs(first: Tensor, second: Tensor, line: Tensor | None, wide: Tensor | None = None) -> Tensor:
    """What a sample is worth: the variances that controls leave, of means in units of the output's variance, of
    variances in units of twice its square; for mirrored samples, and for independent ones, (2, 2).

    From values (p, E, d) of both samples of a few mirrored pairs, and their control. A sample adds the inverse of its
    cost to the precision of an estimate. What these pairs may have missed, by `wide_spread`, is counted in: where they
    are without an event that others will show, they would seem to be worth more than all others.
    """
    odd, even = (first - second).double() / 2, (first + second).double() / 2
    even = even - even.mean(0)
    control = torch.zeros_like(odd) if line is None else line.double()
    target = odd**2 + even**2
    variance = target.mean(0)
    values, controls = torch.cat([odd + even, even - odd]), torch.cat([control, -control])
    left = torch.stack([
        left_by_a_line(torch.stack([even, target], 1), (control**2).unsqueeze(1)),
        left_by_a_line(torch.stack([values, values**2], 1), torch.stack([controls, controls**2], 1)),
    ])  # fmt: skip
    if wide is not None:
        unseen = unseen_spread(wide, variance.new_full((len(variance),), 2 * len(first)))
        left = left + torch.stack([unseen, 2 * unseen])
    shares = (left / torch.stack([variance, variance**2])).nan_to_num(0.0, 0.0, 0.0).mean((2, 3)).clamp(min=1e-12)
    (a0, a1), (b0, b1) = (each.unbind() for each in shares)
    return torch.stack([2 * a0, a1, b0, b1 / 2]).reshape(2, 2)  # of a sample, half a pair; by 2v² for variances


def mirrored_share(costs: Tensor) -> Tensor:
    """Of all samples, those to be mirrored, (1,): n₁/(n₁ + n₂) for the smallest n₁ + n₂ with n₁/aₖ + n₂/bₖ ≥ 1, k = 0,
    1, for costs a of mirrored and b of independent samples.

    It is on one of the axes, or where both hold exactly.
    """
    (a0, a1), (b0, b1) = (each.unbind() for each in costs)
    determinant = 1 / (a0 * b1) - 1 / (a1 * b0)
    one, other = (1 / b1 - 1 / b0) / determinant, (1 / a0 - 1 / a1) / determinant
    inside = (one > 0) & (other > 0) & torch.isfinite(one + other)
    needed = torch.stack([costs[1].amax(), torch.where(inside, one + other, torch.inf), costs[0].amax()])
    shares = torch.stack([torch.zeros_like(one), one / (one + other), torch.ones_like(one)])
    return shares.gather(0, needed.argmin(0, keepdim=True))  # an index would make the host wait


def pair_weights(costs: Tensor, mirrored: Tensor, independent: Tensor) -> tuple[Tensor, Tensor]:
    """The weights (E,) of mirrored pairs in means and in variances, of so many (E,) of each kind, by `pair_costs`."""
    one, other = mirrored / costs[0].unsqueeze(-1), independent / costs[1].unsqueeze(-1)
    of_mean, of_second = one / (one + other)
    return of_mean, of_second


class _Control(NamedTuple):
    """Sums of the powers of a control u."""

    first: Tensor
    second: Tensor
    third: Tensor
    fourth: Tensor


def _controlled(
    counts: Tensor,
    target: Tensor,
    square: Tensor,
    with_first: Tensor,
    with_second: Tensor,
    control: _Control,
    expected: tuple[Tensor, Tensor] | None,
    heavy: float,
) -> tuple[Tensor, Tensor]:
    """The mean of a target t with controls u and u² of known means, and its squared error, from sums (E, F, k).

    In a fold the residual is r = t − a(u − E u) − b(u² − E u²), with a and b from a regression on the other folds, b
    shrunk where there are few pairs, which know little of u⁴. The estimate is the mean of all r, its squared error
    their variance divided by how many there are. The sums are of t, t², t u, t u² and the powers of u, by fold.
    """
    if expected is None:
        return _mean_with_error(counts, target, square, heavy)
    n, t, tu, tw, u, uu, uw, ww = (
        x.sum(1, keepdim=True) - x for x in (counts, target, with_first, with_second, *control)
    )
    n_tu, n_tw = n * tu - t * u, n * tw - t * uu
    n_uu, n_uw, n_ww = n * uu - u**2, n * uw - u * uu, n * ww - uu**2
    first, second = (x.unsqueeze(1) for x in expected)
    varies = n_uu > 1e-12 * (n * first) ** 2
    per_variance = torch.where(varies, 1 / torch.where(varies, n_uu, 1.0), 0.0)
    left = n_ww - n_uw**2 * per_variance  # what u does not say of u²
    bends = varies & (left > 1e-9 * n_ww)
    b = (
        torch.where(bends, (n_tw - n_tu * n_uw * per_variance) / torch.where(bends, left, 1.0), 0.0)
        * n
        / (n + SHRINKING)
    )
    a = (n_tu - b * n_uw) * per_variance
    # sums of u − E u and w = u² − E u², of their squares and products, and with t
    u_sum, w_sum = control.first - counts * first, control.second - counts * second
    u_square = control.second - first * (control.first + u_sum)
    w_square = control.fourth - second * (control.second + w_sum)
    u_w = control.third - second * control.first - first * w_sum
    t_u, t_w = with_first - first * target, with_second - second * target
    residual = target - a * u_sum - b * w_sum
    squares = square + a**2 * u_square + b**2 * w_square + 2 * (a * b * u_w - a * t_u - b * t_w)
    return _mean_with_error(counts, residual, squares, heavy)


def _mean_with_error(counts: Tensor, values: Tensor, squares: Tensor, heavy: float) -> tuple[Tensor, Tensor]:
    """A mean and its squared error, their variance by their number, from sums (E, F, k) of values and their squares.

    The variances v_f of the F folds about the mean of all say how well their average v is known: its own variance is
    q v², with q = Σ(v_f/v − 1)²/F(F − 1). That is 2/n for n normal numbers, and up to 1 where a few of them are most of
    the spread. If too few of these were seen, the mean is off and v too small at once: v is taken as (1 + heavy q²)v.
    """
    total = counts.sum(1)
    mean = values.sum(1) / total
    centre = mean.unsqueeze(1)
    own = ((squares + centre * (centre * counts - 2 * values)) / counts).clamp(min=0)
    variance = (own * counts).sum(1) / total
    error = variance / (total - 1)
    if heavy == 0:
        return mean, error
    q = (own - variance.unsqueeze(1)).square().sum(1) / (FOLDS * (FOLDS - 1) * variance.square().clamp(min=1e-300))
    return mean, error * (1 + heavy * q.square())


class CorrectionSums:
    """How far pairs of values in low precision are from exact ones on the same noise: sums of the differences of e and
    t, and of their squares, for E inputs.

    With these, estimates from many pairs in low precision become unbiased ones of the exact values (two-level Monte
    Carlo, Giles, "Multilevel Monte Carlo path simulation", 2008): E e = E e' + E(e − e'), E t = E t' + E(t − t').
    """

    def __init__(
        self, centre: Tensor, exact: tuple[Tensor, Tensor], low: tuple[Tensor, Tensor], products: bool
    ) -> None:
        """From values (p, E, d) of both samples of p pairs."""
        (even, target), (low_even, low_target) = (even_and_target(centre, values, products) for values in (exact, low))
        self.count = len(even)
        self.even, self.even_error = _mean_and_error(even - low_even)
        self.target, self.target_error = _mean_and_error(target - low_target)

    def alone(self, centre: Tensor, exact: tuple[Tensor, Tensor], products: bool) -> PairEstimate:
        """The moments of these pairs with the errors of the correction only."""
        even, target = even_and_target(centre, exact, products)
        return PairEstimate(even.mean(0), target.mean(0), self.even_error, self.target_error)


def corrected(
    found: PairEstimate, centre: Tensor, even: Tensor, even_error: Tensor, target: Tensor, target_error: Tensor
) -> PairEstimate:
    """An estimate from low precision, corrected; Cov = E t − (μ − a)(μ − a)ᵀ, where μ changes too."""
    before = found.mean - centre
    if found.second.dim() == 3:
        mixed = before.unsqueeze(-1) * even.unsqueeze(-2)
        moved = mixed + mixed.mT + even.unsqueeze(-1) * even.unsqueeze(-2)
    else:
        moved = 2 * before * even + even**2
    return PairEstimate(
        found.mean + even, found.second + target - moved, found.mean_error_squared + even_error,
        found.second_error_squared + target_error,
    )  # fmt: skip


def even_and_target(centre: Tensor, values: Sequence[Tensor], products: bool) -> tuple[Tensor, Tensor]:
    """e and t of pairs of values (p, E, d), in float64."""
    first, second = (x.double() - centre for x in values)
    even, odd = (first + second) / 2, (first - second) / 2
    if not products:
        return even, odd**2 + even**2
    return even, odd.unsqueeze(-1) * odd.unsqueeze(-2) + even.unsqueeze(-1) * even.unsqueeze(-2)


def _mean_and_error(x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over the first dimension, and its squared standard error."""
    return x.mean(0), x.var(0) / len(x)
