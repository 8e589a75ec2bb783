"""How far two values are from each other, as the paper measures it."""

from __future__ import annotations

import torch
from torch import Tensor

from netmoments.checks import (
    require_broadcastable,
    require_finite,
    require_float_tensor,
    require_float_tensors,
)


def relative_difference(x: Tensor, y: Tensor) -> Tensor:
    """2|x − y| / (|x| + |y|), the paper's absolute relative difference: 0 for equal values (0 and 0 too), at most 2."""
    caller = "relative_difference"
    x, y = (require_float_tensor(caller, name, value).double() for name, value in (("x", x), ("y", y)))
    x, y = require_float_tensors(caller, x=x, y=y)
    require_broadcastable(caller, x=x.shape, y=y.shape)
    require_finite(caller, "x", x)
    require_finite(caller, "y", y)
    larger = torch.maximum(x.abs(), y.abs())
    larger = torch.where(larger > 0, larger, 1.0)
    x, y = x / larger, y / larger  # so that nothing overflows or vanishes
    size = x.abs() + y.abs()
    return torch.where(size > 0, 2 * (x - y).abs() / torch.where(size > 0, size, 1.0), 0.0).clamp(max=2)
