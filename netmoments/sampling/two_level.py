"""Most samples in low precision, and a share of them exactly as well: which share, and what these correct.

With e', t' the numbers of a pair (see `pair_sums`) in low precision, e, t the exact ones on the same noise,

    E e = E e' + E(e − e'),     E t = E t' + E(t − t')

where differences vary so little that few of them are enough (two-level Monte Carlo, Giles, "Multilevel Monte Carlo path
simulation", 2008). Where n pairs leave the squared error a/n, and n pairs of differences b/n, a share ρ of pairs that
are run exactly as well leaves (a + b/ρ)/n at the cost c' + ρc of each, c' and c the costs of both networks: the best is
ρ = √(bc'/ac). More is taken where differences may be rare but large, as of decisions: see `exact_share`.

This is for a CPU; on a GPU, where the first round is large, that is the share (see `pair_sums.CorrectionSums`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from netmoments.sampling.pair_sums import (
    PairEstimate,
    Standing,
    allowing_for_the_unseen,
    even_and_target,
    relative_errors,
)

LEAST_SHARE = 1 / 25
"""Of the pairs, at least, however many: differences may be of rare decisions."""
UNSEEN = 4.0
"""Exact runs, by 1/tolerance, at least: one that is off by a deviation moves the mean by a quarter of the tolerance."""
ADDED = 0.1
"""Of the squared error, at most, from differences."""
COSTS = 0.5
"""c'/c as it is taken for the share, so that it depends on values alone, not on times."""
MOST_SHARE = 0.25
"""Of the pairs: where more would have to be exact, low precision is not even tried; and no more are, if it was."""
WORTH = 0.1
"""Seconds that exact runs would take still, below which there is too little to gain for what it takes besides runs."""
CHEAPER = 0.85
"""Of the cost of exact runs, at most: a and b of the first pairs say it to about that."""


def exact_share(spread: float, difference: float, tolerance: float, most: int) -> float:
    """The share ρ of pairs to be run exactly, too, from a and b; above 1 where so many pairs cannot be enough.

    √(b/2a), such that differences are no more than a tenth of the squared error, b/ρ ≤ ADDED·a; and as many that what
    none of them has shown is small beside the tolerance: UNSEEN/tolerance runs of the pairs that this will take. Where
    the most pairs are too few, a is taken as if they were enough: that large, it is of tails that no pair has shown.
    """
    pairs = min(spread / tolerance**2, most)
    ratio = difference / (pairs * tolerance**2)
    return max(LEAST_SHARE, math.sqrt(COSTS * ratio), ratio / ADDED, UNSEEN / (2 * tolerance * pairs))


def exact_pairs_worth(
    spread: float, difference: float, tolerance: float, pairs: tuple[int, int], costs: tuple[float, float]
) -> tuple[float, int]:
    """The share of pairs to be run exactly, too, and how many these will be; 0 where exact ones alone are as cheap.

    From a and b; pairs that there are, exact and in low precision, and the most there may be; costs c and c' of a run.
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
    """Pairs of E inputs that were run in low precision and exactly: sums of the differences of e and t, about the same
    centre (E, d), and of their squares.
    """

    def __init__(self, centre: Tensor, second: Tensor) -> None:
        """`second` are the covariances (E, d, d) or variances (E, d) as they are known so far."""
        self.centre, self.second = centre, second
        self.share, self.least = 1.0, 0
        """Of the pairs in low precision, those to be run exactly, too; and how many at once."""
        self.pairs, self.of_low = centre.new_zeros(len(centre)), centre.new_zeros(len(centre))
        """How many there are of each input, (E,), and how many in low precision."""
        self.wins = torch.zeros_like(centre)
        """How often each output was the largest, (E, d), more often than in low precision."""
        self._sums = [torch.zeros_like(x) for x in (centre, centre, second, second)]

    def spread_of(self, found: PairEstimate, dtype: torch.dtype) -> float:
        """b: the squared error of differences, relative to the outputs as found, times their number."""
        _, even_error, _, target_error = self.differences()
        if not (bool(even_error.isfinite().all()) and bool(target_error.isfinite().all())):
            return math.inf
        off = relative_errors(found._replace(mean_error_squared=even_error, second_error_squared=target_error), dtype)
        return float((off.square() * self.pairs).mean())

    def watch(self, found: Standing, dtype: torch.dtype, tolerance: float, most: int) -> None:
        """Take more of them from now on where differences turn out to be larger than they were."""
        spread = float((found.reached.square() * found.pairs).mean())
        share = exact_share(spread, self.spread_of(found.estimate, dtype), tolerance, most)
        self.share = max(self.share, min(MOST_SHARE, share))

    def take(self, where: Tensor | None, count: int) -> int:
        """Count in so many more pairs in low precision, of the entries with these indices, or of all; how many of them
        are to be run exactly, too.
        """
        rows = self._rows(where)
        self.of_low[rows] += count
        wanted = max(self.least, math.ceil(self.share * float(self.of_low[rows].max())))
        return min(count, max(0, wanted - int(self.pairs[rows].min())))

    def add(self, where: Tensor | None, exact: Sequence[Tensor], low: Sequence[Tensor]) -> None:
        """Count in exact values and those in low precision, (p, A, d) of both samples of p pairs."""
        rows, products = self._rows(where), self.second.dim() == 3
        (even, target), (low_even, low_target) = (
            even_and_target(self.centre[rows], values, products) for values in (exact, low)
        )
        even, target = even - low_even, target - low_target
        for sums, x in zip(self._sums, (even, even**2, target, target**2), strict=True):
            sums.index_add_(0, rows, x.sum(0))
        self.pairs[rows] += len(even)
        self.wins.index_add_(0, rows, _wins(exact) - _wins(low))

    def differences(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """E(e − e') (E, d) and E(t − t'), (E, d, d) or (E, d), each with its squared error behind it."""
        found = []
        for sums, squares in (self._sums[:2], self._sums[2:]):
            pairs = self.pairs.reshape(-1, *(1,) * (sums.dim() - 1))
            mean = sums / pairs
            found += [mean, (squares / pairs - mean**2).clamp(min=0) / (pairs - 1)]
        even, even_error, target, target_error = found
        return even, even_error, target, target_error

    def correction(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`differences`, with errors that allow for what so many pairs cannot have shown."""
        even, even_error, target, target_error = self.differences()
        allowed = allowing_for_the_unseen(PairEstimate(even, self.second, even_error, target_error), 2 * self.pairs)
        return even, allowed.mean_error_squared, target, allowed.second_error_squared

    def shares_of_wins(self, wins: Tensor) -> Tensor:
        """Shares (E, d) of the samples in which each output is the largest, from counts in low precision."""
        shares = wins / wins.sum(-1, keepdim=True) + self.wins / (2 * self.pairs.unsqueeze(-1))
        shares = shares.clamp(min=0)
        return shares / shares.sum(-1, keepdim=True)

    def _rows(self, where: Tensor | None) -> Tensor:
        return torch.arange(len(self.centre), device=self.centre.device) if where is None else where


def _wins(values: Sequence[Tensor]) -> Tensor:
    """How often each output is the largest, (A, d), of values (p, A, d) of both samples."""
    both = torch.cat(list(values))
    return torch.nn.functional.one_hot(both.argmax(-1), both.shape[-1]).sum(0).double()
