"""Sums over pairs of samples, streamed: unbiased moments with control variates, and their standard errors.

Samples come in pairs, y₊ = f(m + δ) and y₋ = f(m − δ) (mirrored), or two independent samples. All that matters of a
pair is, about a centre a near the mean,

    e = (y₊ + y₋)/2 − a          even in δ: all that the mean of f depends on
    o = (y₊ − y₋)/2              odd in δ
    t = o oᵀ + e eᵀ              E t = Cov f + (μ − a)(μ − a)ᵀ, for mirrored and for independent pairs

The control of both is a linear function ℓ = S δ with known covariance R = S Σ Sᵀ (Glynn and Szechtman, "Some new
perspectives on the method of control variates", 2002). It has an odd and an even part too, which for mirrored pairs are
ℓ and 0:

    for tᵢⱼ      u = ℓℓᵀ of both samples, averaged, with mean Rᵢⱼ; for mirrored pairs also u², with mean
                 RᵢᵢRⱼⱼ + 2Rᵢⱼ², which responds to the tails of outputs that are not Gaussian
    for eᵢ       u = ℓᵢ² and u² for mirrored pairs; u = (ℓ₊ + ℓ₋)/2 with mean 0 for independent ones

Which pairs are better depends on the quantity. y² contains the term 2ℓ·(even part), which no linear control explains
and which a mirrored pair does not have: mirrored pairs are better for variances. But they see the even part, which is
the noise of the mean, once instead of twice: independent pairs are better for means, unless little is even.
`pair_costs` measures this on the first pairs, and `adaptive` draws both kinds in the proportion that `mirrored_share`
finds.

Pairs are dealt to `FOLDS` folds. The coefficients used in one fold are fitted on the others (cross-fitting,
Chernozhukov et al. 2018), so each fold's estimate is unbiased whatever the control. The fits, the estimates and the
variances of their residuals all follow from sums over the pairs of each fold, so memory does not grow with the number
of samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from netmoments.sampling.estimate import (
    PairEstimate,
    allowing_for_skewness,
    allowing_for_the_unseen,
    counts_of_infinite,
    residual_variance,
    tolerance_met,
    unseen_variances,
    wide_residuals,
)
from netmoments.sampling.slopes import linear_controls
from netmoments.sampling.two_level import Correction, corrected, correction_from, even_and_target

FOLDS = 4
SUMS = 9
"""Sums of each product of outputs: see `block_sums`."""
SHRINKING = 1000
"""The coefficient of u² is shrunk by n/(n + SHRINKING): few pairs know little of u⁴."""
HEAVY = 10.0
"""How strongly a squared error grows if it is itself known badly: see `_mean_with_error`."""
HALF_SHARE = 0.5
"""Half precision is used if its correction is known to within this share of the tolerance."""


class Standing(NamedTuple):
    """Where the sampling of E inputs stands. All but the estimate is on the host."""

    estimate: PairEstimate
    reached: Tensor
    """The tolerance that each input meets, (E,)."""
    pairs: Tensor
    """How many pairs each input has had, (E,)."""
    infinite: int
    """How many samples gave NaN or infinite outputs."""
    decisions: Tensor
    """Further numbers that were read from the device at the same time."""


class BlockSums(NamedTuple):
    """Sums over pairs of one kind, of A inputs with d outputs."""

    sums: Tensor
    """(A, FOLDS, m), in float64; `block_sums` says which m numbers these are."""
    wins: Tensor
    """How often each output was the largest, (A, d)."""
    bad: Tensor
    """How many samples were not finite, and how often each output was not, (1 + d,)."""


class FirstSums(NamedTuple):
    """What follows from the first pairs of E inputs with d outputs."""

    centre: Tensor
    """The mean of their values, (E, d), in float64: the centre a of all sums."""
    block: BlockSums
    """Their sums about the centre: of values in half precision if these are used, else of the exact ones."""
    costs: Tensor
    """`pair_costs`, (2, 2); ones where all pairs are to be independent."""
    decisions: Tensor
    """The fields of `Decisions`, which the host has not read yet; the first alone without half precision."""
    correction: Correction | None
    """What corrects half precision, 0 if that is not used; None where there is none."""

    @classmethod
    def of(cls, flat: tuple[Tensor, ...]) -> FirstSums:
        """From what `flat` gave."""
        centre, sums, wins, bad, costs, decisions, *correction = flat
        return cls(
            centre, BlockSums(sums, wins, bad), costs, decisions, Correction(*correction) if correction else None
        )

    @property
    def flat(self) -> tuple[Tensor, ...]:
        """All tensors in a row, as recorded work returns them."""
        return self.centre, *self.block, self.costs, self.decisions, *(self.correction or ())


class Decisions(NamedTuple):
    """What the first pairs decide, for all inputs together."""

    mirrored_share: float
    """The share of the further pairs that should be mirrored."""
    half_used: float = 0.0
    """1 if values in half precision are used, as their correction is known well enough; else 0."""
    half_finite: float = 1.0
    """1 if all values in half precision were finite; else 0."""


class PairSums:
    """Sums over the pairs of samples of E inputs, for d outputs: of mirrored pairs, of independent ones, or of both.

    The sums of either kind are (E, FOLDS, m), in float64; `block_sums` says which m numbers these are.
    """

    def __init__(
        self, centre: Tensor, dtype: torch.dtype, products: bool, known: Tensor | None, costs: Tensor | None = None
    ) -> None:
        self.centre = centre
        """The centre a of all sums, (E, d): float64, with values that the dtype of the samples can represent."""
        self.dtype, self.products = dtype, products
        self.known = known
        """R, the covariance (E, d, d) or the variances (E, d) of ℓ; None without a control."""
        self.costs = costs
        """`pair_costs`, which weight the two kinds; None where there is one kind only."""
        self.correction: Correction | None = None
        """What to add where the sums are of values in low precision."""
        self.wide: Tensor | None = None
        """`wide_residuals`, if samples at wider noise were taken."""
        self.heavy = HEAVY
        """How strongly errors allow for rare large values (`_mean_with_error`): 0, not at all, for plain samples."""
        self.sums: dict[bool, Tensor] = {}
        """The sums by kind: True for mirrored pairs."""
        self.wins = torch.zeros_like(centre)
        """How often each output was the largest, (E, d)."""
        self.bad = centre.new_zeros(1 + centre.shape[1], dtype=torch.int64)
        """How many samples were not finite, and how often each output was not."""

    def add(self, mirrored: bool, where: Tensor | None, block: BlockSums) -> None:
        """Add the sums over pairs of one kind, of the inputs with indices `where`, or of all."""
        sums, wins, bad = block
        if mirrored not in self.sums:
            self.sums[mirrored] = self.centre.new_zeros(len(self.centre), *sums.shape[1:])
        if where is None:
            self.sums[mirrored] += sums
            self.wins += wins
        else:
            self.sums[mirrored].index_add_(0, where, sums)
            self.wins.index_add_(0, where, wins)
        self.bad += bad

    def standing(self, replayed: Callable[..., tuple[Tensor, ...]], *decisions: Tensor) -> Standing:
        """The estimates so far and the tolerance they meet.

        The host waits for the device once, and reads `decisions` at the same time. `replayed` does the work, see
        `FastNetwork.replayed`.
        """
        work = partial(estimated, self.products, self.dtype, self.heavy)
        sums = self.sums.get(True), self.sums.get(False)
        *estimate, tolerances = replayed(
            ("estimate", self.products, self.heavy), work, self.centre, *sums, self.known, self.costs, self.wide,
            *(self.correction or ()),
        )  # fmt: skip
        pairs = [kind[..., 0].sum(1) for kind in sums if kind is not None]
        read = torch.cat([tolerances, sum(pairs[1:], pairs[0]), self.bad[:1].double(), *decisions]).cpu()
        entries = len(tolerances)
        reached, done, infinite, others = read.split([entries, entries, 1, len(read) - 2 * entries - 1])
        return Standing(PairEstimate(*estimate), reached, done.long(), int(infinite), others)


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
    """The fields of a `PairEstimate` from the sums of one or both kinds (see `PairSums`), and the tolerance it meets.

    Both allow for what the samples may not have shown; the errors also for skewness (see `estimate`).
    """
    kinds = [
        of_one_kind(centre, sums, known, products, kind, heavy)
        for kind, sums in ((True, mirrored), (False, independent))
        if sums is not None
    ]
    estimate = kinds[0]
    if mirrored is not None and independent is not None and costs is not None:
        counts = mirrored[..., 0].sum(1), independent[..., 0].sum(1)
        both = combined(kinds[0], kinds[1], *pair_weights(costs, *counts))
        estimate = chosen(counts[1] > 0, both, estimate)  # inputs that need no more pairs have none of the second kind
    if correction:
        estimate = corrected(estimate, centre, Correction(*correction))
    pairs = torch.stack([sums[..., 0].sum(1) for sums in (mirrored, independent) if sums is not None]).sum(0)
    estimate = allowing_for_the_unseen(estimate, 2 * pairs, wide)
    return *allowing_for_skewness(estimate), tolerance_met(estimate, dtype)


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
) -> FirstSums:
    """What follows from the first pairs.

    `first`, `second` and, where there is half precision, the two of `low` are values (p, E, d); `slopes` and
    `deviations` are as for `linear_controls`, `wide` is `wide_residuals`. Half precision is used if its correction is
    known to within `HALF_SHARE` of the tolerance.
    """
    centre = ((first + second) / 2).mean(0).double()
    control = linear_controls(slopes, deviations, None)
    exact_sums = block_sums(first, second, control, centre, products)
    costs, share = centre.new_ones(2, 2), centre.new_zeros(1)
    if mirrored:
        costs = pair_costs(first, second, None if control is None else control[0], wide)
        share = mirrored_share(costs)
    if not low:
        return FirstSums(centre, exact_sums, costs, share, None)
    correction = correction_from(centre, (first, second), low, products)
    even, target = even_and_target(centre, (first, second), products)
    of_correction = PairEstimate(
        even.mean(0), target.mean(0), correction.even_error_squared, correction.target_error_squared
    )
    used = (tolerance_met(of_correction, first.dtype) <= HALF_SHARE * tolerance).all()
    low_sums = block_sums(low[0], low[1], control, centre, products)
    sums = BlockSums(*(torch.where(used, one, other) for one, other in zip(low_sums, exact_sums, strict=True)))
    decisions = torch.cat([share, torch.stack([used, low_sums.bad[0] == 0]).double()])
    correction = Correction(*(torch.where(used, part, 0.0) for part in correction))
    return FirstSums(centre, sums, costs, decisions, correction)


def flat_first_sums(products: bool, mirrored: bool, tolerance: float, *given: Any) -> tuple[Tensor, ...]:
    """`first_sums` as recorded work returns it."""
    return first_sums(products, mirrored, tolerance, *given).flat


def wide_residuals_of(slopes: Tensor | None, deviations: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
    """`wide_residuals` of mirrored pairs with these deviations, from the values (p, E, d) at both samples."""
    control = linear_controls(slopes, deviations, None)
    return (wide_residuals(first, second, None if control is None else control[0]),)


def block_sums(
    first: Tensor, second: Tensor, control: tuple[Tensor, Tensor | None] | None, centre: Tensor, products: bool
) -> BlockSums:
    """The sums over a block of p pairs, a multiple of FOLDS, for A inputs with d outputs.

    `first` and `second` are the values (p, A, d) at both samples, `control` is ℓ as `linear_controls` gives it,
    `centre` (A, d). The m numbers are the sums of

        1;   e, e u, e u², u, u², u³, u⁴ for the control u of e;   e eᵀ, t, t², t u, t u², u, u², u³, u⁴ for that of t

    where products and powers of matrices are elementwise. Without `products` only their diagonals are summed. Sums that
    are not used are 0.
    """
    outputs = first.shape[-1]
    both = torch.cat([first, second])
    bad = counts_of_infinite(both)
    winners = both.argmax(-1).mT
    wins = torch.zeros(first.shape[1], outputs, dtype=torch.float64, device=first.device)
    wins.scatter_add_(1, winners, torch.ones_like(winners, dtype=torch.float64))
    # float32 is exact enough for the sums of one block, in units in which fourth powers are within its range
    dtype = torch.float64 if products else first.dtype

    def by_fold(x: Tensor) -> Tensor:
        return x.movedim(0, 1).to(dtype).unflatten(1, (FOLDS, -1))

    def summed(x: Tensor) -> Tensor:
        return x.sum(2).double()

    def square_sums(*factors: Tensor) -> Tensor:
        """The sum over pairs and factors x of x xᵀ, or of the squares alone."""
        x = factors[0] if len(factors) == 1 else torch.cat(factors, 2)
        return (x.mT @ x).flatten(2) if products else summed(x**2)

    first, second = (x - centre.to(x.dtype) for x in (first, second))
    unit: Tensor | float = 1.0
    if not products:
        largest = torch.maximum(*(torch.linalg.vector_norm(x, math.inf, 0) for x in (first, second)))
        unit = largest.clamp(min=torch.finfo(dtype).tiny)
        first, second = first.div_(unit), second.div_(unit)
    first, second = by_fold(first), by_fold(second)
    even, odd = (first + second) / 2, (first - second) / 2
    count = torch.full_like(even[:, :, 0, :1], even.shape[2], dtype=torch.float64)
    root = math.sqrt(2)
    of_values = [square_sums(even), square_sums(odd, even), square_sums(odd**2, even**2, root * odd * even)]
    if control is None:
        nothing = torch.zeros_like(of_values[0])
        means = [summed(even), *6 * [nothing[..., :outputs]]]
        sums = torch.cat([count, *means, *of_values, *6 * [nothing]], -1)
        return BlockSums(sums * _powers_of_unit(unit), wins, bad)
    linear = by_fold(control[0])
    if control[1] is None:
        square = linear**2
        powers = [square, square**2, square**3, square**4]
        of_controls = [square_sums(odd * linear, even * linear), square_sums(odd * square, even * square)]
        of_controls += [square_sums(x) for x in (linear, square, square * linear, square**2)]
    else:
        other = by_fold(control[1])
        u_even, u_odd = (linear + other) / 2, (linear - other) / 2
        nothing, none = torch.zeros_like(of_values[0]), torch.zeros_like(linear)
        powers = [u_even, u_even**2, none, none]
        of_controls = [square_sums(odd * u_odd, odd * u_even, even * u_odd, even * u_even), nothing]
        of_controls += [square_sums(u_odd, u_even)]
        of_controls += [square_sums(u_odd**2, u_even**2, root * u_odd * u_even), nothing, nothing]
    means = [summed(x) for x in (even, even * powers[0], even * powers[1], *powers)]
    return BlockSums(torch.cat([count, *means, *of_values, *of_controls], -1) * _powers_of_unit(unit), wins, bad)


def _powers_of_unit(unit: Tensor | float) -> Tensor | float:
    """What turns the numbers of `block_sums` of values in units (A, d) into those of the values, (A, 1, m)."""
    if isinstance(unit, float):
        return unit
    one, square = torch.ones_like(unit, dtype=torch.float64), unit.double().square()
    means, of_values = [*3 * [unit.double()], *4 * [one]], [square, square, square.square()]
    return torch.cat([one[:, :1], *means, *of_values, square, square, *4 * [one]], -1).unsqueeze(1)


def of_one_kind(
    centre: Tensor, sums: Tensor, known: Tensor | None, products: bool, mirrored: bool, heavy: float = 0.0
) -> PairEstimate:
    """The estimate from the sums (E, FOLDS, m) of mirrored pairs, or of independent ones, about a centre (E, d).

    Means and products go through the same regression, side by side. Their squared errors are right on average, and
    enlarged where they are known badly themselves: see `_mean_with_error` for `heavy`.
    """
    numbers = sums.shape[-1] - 1  # 7d + 9d², or 16d
    outputs = round((math.sqrt(49 + 36 * numbers) - 7) / 18) if products else numbers // 16
    sizes = [1] + 7 * [outputs] + 9 * [outputs**2 if products else outputs]
    counts, even, even_u, even_w, *rest = sums.split(sizes, -1)
    mean_control, (even_even, target, target_target, target_u, target_w, *control) = rest[:4], rest[4:]
    step = outputs + 1 if products else 1

    def diagonal(product: Tensor) -> Tensor:
        """Of all products, those of each output with itself."""
        return product[..., ::step]

    def outer_square(x: Tensor) -> Tensor:
        return (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(1) if products else x**2

    def beside(mean: Tensor, product: Tensor) -> Tensor:
        return torch.cat([mean, product], -1)

    expected = None
    if known is not None:
        covariance = known.reshape(len(known), -1)
        variance = diagonal(covariance)
        if mirrored:
            second = beside(3 * variance**2, outer_square(variance) + 2 * covariance**2)
            expected = beside(variance, covariance), second
        else:  # the second ones are not used
            expected = beside(torch.zeros_like(variance), covariance), beside(variance, covariance)
    value, error = _controlled(
        counts, beside(even, target), beside(diagonal(even_even), target_target), beside(even_u, target_u),
        beside(even_w, target_w), _Control(*map(beside, mean_control, control)), expected, heavy,
    )  # fmt: skip
    mean, second = value[:, :outputs], value[:, outputs:]
    mean_error_squared, second_error_squared = error[:, :outputs], error[:, outputs:]
    # E t = Cov + (μ − a)(μ − a)ᵀ: subtract an unbiased estimate of the last term, from products of different pairs
    count, total, squares = counts.sum(1), even.sum(1), even_even.sum(1)
    different = count * (count - 1)
    spread = squares / count
    second = second - (outer_square(total) - squares) / different
    second_error_squared = second_error_squared + (outer_square(diagonal(spread)) + spread**2) / different
    shape = (-1, outputs, outputs) if products else (-1, outputs)
    return PairEstimate(centre + mean, second.reshape(shape), mean_error_squared, second_error_squared.reshape(shape))


def combined(one: PairEstimate, other: PairEstimate, mean_weight: Tensor, second_weight: Tensor) -> PairEstimate:
    """Two independent estimates as one; the weights (E,) are those of the first, in means and in products.

    The weights must not come from the errors of these estimates: large estimates of a variance have large errors, so
    weights by errors would make variances too small.
    """
    of_mean = mean_weight.unsqueeze(-1)
    of_second = second_weight.reshape(-1, *(1,) * (one.second.dim() - 1))
    return PairEstimate(
        of_mean * one.mean + (1 - of_mean) * other.mean,
        of_second * one.second + (1 - of_second) * other.second,
        of_mean**2 * one.mean_error_squared + (1 - of_mean) ** 2 * other.mean_error_squared,
        of_second**2 * one.second_error_squared + (1 - of_second) ** 2 * other.second_error_squared,
    )


def chosen(condition: Tensor, one: PairEstimate, other: PairEstimate) -> PairEstimate:
    """The first estimate for the inputs where the condition (E,) holds, the other for the rest."""
    return PairEstimate(
        *(torch.where(condition.reshape(-1, *(1,) * (a.dim() - 1)), a, b) for a, b in zip(one, other, strict=True))
    )


def pair_costs(first: Tensor, second: Tensor, linear: Tensor | None, wide: Tensor | None = None) -> Tensor:
    """How much variance a sample leaves, (2, 2): rows mirrored and independent samples, columns means and variances.

    These are the residual variances after the controls: for means in units of the output's variance, for variances in
    units of twice its square. A sample adds the inverse of its cost to the precision of an estimate. `first` and
    `second` are the values (p, E, d) at both samples of a few mirrored pairs, `linear` is their control ℓ. What these
    pairs may have missed, by `wide` (`wide_residuals`), is included: without it, pairs that happened not to show a rare
    event would seem to be worth more than all later ones.
    """
    odd, even = (first - second).double() / 2, (first + second).double() / 2
    even = even - even.mean(0)
    control = torch.zeros_like(odd) if linear is None else linear.double()
    target = odd**2 + even**2
    variance = target.mean(0)
    values, controls = torch.cat([odd + even, even - odd]), torch.cat([control, -control])
    residual = torch.stack([
        residual_variance(torch.stack([even, target], 1), (control**2).unsqueeze(1)),
        residual_variance(torch.stack([values, values**2], 1), torch.stack([controls, controls**2], 1)),
    ])  # fmt: skip
    if wide is not None:
        unseen = unseen_variances(wide, variance.new_full((len(variance),), 2 * len(first)))
        residual = residual + torch.stack([unseen, 2 * unseen])
    shares = (residual / torch.stack([variance, variance**2])).nan_to_num(0.0, 0.0, 0.0).mean((2, 3)).clamp(min=1e-12)
    (a0, a1), (b0, b1) = (kind.unbind() for kind in shares)
    return torch.stack([2 * a0, a1, b0, b1 / 2]).reshape(2, 2)  # per sample, which is half a pair; variances by 2v²


def mirrored_share(costs: Tensor) -> Tensor:
    """The share of all samples that should be mirrored, (1,), for `pair_costs` a (mirrored) and b (independent).

    It is n₁/(n₁ + n₂) for the smallest n₁ + n₂ with n₁/aₖ + n₂/bₖ ≥ 1 for both quantities k = 0, 1. The minimum is on
    one of the axes, or where both constraints hold with equality.
    """
    (a0, a1), (b0, b1) = (kind.unbind() for kind in costs)
    determinant = 1 / (a0 * b1) - 1 / (a1 * b0)
    one, other = (1 / b1 - 1 / b0) / determinant, (1 / a0 - 1 / a1) / determinant
    inside = (one > 0) & (other > 0) & torch.isfinite(one + other)
    needed = torch.stack([costs[1].amax(), torch.where(inside, one + other, torch.inf), costs[0].amax()])
    shares = torch.stack([torch.zeros_like(one), one / (one + other), torch.ones_like(one)])
    return shares.gather(0, needed.argmin(0, keepdim=True))  # indexing would make the host wait


def pair_weights(costs: Tensor, mirrored: Tensor, independent: Tensor) -> tuple[Tensor, Tensor]:
    """The weights (E,) of mirrored pairs in means and in variances, given how many (E,) there are of either kind."""
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

    The residual in a fold is r = t − a(u − E u) − b(u² − E u²), where a and b come from a regression on the other
    folds, and b is shrunk where there are few pairs. The estimate is the mean of all r; its squared error is the
    variance of r divided by their number. The sums are those of t, t², t u, t u² and the powers of u in each fold.
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
    own_part = n_ww - n_uw**2 * per_variance  # of u², what u does not explain
    bends = varies & (own_part > 1e-9 * n_ww)
    b = torch.where(bends, (n_tw - n_tu * n_uw * per_variance) / torch.where(bends, own_part, 1.0), 0.0)
    b = b * n / (n + SHRINKING)
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
    """A mean and its squared error, from the sums (E, F, k) of values and of their squares.

    The squared error is the variance v divided by the number of values. The variances v_f of the F folds, about the
    mean of all, say how well v, their average, is known: its own variance is q v² with q = Σ(v_f/v − 1)²/F(F − 1). For
    n normal numbers q is 2/n; it approaches 1 where a few values make up most of the spread. If too few of those were
    seen, the mean is off and v too small at the same time; therefore v is taken as (1 + heavy q²)v.
    """
    total = counts.sum(1)
    mean = values.sum(1) / total
    centre = mean.unsqueeze(1)
    of_folds = ((squares + centre * (centre * counts - 2 * values)) / counts).clamp(min=0)
    variance = (of_folds * counts).sum(1) / total
    error = variance / (total - 1)
    if heavy == 0:
        return mean, error
    q = (of_folds - variance.unsqueeze(1)).square().sum(1) / (FOLDS * (FOLDS - 1) * variance.square().clamp(min=1e-300))
    return mean, error * (1 + heavy * q.square())
