"""Gaussians through a network's graph; the names of `netmoments.rules`, which users write rules of their own with."""

from netmoments.rules import (
    Elementwise,
    Largest,
    Local,
    Nonlinearity,
    OneInput,
    PiecewiseLinear,
    ThirdCumulants,
    affine,
    elementwise,
    register_rule,
)

__all__ = [
    "Elementwise",
    "Largest",
    "Local",
    "Nonlinearity",
    "OneInput",
    "PiecewiseLinear",
    "ThirdCumulants",
    "affine",
    "elementwise",
    "register_rule",
]
