"""Which score is the largest: the probability of each class when the scores are Gaussian."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor

from netmoments.checks import describe, require_broadcastable, require_finite, require_float_tensors
from netmoments.gaussian import tolerance
from netmoments.memory import scratch_budget
from netmoments.moments.orthants import BLOCK, CERTAIN, orthant_by_separation, quasi_random
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


@torch.no_grad()
def winning_probabilities(
    mean: Tensor, covariance: Tensor, *, points: int = 2048, memory_budget: int | None = None
) -> Tensor:
    """P(argmax y = k) of every k for y ~ N(mean, covariance): (..., d) and (..., d, d) to (..., d), summing to 1.

    P(k) = P(y_j − y_k ≤ 0 for all j ≠ k), by separation of variables over `points` quasi-random points (best a power
    of 2); the same for the same input, whatever the random seed. For d ≤ 2 it is exact; for d = 3 to 1e-10 of itself
    above 1e-4, to 1e-5 below. For d = 10 and 2048 points the relative error is 4e-4 in the median and below 3e-3 in 99
    of 100, in the tails as well (`benchmarks.winners`), and falls a little slower than 1/points. A class with min_j
    P(y_k ≥ y_j) < 1e-30 gets that minimum, an upper bound.

    Singular and zero covariances are fine: a difference with variance up to 8 eps (Σ_jj + Σ_kk), eps that of the
    dtype, is certain, and where two logits are equal with certainty the first wins. Where the differences have (nearly)
    linear dependencies the absolute error is the same, but 1 in 100 of the probabilities is off by more than 3 %, and
    small ones can be wrong entirely. There are no gradients. Values must be finite and the covariance symmetric;
    that it is positive semidefinite is checked for pairs only.
    `memory_budget`, in bytes, bounds the scratch memory where d allows: 16 MiB on a CPU, 1 GiB on a GPU by default.

    >>> winning_probabilities(torch.zeros(2), torch.eye(2))
    tensor([0.5000, 0.5000])
    >>> winning_probabilities(torch.tensor([0.0, 3.0, 3.0]), torch.zeros(3, 3))
    tensor([0., 1., 0.])
    """
    return _winning("winning_probabilities", mean, covariance, points, memory_budget).to(mean.dtype)


@torch.no_grad()
def losing_probability(
    mean: Tensor, covariance: Tensor, label: int | Tensor, *, points: int = 2048, memory_budget: int | None = None
) -> Tensor:
    """P(argmax y ≠ label) for y ~ N(mean, covariance): (...), with `label` an integer or integers of the batch shape.

    The sum of the other classes' `winning_probabilities`, so that 1e-20 has as many digits as 1/2.

    >>> losing_probability(torch.tensor([9.0, 0.0], dtype=torch.float64), torch.eye(2, dtype=torch.float64), 0)
    tensor(9.8308e-11, dtype=torch.float64)
    """
    caller = "losing_probability"
    chance = _winning(caller, mean, covariance, points, memory_budget)
    index = _labels(caller, label, chance).unsqueeze(-1)
    return chance.scatter(-1, index, 0.0).sum(-1).to(mean.dtype)


def _winning(caller: str, mean: Tensor, covariance: Tensor, points: int, memory_budget: int | None) -> Tensor:
    """`winning_probabilities` in float64."""
    mean, covariance = require_float_tensors(caller, mean=mean, covariance=covariance)
    batch = _require_logits(caller, mean, covariance)
    if isinstance(points, bool) or not isinstance(points, int) or points < 1:
        raise ValueError(f"{caller}: points must be a positive integer, got {points!r}")
    budget, classes = scratch_budget(mean.device, memory_budget), mean.shape[-1]
    if classes == 1:
        return torch.ones(*batch, 1, dtype=torch.float64, device=mean.device)
    uniform = quasi_random(classes - 1, points, mean.device)
    certain = 8 * torch.finfo(mean.dtype).eps
    means = mean.double().expand(*batch, classes).reshape(-1, classes)
    covariances = (0.5 * (covariance.double() + covariance.double().mT)).expand(*batch, classes, classes)
    together = max(1, budget // (8 * 10 * classes * classes))
    parts = zip(means.split(together), covariances.reshape(-1, classes, classes).split(together), strict=True)
    chance = torch.cat([Contest(caller, m, c, certain).chances(uniform, budget) for m, c in parts])
    return (chance / chance.sum(-1, keepdim=True)).reshape(*batch, classes)


def _require_logits(caller: str, mean: Tensor, covariance: Tensor) -> torch.Size:
    """Shapes (..., d) and (..., d, d), finite values, a symmetric covariance with variances ≥ 0: the batch's shape."""
    if mean.dim() < 1 or mean.shape[-1] == 0:
        raise ValueError(f"{caller}: mean must have shape (..., d) with d ≥ 1, got {describe(mean)}")
    classes = mean.shape[-1]
    if covariance.dim() < 2 or covariance.shape[-2:] != (classes, classes):
        raise ValueError(
            f"{caller}: covariance must have shape (..., {classes}, {classes}) to match mean of shape "
            f"{tuple(mean.shape)}, got {describe(covariance)}"
        )
    batch = require_broadcastable(caller, mean=mean.shape[:-1], covariance=covariance.shape[:-2])
    require_finite(caller, "mean", mean)
    require_finite(caller, "covariance", covariance)
    asymmetry = (covariance - covariance.mT).abs().amax((-2, -1))
    if bool((asymmetry > tolerance(covariance) * covariance.abs().amax((-2, -1))).any()):
        raise ValueError(
            f"{caller}: covariance must be symmetric, got |Σ − Σᵀ| up to {float(asymmetry.max()):.3g}; "
            f"pass (S + S.mT) / 2 if the difference is noise"
        )
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    if bool((variance < 0).any()):
        raise ValueError(f"{caller}: covariance must have variances ≥ 0 on its diagonal, got {float(variance.min()):g}")
    return batch


def _labels(caller: str, label: int | Tensor, chance: Tensor) -> Tensor:
    """`label` as an index of the batch's shape, each in 0 … d − 1."""
    index = torch.as_tensor(label, device=chance.device)
    if index.dtype.is_floating_point or index.dtype.is_complex or index.dtype == torch.bool:
        raise TypeError(f"{caller}: label must be an integer or a tensor of integers, got {describe(label)}")
    batch, classes = chance.shape[:-1], chance.shape[-1]
    if bool(((index < 0) | (index >= classes)).any()):
        raise ValueError(
            f"{caller}: label must be between 0 and {classes - 1}, got {int(index.min())} to {int(index.max())}"
        )
    try:
        return index.long().expand(batch)
    except RuntimeError:
        raise ValueError(
            f"{caller}: label must broadcast to the batch shape {tuple(batch)}, got {describe(label)}"
        ) from None
