"""Moments from pairs of samples, streamed: sums that give unbiased estimates with control variates and their errors.

Samples come in pairs y₊ = f(m + δ), y₋ = f(m − δ), or of two independent samples. Of each only two numbers matter,
about a centre a near the mean:

    e = (y₊ + y₋)/2 − a          even in δ: all that the mean of f sees of the noise
    o = (y₊ − y₋)/2              odd in δ
    t = o oᵀ + e eᵀ              E t = Cov f + (μ − a)(μ − a)ᵀ, for mirrored and for independent pairs

A linear function ℓ = S δ with known covariance R = S Σ Sᵀ is the control of both: u = ℓᵢ² of eᵢ and u = ℓᵢℓⱼ of tᵢⱼ,
whose mean is Rᵢⱼ, and the squares u², whose mean is RᵢᵢRⱼⱼ + 2Rᵢⱼ², which see the tails of outputs that are not
Gaussian (Glynn and Szechtman, "Some new perspectives on the method of control variates", 2002). Mirrored pairs are what
makes it a good one: y² has the term 2ℓ·(even part), which no linear control explains and which a mirrored pair does not
have.

Pairs are dealt to folds. The coefficients used in a fold are fitted on the others (cross-fitting, Chernozhukov et al.
2018), so each fold's estimate is unbiased whatever the control. All of it, the fits, the estimates and the variances of
what is left, follows from sums over the pairs of each fold, so that memory does not grow with the samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

FOLDS = 4
SHRINKING = 1000
"""Pairs at which the slope on u² has half its weight."""
MOST_SHARE = 1.0
"""Errors of variances of more than this are only made larger as if they were this."""


@dataclass(frozen=True, eq=False)
class PairEstimate:
    """Means (E, d), covariances (E, d, d) or variances (E, d), and the squares of their standard errors."""

    mean: Tensor
    second: Tensor
    mean_error: Tensor
    second_error: Tensor

    @property
    def variance(self) -> Tensor:
        return self.second if self.second.dim() == 2 else self.second.diagonal(dim1=-2, dim2=-1)

    @property
    def variance_error(self) -> Tensor:
        return self.second_error if self.second_error.dim() == 2 else self.second_error.diagonal(dim1=-2, dim2=-1)


def allowing_for_skewness(found: PairEstimate) -> PairEstimate:
    """The same with larger errors where variances are known badly: few samples have seen the tails of their squares.

    An estimated variance v with error r·v is skewed: too small more often than too large, nearly symmetric in its
    logarithm. Two standard errors up are then v·e^{2r}, so that one is taken as (e^{2r} − 1)/2 of v, and covariances in
    proportion. That is r for small ones (0.0101 for 0.01), 0.41 for 0.3.
    """
    share = (found.variance_error.sqrt() / found.variance.clamp(min=0)).nan_to_num(0.0).clamp(max=MOST_SHARE)
    factor = torch.where(share > 0, torch.expm1(2 * share) / (2 * share), 1.0)
    squared = factor.unsqueeze(-1) * factor.unsqueeze(-2) if found.second.dim() == 3 else factor**2
    return PairEstimate(found.mean, found.second, found.mean_error, found.second_error * squared)


class PairSums:
    """Sums over pairs for E inputs of d outputs, in float64, by fold, (E, FOLDS, m); `block_sums` has the m numbers.

    With `products` of all pairs of outputs, d² of them, else of squares only.
    """

    def __init__(self, centre: Tensor, products: bool) -> None:
        entries, outputs = centre.shape
        self.centre = centre
        """About which all sums are, (E, d): float64, of values that the samples' dtype has."""
        self.products = products
        self.pairs = torch.zeros(entries, dtype=torch.int64)
        numbers = 1 + 3 * outputs + 9 * (outputs**2 if products else outputs)
        self.sums = centre.new_zeros(entries, FOLDS, numbers)
        self.wins = centre.new_zeros(entries, outputs)

    def add(self, entries: Tensor, pairs: int, sums: Tensor, wins: Tensor) -> None:
        """Count in sums (A, FOLDS, m) and wins (A, d) of so many more pairs of A of the entries."""
        self.pairs[entries.cpu()] += pairs
        self.sums.index_add_(0, entries, sums)
        self.wins.index_add_(0, entries, wins)

    def estimate(self, known: Tensor | None) -> PairEstimate:
        """The estimates; `known` is R, the covariance or the variances of ℓ, None where there was no control."""
        mean, second, mean_error, second_error = estimated(self.sums, known, self.products)
        return PairEstimate(self.centre + mean, second, mean_error, second_error)


def block_sums(
    first: Tensor, second: Tensor, line: Tensor | None, centre: Tensor, products: bool
) -> tuple[Tensor, Tensor]:
    """Sums (A, FOLDS, m) of p pairs, a multiple of FOLDS, and how often each output was the largest, (A, d).

    From values (p, A, d) of both samples, `line` being ℓ of the first ones (and −ℓ that of the second), and the centre
    (A, d). The m numbers are Σ of 1, e, e u, e u² for u = ℓ²; then of e eᵀ, t, t², u, t u, u², t u², u³, u⁴ for
    u = ℓ ℓᵀ, powers and products of these matrices being elementwise.
    """
    outputs = first.shape[-1]
    winners = torch.cat([first, second]).argmax(-1).mT
    wins = torch.zeros(first.shape[1], outputs, dtype=torch.float64, device=first.device)
    wins.scatter_add_(1, winners, torch.ones_like(winners, dtype=torch.float64))
    dtype = torch.float64 if products else first.dtype  # a float32 product is exact enough; sums are not
    centre = centre.to(first.dtype)
    first, second = ((x - centre).movedim(0, 1).to(dtype).unflatten(1, (FOLDS, -1)) for x in (first, second))
    even, odd = (first + second) / 2, (first - second) / 2

    def total(a: Tensor, b: Tensor) -> Tensor:
        return (a.mT @ b).flatten(2) if products else (a * b).sum(2, dtype=torch.float64)

    even_even = total(even, even)
    target = total(odd, odd) + even_even
    if products:
        both, odd_square, even_square = odd * even, odd**2, even**2
        target_target = total(odd_square, odd_square) + 2 * total(both, both) + total(even_square, even_square)
    else:
        squares = odd**2 + even**2
        target_target = total(squares, squares)
    count = torch.full_like(target[..., :1], even.shape[2])
    even_sum = even.sum(2, dtype=torch.float64)
    if line is None:
        nothing = torch.zeros_like(target)
        none = nothing[..., :outputs]
        return torch.cat([count, even_sum, none, none, even_even, target, target_target, *6 * [nothing]], -1), wins
    line = line.movedim(0, 1).to(dtype).unflatten(1, (FOLDS, -1))
    square = line**2
    fourth = square**2
    if products:
        target_line = total(odd * line, odd * line) + total(even * line, even * line)
        target_square = total(odd * square, odd * square) + total(even * square, even * square)
    else:
        target_line, target_square = total(squares, square), total(squares, fourth)
    means = [even_sum, *((even * x).sum(2, dtype=torch.float64) for x in (square, fourth))]
    lines = [total(line, line), target_line, total(square, square), target_square]
    lines += [total(square * line, square * line), total(fourth, fourth)]
    return torch.cat([count, *means, even_even, target, target_target, *lines], -1), wins


def estimated(sums: Tensor, known: Tensor | None, products: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean − centre (E, d), covariance or variance, and their squared errors, from sums (E, FOLDS, m).

    Means and products go through the same regression, side by side.
    """
    numbers = sums.shape[-1] - 1  # 3d + 9d², or 12d
    outputs = round((math.sqrt(1 + 4 * numbers) - 1) / 6) if products else numbers // 12
    sizes = [1] + 3 * [outputs] + 9 * [outputs**2 if products else outputs]
    counts, even, even_line, even_square, even_even, target, target_target, *lines = sums.split(sizes, -1)
    line, target_line, line_2, target_square, line_3, line_4 = lines
    step = outputs + 1 if products else 1  # of each output with itself, among all products

    def own(product: Tensor) -> Tensor:
        return product[..., ::step]

    def beside(mean: Tensor, product: Tensor) -> Tensor:
        return torch.cat([mean, product], -1)

    moments = _Control(*(beside(own(x), x) for x in (line, line_2, line_3, line_4)))
    expected = None
    if known is not None:
        flat = known.reshape(len(known), -1)
        each = own(flat)
        both = (each.unsqueeze(-1) * each.unsqueeze(-2)).flatten(1) if products else each**2
        expected = beside(each, flat), beside(own(both) + 2 * each**2, both + 2 * flat**2)
    value, error = _controlled(
        counts, beside(even, target), beside(own(even_even), target_target), beside(even_line, target_line),
        beside(even_square, target_square), moments, expected,
    )  # fmt: skip
    mean, second = value[:, :outputs], value[:, outputs:]
    mean_error, second_error = error[:, :outputs], error[:, outputs:]
    # what an estimated mean costs: (μ − a)(μ − a)ᵀ from pairs of different pairs
    count, total, squares = counts.sum(1), even.sum(1), even_even.sum(1)
    different = count * (count - 1)
    product = (total.unsqueeze(-1) * total.unsqueeze(-2)).flatten(1) if products else total**2
    spread = squares / count
    each = own(spread)
    both = (each.unsqueeze(-1) * each.unsqueeze(-2)).flatten(1) if products else each**2
    second = second - (product - squares) / different
    second_error = second_error + (both + spread**2) / different
    shape = (-1, outputs, outputs) if products else (-1, outputs)
    return mean, second.reshape(shape), mean_error, second_error.reshape(shape)


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
) -> tuple[Tensor, Tensor]:
    """The mean of a target t with controls u and u² of known means, and its squared error, from sums (E, F, k).

    In a fold the residual is r = t − a(u − E u) − b(u² − E u²), with a and b from a regression on the other folds, b
    shrunk where there are few pairs, which know little of u⁴. The estimate is the mean of all r, its squared error
    their variance divided by how many there are. The sums are of t, t², t u, t u² and the powers of u, by fold.
    """
    total = counts.sum(1)
    if expected is None:
        mean = target.sum(1) / total
        return mean, (square.sum(1) / total - mean**2).clamp(min=0) / (total - 1)
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
    mean = residual.sum(1) / total
    return mean, (squares.sum(1) / total - mean**2).clamp(min=0) / (total - 1)


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
        (even, target), (low_even, low_target) = (_even_and_target(centre, values, products) for values in (exact, low))
        self.count = len(even)
        self.even, self.even_error = _mean_and_error(even - low_even)
        self.target, self.target_error = _mean_and_error(target - low_target)

    def alone(self, centre: Tensor, exact: tuple[Tensor, Tensor], products: bool) -> PairEstimate:
        """The moments of these pairs with the errors of the correction only."""
        even, target = _even_and_target(centre, exact, products)
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
        found.mean + even, found.second + target - moved, found.mean_error + even_error,
        found.second_error + target_error,
    )  # fmt: skip


def _even_and_target(centre: Tensor, values: tuple[Tensor, Tensor], products: bool) -> tuple[Tensor, Tensor]:
    """e and t of pairs of values (p, E, d), in float64."""
    first, second = (x.double() - centre for x in values)
    even, odd = (first + second) / 2, (first - second) / 2
    if not products:
        return even, odd**2 + even**2
    return even, odd.unsqueeze(-1) * odd.unsqueeze(-2) + even.unsqueeze(-1) * even.unsqueeze(-2)


def _mean_and_error(x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over the first dimension, and its squared standard error."""
    return x.mean(0), x.var(0) / len(x)
