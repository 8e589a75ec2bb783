"""Which logit is the largest: the probability of each class when the logits are Gaussian."""

from __future__ import annotations

import torch
from torch import Tensor

from netmoments.checks import describe, require_broadcastable, require_finite, require_float_tensors
from netmoments.gaussian.validation import tolerance
from netmoments.moments.contest import Contest
from netmoments.moments.separation import quasi_random
from netmoments.relu.tiling import memory_budget_for


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
    budget, classes = memory_budget_for(mean.device, memory_budget), mean.shape[-1]
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
