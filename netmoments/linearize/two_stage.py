"""The paper's two-stage linearization: everything before one ReLU, and everything after it, made affine at a point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import jvp
from torch.nn.functional import pad

from netmoments.affine_relu_affine import AffineReluAffine
from netmoments.checks import describe, require_finite, require_float_tensor, require_float_tensors
from netmoments.gaussian import event_dimensions
from netmoments.linearize.jacobian import by_forward_mode, by_reverse_mode
from netmoments.memory import directions_at_once, gigabytes, memory_limit, points_at_once
from netmoments.network.exported import largest_batch
from netmoments.network.model import NetworkModel
from netmoments.network.relu_calls import Cut
from netmoments.precision import full_precision, matvec
from netmoments.progress import Progress

CALLER = "two_stage"


def two_stage(
    network: Any,
    at: Tensor,
    layer: int | str = -1,
    *,
    outputs: Sequence[int] | Tensor | None = None,
    event_ndim: int | None = None,
    memory_budget: int | None = None,
) -> AffineReluAffine:
    """network(x) ≈ B relu(A x + c₁) + D x + c₂ near a point, exact there, with its Jacobians.

    Args:
        network: any module in eval mode, or an exported program; it is not changed.
        at: the point, (n,) or (C, H, W), or a batch of points, each with a linearization of its own.
        layer: which ReLU is kept: its place in the order of calls (from either end), or its name; see `relus`.
        outputs: indices of the scores wanted, (k,) or one set a point (N, k); all by default.
        event_ndim: how many trailing dimensions of `at` make one input, where that is not clear.
        memory_budget: bytes that A, B and D may take, by default half of what is free; more is refused beforehand.

    Units of the ReLU without influence on any output (behind a max-pool, or a dead ReLU) are dropped and their rows of
    A never computed. D is there only if the output depends on the input by a path around the ReLU (a skip connection).
    The result carries no gradient to the network's weights. A network with other nonlinear functions on the way is
    linearized at the point, smooth ones with a warning.
    """
    cut, points, batch, indices, largest, limit = prepared(
        CALLER, network, at, layer, outputs, event_ndim, memory_budget
    )
    together = points_at_once(points.device, largest, points.element_size(), memory_budget)
    together = min(together, largest_batch(cut.network), len(points))
    working = directions_at_once(points.device, largest * together, points.element_size(), memory_budget)
    groups = []
    with Progress("linearizing", len(points)) as progress:
        for part, chosen in zip(points.split(together), indices.split(together), strict=True):
            groups.append(_linearized(cut, part, chosen, working, limit // len(points)))
            progress.advance(len(part))
    return _shaped(_joined(groups), batch)


class Prepared(NamedTuple):
    """What is to be linearized, checked."""

    cut: Cut
    points: Tensor
    batch: torch.Size
    indices: Tensor
    largest: int
    """Elements of the largest activation of a point."""
    limit: int
    """Bytes that may be kept."""


def prepared(
    caller: str,
    network: Any,
    at: Any,
    layer: int | str,
    outputs: Sequence[int] | Tensor | None,
    event_ndim: int | None,
    memory_budget: int | None,
) -> Prepared:
    """The arguments of `two_stage` read and checked, and B known to fit."""
    points, batch = points_of(caller, at, event_ndim)
    model = NetworkModel.of(network, points, caller).refreshed()
    cut = Cut(model.network, model.relu(layer))
    model.require_linearizable()
    indices = output_indices(outputs, points.shape[0], model.outputs, caller)
    limit = memory_limit(points.device, memory_budget)
    _require_room(caller, cut, points, indices, limit)
    return Prepared(cut, points, batch, indices, model.largest, limit)


class Parts(NamedTuple):
    """The matrices of a group of points, all with one batch dimension."""

    A: Tensor
    c1: Tensor
    B: Tensor
    c2: Tensor
    D: Tensor | None


def _shaped(parts: Parts, batch: torch.Size) -> AffineReluAffine:
    """With the batch dimensions of the points."""
    A, c1, B, c2 = (x.reshape(*batch, *x.shape[1:]) for x in parts[:4])
    return AffineReluAffine(A, c1, B, c2, None if parts.D is None else parts.D.reshape(*batch, *parts.D.shape[1:]))


def _linearized(cut: Cut, points: Tensor, rows: Tensor, working: int, limit_each: int) -> Parts:
    with torch.inference_mode(False), full_precision():
        points = points.clone()  # one made in inference mode could not be differentiated
        z, out, B, D, live = after_the_cut(cut, points, rows, working)
        _refuse_beyond(cut.relu.name, points, live.shape[1], limit_each)
        A = _before_the_cut(cut, points, live, working)
    flat = points.flatten(1)
    z = z.gather(1, live)
    c2 = out - matvec(B, torch.relu(z))
    return Parts(A, z - matvec(A, flat), B, c2 if D is None else c2 - matvec(D, flat), D)


def _joined(groups: list[Parts]) -> Parts:
    """One batch of them all; units that only other points have are zero rows of A and columns of B."""
    if len(groups) == 1:
        return groups[0]
    units = max(group.A.shape[1] for group in groups)
    A = torch.cat([pad(group.A, (0, 0, 0, units - group.A.shape[1])) for group in groups])
    c1 = torch.cat([pad(group.c1, (0, units - group.c1.shape[1])) for group in groups])
    B = torch.cat([pad(group.B, (0, units - group.B.shape[2])) for group in groups])
    c2 = torch.cat([group.c2 for group in groups])
    if all(group.D is None for group in groups):
        return Parts(A, c1, B, c2, None)
    nothing = A.new_zeros(B.shape[1], A.shape[2])
    around = [nothing.expand(len(group.A), -1, -1) if group.D is None else group.D for group in groups]
    return Parts(A, c1, B, c2, torch.cat(around))


def points_of(caller: str, at: Any, event_ndim: int | None) -> tuple[Tensor, torch.Size]:
    """The points as one batch (N, *event), without a graph, and the batch shape they came with."""
    at = require_float_tensor(caller, "at", at)
    kept = event_dimensions(caller, "at", at, event_ndim)
    require_finite(caller, "at", at)
    batch = at.shape[: at.dim() - kept]
    if at.numel() == 0:
        raise ValueError(f"{caller}: at must hold at least one point, got {describe(at)}")
    return at.detach().reshape(-1, *at.shape[at.dim() - kept :]), batch


def output_indices(outputs: Sequence[int] | Tensor | None, images: int, count: int, caller: str) -> Tensor:
    """The chosen outputs of each image as indices, (N, k)."""
    if outputs is None:
        return torch.arange(count).expand(images, -1)
    chosen = torch.as_tensor(outputs)
    if chosen.is_floating_point() or chosen.dtype == torch.bool or chosen.dim() not in (1, 2) or chosen.numel() == 0:
        raise ValueError(f"{caller}: outputs must be indices of scores, (k,) or (N, k), got {describe(chosen)}")
    if chosen.dim() == 2 and chosen.shape[0] != images:
        raise ValueError(f"{caller}: outputs has {chosen.shape[0]} rows for {images} points, got {describe(chosen)}")
    if int(chosen.min()) < -count or int(chosen.max()) >= count:
        raise ValueError(
            f"{caller}: outputs must be from 0 to {count - 1}, got {sorted(set(chosen.flatten().tolist()))}"
        )
    return (chosen % count).long().expand(images, -1)


def after_the_cut(
    cut: Cut, points: Tensor, rows: Tensor, working: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """z (N, p), the chosen outputs (N, k), B (N, k, L) and D (N, k, n) or None; and which units (N, L) B is about."""
    with torch.enable_grad():
        x = points.clone().requires_grad_()
        z = cut.stem(points).detach()
        y = torch.relu(z).requires_grad_()
        out = cut.head(x, y)
        rows = rows.to(points.device)
        D, B = by_reverse_mode(out, (x, y), rows, working) if out.requires_grad else (None, None)
    if B is None:
        B = z.new_zeros(*rows.shape, z[0].numel())
    if D is not None and not bool(D.any()):  # a ReLU in place leaves a path that carries nothing
        D = None
    live = live_units(B)
    if live.shape[1] < B.shape[2]:
        B = B.gather(2, live.unsqueeze(1).expand(-1, B.shape[1], -1))
    return z.flatten(1), out.detach().gather(1, rows), B, D, live


def live_units(B: Tensor) -> Tensor:
    """Units with a non-zero column of B, (N, L): as many as the liveliest image has, at least 1."""
    matters = (B != 0).any(1)
    most = max(1, int(matters.sum(1).max()))
    if most == B.shape[2]:
        return torch.arange(most, device=B.device).expand(B.shape[0], -1)
    return torch.argsort(matters, dim=1, descending=True, stable=True)[:, :most].sort(1).values


def _before_the_cut(cut: Cut, points: Tensor, live: Tensor, working: int) -> Tensor:
    """A, (N, L, n): by forward mode where that takes fewer passes than reverse mode and every function has it."""
    size = points[0].numel()
    if size < live.shape[1]:
        everything = live.shape[1] == cut.relu.size
        try:
            return by_forward_mode(cut.stem, points, None if everything else live, working)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            pass  # a function with a backward formula only: row by row instead
    with torch.enable_grad():
        x = points.clone().requires_grad_()
        z = cut.stem(x)
        (A,) = by_reverse_mode(z, (x,), live, working) if z.requires_grad else (None,)
    return points.new_zeros(points.shape[0], live.shape[1], size) if A is None else A


def _require_room(caller: str, cut: Cut, points: Tensor, rows: Tensor, limit: int) -> None:
    """B alone must fit before it is computed: it tells which rows of A matter."""
    bytes_needed = rows.numel() * (cut.relu.size + points[0].numel()) * points.element_size()
    if bytes_needed > limit:
        raise MemoryError(
            f"{caller}: {rows.shape[1]} outputs × ({cut.relu.size} units of {cut.relu.name!r} + {points[0].numel()} "
            f"inputs) for {points.shape[0]} images take {gigabytes(bytes_needed)}, and {gigabytes(limit)} may be used; "
            f"choose fewer outputs (outputs=), fewer images at a time, or raise memory_budget"
        )


def _refuse_beyond(name: str, points: Tensor, units: int, limit_each: int) -> None:
    """A must fit before it is computed."""
    size = points[0].numel()
    bytes_needed = units * size * points.element_size()
    if bytes_needed > limit_each:
        raise MemoryError(
            f"{CALLER}: the Jacobian before {name!r} is {units} × {size}, {gigabytes(bytes_needed)} for each image, "
            f"and {gigabytes(limit_each)} may be used for each; choose another layer, fewer outputs (outputs=), fewer "
            f"images at a time, raise memory_budget, or use two_stage_maps, which makes about {min(units, size):,} "
            f"passes instead of storing it"
        )


VALUE_CALLER = "two_stage_value"


def two_stage_value(network: Any, at: Tensor, x: Tensor, layer: int | str = -1) -> Tensor:
    """`two_stage(network, at, layer)(x)` for points and inputs of one shape, (*event) or (N, *event): (d,) or (N, d).

    With v = x − at, z the pre-activations of the ReLU at the point and y = relu(z),

        g(x) = network(at) + B (relu(z + A v) − y) + D v,

    where A v is the derivative of the part before the ReLU along v, and the rest that of the part after it along
    (v, relu(z + A v) − y): two Jacobian–vector products, about four forward passes, and no Jacobian. The network's own
    value at x = at. Forward mode; a network with a function that has none goes through two backward passes instead.
    """
    points, batch = points_of(VALUE_CALLER, at, None)
    require_float_tensors(VALUE_CALLER, at=at, x=x)
    if x.shape != at.shape:
        raise ValueError(f"{CALLER}: at and x must have one shape, got {describe(at)} and {describe(x)}")
    require_finite(VALUE_CALLER, "x", x)
    model = NetworkModel.of(network, points, VALUE_CALLER).refreshed()
    cut = Cut(model.network, model.relu(layer))
    model.require_linearizable()
    together = directions_at_once(points.device, model.largest, points.element_size(), None)
    parts = zip(
        *(part.split(min(together, largest_batch(model.network))) for part in (points, _like(x, points))), strict=True
    )
    with torch.inference_mode(False), full_precision():
        values = torch.cat([_value(cut, point.clone(), other.clone()) for point, other in parts])
    return values.reshape(*batch, -1)


def _like(x: Tensor, points: Tensor) -> Tensor:
    return x.detach().reshape(points.shape)


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
            value, slope = jvp(function, at, direction)[:2]
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
