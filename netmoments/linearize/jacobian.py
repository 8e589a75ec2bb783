"""Exact Jacobians of a batch of images at once, in chunks of bounded memory.

A network in eval mode treats every image by itself, so one backward pass with a different direction for each image
gives a row of each image's Jacobian, and `vmap` over directions gives many rows; forward mode likewise gives columns."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import jvp, vmap

from netmoments.precision import full_precision
from netmoments.progress import Progress


def by_reverse_mode(outputs: Tensor, inputs: tuple[Tensor, ...], rows: Tensor, chunk: int) -> tuple[Tensor | None, ...]:
    """Rows ∂outputs[image, rows[image, r]] / ∂input, (N, R, n) for each of the inputs, None for one without influence.

    `outputs` (N, ...) must come from `inputs` (N, ...) by autograd; `rows` (N, R) are indices of the flat outputs.
    `chunk` rows are computed at a time.
    """
    images, count = rows.shape
    flat = outputs.reshape(images, -1)
    results: list[Tensor | None] = [None] * len(inputs)
    with full_precision(), Progress("Jacobian, row by row", count) as progress:
        for start in range(0, count, chunk):
            chosen = rows[:, start : start + chunk]
            directions = flat.new_zeros(chosen.shape[1], *flat.shape)
            directions.scatter_(2, chosen.T.unsqueeze(2), 1.0)
            parts = torch.autograd.grad(
                flat, inputs, directions, retain_graph=True, is_grads_batched=True, allow_unused=True
            )
            for place, part in enumerate(parts):
                if part is not None:
                    results[place] = _stored(results[place], part, start, (images, count))
            progress.advance(chosen.shape[1])
    return tuple(results)


def _stored(result: Tensor | None, part: Tensor, start: int, shape: tuple[int, int]) -> Tensor:
    """The rows of `part`, (rows, N, ...), put into the result, (N, all rows, n), which is made on first use."""
    part = part.reshape(*part.shape[:2], -1)
    if result is None:
        result = part.new_empty(*shape, part.shape[2])
    result[:, start : start + part.shape[0]] = part.transpose(0, 1)
    return result


def by_forward_mode(function: Callable[[Tensor], Tensor], at: Tensor, rows: Tensor | None, chunk: int) -> Tensor:
    """The Jacobian of `function` at `at` (N, ...), (N, p, n), column by column; with `rows` (N, R), those rows only."""
    images, size = at.shape[0], at[0].numel()
    result: Tensor | None = None

    def column(direction: Tensor) -> Tensor:
        tangent = jvp(function, (at,), (direction.reshape(at.shape[1:]).expand(at.shape),))[1]
        return tangent.reshape(images, -1)

    with torch.no_grad(), full_precision(), Progress("Jacobian, column by column", size) as progress:
        for start in range(0, size, chunk):
            count = min(chunk, size - start)
            directions = at.new_zeros(count, size)
            directions[:, start : start + count].fill_diagonal_(1.0)
            part = vmap(column)(directions).permute(1, 2, 0)
            if rows is not None:
                part = part.gather(1, rows.unsqueeze(2).expand(-1, -1, count))
            if result is None:
                result = part.new_empty(images, part.shape[1], size)
            result[:, :, start : start + count] = part
            progress.advance(count)
    assert result is not None
    return result


def linearized(network: nn.Module, points: Tensor, rows: Tensor, working: int) -> tuple[Tensor, Tensor]:
    """The chosen scores (N, k) at points (N, *event), and their Jacobian (N, k, n)."""
    with torch.inference_mode(False), full_precision(), torch.enable_grad():
        x = points.detach().clone().requires_grad_()
        out = network(x.clone())
        rows = rows.to(points.device)
        (jacobian,) = by_reverse_mode(out, (x,), rows, working) if out.requires_grad else (None,)
    if jacobian is None:
        jacobian = points.new_zeros(*rows.shape, points[0].numel())
    return out.detach().gather(1, rows), jacobian
