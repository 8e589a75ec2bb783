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
    """Sums over pairs for E inputs of d outputs, in float64, by fold; of all products of outputs or of squares only."""

    def __init__(self, centre: Tensor, products: bool) -> None:
        entries, outputs = centre.shape
        self.centre = centre  # float64, of values that the samples' dtype has
        self.products = products
        self.pairs = torch.zeros(entries, dtype=torch.int64)
        one = centre.new_zeros(entries, FOLDS, outputs)
        two = centre.new_zeros(entries, FOLDS, outputs, outputs) if products else one
        self.even, self.even_line = one, torch.zeros_like(one)
        names = ("even_even", "target", "line", "target_target", "target_line", "line_line")
        self.even_even, self.target, self.line, self.target_target, self.target_line, self.line_line = (
            torch.zeros_like(two) for _ in names
        )
        self.counts = centre.new_zeros(entries, FOLDS)
        self.wins = centre.new_zeros(entries, outputs)
        self._ones = centre.new_ones(1)

    def add(self, entries: Tensor, first: Tensor, second: Tensor, line: Tensor | None) -> None:
        """Count in values (p, A, d) of both samples of p pairs, a multiple of FOLDS, for A of the entries.

        `line` is ℓ of the first samples, −ℓ being that of the second.
        """
        pairs, outputs = first.shape[0], first.shape[-1]
        for values in (first, second):
            winners = values.argmax(-1) + outputs * entries
            self.wins.view(-1).index_add_(0, winners.flatten(), self._ones[:1].expand(winners.numel()))
        dtype = torch.float64 if self.products else first.dtype  # a float32 product is exact enough; sums are not
        centre = self.centre[entries].to(first.dtype)
        first, second = ((x - centre).movedim(0, 1).to(dtype).unflatten(1, (FOLDS, -1)) for x in (first, second))
        even, odd = (first + second) / 2, (first - second) / 2
        self.pairs[entries.cpu()] += pairs
        even_even = self._product(even, even)
        found = {
            "counts": even.new_full((len(entries), FOLDS), pairs / FOLDS, dtype=torch.float64),
            "even": even.sum(2, dtype=torch.float64),
            "even_even": even_even,
            "target": self._product(odd, odd) + even_even,
        }
        if self.products:
            both, odd_square, even_square = odd * even, odd**2, even**2
            found["target_target"] = (
                self._product(odd_square, odd_square)
                + 2 * self._product(both, both)
                + self._product(even_square, even_square)
            )
        else:
            target = odd**2 + even**2
            found["target_target"] = self._product(target, target)
        if line is not None:
            line = line.movedim(0, 1).to(dtype).unflatten(1, (FOLDS, -1))
            square = line**2
            found["even_line"] = (even * square).sum(2, dtype=torch.float64)
            found["line"] = self._product(line, line)
            found["line_line"] = self._product(square, square)
            if self.products:
                odd_line, even_line = odd * line, even * line
                found["target_line"] = self._product(odd_line, odd_line) + self._product(even_line, even_line)
            else:
                found["target_line"] = self._product(target, square)
        for name, value in found.items():
            getattr(self, name).index_add_(0, entries, value)

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        return a.mT @ b if self.products else (a * b).sum(2, dtype=torch.float64)

    def estimate(self, known: Tensor | None) -> PairEstimate:
        """The estimates; `known` is R, the covariance or the variances of ℓ, None where there was no control."""
        count = self.counts.sum(1)[:, None]
        own = known if known is None or not self.products else known.diagonal(dim1=-2, dim2=-1)
        mean, mean_error = _controlled(
            self.counts, self.even, self._own(self.even_even), self.even_line, self._own(self.line),
            self._own(self.line_line), own,
        )  # fmt: skip
        second, second_error = _controlled(
            self.counts, self.target, self.target_target, self.target_line, self.line, self.line_line, known
        )
        total, squares = self.even.sum(1), self.even_even.sum(1)
        pairs = (count * (count - 1)).reshape(-1, *(1,) * (squares.dim() - 1))
        product = total.unsqueeze(-1) * total.unsqueeze(-2) if self.products else total**2
        second = second - (product - squares) / pairs
        spread = squares / count.reshape(-1, *(1,) * (squares.dim() - 1))
        each = self._own(spread.unsqueeze(1)).squeeze(1)
        both = each.unsqueeze(-1) * each.unsqueeze(-2) if self.products else each**2
        second_error = second_error + (both + spread**2) / pairs
        return PairEstimate(self.centre + mean, second, mean_error, second_error)

    def _own(self, x: Tensor) -> Tensor:
        """The part of each output with itself."""
        return x.diagonal(dim1=-2, dim2=-1) if self.products else x


def _controlled(
    counts: Tensor, target: Tensor, square: Tensor, cross: Tensor, line: Tensor, line_line: Tensor, known: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The mean of a target t with the control u − known, and its squared error, from sums over folds (E, F, ...).

    In fold k the residual is r = t − γ(u − known) with γ = Cov(t, u)/Var(u) on the other folds; the estimate is the
    mean of all r, its squared error their variance divided by how many there are.
    """
    counts = counts.reshape(*counts.shape, *(1,) * (target.dim() - 2))
    total = counts.sum(1)
    if known is None:
        mean = target.sum(1) / total
        return mean, (square.sum(1) / total - mean**2).clamp(min=0) / (total - 1)
    others = [x.sum(1, keepdim=True) - x for x in (counts, target, cross, line, line_line)]
    n, t, tu, u, uu = others
    covariance, variance = tu / n - t * u / n**2, uu / n - (u / n) ** 2
    known = known.unsqueeze(1)
    varies = variance > 1e-12 * known**2
    slope = torch.where(varies, covariance / torch.where(varies, variance, 1.0), 0.0)
    residual = target - slope * (line - counts * known)
    # Σ (t − γ(u − R))²
    centred_cross = cross - known * target
    centred_square = line_line - 2 * known * line + counts * known**2
    squares = square - 2 * slope * centred_cross + slope**2 * centred_square
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

    def corrected(self, found: PairEstimate, centre: Tensor) -> PairEstimate:
        """An estimate from low precision, corrected; Cov = E t − (μ − a)(μ − a)ᵀ, where μ changes too."""
        before, change = found.mean - centre, self.even
        if found.second.dim() == 3:
            mixed = before.unsqueeze(-1) * change.unsqueeze(-2)
            moved = mixed + mixed.mT + change.unsqueeze(-1) * change.unsqueeze(-2)
        else:
            moved = 2 * before * change + change**2
        return PairEstimate(
            found.mean + change,
            found.second + self.target - moved,
            found.mean_error + self.even_error,
            found.second_error + self.target_error,
        )


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
