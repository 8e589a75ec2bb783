"""Rules for nonlinear layers: those that come with the library, and what users need to write their own."""

from netmoments.rules.base import (
    Local,
    Nonlinearity,
    OneInput,
    PowerMoments,
    SketchedLayer,
    ThirdCumulants,
    UnitMoments,
)
from netmoments.rules.composed import OfWindows, SumOfProducts
from netmoments.rules.maximum import Largest
from netmoments.rules.one_number import Elementwise, PiecewiseLinear
from netmoments.rules.registry import affine, elementwise, register_rule

__all__ = [
    "Elementwise",
    "Largest",
    "Local",
    "Nonlinearity",
    "OfWindows",
    "OneInput",
    "PiecewiseLinear",
    "PowerMoments",
    "SketchedLayer",
    "SumOfProducts",
    "ThirdCumulants",
    "UnitMoments",
    "affine",
    "elementwise",
    "register_rule",
]
