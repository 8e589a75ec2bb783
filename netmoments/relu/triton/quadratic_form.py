"""B N Bᵀ on a GPU for the nonlinear part N of a layer's covariance, without ever storing N.

The covariance of the pre-activations is given by its factors, and made a strip of rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from netmoments.precision import full_precision
from netmoments.relu.triton.kernels import BLOCK
from netmoments.relu.triton.launch import (
    Layer,
    Strip,
    form_diagonal,
    form_gradient,
    form_product,
    image_chunks,
    layer_of,
    part_of,
    refuse,
    table_bytes,
)


class _Pairs(NamedTuple):
    """The inputs of `pairs_form` for a chunk of images, restricted to the units that matter, which are at `places`."""

    images: slice
    places: Tensor
    layer: Layer
    left: Tensor
    right: Tensor
    weights: Tensor

    def strips(self, memory_budget: int, squares: int, lower: bool) -> Iterator[Strip]:
        """The covariance of the pre-activations in strips, of which `squares` of the same size fit into the budget.

        A strip has all columns, or those up to its last row if only the lower triangle is wanted (`lower`). It starts
        with a block of units, and so with a tile.
        """
        units, block = self.layer.units, int(BLOCK)
        images = max(self.left.shape[0], self.right.shape[0])
        rows = memory_budget // (squares * images * units * self.left.dtype.itemsize) // block * block
        for start in range(0, units, max(block, rows)):
            stop = min(start + max(block, rows), units)
            yield Strip(self.left[:, start:stop] @ self.right[:, : stop if lower else units].mT, start)


def _relevant_pairs(
    mean: Tensor,
    variance: Tensor,
    left: Tensor,
    right: Tensor,
    weights: Tensor,
    live: Tensor | None,
    memory_budget: int,
) -> Iterator[_Pairs]:
    """Chunks of images, with units that are active and `live` in any of them; the host waits once for each chunk."""
    images, units = max(x.shape[0] for x in (mean, variance, left, right, weights)), mean.shape[1]
    shared = left.shape[0] == right.shape[0] == 1
    bytes_each = table_bytes(units, mean.dtype) + (0 if shared else units * units * mean.dtype.itemsize)
    for chunk in image_chunks(images, bytes_each, memory_budget):
        parts = [part_of(x, chunk) for x in (mean, variance, left, right, weights)]
        layer = layer_of(parts[0].expand(chunk.stop - chunk.start, -1), parts[1])
        relevant = layer.active() if live is None else layer.active() & part_of(live, chunk)
        relevant = relevant.any(0)
        order = relevant.argsort(descending=True, stable=True)
        code, count = torch.cat((layer.fault, relevant.sum(0, keepdim=True))).tolist()
        refuse(code)
        if count == units:
            yield _Pairs(chunk, order, layer.nonlinear(), *parts[2:])
        elif count:
            index = order[:count]
            found = layer_of(parts[0].expand(layer.images, -1).index_select(1, index), parts[1].index_select(1, index))
            yield _Pairs(
                chunk,
                index,
                found.nonlinear(),
                parts[2].index_select(1, index),
                parts[3].index_select(1, index),
                parts[4].index_select(2, index),
            )


def pairs_form(
    mean: Tensor, variance: Tensor, left: Tensor, right: Tensor, weights: Tensor, live: Tensor, memory_budget: int
) -> Tensor:
    """B N Bᵀ, (images, d, d), from the arguments of `relu.quadratic_form.pairs_form`, which has the plain version."""
    images, outputs = max(x.shape[0] for x in (mean, variance, left, right, weights)), weights.shape[1]
    result = mean.new_zeros(images, outputs, outputs)
    with full_precision():
        for pairs in _relevant_pairs(mean, variance, left, right, weights, live, memory_budget):
            for strip in pairs.strips(memory_budget, squares=1, lower=False):
                result[pairs.images] += pairs.weights @ form_product(pairs.layer, strip, pairs.weights).mT
    return result


def pairs_form_diagonal(
    mean: Tensor, variance: Tensor, left: Tensor, right: Tensor, weights: Tensor, live: Tensor, memory_budget: int
) -> Tensor:
    """The diagonal of B N Bᵀ, (images, d): see `relu.quadratic_form.pairs_form_diagonal`."""
    images, outputs = max(x.shape[0] for x in (mean, variance, left, right, weights)), weights.shape[1]
    result = mean.new_zeros(images, outputs)
    with full_precision():
        for pairs in _relevant_pairs(mean, variance, left, right, weights, live, memory_budget):
            for strip in pairs.strips(memory_budget, squares=1, lower=True):
                result[pairs.images] += form_diagonal(pairs.layer, strip, pairs.weights)
    return result


def pairs_form_gradients(
    grad: Tensor,
    mean: Tensor,
    variance: Tensor,
    left: Tensor,
    right: Tensor,
    weights: Tensor,
    live: Tensor | None,
    memory_budget: int,
) -> tuple[Tensor, ...]:
    """Gradients of the form or its diagonal in mean, variance, left, right and, if `live` is None, weights.

    As in the plain version, the covariance of a pair i > j is leftᵢ · rightⱼ.
    """
    inputs = (mean, variance, left, right, weights)
    results = tuple(torch.zeros_like(x) for x in inputs)
    with full_precision():
        for pairs in _relevant_pairs(*inputs, live, memory_budget):
            upstream = grad[pairs.images]
            pull = _symmetric_times(upstream, pairs.weights)
            rows_of_left = torch.zeros_like(pairs.left)
            by_right = torch.zeros_like(pairs.right)
            for strip in pairs.strips(memory_budget, squares=2, lower=False):
                found = form_gradient(pairs.layer, strip, pull, pairs.weights)
                by_pair = found.by_covariance.tril_(strip.start - 1)
                rows = slice(strip.start, strip.stop)
                shape = rows_of_left[:, rows].shape
                rows_of_left[:, rows] = (by_pair @ pairs.right).mul_(2).sum_to_size(shape)
                by_right += (by_pair.mT @ pairs.left[:, rows]).mul_(2).sum_to_size(by_right.shape)
                _add(results[0], pairs, found.by_mean)
                _add(results[1], pairs, found.by_variance)
                if live is None:
                    product = form_product(pairs.layer, strip, pairs.weights)
                    _add(results[4].mT, pairs, _symmetric_times(upstream, product).mT)
            _add(results[2], pairs, rows_of_left)
            _add(results[3], pairs, by_right)
    return results


def _add(target: Tensor, pairs: _Pairs, value: Tensor) -> None:
    """target[images, units] += value, summed over images if they share the target."""
    part = target if target.shape[0] == 1 else target[pairs.images]
    part.index_add_(1, pairs.places, value.sum_to_size(part.shape[0], *value.shape[1:]))


def _symmetric_times(grad: Tensor, matrix: Tensor) -> Tensor:
    """(G + Gᵀ) matrix for G (images, d, d), or the diagonal G given as (images, d)."""
    return matrix * (2 * grad).unsqueeze(-1) if grad.dim() == 2 else (grad + grad.mT) @ matrix
