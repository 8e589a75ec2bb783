"""The paper's two-stage linearization: the network before one ReLU, and the network after it, made affine at a point.

Jacobians are exact, for a batch of images at once, and computed in pieces of bounded memory. A network in eval mode
treats every image by itself, so one backward pass with a different direction for each image gives one row of each
image's Jacobian, and `vmap` over directions gives many rows. Forward mode gives columns in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.functional import pad

from netmoments.affine_relu_affine import AffineReluAffine
from netmoments.checks import describe, require_finite, require_float_tensor
from netmoments.files import first_line
from netmoments.gaussian import event_dimensions
from netmoments.memory import gigabytes, matrices_together, memory_limit, points_together
from netmoments.network.model import NetworkModel
from netmoments.network.relu_calls import Cut
from netmoments.precision import full_precision, matvec, value_and_slope
from netmoments.progress import progress_bar

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
    """Linearize a network at a point around one ReLU: network(x) ≈ B relu(A x + c₁) + D x + c₂.

    Args:
        network: any module in eval mode, or an exported program; it is not changed.
        at: the point, (n,) or (C, H, W), or a batch of points, each with a linearization of its own.
        layer: which ReLU is kept: its place in the order of calls (from either end), or its name; see `relus`.
        outputs: indices of the scores wanted, (k,), or for each point its own, (N, k); all by default.
        event_ndim: how many trailing dimensions of `at` make one input, where that is not clear.
        memory_budget: bytes that A, B and D may take, by default half of what is free; more is refused beforehand.

    For n inputs, k outputs and q units of the ReLU with influence on these, A is (q, n), B (k, q) and D (k, n), each
    after the batch of points. Units without influence (behind a max-pool, or a dead ReLU) are dropped and their rows of
    A never computed. D is there only if the outputs depend on the input by a path around the ReLU (a skip connection).
    The result carries no gradient to the network's weights.

    At the point the result equals the network to rounding, away from it to first order; for (Affine, ReLU, Affine) it
    does so everywhere. Other nonlinear functions of the network are linearized too, smooth ones with a warning.

    >>> network = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)).eval()
    >>> g = two_stage(network, at=torch.zeros(2))
    >>> bool(torch.allclose(g(torch.ones(1, 2)), network(torch.ones(1, 2)), atol=1e-6))
    True
    """
    points, batch = points_of(CALLER, at, event_ndim)
    model = NetworkModel.of(network, points, CALLER)
    indices = output_indices(outputs, len(points), model.outputs, CALLER)
    model.memory_budget = memory_budget
    flat = linearized_at(model, points, layer, indices)
    if len(batch) == 1:
        return flat
    parts = (flat.A, flat.c1, flat.B, flat.c2, flat.D)
    return AffineReluAffine(*(None if x is None else x.reshape(*batch, *x.shape[1:]) for x in parts))  # type: ignore[arg-type]


def linearized_at(model: NetworkModel, points: Tensor, layer: int | str, indices: Tensor) -> AffineReluAffine:
    """`two_stage` at points (N, *event) for the scores with indices (N, k), without checking these again."""
    return Linearizer.of(model, layer, points).at(points, indices)


def linearized_in_groups(
    model: NetworkModel, points: Tensor, layer: int | str, indices: Tensor
) -> Iterator[tuple[int, AffineReluAffine]]:
    """`linearized_at` for groups of as many points as fit into memory: yields the place of the first, and the group."""
    linearizer = Linearizer.of(model, layer, points)
    units, inputs = linearizer.cut.relu.shape.numel(), points[0].numel()
    numbers_each = units * inputs + indices.shape[1] * (units + inputs)
    together = matrices_together(points, numbers_each, model.memory_budget)
    for start in range(0, len(points), together):
        group = slice(start, start + together)
        yield start, linearizer.at(points[group], indices[group])


class Linearizer(NamedTuple):
    """A network cut at a ReLU, and how much of the work goes at a time."""

    cut: Cut
    limit: int
    """The bytes that A, B and D of all points together may take."""
    together: int
    """How many points go through the network at a time."""
    directions: int
    """How many directions of each of these points go at a time."""

    @classmethod
    def of(cls, model: NetworkModel, layer: int | str, points: Tensor) -> Linearizer:
        """For points like these, (N, *event)."""
        cut, limit = model.cut(layer), memory_limit(points.device, model.memory_budget)
        return cls(cut, limit, *points_together(points, model.pass_size, model.most_images, model.memory_budget))

    def at(self, points: Tensor, indices: Tensor) -> AffineReluAffine:
        """The linearizations at points (N, *event), for the scores with indices (N, k)."""
        require_room_for_jacobians(self.cut, points, indices, self.limit)
        groups = []
        with (
            refusing_what_torch_cannot_derive(),
            torch.inference_mode(False),
            full_precision(),
            progress_bar("linearizing", len(points)) as show,
        ):
            for start in range(0, len(points), self.together):
                show(start)
                group = slice(start, start + self.together)
                at = points[group].clone()  # one made in inference mode could not be differentiated
                z, out, B, D, live = after_the_cut(self.cut, at, indices[group], self.directions)
                A = _before_the_cut(self.cut, at, live, self.directions, self.limit // len(points))
                require_finite_derivatives(A, B, D)
                z, flat = z.gather(1, live), at.flatten(1)
                c2 = out - matvec(B, torch.relu(z))
                groups.append((A, z - matvec(A, flat), B, c2 if D is None else c2 - matvec(D, flat), D))
        return AffineReluAffine.trusted(*(groups[0] if len(groups) == 1 else _joined(groups)))


def tangent_at(model: NetworkModel, points: Tensor, indices: Tensor) -> AffineReluAffine:
    """The tangent f(p) + J(x − p) at points p (N, *event), for the scores with indices (N, k).

    It is for networks without a ReLU, and as an `AffineReluAffine` has one unit, which is never open and has no weight.
    """
    model.require_differentiable()
    together, directions = points_together(points, model.pass_size, model.most_images, model.memory_budget)
    groups: list[Parts] = []
    with refusing_what_torch_cannot_derive(), progress_bar("linearizing", len(points)) as show:
        for start in range(0, len(points), together):
            show(start)
            at = points[start : start + together]
            out, D = scores_and_jacobians(model.network, at, indices[start : start + together], directions)
            A, B = at.new_zeros(len(at), 1, D.shape[2]), at.new_zeros(len(at), D.shape[1], 1)
            groups.append((A, at.new_full((len(at), 1), -1.0), B, out - matvec(D, at.flatten(1)), D))
    return AffineReluAffine.trusted(*(groups[0] if len(groups) == 1 else _joined(groups)))


@contextmanager
def refusing_what_torch_cannot_derive() -> Iterator[None]:
    """A block in which torch's errors on the way to derivatives say what is wrong.

    They come from choices by values, or from a `vmap` inside the network.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise
        reason = first_line(error).partition(". ")[0]  # what follows asks to report that to torch
        raise ValueError(
            f"the network cannot be linearized: {reason} (derivatives are taken many at once, by torch's "
            f"vmap, which not every network allows); use method='auto' or 'sampling'"
        ) from error


Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""A, c₁, B, c₂ and D of a group of points, all with one batch dimension."""


def _joined(groups: list[Parts]) -> Parts:
    """Join groups to one batch; a group with fewer units than others gets zero rows of A and columns of B."""
    units = max(A.shape[1] for A, *_ in groups)
    A = torch.cat([pad(A, (0, 0, 0, units - A.shape[1])) for A, *_ in groups])
    c1 = torch.cat([pad(c1, (0, units - c1.shape[1])) for _, c1, *_ in groups])
    B = torch.cat([pad(B, (0, units - B.shape[2])) for _, _, B, *_ in groups])
    c2 = torch.cat([c2 for *_, c2, _ in groups])
    if all(D is None for *_, D in groups):
        return A, c1, B, c2, None
    zeros = A.new_zeros(B.shape[1], A.shape[2])
    around = [zeros.expand(len(of_group), -1, -1) if D is None else D for of_group, *_, D in groups]
    return A, c1, B, c2, torch.cat(around)


def require_room_for_jacobians(cut: Cut, points: Tensor, indices: Tensor, limit: int) -> None:
    """Refuse if not even B and D fit, before they are computed. B then tells which rows of A matter."""
    units, inputs = cut.relu.shape.numel(), points[0].numel()
    needed = indices.numel() * (units + inputs) * points.element_size()
    if needed > limit:
        raise MemoryError(
            f"{cut.caller}: {indices.shape[1]} outputs × ({units} units of {cut.relu.name!r} + {inputs} inputs) for "
            f"{len(points)} images take {gigabytes(needed)}, and {gigabytes(limit)} may be used; choose fewer outputs "
            f"(outputs=), fewer images at a time, or raise memory_budget"
        )


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
    """Check the `outputs` that a user asks for; they become indices from 0 for every image, (N, k)."""
    if outputs is None:
        return torch.arange(count).expand(images, -1)
    try:
        chosen = torch.as_tensor(outputs)
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(f"{caller}: outputs must be indices of scores, (k,) or (N, k), got {outputs!r}") from None
    integer = not (
        chosen.is_floating_point() or chosen.is_complex() or chosen.is_quantized or chosen.dtype == torch.bool
    )
    if not integer or chosen.is_meta or chosen.dim() not in (1, 2) or chosen.numel() == 0:
        raise ValueError(f"{caller}: outputs must be indices of scores, (k,) or (N, k), got {describe(chosen)}")
    if chosen.dim() == 2 and chosen.shape[0] != images:
        raise ValueError(f"{caller}: outputs has {chosen.shape[0]} rows for {images} points, got {describe(chosen)}")
    if int(chosen.min()) < -count or int(chosen.max()) >= count:
        raise ValueError(
            f"{caller}: outputs must be from 0 to {count - 1}, got {sorted(set(chosen.flatten().tolist()))}"
        )
    return (chosen % count).long().expand(images, -1)


def after_the_cut(
    cut: Cut, points: Tensor, rows: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Linearize the head: z (N, p), the outputs `rows` (N, k), B (N, k, L), D (N, k, n) or None, live units (N, L).

    B has columns for the live units only. `chunk` rows are computed at a time.
    """
    with torch.enable_grad():
        x = points.clone().requires_grad_()
        z = cut.stem(points).detach()
        y = torch.relu(z).requires_grad_()
        out = cut.head(x, y)
        rows = rows.to(points.device)
        D, B = by_reverse_mode(out, (x, y), rows, chunk) if out.requires_grad else (None, None)
    if B is None:
        B = z.new_zeros(*rows.shape, z[0].numel())
    if D is not None and not bool(D.any()):  # a ReLU in place leaves a path that carries nothing
        D = None
    live = live_units(B)
    if live.shape[1] < B.shape[2]:
        B = B.gather(2, live.unsqueeze(1).expand(-1, B.shape[1], -1))
    return z.reshape(len(z), -1), out.detach().gather(1, rows), B, D, live


def live_units(B: Tensor) -> Tensor:
    """The units with a non-zero column of B, (N, L), where L is the most that any image has, but at least 1.

    Images with fewer live units have some others too.
    """
    matters = (B != 0).any(1)
    most = max(1, int(matters.sum(1).max()))
    if most == B.shape[2]:
        return torch.arange(most, device=B.device).expand(B.shape[0], -1)
    return torch.argsort(matters, dim=1, descending=True, stable=True)[:, :most].sort(1).values


def _before_the_cut(cut: Cut, points: Tensor, live: Tensor, chunk: int, limit_each: int) -> Tensor:
    """A, (N, L, n), the Jacobian of the stem for live units; refused before it is computed if it does not fit.

    Forward mode is taken where it needs fewer passes than reverse mode and every function supports it.
    """
    size, units = points[0].numel(), live.shape[1]
    needed = units * size * points.element_size()
    if needed > limit_each:
        raise MemoryError(
            f"{cut.caller}: the Jacobian before {cut.relu.name!r} is {units} × {size}, {gigabytes(needed)} for each "
            f"image, and {gigabytes(limit_each)} may be used for each; choose another layer, fewer outputs (outputs=), "
            f"fewer images at a time, raise memory_budget, or use two_stage_maps, which makes about "
            f"{min(units, size):,} passes instead of storing it"
        )
    if size < units:
        all_live = units == cut.relu.size
        try:
            return by_forward_mode(cut.stem, points, None if all_live else live, chunk)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            pass  # a function with a backward formula only: row by row instead
    with torch.enable_grad():
        x = points.clone().requires_grad_()
        z = cut.stem(x)
        (A,) = by_reverse_mode(z, (x,), live, chunk) if z.requires_grad else (None,)
    return points.new_zeros(points.shape[0], live.shape[1], size) if A is None else A


def by_reverse_mode(outputs: Tensor, inputs: tuple[Tensor, ...], rows: Tensor, chunk: int) -> tuple[Tensor | None, ...]:
    """Rows ∂outputs[image, rows[image, r]] / ∂input, (N, R, n) for each of the inputs, None for one without influence.

    `outputs` (N, ...) must come from `inputs` (N, ...) by autograd; `rows` (N, R) are indices of the flat outputs.
    `chunk` rows are computed at a time.
    """
    images, count = rows.shape
    flat = outputs.reshape(images, -1)
    results: list[Tensor | None] = [None] * len(inputs)
    with full_precision(), progress_bar("Jacobian, row by row", count) as show:
        for start in range(0, count, chunk):
            show(start)
            chosen = rows[:, start : start + chunk]
            directions = flat.new_zeros(chosen.shape[1], *flat.shape)
            directions.scatter_(2, chosen.T.unsqueeze(2), 1.0)
            parts = torch.autograd.grad(
                flat, inputs, directions, retain_graph=True, is_grads_batched=True, allow_unused=True
            )
            for place, part in enumerate(parts):
                if part is None:
                    continue
                jacobian, part = results[place], part.reshape(*part.shape[:2], -1)
                if jacobian is None:
                    jacobian = results[place] = part.new_empty(images, count, part.shape[2])
                jacobian[:, start : start + part.shape[0]] = part.transpose(0, 1)
    return tuple(results)


def by_forward_mode(function: Callable[[Tensor], Tensor], at: Tensor, rows: Tensor | None, chunk: int) -> Tensor:
    """The Jacobian (N, p, n) of `function` at points (N, ...), column by column; or its `rows` (N, R) only."""
    images, size = at.shape[0], at[0].numel()
    result: Tensor | None = None

    def column(direction: Tensor) -> Tensor:
        tangent = value_and_slope(function, (at,), (direction.reshape(at.shape[1:]).expand(at.shape),))[1]
        return tangent.reshape(images, -1)

    with torch.no_grad(), full_precision(), progress_bar("Jacobian, column by column", size) as show:
        for start in range(0, size, chunk):
            show(start)
            count = min(chunk, size - start)
            directions = at.new_zeros(count, size)
            directions[:, start : start + count].fill_diagonal_(1.0)
            part = vmap(column)(directions).permute(1, 2, 0)
            if rows is not None:
                part = part.gather(1, rows.unsqueeze(2).expand(-1, -1, count))
            if result is None:
                result = part.new_empty(images, part.shape[1], size)
            result[:, :, start : start + count] = part
    assert result is not None
    return result


def scores_and_jacobians(network: nn.Module, points: Tensor, rows: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """The scores with indices `rows` (N, k) at points (N, *event), and their Jacobian (N, k, n)."""
    with torch.inference_mode(False), full_precision(), torch.enable_grad():
        x = points.detach().clone().requires_grad_()
        out = network(x.clone())
        rows = rows.to(points.device)
        (jacobian,) = by_reverse_mode(out, (x,), rows, chunk) if out.requires_grad else (None,)
    if jacobian is None:
        jacobian = points.new_zeros(*rows.shape, points[0].numel())
    require_finite_derivatives(jacobian)
    return out.detach().gather(1, rows), jacobian


def require_finite_derivatives(*jacobians: Tensor | None) -> None:
    """Raise an error where a derivative is NaN or infinite, though the scores are not."""
    if not all(bool(x.isfinite().all()) for x in jacobians if x is not None):
        raise ValueError(
            "the network's derivative is NaN or infinite at the point where it is linearized (a square root at 0, or "
            "in a branch that torch.where does not take?); use method='auto' or 'sampling'"
        )
