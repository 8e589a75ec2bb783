"""The nonlinear part of a covariance from samples: between all pairs of units, without forming one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from netmoments.propagate.nonlinearity import Nonlinearity
from netmoments.propagate.sampled_windows import centred, laid_out, units_in_parts, windows_in_parts

LEAST_SAMPLES = 4
"""Fewer do not give two spreads that know nothing of each other."""


def paired(count: int) -> int:
    """How many of K samples, from the first and the last, are paired with each other: the work goes with the square."""
    return max(count // 2 if count < 8 else 3 * count // 8, 1)


class Quadratics(NamedTuple):
    """The quadratic forms zᵀM_i z', M_i = Σ_u a_iu H_u, of r scores at K samples of N images."""

    own: Tensor
    """At a sample and itself, (N, r, K), samples about their mean."""
    across: Tensor
    """At some of the first samples and as many of the last, (N, r, k, k), about any point: the means of rows and
    columns are not used."""


@dataclass(frozen=True, eq=False)
class BentUnits:
    """The m units of a layer that are not linear over the noise."""

    units: Tensor
    """Which, (m,)."""
    windows: Tensor
    """What each looks at, (m, w); −1 where a window has fewer."""
    samples: Tensor
    """Of the layer's input, (N, K, p)."""
    curvature: Tensor
    """H, (N, m, w, w)."""

    def quadratics(self, weights: Tensor) -> Quadratics:
        """Σ_u a_iu z_uᵀ H_u z_u' for weights a on all units of the layer, (N, r, n)."""
        images, count = self.samples.shape[:2]
        few, scores = paired(count), weights.shape[1]
        total = Quadratics(weights.new_zeros(images, scores, count), weights.new_zeros(images, scores, few, few))
        weights = weights.index_select(-1, self.units)
        if self.windows.shape[1] == 1:
            self._add_of_single_inputs(weights, total)
        else:
            self._add_of_windows(weights, total)
        return total

    def _add_of_single_inputs(self, weights: Tensor, total: Quadratics) -> None:
        """z_kᵀ diag(a H) z_l: a product of matrices for each score."""
        images, count = self.samples.shape[:2]
        few = paired(count)
        for some in units_in_parts(self.samples, images * count, len(self.units)):
            places = self.windows[some].squeeze(-1)
            z = centred(self.samples.flatten(0, 1).index_select(1, places).unflatten(0, (images, count)), 1)
            curved = self.curvature[:, some].flatten(1).unsqueeze(1) * z
            total.own.add_(weights[..., some] @ (z * curved).mT)
            for across, own in zip(total.across.unbind(1), weights[..., some].unbind(1), strict=True):
                across.add_((z[:, :few] * own.unsqueeze(1)) @ curved[:, -few:].mT)

    def _add_of_windows(self, weights: Tensor, total: Quadratics) -> None:
        """The forms of every unit between first and last samples, (N, some, k·k), then their sums for all scores."""
        count, width = self.samples.shape[1], self.windows.shape[1]
        few = paired(count)
        each = max(width * count, few * few)
        across = total.across.view(*weights.shape[:2], -1)
        for some, sampled in windows_in_parts(self.windows, laid_out(self.samples.mT), each):
            z = centred(sampled, -1)
            curved = self.curvature[:, some] @ z
            total.own.add_(weights[..., some] @ (z * curved).sum(2))
            across.add_(weights[..., some] @ (z[..., :few].mT @ curved[..., -few:]).flatten(2))


def bent_units(rule: Nonlinearity, curvature: Tensor, covariance: Tensor, samples: Tensor) -> BentUnits | None:
    """The units of a layer whose curvature can be seen, or None, from H and S, (N, n, w, w), and samples (N, K, p).

    A unit counts if Σ|H_ij| s_i s_j, which bounds √(tr HSHS), is above √eps of the image's largest one.
    """
    s = covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    size = (curvature.abs() * s.unsqueeze(-1) * s.unsqueeze(-2)).sum((-2, -1))
    bent = size > torch.finfo(size.dtype).eps ** 0.5 * size.amax(-1, keepdim=True)
    units = bent.any(0).nonzero().squeeze(-1)
    if not len(units):
        return None
    own = (curvature * bent[..., None, None]).index_select(1, units)
    return BentUnits(units, rule.windows[units], samples, own)


def nonlinear_covariance(remainders: Tensor, quadratics: Quadratics | None) -> Tensor:
    """Cov of r scores, (N, r, r), without their linear parts: what remains of K samples of them, (N, r, K), is known.

    The quadratic part by `quadratic_covariance`; the remainders without their ½ zᵀMz as the samples have them.
    """
    if quadratics is None or remainders.shape[-1] < LEAST_SAMPLES:
        return sample_covariance(remainders)
    return quadratic_covariance(quadratics.across) + sample_covariance(remainders - 0.5 * quadratics.own)


def quadratic_covariance(across: Tensor) -> Tensor:
    """½ tr(M_i S M_j S), (N, r, r), the covariance of ½ zᵀM_i z for Gaussian z, unbiased given M.

    One S is that of the first samples, the other that of the last, each about their own mean: from the forms zᵀM_i z'
    between the two, (N, r, a, b), less the means of their rows and columns, ½ Σ W_i W_j / ((a − 1)(b − 1)). This never
    has a negative eigenvalue.
    """
    first, second = across.shape[-2:]
    forms = across - across.mean(-1, keepdim=True)
    flat = (forms - forms.mean(-2, keepdim=True)).flatten(-2)
    return flat @ flat.mT / (2 * (first - 1) * (second - 1))


def sample_covariance(values: Tensor) -> Tensor:
    """Σ_k (x_k − x̄)(x_k − x̄)ᵀ / (K − 1) of values (..., r, K)."""
    deviations = values - values.mean(-1, keepdim=True)
    return deviations @ deviations.mT / (values.shape[-1] - 1)
