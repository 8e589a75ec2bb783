"""Moments of a function of two Gaussian inputs by quadrature, to rounding where the function is smooth."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor


def moments_by_quadrature(
    function: Callable[[Tensor], Tensor], mean: Tensor, std: float, nodes: int = 60
) -> tuple[Tensor, Tensor]:
    """Mean (d,) and covariance (d, d) of function(x), from (N, 2) to (N, d), for x ~ N(mean, std² I)."""
    places, weights = (torch.from_numpy(x) for x in np.polynomial.hermite_e.hermegauss(nodes))
    weights = torch.outer(weights, weights).flatten() / weights.sum() ** 2
    with torch.no_grad():
        values = function(mean + std * torch.cartesian_prod(places, places))
    expected = weights @ values
    return expected, (values - expected).T * weights @ (values - expected)
