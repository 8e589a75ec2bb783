"""What a trained network does under Gaussian noise: moments, flips and attacks, each with its error.

Names are imported when they are first used, so that the command line starts without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from netmoments import attacks, data, paper, propagate, rules
    from netmoments.affine_relu_affine import AffineReluAffine
    from netmoments.attacks.expected_logits import ExpectedLogits
    from netmoments.covariances import Covariance, Dense, Diagonal, Isotropic, LowRank
    from netmoments.flips.flip_probability import class_probabilities, flip_probability
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

_NAMES = {
    "affine_relu_affine": ["AffineReluAffine"],
    "attacks.expected_logits": ["ExpectedLogits"],
    "covariances": ["Covariance", "Dense", "Diagonal", "Isotropic", "LowRank"],
    "flips.flip_probability": ["class_probabilities", "flip_probability"],
    "flips.result": ["ClassProbabilities", "FlipProbability", "NearestFlip"],
    "flips.search": ["nearest_flip"],
    "gaussian": ["Gaussian"],
    "linearize.bank": ["LinearizationBank"],
    "linearize.matrix_free": ["two_stage_maps"],
    "linearize.two_stage": ["two_stage"],
    "moments.methods": ["Auto", "Layerwise", "Linear", "Sampling", "Sketch", "TwoStage"],
    "moments.output_moments": ["output_moments"],
    "moments.result": ["OutputMoments"],
    "moments.tightness": ["Tightness", "tightness"],
    "network.loading": ["load_network"],
    "network.model": ["NetworkModel", "relus"],
    "relu.covariance": ["orthant_probability", "relu_covariance"],
    "relu.marginal": ["relu_mean", "relu_variance"],
    "rules.registry": ["register_rule"],
    "sampling.monte_carlo": ["SampledMoments", "monte_carlo", "relative_difference"],
}
"""Public names by the module that defines them."""
_HOME = {name: f"netmoments.{module}" for module, names in _NAMES.items() for name in names}
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
    "Covariance",
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
        value: Any = importlib.import_module(_ROOMS[name])
    elif name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'netmoments' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
