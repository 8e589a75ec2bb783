"""The value of a two-stage linearization without its matrices, for Table 1, by four forward passes per point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from netmoments.checks import describe, require_finite, require_float_tensors
from netmoments.linearize.two_stage import points_of
from netmoments.memory import elements_together
from netmoments.network.model import NetworkModel
from netmoments.network.relu_calls import Cut
from netmoments.precision import full_precision, value_and_slope

CALLER = "two_stage_value"


def two_stage_value(network: Any, at: Tensor, x: Tensor, layer: int | str = -1) -> Tensor:
    """`two_stage(network, at, layer)(x)` for points and inputs of one shape, (*event) or (N, *event): (d,) or (N, d).

    With v = x − at, z the pre-activations of the ReLU at the point and y = relu(z),

        g(x) = network(at) + B (relu(z + A v) − y) + D v,

    where A v is the derivative of the part before the ReLU along v, and the rest that of the part after it along
    (v, relu(z + A v) − y): two Jacobian–vector products, about four forward passes, and no Jacobian. The network's own
    value at x = at. Forward mode; a network with a function that has none goes through two backward passes instead.
    """
    points, batch = points_of(CALLER, at, None)
    require_float_tensors(CALLER, at=at, x=x)
    if x.shape != at.shape:
        raise ValueError(f"{CALLER}: at and x must have one shape, got {describe(at)} and {describe(x)}")
    require_finite(CALLER, "x", x)
    model = NetworkModel.of(network, points, CALLER)
    cut = model.cut(layer)
    together = elements_together("backward", points, model.pass_size)
    parts = zip(
        *(part.split(min(together, model.most_images)) for part in (points, x.detach().reshape(points.shape))),
        strict=True,
    )
    with torch.inference_mode(False), full_precision():
        values = torch.cat([_value(cut, point.clone(), other.clone()) for point, other in parts])
    return values.reshape(*batch, -1)


def _value(cut: Cut, at: Tensor, x: Tensor) -> Tensor:
    step = x - at
    z, moved = along(cut.stem, (at,), (step,))
    y = torch.relu(z)
    out, change = along(cut.head, (at, y), (step, torch.relu(z + moved) - y))
    return out + change


def along(
    function: Callable[..., Tensor], at: tuple[Tensor, ...], direction: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """The value of a function at a point, and its derivative along a direction."""
    try:
        with torch.no_grad():
            value, slope = value_and_slope(function, at, direction)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # a function with a backward formula only
        value, slope = _along_by_reverse_mode(function, at, direction)
    return value.detach(), slope.detach()


def _along_by_reverse_mode(
    function: Callable[..., Tensor], at: tuple[Tensor, ...], direction: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Jᵀu is linear in u, and the derivative of vᵀ(Jᵀu) in u is J v."""
    with torch.enable_grad():
        leaves = tuple(part.detach().clone().requires_grad_() for part in at)
        value = function(*leaves)
        if not value.requires_grad:
            return value, torch.zeros_like(value)
        weights = torch.zeros_like(value, requires_grad=True)
        pulled = torch.autograd.grad(value, leaves, weights, create_graph=True, allow_unused=True)
        total = sum(
            ((part * step).sum() for part, step in zip(pulled, direction, strict=True) if part is not None),
            start=value.new_zeros(()),
        )
        if not total.requires_grad:
            return value, torch.zeros_like(value)
        (slope,) = torch.autograd.grad(total, weights)
    return value, slope
