"""Moments from pairs of samples, streamed: sums that give unbiased estimates with control variates and their errors.

Samples come in pairs y₊ = f(m + δ), y₋ = f(m − δ), or of two independent samples. Of each only two numbers matter,
about a centre a near the mean:

    e = (y₊ + y₋)/2 − a          even in δ: all that the mean of f sees of the noise
    o = (y₊ − y₋)/2              odd in δ
    t = o oᵀ + e eᵀ              E t = Cov f + (μ − a)(μ − a)ᵀ, for mirrored and for independent pairs

A linear function ℓ = S δ with known covariance R = S Σ Sᵀ is the control of both: ℓᵢ² − Rᵢᵢ of eᵢ, ℓᵢℓⱼ − Rᵢⱼ of tᵢⱼ
(Glynn and Szechtman, "Some new perspectives on the method of control variates", 2002). Mirrored pairs are what makes it
a good one: y² has the term 2ℓ·(even part), which no linear control explains and which a mirrored pair does not have.

Pairs are dealt to folds. The coefficients used in a fold are fitted on the others (cross-fitting, Chernozhukov et al.
2018), so each fold's estimate is unbiased whatever the control. All of it, the fits, the estimates and the variances of
what is left, follows from sums over the pairs of each fold, so that memory does not grow with the samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

FOLDS = 4


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
        numbers = 1 + 2 * outputs + 6 * (outputs**2 if products else outputs)
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
    (A, d). The m numbers are Σ of 1, e, e ℓ²; then of e eᵀ, t, ℓ ℓᵀ, t², t ℓℓᵀ, (ℓℓᵀ)², elementwise for the matrices.
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
    if line is None:
        nothing = torch.zeros_like(target)
        even_line, of_line = nothing[..., :outputs], [nothing, target_target, nothing, nothing]
    else:
        line = line.movedim(0, 1).to(dtype).unflatten(1, (FOLDS, -1))
        square = line**2
        if products:
            odd_line, even_line = odd * line, even * line
            target_line = total(odd_line, odd_line) + total(even_line, even_line)
        else:
            target_line = total(squares, square)
        even_line = (even * square).sum(2, dtype=torch.float64)
        of_line = [total(line, line), target_target, target_line, total(square, square)]
    count = torch.full_like(target[..., :1], even.shape[2])
    means = [even.sum(2, dtype=torch.float64), even_line]
    return torch.cat([count, *means, even_even, target, *of_line], -1), wins


def estimated(sums: Tensor, known: Tensor | None, products: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean − centre (E, d), covariance or variance, and their squared errors, from sums (E, FOLDS, m).

    Means and products go through the same regression, side by side.
    """
    numbers = sums.shape[-1] - 1
    # numbers = 2d + 6d² or 8d
    outputs = round((math.sqrt(1 + 6 * numbers) - 1) / 6) if products else numbers // 8
    sizes = [1, outputs, outputs] + 6 * [outputs**2 if products else outputs]
    counts, even, even_line, even_even, target, line, target_target, target_line, line_line = sums.split(sizes, -1)
    step = outputs + 1 if products else 1  # of each output with itself, among all products

    def beside(mean: Tensor, product: Tensor) -> Tensor:
        return torch.cat([mean, product], -1)

    def own(product: Tensor) -> Tensor:
        return product[..., ::step]

    if known is not None:
        flat = known.reshape(len(known), -1)
        known = beside(own(flat), flat)
    value, error = _controlled(
        counts, beside(even, target), beside(own(even_even), target_target), beside(even_line, target_line),
        beside(own(line), line), beside(own(line_line), line_line), known,
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


def _controlled(
    counts: Tensor, target: Tensor, square: Tensor, cross: Tensor, line: Tensor, line_line: Tensor, known: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The mean of a target t with the control u − known, and its squared error, from sums over folds (E, F, k).

    In fold k the residual is r = t − γ(u − known) with γ = Cov(t, u)/Var(u) on the other folds; the estimate is the
    mean of all r, its squared error their variance divided by how many there are.
    """
    total = counts.sum(1)
    if known is None:
        mean = target.sum(1) / total
        return mean, (square.sum(1) / total - mean**2).clamp(min=0) / (total - 1)
    n, t, tu, u, uu = (x.sum(1, keepdim=True) - x for x in (counts, target, cross, line, line_line))
    known = known.unsqueeze(1)
    covariance, variance = tu / n - t * u / n**2, uu / n - (u / n) ** 2
    varies = variance > 1e-12 * known**2
    slope = torch.where(varies, covariance / torch.where(varies, variance, 1.0), 0.0)
    residual = target - slope * (line - counts * known)
    # Σ (t − γ(u − R))²
    centred_square = line_line - 2 * known * line + counts * known**2
    squares = square - 2 * slope * (cross - known * target) + slope**2 * centred_square
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
