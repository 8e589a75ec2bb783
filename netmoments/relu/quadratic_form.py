"""Quadratic forms B N Bᵀ of the nonlinear covariances N between a layer's units, without ever storing N.

With weights B that is what pairs of units contribute to the covariance of the layer's outputs. N is evaluated a tile at
a time and multiplied at once, forwards and backwards, so memory does not grow with the number of pairs. On a GPU with
Triton the kernels of `triton.quadratic_form` do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from netmoments.memory import scratch_budget
from netmoments.normal import standard_deviation, standardize
from netmoments.precision import full_precision
from netmoments.relu.bivariate import (
    SMALL_LAYER,
    Scratch,
    Units,
    active,
    deep_layers,
    nonlinear_matrix,
    noticeable,
    scratch_for,
    units_of,
)
from netmoments.relu.tiles import (
    Chunk,
    GradientOfImages,
    GradientOfTile,
    OfImages,
    Tile,
    UnitGradients,
    chunks,
    images_of,
    nonlinear_covariance,
    tail_covariance,
    tail_gradient,
    tile_elements,
    tile_gradient,
    triangle,
)
from netmoments.relu.triton import launch as fused
from netmoments.relu.triton import quadratic_form as fused_form


def pairs_form(
    mean: Tensor, variance: Tensor, left: Tensor, right: Tensor, weights: Tensor, memory_budget: int | None
) -> Tensor:
    """B N Bᵀ, (images, d, d), for the nonlinear covariances N of pairs of different units (the diagonal of N is 0).

    The pre-activations have Cov(zᵢ, zⱼ) = leftᵢ · rightⱼ. Dimension 0 of every input is images, or 1 where they share
    it: mean and variance (·, p), left and right (·, p, r), weights B (·, d, p). It is differentiable in all of them,
    tile by tile; nothing is kept for that.
    """
    return _PairsForm.apply(mean, variance, left, right, weights, False, memory_budget)


def pairs_form_diagonal(
    mean: Tensor, variance: Tensor, left: Tensor, right: Tensor, weights: Tensor, memory_budget: int | None
) -> Tensor:
    """The diagonal of `pairs_form`, (images, d), without the rest of it."""
    return _PairsForm.apply(mean, variance, left, right, weights, True, memory_budget)


def unflatten_batch(tensor: Tensor, batch: torch.Size) -> Tensor:
    """Turn one batch dimension back into `batch`; a tensor that all images share is expanded."""
    event = tensor.shape[1:]
    return tensor.expand(batch.numel(), *event).reshape(*batch, *event)


def flatten_batch(tensor: Tensor, batch: torch.Size, kept: int) -> Tensor:
    """Turn batch dimensions into one: N images, or 1 if all images share the tensor, which is then not copied.

    The last `kept` dimensions stay.
    """
    own_batch = tensor.shape[: tensor.dim() - kept]
    event = tensor.shape[tensor.dim() - kept :]
    if own_batch.numel() == 1:
        return tensor.reshape(1, *event)
    return tensor.expand(*batch, *event).reshape(-1, *event)


class _Layer(NamedTuple):
    """The inputs of one chunk of images, restricted to the units that matter."""

    units: Units
    left: Tensor
    right: Tensor
    columns: Tensor
    """The columns of B, (images or 1, units, d)."""

    @classmethod
    def of_chunk(cls, chunk: Chunk, units: Units, left: Tensor, right: Tensor, weights: Tensor) -> _Layer:
        return cls(chunk.restrict(units), chunk.pick(left), chunk.pick(right), chunk.pick(weights.mT))

    def covariance(self, tile: Tile) -> Tensor:
        """Covariances of the pre-activations of a tile's pairs."""
        return self.left[:, tile.rows] @ self.right[:, tile.columns].mT


class _Route(NamedTuple):
    """How pairs are evaluated: functions for the units that matter, given B, and for tiles' values and derivatives."""

    relevant: Callable[[Units, Tensor], Tensor]
    covariance: Callable[[Units, Tile, Tensor, Scratch], Tensor]
    gradient: GradientOfTile


_USUAL = _Route(lambda units, weights: active(units), nonlinear_covariance, tile_gradient)
_TAILS = _Route(noticeable, tail_covariance, tail_gradient)
"""The route for deep layers, which takes float64."""


def _lower_tiles(route: _Route, layer: _Layer, images: int, elements: int) -> Iterator[tuple[Tile, Tensor]]:
    """The tiles of L, the part of N below its diagonal: N = L + Lᵀ. A tile's values last until the next one."""
    scratch, units = scratch_for(layer.left, images * elements), layer.units.with_series()
    for tile in triangle(layer.columns.shape[1], elements):
        yield tile, route.covariance(units, tile, layer.covariance(tile), scratch)


def _times_columns(route: _Route, layer: _Layer, images: int, elements: int) -> Tensor:
    """N Bᵀ, (images, units, d)."""
    product = layer.columns.new_zeros(images, *layer.columns.shape[1:])
    for tile, value in _lower_tiles(route, layer, images, elements):
        product[:, tile.rows] += value @ layer.columns[:, tile.columns]
        product[:, tile.columns] += value.mT @ layer.columns[:, tile.rows]
    return product


def _lower_times_columns(route: _Route, layer: _Layer, images: int, elements: int) -> Tensor:
    """L Bᵀ, (images, units, d), which is enough for B N Bᵀ = B L Bᵀ + (B L Bᵀ)ᵀ."""
    product = layer.columns.new_zeros(images, *layer.columns.shape[1:])
    for tile, value in _lower_tiles(route, layer, images, elements):
        product[:, tile.rows] += value @ layer.columns[:, tile.columns]
    return product


def _source_gradients(route: _Route, layer: _Layer, images: int, upstream: Tensor, elements: int) -> tuple[Tensor, ...]:
    """Gradients in mean, variance, left and right, where the pair (i, j) has the weight upstreamᵢ · bⱼ."""
    scratch, units = scratch_for(layer.left, images * elements), layer.units.with_series()
    by_unit = UnitGradients(images, layer.units)
    by_left, by_right = torch.zeros_like(layer.left), torch.zeros_like(layer.right)
    for tile in triangle(by_unit.by_mean.shape[1], elements):
        rows, columns = tile
        covariance = layer.covariance(tile)
        weight = upstream[:, rows] @ layer.columns[:, columns].mT
        slopes = route.gradient(units, tile, covariance, weight, scratch)
        by_unit.add_tile(slopes, tile)
        by_pair = (weight * slopes.by_covariance).sum_to_size(covariance.shape)
        by_left[:, rows] += (by_pair @ layer.right[:, columns]).sum_to_size(by_left[:, rows].shape)
        by_right[:, columns] += (by_pair.mT @ layer.left[:, rows]).sum_to_size(by_right[:, columns].shape)
    return by_unit.by_mean, by_unit.by_variance, by_left, by_right


def _live(weights: Tensor) -> Tensor:
    """Which units some output depends on; the others, behind a max-pool say, never matter to B N Bᵀ."""
    return (weights != 0).any(1)


def _deep(mean: Tensor, variance: Tensor, weights: Tensor, images: int) -> Tensor:
    """Which images have a deep layer, (images,): see `deep_layers`."""
    std = standard_deviation(variance)
    return deep_layers(Units(standardize(mean, std), std), weights).expand(images)


def _small_form(
    mean: Tensor, variance: Tensor, left: Tensor, right: Tensor, weights: Tensor, images: int, diagonal: bool
) -> Tensor:
    """B N Bᵀ, or its diagonal, for few pairs, which are evaluated all at once."""
    with full_precision():
        product = nonlinear_matrix(units_of(mean, variance), left @ right.mT) @ weights.mT
        form = (product * weights.mT).sum(1) if diagonal else weights @ product
    return form.expand(images, *form.shape[1:]).clone() if len(form) < images else form


def _form(
    route: _Route,
    mean: Tensor,
    variance: Tensor,
    left: Tensor,
    right: Tensor,
    weights: Tensor,
    images: int,
    diagonal: bool,
    memory_budget: int,
) -> Tensor:
    """B N Bᵀ, or its diagonal, tile by tile."""
    units, outputs = units_of(mean, variance), weights.shape[1]
    result = mean.new_zeros(images, outputs) if diagonal else mean.new_zeros(images, outputs, outputs)
    elements = tile_elements(memory_budget, mean.dtype)
    shared = left.shape[0] == right.shape[0] == 1
    with full_precision():
        for chunk in chunks(route.relevant(units, weights) & _live(weights), images, elements, shared):
            layer = _Layer.of_chunk(chunk, units, left, right, weights)
            product = _lower_times_columns(route, layer, chunk.count, elements // chunk.count)
            if diagonal:
                result[chunk.images] = product.mul_(layer.columns).sum(1).mul_(2)
            else:
                half = layer.columns.mT @ product
                result[chunk.images] = half + half.mT
    return result


class _PairsForm(OfImages):
    """`pairs_form` or its diagonal, with the gradient of `_PairsFormGradient`."""

    @staticmethod
    def forward(
        mean: Tensor,
        variance: Tensor,
        left: Tensor,
        right: Tensor,
        weights: Tensor,
        diagonal: bool,
        memory_budget: int | None,
    ) -> Tensor:
        inputs = (mean, variance, left, right, weights)
        images = max(map(len, inputs))
        if fused.ENABLED and fused.available(mean):
            form = fused_form.pairs_form_diagonal if diagonal else fused_form.pairs_form
            result = form(*inputs, _live(weights), scratch_budget(mean.device, memory_budget))
        elif images * mean.shape[1] ** 2 <= SMALL_LAYER:
            result = _small_form(*inputs, images, diagonal)
        else:
            result = _form(_USUAL, *inputs, images, diagonal, scratch_budget(mean.device, memory_budget))
        deep = _deep(mean, variance, weights, images)
        if bool(deep.any()):
            m, v, a, b, w = (images_of(x, deep).double() for x in inputs)
            budget = scratch_budget(mean.device, memory_budget)
            result[deep] = _form(_TAILS, m, v, a, b, w, int(deep.sum()), diagonal, budget).to(result.dtype)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:5])
        ctx.memory_budget = inputs[6]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _PairsFormGradient.apply(grad, *ctx.saved_tensors, ctx.needs_input_grad[4], ctx.memory_budget)
        return (*gradients, None, None)


def _form_gradients(
    route: _Route,
    grad: Tensor,
    mean: Tensor,
    variance: Tensor,
    left: Tensor,
    right: Tensor,
    weights: Tensor,
    weights_too: bool,
    memory_budget: int,
) -> tuple[Tensor, ...]:
    """Gradients in mean, variance, left, right and, if wanted, weights, tile by tile."""
    units = units_of(mean, variance)
    relevant = route.relevant(units, weights)
    if not weights_too:
        relevant = relevant & _live(weights)
    results = tuple(torch.zeros_like(x) for x in (mean, variance, left, right, weights.mT))
    elements = tile_elements(memory_budget, mean.dtype)
    shared = left.shape[0] == right.shape[0] == 1
    with full_precision():
        for chunk in chunks(relevant, grad.shape[0], elements, shared):
            layer = _Layer.of_chunk(chunk, units, left, right, weights)
            chunk_grad = grad[chunk.images]
            upstream = _times_symmetric(layer.columns, chunk_grad)
            parts = _source_gradients(route, layer, chunk.count, upstream, elements // chunk.count)
            for target, part in zip(results, parts, strict=False):
                chunk.add(target, part)
            if weights_too:
                product = _times_columns(route, layer, chunk.count, elements // chunk.count)
                chunk.add(results[4], _times_symmetric(product, chunk_grad))
    return (*results[:4], results[4].mT.contiguous())


class _PairsFormGradient(GradientOfImages):
    """The vector–Jacobian product of `_PairsForm`, for an upstream gradient G of the form or of its diagonal.

    The pair (i, j) has the weight bᵢᵀ(G + Gᵀ)bⱼ, with b the columns of B. The gradient in B is (G + Gᵀ) B N; it is
    computed only if wanted (`weights_too`), since no unit may be skipped for it.
    """

    @staticmethod
    def forward(
        grad: Tensor,
        mean: Tensor,
        variance: Tensor,
        left: Tensor,
        right: Tensor,
        weights: Tensor,
        weights_too: bool,
        memory_budget: int | None,
    ) -> Any:
        memory_budget = scratch_budget(mean.device, memory_budget)
        inputs = (mean, variance, left, right, weights)
        deep = _deep(mean, variance, weights, len(grad))
        any_deep = bool(deep.any())
        usual = torch.where(deep.reshape(-1, *(1,) * (grad.dim() - 1)), 0.0, grad) if any_deep else grad
        if fused.available(mean):
            live = None if weights_too else _live(weights)
            results = fused_form.pairs_form_gradients(usual, *inputs, live, memory_budget)
        else:
            results = _form_gradients(_USUAL, usual, *inputs, weights_too, memory_budget)
        if any_deep:
            m, v, a, b, w = (images_of(x, deep).double() for x in inputs)
            of_deep = _form_gradients(_TAILS, grad[deep].double(), m, v, a, b, w, weights_too, memory_budget)
            for result, part in zip(results, of_deep, strict=True):
                if result.shape[0] == 1:
                    result += part.to(result.dtype)
                else:
                    result[deep] += part.to(result.dtype)
        return results


def _times_symmetric(matrix: Tensor, grad: Tensor) -> Tensor:
    """matrix (G + Gᵀ) for G (images, d, d), or the diagonal G given as (images, d)."""
    return matrix * (2 * grad).unsqueeze(1) if grad.dim() == 2 else matrix @ (grad + grad.mT)
