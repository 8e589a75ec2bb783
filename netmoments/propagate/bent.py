"""The nonlinear part of a covariance from samples: between all pairs of units, without forming one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from netmoments.propagate.nonlinearity import Local, Nonlinearity
from netmoments.propagate.sampled_windows import windows_in_parts

LEAST_SAMPLES = 4
"""Fewer do not give a product of two covariances without bias, the mean being unknown."""


@dataclass(frozen=True, eq=False)
class BentUnits:
    """The m units of a layer that are not linear over the noise, at K samples."""

    units: Tensor
    """Which, (m,)."""
    windows: Tensor
    """(m, w), places in `samples`; −1 where a window has fewer."""
    samples: Tensor
    """What the windows look at, (K, q), centred: Σ_k z_k = 0."""
    curvature: Tensor
    """H, (m, w, w)."""
    remainder: Tensor
    """y − E f − g·(z − m) of each unit, (K, m), centred."""

    def grams(self, weights: Tensor) -> Tensor:
        """W_i[k, l] = Σ_u a_iu z_kuᵀ H_u z_lu for weights a on all units of the layer, (r, n): (r, K, K)."""
        weights, count = weights[:, self.units], len(self.samples)
        total = weights.new_zeros(len(weights), count, count)
        for some, z in windows_in_parts(self.windows, self.samples):
            curved = (self.curvature[some] @ z).flatten(0, 1)
            for gram, own in zip(total, weights[:, some], strict=True):
                gram.addmm_((z * own[:, None, None]).flatten(0, 1).mT, curved)
        return total

    def remainders(self, weights: Tensor) -> Tensor:
        """Σ_u a_iu (y − E f − g·(z − m))_u, (r, K)."""
        return weights[:, self.units] @ self.remainder.mT


def bent_units(
    rule: Nonlinearity, local: Local, covariance: Tensor, centred: Tensor, remainder: Tensor
) -> BentUnits | None:
    """The bent units of a layer with window covariances (n, w, w), samples (K, p) and remainders (K, n), or None.

    A unit counts if its nonlinear part, √(½ tr HSHS) or what the samples show of it, is above eps of the largest one.
    """
    size = local.quadratic_variance(covariance) + remainder.square().mean(0)
    units = (size > torch.finfo(size.dtype).eps ** 2 * size.max()).nonzero().squeeze(-1)
    if not len(units):
        return None
    windows = rule.windows[units]
    used, places = windows.clamp(min=0).unique(return_inverse=True)
    places = torch.where(windows >= 0, places, -1)
    return BentUnits(units, places, centred[:, used], local.curvature[units], remainder[:, units])


def nonlinear_covariance(grams: Tensor, remainders: Tensor) -> Tensor:
    """Cov of r scores, (r, r), without their linear parts, from `grams` and `remainders` summed over all layers.

    The quadratic part by `quadratic_covariance`; the remainders without their ½ zᵀHz as the samples have them.
    """
    if grams.shape[-1] < LEAST_SAMPLES:
        return sample_covariance(remainders)
    rest = remainders - 0.5 * grams.diagonal(dim1=-2, dim2=-1)
    return quadratic_covariance(grams) + sample_covariance(rest)


def quadratic_covariance(grams: Tensor) -> Tensor:
    """½ Σ_uv a_iu a_jv tr(H_u C_uv H_v C_uvᵀ) over all pairs of units, (r, r), unbiased given a and H.

    This is the covariance of ½ Σ_u a_iu z_uᵀH_u z_u for Gaussian z, and ½ E W_i[k, l] W_j[k, l] for Gram matrices of
    two independent samples about their true mean. From K samples about their own mean, so that the rows of W sum to 0,
    the U-statistic over four different samples is

        ½ [ Σ_kl W_i W_j − K/(K−2) Σ_k W_i[k,k] W_j[k,k] + (Σ_k W_i[k,k]) (Σ_k W_j[k,k]) / ((K−1)(K−2)) ] / (K(K−3)),

    as for the unbiased distance covariance (Székely and Rizzo, 2014). It can be negative by chance.
    """
    count = grams.shape[-1]
    diagonal, flat = grams.diagonal(dim1=-2, dim2=-1), grams.flatten(1)
    total = diagonal.sum(-1)
    products = flat @ flat.mT - diagonal @ diagonal.mT * (count / (count - 2))
    products = products + total.unsqueeze(-1) * total / ((count - 1) * (count - 2))
    return products / (2 * count * (count - 3))


def sample_covariance(values: Tensor) -> Tensor:
    """Σ_k (x_k − x̄)(x_k − x̄)ᵀ / (K − 1) of values (r, K)."""
    centred = values - values.mean(-1, keepdim=True)
    return centred @ centred.mT / (values.shape[-1] - 1)
