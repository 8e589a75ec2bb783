"""What a trained ReLU network does under Gaussian noise, computed instead of sampled.

Names are imported on first use, so that the command line starts without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from netmoments import attacks, data, paper, propagate
    from netmoments.affine_relu_affine import AffineReluAffine
    from netmoments.attacks.expected_logits import ExpectedLogits
    from netmoments.gaussian import Dense, Diagonal, Gaussian, Isotropic, LowRank
    from netmoments.linearize.bank import LinearizationBank
    from netmoments.linearize.maps import two_stage_maps
    from netmoments.linearize.two_stage import two_stage
    from netmoments.moments.front_door import output_moments
    from netmoments.moments.result import OutputMoments
    from netmoments.moments.tightness import Tightness, tightness
    from netmoments.network import zoo
    from netmoments.network.inspection import relus
    from netmoments.network.loading import load_network
    from netmoments.propagate.rules import register_rule
    from netmoments.relu import orthant_probability, relu_covariance, relu_mean, relu_variance
    from netmoments.sampling import SampledMoments, monte_carlo, relative_difference

_HOME = {
    "AffineReluAffine": "netmoments.affine_relu_affine",
    "Dense": "netmoments.gaussian",
    "Diagonal": "netmoments.gaussian",
    "ExpectedLogits": "netmoments.attacks.expected_logits",
    "Gaussian": "netmoments.gaussian",
    "Isotropic": "netmoments.gaussian",
    "LinearizationBank": "netmoments.linearize.bank",
    "LowRank": "netmoments.gaussian",
    "OutputMoments": "netmoments.moments.result",
    "SampledMoments": "netmoments.sampling",
    "Tightness": "netmoments.moments.tightness",
    "load_network": "netmoments.network.loading",
    "monte_carlo": "netmoments.sampling",
    "output_moments": "netmoments.moments.front_door",
    "orthant_probability": "netmoments.relu",
    "relative_difference": "netmoments.sampling",
    "relu_covariance": "netmoments.relu",
    "relu_mean": "netmoments.relu",
    "relu_variance": "netmoments.relu",
    "register_rule": "netmoments.propagate.rules",
    "relus": "netmoments.network.inspection",
    "tightness": "netmoments.moments.tightness",
    "two_stage": "netmoments.linearize.two_stage",
    "two_stage_maps": "netmoments.linearize.maps",
}
_ROOMS = {
    "attacks": "netmoments.attacks",
    "data": "netmoments.data",
    "paper": "netmoments.paper",
    "propagate": "netmoments.propagate",
    "zoo": "netmoments.network.zoo",
}

__all__ = [
    "AffineReluAffine",
    "Dense",
    "Diagonal",
    "ExpectedLogits",
    "Gaussian",
    "Isotropic",
    "LinearizationBank",
    "LowRank",
    "OutputMoments",
    "SampledMoments",
    "Tightness",
    "attacks",
    "data",
    "load_network",
    "monte_carlo",
    "orthant_probability",
    "output_moments",
    "paper",
    "propagate",
    "register_rule",
    "relative_difference",
    "relu_covariance",
    "relu_mean",
    "relu_variance",
    "relus",
    "tightness",
    "two_stage",
    "two_stage_maps",
    "zoo",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(_ROOMS[name])
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'netmoments' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
