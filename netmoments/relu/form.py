"""B N Bᵀ for the nonlinear part N of a layer's covariance, without ever storing N."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function

from netmoments.precision import full_precision
from netmoments.relu.gradient import UnitGradients, refuse_forward_mode, refuse_second_derivative
from netmoments.relu.pairs import Tile, Units, nonlinear_covariance, nonlinear_variance, tile_gradient
from netmoments.relu.scratch import scratch_for
from netmoments.relu.tiling import Chunk, active, chunks, tile_elements, triangle, units_of
from netmoments.relu.vmapping import vmap_forward, vmap_gradient


def nonlinear_form(
    mean: Tensor, variance: Tensor, left: Tensor, right: Tensor, weights: Tensor, memory_budget: int
) -> Tensor:
    """B N Bᵀ, (images, d, d), where the pre-activations have Cov(zᵢ, zⱼ) = leftᵢ · rightⱼ.

    Dimension 0 of every input is images, or 1 where they share it: mean and variance (·, p), left and right
    (·, p, r), weights B (·, d, p). Differentiable in all of them, tile by tile, with nothing stored.
    """
    return _NonlinearForm.apply(mean, variance, left, right, weights, memory_budget)


class _Layer(NamedTuple):
    """The inputs of one chunk, restricted to the units that matter."""

    units: Units
    left: Tensor
    right: Tensor
    columns: Tensor
    """The columns of B, (images or 1, units, d)."""

    def covariance(self, tile: Tile) -> Tensor:
        """Covariances of the pre-activations of a tile's pairs."""
        return self.left[:, tile.rows] @ self.right[:, tile.columns].mT


def _restrict(chunk: Chunk, units: Units, left: Tensor, right: Tensor, weights: Tensor) -> _Layer:
    here = Units(chunk.pick(units.h), chunk.pick(units.s))
    return _Layer(here, chunk.pick(left), chunk.pick(right), chunk.pick(weights.mT))


def _times_columns(layer: _Layer, images: int, elements: int) -> Tensor:
    """N Bᵀ, (images, units, d)."""
    scratch = scratch_for(layer.left, images * elements)
    product = nonlinear_variance(layer.units).unsqueeze(-1) * layer.columns
    product = product.expand(images, *product.shape[1:]).clone()
    for tile in triangle(product.shape[1], elements):
        value = nonlinear_covariance(layer.units, tile, layer.covariance(tile), scratch)
        product[:, tile.rows] += value @ layer.columns[:, tile.columns]
        product[:, tile.columns] += value.mT @ layer.columns[:, tile.rows]
    return product


def _source_gradients(layer: _Layer, images: int, upstream: Tensor, elements: int) -> tuple[Tensor, ...]:
    """Gradients in mean, variance, left and right, where the pair (i, j) has the weight upstreamᵢ · bⱼ."""
    scratch = scratch_for(layer.left, images * elements)
    by_unit = UnitGradients(images, layer.units)
    by_left, by_right = torch.zeros_like(layer.left), torch.zeros_like(layer.right)
    for tile in triangle(by_unit.by_mean.shape[1], elements):
        rows, columns = tile
        covariance = layer.covariance(tile)
        weight = upstream[:, rows] @ layer.columns[:, columns].mT
        slopes = tile_gradient(layer.units, tile, covariance, weight, scratch)
        by_unit.add_tile(slopes, tile)
        by_pair = weight.mul_(slopes.by_covariance).sum_to_size(covariance.shape)
        by_left[:, rows] += by_pair @ layer.right[:, columns]
        by_right[:, columns] += by_pair.mT @ layer.left[:, rows]
    by_unit.add_diagonal(layer.units, 0.5 * (upstream * layer.columns).sum(-1))
    return by_unit.by_mean, by_unit.by_variance, by_left, by_right


def _live(weights: Tensor) -> Tensor:
    """Units that some output uses: the others, behind a max-pool say, never matter to B N Bᵀ."""
    return (weights != 0).any(1)


class _NonlinearForm(Function):
    @staticmethod
    def forward(
        mean: Tensor, variance: Tensor, left: Tensor, right: Tensor, weights: Tensor, memory_budget: int
    ) -> Tensor:
        images = max(x.shape[0] for x in (mean, variance, left, right, weights))
        units = units_of(mean, variance)
        result = mean.new_zeros(images, weights.shape[1], weights.shape[1])
        elements = tile_elements(memory_budget, mean.dtype)
        with full_precision():
            for chunk in chunks(active(units) & _live(weights), images, elements, shared=left.shape[0] == 1):
                layer = _restrict(chunk, units, left, right, weights)
                result[chunk.images] = layer.columns.mT @ _times_columns(layer, chunk.count, elements // chunk.count)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:5])
        ctx.memory_budget = inputs[5]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _NonlinearFormGradient.apply(grad, *ctx.saved_tensors, ctx.needs_input_grad[4], ctx.memory_budget)
        return (*gradients, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        return vmap_forward(_NonlinearForm, info.batch_size, in_dims, inputs)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse_forward_mode()


class _NonlinearFormGradient(Function):
    """The vector–Jacobian product of `_NonlinearForm`.

    For the upstream gradient G it weights the pair (i, j) by bᵢᵀ(G + Gᵀ)bⱼ, with b the columns of B; the gradient in B
    is (G + Gᵀ) B N, for which no unit may be skipped, and which is computed only if wanted.
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
        memory_budget: int,
    ) -> Any:
        units = units_of(mean, variance)
        relevant = active(units) if weights_too else active(units) & _live(weights)
        results = tuple(torch.zeros_like(x) for x in (mean, variance, left, right, weights.mT))
        elements = tile_elements(memory_budget, mean.dtype)
        symmetric = grad + grad.mT
        with full_precision():
            for chunk in chunks(relevant, grad.shape[0], elements, shared=left.shape[0] == 1):
                layer = _restrict(chunk, units, left, right, weights)
                upstream = symmetric if symmetric.shape[0] == 1 else symmetric[chunk.images]
                parts = _source_gradients(layer, chunk.count, layer.columns @ upstream, elements // chunk.count)
                for target, part in zip(results, parts, strict=False):
                    chunk.add(target, part)
                if weights_too:
                    product = _times_columns(layer, chunk.count, elements // chunk.count)
                    chunk.add(results[4], product @ upstream)
        return (*results[:4], results[4].mT.contiguous())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        refuse_second_derivative()

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        return vmap_gradient(_NonlinearFormGradient, info.batch_size, in_dims, inputs)
