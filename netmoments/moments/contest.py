"""Every class against every other: which comparisons matter, and how likely a class wins them all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor

from netmoments.moments.separation import BLOCK, CERTAIN, orthant_by_separation
from netmoments.normal import distribution
from netmoments.relu.covariance import orthant_probability

NEGLIGIBLE = 1e-30
"""A class that wins less often than this gets an upper bound instead of its probability."""

OVERLOOKED = 1e-9
"""How much of a class's probability may be lost by leaving out rivals that hardly ever matter."""

_GUESS = 1e-6  # of its upper bound: what P(k) is taken for until it is known
_EXACT = 1e-4  # above it two rivals are an exact orthant probability (absolute error 1e-14)


class Contest:
    """Every class k against every other class j, of some images: tensors of shape (images, k, j)."""

    def __init__(self, caller: str, mean: Tensor, covariance: Tensor, certain: float) -> None:
        power = covariance.diagonal(dim1=-2, dim2=-1)
        scale = power.unsqueeze(-1) + power.unsqueeze(-2)
        variance = scale - 2 * covariance
        if bool((variance < -max(100, mean.shape[-1]) * certain * scale).any()):
            raise ValueError(
                f"{caller}: covariance must be positive semidefinite, got a difference of logits with variance "
                f"{float(variance.min()):.3g}"
            )
        self.covariance = covariance
        self.gap = mean.unsqueeze(-1) - mean.unsqueeze(-2)
        self.floor = certain * scale
        self.spread = torch.where(variance > self.floor, variance, 0.0).sqrt()
        self.lead = self._leads()
        self.upper, self.strongest = self.lead.min(-1)
        self.upper = distribution(self.upper)

    def _leads(self) -> Tensor:
        """t = E[y_k − y_j] / its standard deviation, ±∞ where the winner of the two is certain; ties to the first."""
        first = torch.ones_like(self.gap[0], dtype=torch.bool).triu()
        wins = (self.gap > 0) | ((self.gap == 0) & first)
        sure = torch.where(wins, math.inf, -math.inf).to(self.gap.dtype)
        return torch.where(self.spread > 0, self.gap / torch.where(self.spread > 0, self.spread, 1.0), sure)

    def differences(self, image: Tensor, winner: Tensor, rivals: Tensor) -> Tensor:
        """Cov(y_i − y_k, y_j − y_k) = Σ_ij − Σ_ik − Σ_kj + Σ_kk for i, j among the rivals (pairs, m): (pairs, m, m)."""
        rows = self.covariance[image.unsqueeze(-1), winner.unsqueeze(-1), rivals]
        own = self.covariance[image, winner, winner]
        square = self.covariance[image[:, None, None], rivals.unsqueeze(-1), rivals.unsqueeze(-2)]
        return square - rows.unsqueeze(-1) - rows.unsqueeze(-2) + own[:, None, None]

    def relevance(self) -> Tensor:
        """A bound on how much P(k) would change if rival j were left out: (images, k, j).

        At most P(y_j > y_k, y_k ≥ y_s) with s the strongest rival of k (P(y_s > y_k) for s itself), and a convex set
        at distance r from the mean, in units of the noise, has a probability of at most Φ(−r).
        """
        s = self.strongest.unsqueeze(-1)
        own = self.covariance.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        with_strongest = self.covariance.gather(-2, s.expand_as(self.gap)) - self.covariance.gather(-1, s)
        cross = with_strongest - self.covariance + own
        product = self.spread * self.spread.gather(-1, s)
        rho = (-cross / torch.where(product > 0, product, 1.0)).clamp(-1, 1)
        above = -self.lead.gather(-1, s).expand_as(rho)
        distance = corner_distance(above, self.lead, rho).scatter(-1, s, self.lead.gather(-1, s))
        return torch.where(self.lead == math.inf, 0.0, distribution(-distance))

    def chances(self, uniform: Tensor, budget: int) -> Tensor:
        """P(k), not normalized: (images, k).

        Rivals are left out as if P(k) were a guess; where it turns out smaller, again with more of them.
        """
        chance, relevance = self.upper.clone(), self.relevance()
        image, winner = (self.upper >= NEGLIGIBLE).nonzero(as_tuple=True)
        guess = _GUESS * self.upper[image, winner]
        while len(image):
            here = relevance[image, winner]
            kept = here > OVERLOOKED * guess.unsqueeze(-1) / here.shape[-1]
            found = self._orthants(image, winner, kept, uniform, budget)
            chance[image, winner] = found
            unsure = torch.where(kept, 0.0, here).sum(-1) > OVERLOOKED * found
            image, winner, guess = image[unsure], winner[unsure], found[unsure]
        return chance

    def _orthants(self, image: Tensor, winner: Tensor, kept: Tensor, uniform: Tensor, budget: int) -> Tensor:
        """P(y_j ≤ y_k for the kept j) for each pair (image, k), those with equally many rivals together."""
        result = torch.ones_like(image, dtype=uniform.dtype)
        counts, order = kept.sum(-1).sort(stable=True)
        for span in _spans(counts.tolist(), uniform.shape[-1], budget):
            pairs, rows = order[span], int(counts[span][-1])
            mine, rivals = kept[pairs].sort(dim=-1, descending=True, stable=True)
            parts = image[pairs], winner[pairs], rivals[:, :rows]
            result[pairs] = self._orthant(*parts, mine[:, :rows], uniform)
        return result

    def _orthant(self, image: Tensor, winner: Tensor, rivals: Tensor, mine: Tensor, uniform: Tensor) -> Tensor:
        """One chunk of `_orthants`: rivals (pairs, m) that are not `mine` fill up the rows and constrain nothing."""
        at = image.unsqueeze(-1), winner.unsqueeze(-1), rivals
        if rivals.shape[-1] == 1:
            return distribution(self.lead[at].squeeze(-1))
        nothing = torch.eye(rivals.shape[-1], dtype=uniform.dtype, device=uniform.device)
        both = mine.unsqueeze(-1) & mine.unsqueeze(-2)
        covariance = torch.where(both, self.differences(image, winner, rivals), nothing)
        limit = torch.where(mine, self.gap[at], CERTAIN)
        floor = torch.where(mine, self.floor[at], 0.0)
        if rivals.shape[-1] > 2:
            return orthant_by_separation(limit, covariance, floor, uniform)
        middle = (torch.arange(uniform.shape[-1], dtype=uniform.dtype, device=uniform.device) + 0.5).unsqueeze(0)
        small = orthant_by_separation(limit, covariance, floor, (middle / uniform.shape[-1]).expand(2, -1))
        large = orthant_probability(limit, covariance)[:, 0, 1]
        return torch.where(large > _EXACT, large, small)


def corner_distance(a: Tensor, b: Tensor, rho: Tensor) -> Tensor:
    """The distance of {x ≥ a, y ≥ b} from 0 for standard normals x, y of correlation rho, in their Mahalanobis metric.

    0 if it holds 0; a or b if the nearest point is on one side; else the corner, at √(b² + (a − ρb)²/(1 − ρ²)).
    As ρ → ±1 never too far.
    """
    corner = torch.sqrt(b * b + (a - rho * b).square() / ((1 - rho) * (1 + rho)).clamp(min=1e-12))
    side = torch.where((b > 0) & (rho * b >= a), b, corner)
    side = torch.where((a > 0) & (rho * a >= b), a, side)
    return torch.where((a <= 0) & (b <= 0), 0.0, side)


def _spans(counts: list[int], points: int, budget: int) -> Iterator[slice]:
    """Slices of ascending counts, of one number of rivals (or nearly, if many) that fit the budget; not 0 rivals."""
    start = 0
    for rows, group in groupby(counts, lambda count: count if count < BLOCK else -(-count // BLOCK) * BLOCK):
        stop = start + len(list(group))
        pair_bytes = 8 * (points * (rows + min(rows, BLOCK) + 8) + 6 * rows * rows)
        together = max(1, budget // pair_bytes)
        if rows:
            yield from (slice(at, min(at + together, stop)) for at in range(start, stop, together))
        start = stop
