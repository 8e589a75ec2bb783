"""Two-level sampling: most samples in low precision, corrected by a share of them that is run exactly as well.

With e', t' the numbers of a pair (see `pair_sums`) in low precision, and e, t the exact ones on the same noise,

    E e = E e' + E(e − e'),     E t = E t' + E(t − t')

and the differences vary so little that few of them are enough (two-level Monte Carlo: Giles, "Multilevel Monte Carlo
path simulation", 2008). The corrected estimate is unbiased, whatever low precision does.

How large the share should be: if n pairs in low precision leave the squared error a/n, and n differences b/n, then
running a share ρ of the pairs exactly as well leaves (a + b/ρ)/n, at the cost c' + ρc of each pair, where c' and c are
the costs of both networks. The best is ρ = √(bc'/ac). `exact_share` takes more where differences may be rare but large,
as they are where a network takes decisions.

On a CPU (bfloat16) `ExactPairs` collects the differences as sampling goes on. On a GPU (float16) the first round is
large, and its differences are the whole correction: `correction_from`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from netmoments.sampling.estimate import PairEstimate, allowing_for_the_unseen, tolerance_met

LEAST_SHARE = 1 / 25
"""At least this share of the pairs is run exactly, however many there are: differences may come from rare decisions."""
UNSEEN = 4.0
"""At least UNSEEN/tolerance runs are exact: one more that is off by a deviation moves the mean by a quarter of it."""
ADDED = 0.1
"""Differences add at most this share to the squared error."""
COSTS = 0.5
"""The value of c'/c in the formula for the share. It is fixed, so that samples do not depend on measured times."""
MOST_SHARE = 0.25
"""Low precision is not tried where a larger share would have to be exact, and never corrected by a larger one."""
WORTH = 0.1
"""Seconds that the remaining exact runs would take, below which trying low precision costs more than it can save."""
CHEAPER = 0.85
"""Low precision must promise at most this share of the cost of exact runs: the first pairs tell a and b about that
well.
"""


class Correction(NamedTuple):
    """E(e − e') (E, d) and E(t − t'), (E, d, d) or (E, d), with their squared standard errors."""

    even: Tensor
    even_error_squared: Tensor
    target: Tensor
    target_error_squared: Tensor


def even_and_target(centre: Tensor, values: Sequence[Tensor], products: bool) -> tuple[Tensor, Tensor]:
    """e and t of pairs of values (p, E, d) about a centre (E, d), in float64; t as all products, or squares only."""
    first, second = (x.double() - centre for x in values)
    even, odd = (first + second) / 2, (first - second) / 2
    if not products:
        return even, odd**2 + even**2
    return even, odd.unsqueeze(-1) * odd.unsqueeze(-2) + even.unsqueeze(-1) * even.unsqueeze(-2)


def correction_from(centre: Tensor, exact: Sequence[Tensor], low: Sequence[Tensor], products: bool) -> Correction:
    """The correction from values (p, E, d) of both samples of p pairs, exact and in low precision."""
    (even, target), (low_even, low_target) = (even_and_target(centre, values, products) for values in (exact, low))
    even, target = even - low_even, target - low_target
    count = len(even)
    return Correction(even.mean(0), even.var(0) / count, target.mean(0), target.var(0) / count)


def corrected(estimate: PairEstimate, centre: Tensor, correction: Correction) -> PairEstimate:
    """An estimate from low precision, corrected: Cov = E t − (μ − a)(μ − a)ᵀ about the centre a, with a new μ."""
    offset, moved = estimate.mean - centre, correction.even
    if estimate.second.dim() == 3:
        mixed = offset.unsqueeze(-1) * moved.unsqueeze(-2)
        change = mixed + mixed.mT + moved.unsqueeze(-1) * moved.unsqueeze(-2)
    else:
        change = 2 * offset * moved + moved**2
    return PairEstimate(
        estimate.mean + moved,
        estimate.second + correction.target - change,
        estimate.mean_error_squared + correction.even_error_squared,
        estimate.second_error_squared + correction.target_error_squared,
    )


def exact_share(spread: float, difference: float, tolerance: float, most: int) -> float:
    """The share ρ of pairs to be run exactly as well, from a and b; above 1 where `most` pairs cannot be enough.

    It is √(b/2a), enlarged so that differences add at most a tenth to the squared error, b/ρ ≤ ADDED·a, and so that
    UNSEEN/tolerance runs are exact: what none of those has shown is small beside the tolerance. Where even the most
    pairs are too few for the tolerance, a is taken as if they were enough: an a that large comes from tails that no
    pair has shown.
    """
    pairs = min(spread / tolerance**2, most)
    ratio = difference / (pairs * tolerance**2)
    return max(LEAST_SHARE, math.sqrt(COSTS * ratio), ratio / ADDED, UNSEEN / (2 * tolerance * pairs))


def exact_pairs_worth(
    spread: float, difference: float, tolerance: float, pairs: tuple[int, int], costs: tuple[float, float]
) -> tuple[float, int]:
    """The share of pairs to be run exactly as well, and how many that will be; (0, 0) where exact runs alone are as
    cheap.

    `spread` and `difference` are a and b. `pairs` are those done so far, exact and in low precision, and the most there
    may be; `costs` are c and c' of a run.
    """
    done, most = pairs
    exact_cost, low_cost = costs
    if not (math.isfinite(spread) and math.isfinite(difference)) or spread <= 0:
        return 0.0, 0
    share = exact_share(spread, difference, tolerance, most)
    alone, both = (min(each / tolerance**2, most) for each in (spread, spread + difference / share))
    exact = (alone - done) * exact_cost
    low = both * low_cost + max(0.0, share * both - done) * exact_cost
    return (share, math.ceil(share * both)) if low < CHEAPER * exact else (0.0, 0)


class ExactPairs:
    """Pairs of E inputs that were run in low precision and exactly: sums of their differences and of the squares of
    these.

    The sums are about the same centre (E, d) as those of the pairs in low precision.
    """

    def __init__(self, centre: Tensor, second: Tensor) -> None:
        """`second` are the covariances (E, d, d) or variances (E, d) as they are known so far."""
        self.centre, self.second = centre, second
        self.share, self.least = 1.0, 0
        """The share of pairs in low precision to be run exactly as well; and how many of them right at the start."""
        self.pairs, self.low_pairs = centre.new_zeros(len(centre)), centre.new_zeros(len(centre))
        """How many pairs of each input, (E,), were run exactly, and how many in low precision."""
        self.wins = torch.zeros_like(centre)
        """How much more often each output was the largest, (E, d), exactly than in low precision."""
        self._sums = [torch.zeros_like(x) for x in (centre, centre, second, second)]

    def difference(self, estimate: PairEstimate, dtype: torch.dtype) -> float:
        """b: the squared error of the differences, relative to the outputs as estimated, times their number."""
        mean = self.mean_differences()
        if not bool(mean.even_error_squared.isfinite().all() & mean.target_error_squared.isfinite().all()):
            return math.inf
        only_differences = PairEstimate(
            estimate.mean, estimate.second, mean.even_error_squared, mean.target_error_squared
        )
        return float((tolerance_met(only_differences, dtype).square() * self.pairs).mean())

    def raise_share(
        self, spread: float, estimate: PairEstimate, dtype: torch.dtype, tolerance: float, most: int
    ) -> None:
        """Run a larger share exactly from now on if the differences turn out larger than they were."""
        share = exact_share(spread, self.difference(estimate, dtype), tolerance, most)
        self.share = max(self.share, min(MOST_SHARE, share))

    def take(self, where: Tensor | None, count: int) -> int:
        """How many of `count` further pairs in low precision are to be run exactly as well; they are counted here.

        `where` are the indices of the inputs that they belong to, None for all.
        """
        rows = self._rows(where)
        self.low_pairs[rows] += count
        wanted = max(self.least, math.ceil(self.share * float(self.low_pairs[rows].max())))
        return min(count, max(0, wanted - int(self.pairs[rows].min())))

    def add(self, where: Tensor | None, exact: Sequence[Tensor], low: Sequence[Tensor]) -> None:
        """Add the differences of values (p, A, d) at both samples of p pairs, exact and in low precision."""
        rows, products = self._rows(where), self.second.dim() == 3
        (even, target), (low_even, low_target) = (
            even_and_target(self.centre[rows], values, products) for values in (exact, low)
        )
        even, target = even - low_even, target - low_target
        for sums, x in zip(self._sums, (even, even**2, target, target**2), strict=True):
            sums.index_add_(0, rows, x.sum(0))
        self.pairs[rows] += len(even)
        self.wins.index_add_(0, rows, _wins(exact) - _wins(low))

    def mean_differences(self) -> Correction:
        """The mean differences with their squared standard errors."""
        parts = []
        for sums, squares in (self._sums[:2], self._sums[2:]):
            pairs = self.pairs.reshape(-1, *(1,) * (sums.dim() - 1))
            mean = sums / pairs
            parts += [mean, (squares / pairs - mean**2).clamp(min=0) / (pairs - 1)]
        return Correction(*parts)

    def correction(self) -> Correction:
        """`mean_differences`, with errors that allow for what so many pairs cannot have shown."""
        even, even_error, target, target_error = self.mean_differences()
        allowed = allowing_for_the_unseen(PairEstimate(even, self.second, even_error, target_error), 2 * self.pairs)
        return Correction(even, allowed.mean_error_squared, target, allowed.second_error_squared)

    def shares_of_wins(self, low_wins: Tensor) -> Tensor:
        """Shares (E, d) of the samples in which each output is the largest, from the counts in low precision."""
        shares = low_wins / low_wins.sum(-1, keepdim=True) + self.wins / (2 * self.pairs.unsqueeze(-1))
        shares = shares.clamp(min=0)
        return shares / shares.sum(-1, keepdim=True)

    def _rows(self, where: Tensor | None) -> Tensor:
        return torch.arange(len(self.centre), device=self.centre.device) if where is None else where


def _wins(values: Sequence[Tensor]) -> Tensor:
    """How often each output is the largest, (A, d), of values (p, A, d) at both samples."""
    both = torch.cat(list(values))
    return torch.nn.functional.one_hot(both.argmax(-1), both.shape[-1]).sum(0).double()
