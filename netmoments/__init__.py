"""What a trained ReLU network does under Gaussian noise, computed instead of sampled.

Names are imported on first use, so that the command line starts without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from netmoments import paper
    from netmoments.affine_relu_affine import AffineReluAffine
    from netmoments.gaussian import Dense, Diagonal, Gaussian, Isotropic, LowRank
    from netmoments.relu import orthant_probability, relu_covariance, relu_mean, relu_variance
    from netmoments.sampling import SampledMoments, monte_carlo, relative_difference

_HOME = {
    "AffineReluAffine": "netmoments.affine_relu_affine",
    "Dense": "netmoments.gaussian",
    "Diagonal": "netmoments.gaussian",
    "Gaussian": "netmoments.gaussian",
    "Isotropic": "netmoments.gaussian",
    "LowRank": "netmoments.gaussian",
    "SampledMoments": "netmoments.sampling",
    "monte_carlo": "netmoments.sampling",
    "orthant_probability": "netmoments.relu",
    "relative_difference": "netmoments.sampling",
    "relu_covariance": "netmoments.relu",
    "relu_mean": "netmoments.relu",
    "relu_variance": "netmoments.relu",
}

__all__ = [
    "AffineReluAffine",
    "Dense",
    "Diagonal",
    "Gaussian",
    "Isotropic",
    "LowRank",
    "SampledMoments",
    "monte_carlo",
    "orthant_probability",
    "paper",
    "relative_difference",
    "relu_covariance",
    "relu_mean",
    "relu_variance",
]


def __getattr__(name: str) -> Any:
    if name == "paper":
        return importlib.import_module("netmoments.paper")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'netmoments' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
