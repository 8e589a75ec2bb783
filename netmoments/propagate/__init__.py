"""Gaussians through a network's graph: rules for layers, and what users need to write their own."""

from netmoments.propagate.elementwise import Elementwise
from netmoments.propagate.largest import Largest
from netmoments.propagate.nonlinearity import Local, Nonlinearity, ThirdCumulants
from netmoments.propagate.piecewise_linear import PiecewiseLinear
from netmoments.propagate.rules import affine, elementwise, register_rule

__all__ = [
    "Elementwise",
    "Largest",
    "Local",
    "Nonlinearity",
    "PiecewiseLinear",
    "ThirdCumulants",
    "affine",
    "elementwise",
    "register_rule",
]
