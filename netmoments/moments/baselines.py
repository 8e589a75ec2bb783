"""What the field uses instead, for comparison: the unscented transform, and covariances by a series of four terms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from netmoments.gaussian.covariance import Covariance
from netmoments.normal import density, standard_deviation
from netmoments.precision import full_precision
from netmoments.propagate.layerwise import gaussian_layerwise
from netmoments.propagate.piecewise_linear import PiecewiseLinear
from netmoments.propagate.plan import Plan
from netmoments.relu.marginal import standardize

TOGETHER_BYTES = {"cpu": 2**24, "cuda": 2**28}
"""Points that go through a network at a time."""


@torch.no_grad()
def unscented(
    network: Callable[[Tensor], Tensor], mean: Tensor, covariance: Covariance, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean (k,) and covariance (k, k) of the chosen scores from 2r points x ± √r Rᵢ, all of weight 1/(2r), Σ = RRᵀ.

    The unscented transform with κ = 0, the third-degree cubature rule: exact for cubic polynomials. `mean` is (1, ...)
    """
    root = covariance.root()
    spread = root.mT * root.shape[-1] ** 0.5
    together = max(1, TOGETHER_BYTES.get(mean.device.type, TOGETHER_BYTES["cpu"]) // (mean.numel() * mean.itemsize))
    scores = []
    with full_precision():
        for offset in torch.cat([spread, -spread]).split(together):
            scores.append(network(mean + offset.reshape(-1, *mean.shape[1:]))[:, rows].double())
    values = torch.cat(scores)
    centred = values - values.mean(0)
    return values.mean(0).to(mean.dtype), (centred.mT @ centred / len(centred)).to(mean.dtype)


def by_series(plan: Plan, mean: Tensor, covariance: Covariance, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Layer by layer, every tensor Gaussian, covariances of piecewise linear units by four terms of their series."""
    stages = tuple(
        replace(stage, rule=_series(stage.rule)) if isinstance(stage.rule, PiecewiseLinear) else stage
        for stage in plan.stages
    )
    means, covariances = gaussian_layerwise(replace(plan, stages=stages), mean, covariance, rows.unsqueeze(0))
    return means[0], covariances[0]


def _series(rule: PiecewiseLinear) -> FourTerms:
    return FourTerms(rule.offset, rule.slope, rule.bends, rule.kinks)


@dataclass(frozen=True, eq=False)
class FourTerms(PiecewiseLinear):
    """Piecewise linear units whose covariances are four terms of the series in their correlation ρ."""

    def pairs(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """Σₙ₌₂⁴ aₙ aₙ' ρⁿ/n!, with aₙ = s Σ bend Heₙ₋₂(h)φ(h) up to sign; the first term is the linear part."""
        s = standard_deviation(covariance.diagonal(dim1=-2, dim2=-1))
        h = standardize(mean - self._beside(self.kinks, mean), s)
        bell = self._beside(self.bends, mean) * density(h)
        safe = torch.where(s > 0, s, 1.0)
        rho = (covariance / safe.unsqueeze(-1) / safe.unsqueeze(-2)).clamp(-1, 1)
        second, third, fourth = (s * (bell * factor).sum(0) for factor in (1.0, h, h * h - 1))

        def term(coefficient: Tensor, power: int, factorial: float) -> Tensor:
            return coefficient.unsqueeze(-1) * coefficient.unsqueeze(-2) * rho**power / factorial

        return term(second, 2, 2.0) + term(third, 3, 6.0) + term(fourth, 4, 24.0)
