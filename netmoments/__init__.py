"""What a trained network does under Gaussian noise: moments, flips, attacks, each with its error.

Names are imported on first use, so that the command line starts without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from netmoments import attacks, data, paper, propagate, rules
    from netmoments.affine_relu_affine import AffineReluAffine
    from netmoments.attacks.expected_logits import ExpectedLogits
    from netmoments.covariances import Dense, Diagonal, Isotropic, LowRank
    from netmoments.flips.class_probabilities import class_probabilities
    from netmoments.flips.flip_probability import flip_probability
    from netmoments.flips.result import ClassProbabilities, FlipProbability, NearestFlip
    from netmoments.flips.search import nearest_flip
    from netmoments.gaussian import Gaussian
    from netmoments.linearize.bank import LinearizationBank
    from netmoments.linearize.matrix_free import two_stage_maps
    from netmoments.linearize.two_stage import two_stage
    from netmoments.moments.methods import Auto, Layerwise, Linear, Sampling, Sketch, TwoStage
    from netmoments.moments.output_moments import output_moments
    from netmoments.moments.result import OutputMoments
    from netmoments.moments.tightness import Tightness, tightness
    from netmoments.network import zoo
    from netmoments.network.loading import load_network
    from netmoments.network.model import NetworkModel, relus
    from netmoments.relu.covariance import orthant_probability, relu_covariance
    from netmoments.relu.marginal import relu_mean, relu_variance
    from netmoments.rules.registry import register_rule
    from netmoments.sampling.monte_carlo import SampledMoments, monte_carlo, relative_difference

_HOME = {
    "AffineReluAffine": "netmoments.affine_relu_affine",
    "Auto": "netmoments.moments.methods",
    "ClassProbabilities": "netmoments.flips.result",
    "Dense": "netmoments.covariances",
    "Diagonal": "netmoments.covariances",
    "ExpectedLogits": "netmoments.attacks.expected_logits",
    "FlipProbability": "netmoments.flips.result",
    "Gaussian": "netmoments.gaussian",
    "Isotropic": "netmoments.covariances",
    "Layerwise": "netmoments.moments.methods",
    "Linear": "netmoments.moments.methods",
    "LinearizationBank": "netmoments.linearize.bank",
    "LowRank": "netmoments.covariances",
    "NearestFlip": "netmoments.flips.result",
    "NetworkModel": "netmoments.network.model",
    "OutputMoments": "netmoments.moments.result",
    "SampledMoments": "netmoments.sampling.monte_carlo",
    "Sampling": "netmoments.moments.methods",
    "Sketch": "netmoments.moments.methods",
    "Tightness": "netmoments.moments.tightness",
    "TwoStage": "netmoments.moments.methods",
    "class_probabilities": "netmoments.flips.class_probabilities",
    "flip_probability": "netmoments.flips.flip_probability",
    "load_network": "netmoments.network.loading",
    "monte_carlo": "netmoments.sampling.monte_carlo",
    "nearest_flip": "netmoments.flips.search",
    "output_moments": "netmoments.moments.output_moments",
    "orthant_probability": "netmoments.relu.covariance",
    "relative_difference": "netmoments.sampling.monte_carlo",
    "relu_covariance": "netmoments.relu.covariance",
    "relu_mean": "netmoments.relu.marginal",
    "relu_variance": "netmoments.relu.marginal",
    "register_rule": "netmoments.rules.registry",
    "relus": "netmoments.network.model",
    "tightness": "netmoments.moments.tightness",
    "two_stage": "netmoments.linearize.two_stage",
    "two_stage_maps": "netmoments.linearize.matrix_free",
}
_ROOMS = {
    "attacks": "netmoments.attacks",
    "data": "netmoments.data",
    "paper": "netmoments.paper",
    "propagate": "netmoments.propagate",
    "rules": "netmoments.rules",
    "zoo": "netmoments.network.zoo",
}

__all__ = [
    "AffineReluAffine",
    "Auto",
    "ClassProbabilities",
    "Dense",
    "Diagonal",
    "ExpectedLogits",
    "FlipProbability",
    "Gaussian",
    "Isotropic",
    "Layerwise",
    "Linear",
    "LinearizationBank",
    "LowRank",
    "NearestFlip",
    "NetworkModel",
    "OutputMoments",
    "SampledMoments",
    "Sampling",
    "Sketch",
    "Tightness",
    "TwoStage",
    "attacks",
    "class_probabilities",
    "data",
    "flip_probability",
    "load_network",
    "monte_carlo",
    "nearest_flip",
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
    "rules",
    "tightness",
    "two_stage",
    "two_stage_maps",
    "zoo",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        found: Any = importlib.import_module(_ROOMS[name])
    elif name in _HOME:
        found = getattr(importlib.import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'netmoments' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
