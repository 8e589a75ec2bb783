"""The paper's two-stage linearization: everything before one ReLU, and everything after it, made affine at a point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from netmoments.affine_relu_affine import AffineReluAffine
from netmoments.checks import describe, require_finite, require_float_tensor
from netmoments.gaussian.gaussian import event_dimensions
from netmoments.linearize.jacobian import by_forward_mode, by_reverse_mode
from netmoments.linearize.memory import directions_at_once, gigabytes, memory_limit
from netmoments.network.cut import Cut, find_relu
from netmoments.network.inspection import as_network, inspect
from netmoments.network.tracing import Trace
from netmoments.precision import full_precision, matvec

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

    Units of the ReLU without influence on any output (behind a max-pool, or a dead ReLU) are dropped and their rows of A
    never computed. D is there only if the output depends on the input by a path around the ReLU (a skip connection).
    The result carries no gradient to the network's weights. A network with other nonlinear functions on the way is
    linearized at the point, smooth ones with a warning.
    """
    network = as_network(network, CALLER)
    points, batch = points_of(at, event_ndim)
    found = inspect(network, points, CALLER)
    cut = Cut(network, find_relu(found.relus, layer))
    rows = output_rows(outputs, points.shape[0], found.output.shape[1])
    working = _directions(found, points, memory_budget)
    limit = memory_limit(points.device, memory_budget)
    _require_room(cut, points, rows, limit)
    with full_precision():
        z, out, B, D, live = _after(cut, points, rows, working)
        refuse_beyond(cut.relu.name, points, live.shape[1], limit)
        A = _before(cut, points, live, working)
    z = z.reshape(z.shape[0], -1).gather(1, live)
    flat = points.flatten(1)
    c1 = z - matvec(A, flat)
    c2 = out - matvec(B, torch.relu(z))
    if D is not None:
        c2 = c2 - matvec(D, flat)
    parts = [x.reshape(*batch, *x.shape[1:]) if x is not None else None for x in (A, c1, B, c2, D)]
    return AffineReluAffine(*parts)  # type: ignore[arg-type]


def points_of(at: Any, event_ndim: int | None) -> tuple[Tensor, torch.Size]:
    """The points as one batch (N, *event), without a graph, and the batch shape they came with."""
    at = require_float_tensor(CALLER, "at", at)
    kept = event_dimensions(CALLER, "at", at, event_ndim)
    require_finite(CALLER, "at", at)
    batch = at.shape[: at.dim() - kept]
    if at.numel() == 0:
        raise ValueError(f"{CALLER}: at must hold at least one point, got {describe(at)}")
    return at.detach().reshape(-1, *at.shape[at.dim() - kept :]), batch


def output_rows(outputs: Sequence[int] | Tensor | None, images: int, count: int) -> Tensor:
    """The chosen outputs of each image as indices, (N, k)."""
    if outputs is None:
        return torch.arange(count).expand(images, -1)
    chosen = torch.as_tensor(outputs)
    if chosen.is_floating_point() or chosen.dtype == torch.bool or chosen.dim() not in (1, 2) or chosen.numel() == 0:
        raise ValueError(f"{CALLER}: outputs must be indices of scores, (k,) or (N, k), got {describe(chosen)}")
    if chosen.dim() == 2 and chosen.shape[0] != images:
        raise ValueError(f"{CALLER}: outputs has {chosen.shape[0]} rows for {images} points, got {describe(chosen)}")
    if int(chosen.min()) < -count or int(chosen.max()) >= count:
        raise ValueError(f"{CALLER}: outputs must be from 0 to {count - 1}, got {sorted(set(chosen.flatten().tolist()))}")
    return (chosen % count).long().expand(images, -1)


def _after(cut: Cut, points: Tensor, rows: Tensor, working: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """z, the chosen outputs, B and D at the points, with B restricted to the units that matter, and those units."""
    with torch.enable_grad():
        x = points.clone().requires_grad_()
        z = cut.stem(points).detach()
        y = torch.relu(z).requires_grad_()
        out = cut.head(x, y)
        rows = rows.to(points.device)
        if out.requires_grad:
            D, B = by_reverse_mode(out, (x, y), rows, working)
        else:
            D = B = None
    if B is None:
        B = z.new_zeros(*rows.shape, z[0].numel())
    live = live_units(B)
    if live.shape[1] < B.shape[2]:
        B = B.gather(2, live.unsqueeze(1).expand(-1, B.shape[1], -1))
    return z, out.detach().gather(1, rows), B, D, live


def live_units(B: Tensor) -> Tensor:
    """Units with a non-zero column of B, (N, L): as many as the liveliest image has, at least 1."""
    matters = (B != 0).any(1)
    most = max(1, int(matters.sum(1).max()))
    if most == B.shape[2]:
        return torch.arange(most, device=B.device).expand(B.shape[0], -1)
    return torch.argsort(matters, dim=1, descending=True, stable=True)[:, :most].sort(1).values


def _before(cut: Cut, points: Tensor, live: Tensor, working: int) -> Tensor:
    """A, (N, L, n): by forward mode where that takes fewer passes than reverse mode."""
    size = points[0].numel()
    if size < live.shape[1]:
        everything = live.shape[1] == cut.relu.size
        return by_forward_mode(cut.stem, points, None if everything else live, working)
    with torch.enable_grad():
        x = points.clone().requires_grad_()
        z = cut.stem(x)
        (A,) = by_reverse_mode(z, (x,), live, working) if z.requires_grad else (None,)
    return points.new_zeros(points.shape[0], live.shape[1], size) if A is None else A


def _directions(found: Trace, points: Tensor, budget: int | None) -> int:
    return directions_at_once(points.device, found.largest * points.shape[0], points.element_size(), budget)


def _require_room(cut: Cut, points: Tensor, rows: Tensor, limit: int) -> None:
    """B alone must fit before it is computed: it tells which rows of A matter."""
    bytes_needed = rows.numel() * (cut.relu.size + points[0].numel()) * points.element_size()
    if bytes_needed > limit:
        raise MemoryError(
            f"{CALLER}: {rows.shape[1]} outputs × ({cut.relu.size} units of {cut.relu.name!r} + {points[0].numel()} inputs) "
            f"for {points.shape[0]} images take {gigabytes(bytes_needed)}, and {gigabytes(limit)} may be used; choose "
            f"fewer outputs (outputs=), fewer images at a time, or raise memory_budget"
        )


def refuse_beyond(name: str, points: Tensor, units: int, limit: int) -> None:
    """A must fit before it is computed."""
    images, size = points.shape[0], points[0].numel()
    bytes_needed = images * units * size * points.element_size()
    if bytes_needed > limit:
        raise MemoryError(
            f"{CALLER}: the Jacobian before {name!r} is {units} × {size} for each of {images} images, "
            f"{gigabytes(bytes_needed)}, and {gigabytes(limit)} may be used; choose another layer, fewer outputs (outputs=), "
            f"fewer images at a time, raise memory_budget, or use netmoments.matrix_free_two_stage, which stores no Jacobian"
        )


def scores(network: nn.Module, points: Tensor) -> Tensor:
    """The network's output at the points, without a graph."""
    with torch.no_grad(), full_precision():
        return network(points.clone())
