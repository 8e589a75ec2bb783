"""How far from Gaussian the input of a nonlinear layer is: the third cumulants that earlier layers gave it.

To second order in the noise ε of the image a tensor is mean + Fᵀε + ½(Q[ε, ε] − tr Q). Its third cumulants are those of
a Gaussian's second-order polynomial, κ(x, y, z) = Q_x[f_y, f_z] + Q_y[f_x, f_z] + Q_z[f_x, f_y].
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from netmoments.propagate.nonlinearity import Local, ThirdCumulants, whitened
from netmoments.propagate.spread import Rows, weighted_matrices

MOST_DIRECTIONS = 9
"""Of a window: those of largest curvature; all of a 3×3 window's."""


class ThirdOrder(NamedTuple):
    """What the windows of a layer have beyond a Gaussian."""

    cumulants: ThirdCumulants
    turns: Tensor
    """What their bends add to the output's linear part, (..., n, K): Σᵢⱼ Hᵢⱼ Qᵢfⱼ."""


def third_order(rows: Rows, spread: Tensor, local: Local, covariance: Tensor, present: Tensor) -> ThirdOrder:
    """From windows' spreads (..., n, w, rows), their Gaussian moments and covariances (..., n, w, w)."""
    q = min(spread.shape[-2], MOST_DIRECTIONS)
    root, inverse = whitened(covariance, local.curvature, present, q)
    axes = inverse[..., :q, :]
    along = axes @ spread[..., rows.probes]
    bent = weighted_matrices(axes @ spread[..., rows.quadratic], rows)
    towards = bent @ along.mT.unsqueeze(-3)
    bends = along.unsqueeze(-3) @ towards
    curvature = root[..., :q].mT @ local.curvature @ root[..., :q]
    turns = (curvature.unsqueeze(-2) * towards).sum((-3, -1))
    return ThirdOrder(ThirdCumulants(root, _symmetric_sum(bends)), turns)


def _symmetric_sum(bends: Tensor) -> Tensor:
    """κ_abc = Q_a[b, c] + Q_b[a, c] + Q_c[a, b]."""
    return bends + bends.transpose(-3, -2) + bends.transpose(-3, -1)
