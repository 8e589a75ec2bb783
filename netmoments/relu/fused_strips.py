"""K Bᵀ, and derivatives of covariances and forms, on a GPU: strip by strip of full rows of the matrix of pairs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from netmoments.normal import standard_deviation
from netmoments.relu import kernels
from netmoments.relu.fused import Layer, Shape, Strip, by_image, dense_rows
from netmoments.relu.kernel_tables import TERMS, tables
from netmoments.relu.marginal import standardize, variance_slopes
from netmoments.relu.pairs import Units, gate_slopes

PRODUCT_TILES = {torch.float32: Shape(32, 4, 255), torch.float64: Shape(32, 4, 255)}
GRADIENT_TILES = {torch.float32: Shape(32, 4, 255), torch.float64: Shape(32, 8, 255)}

PROGRAMS = 1024
"""Work is split until there are at least about so many programs, to fill a GPU."""


class _Parts(NamedTuple):
    """Columns split into parts, each of so many blocks, so that there are programs enough."""

    rows: int
    parts: int
    blocks: int

    @classmethod
    def of(cls, layer: Layer, strip: Strip, side: int, numbers: int) -> _Parts:
        """`numbers` is how many each part writes for a unit and image."""
        rows, columns = -(-strip.covariance.shape[1] // side), -(-layer.units // side)
        most = max(1, 2**24 // max(1, layer.images * layer.units * numbers))
        parts = min(columns, most, -(-PROGRAMS // (rows * layer.images)))
        blocks = -(-columns // parts)
        return cls(rows, -(-columns // blocks), blocks)


def form_product(layer: Layer, strip: Strip, weights: Tensor) -> Tensor:
    """K Bᵀ of the units of a strip of full rows, as (images, outputs, units): 0 for the other units."""
    outputs = weights.shape[1]
    weights, covariance = dense_rows(weights), dense_rows(strip.covariance)
    shape = PRODUCT_TILES[weights.dtype]
    split = _Parts.of(layer, strip, shape.side, outputs)
    product = weights.new_zeros(split.parts, layer.images, outputs, layer.units)
    at = tables(weights.dtype, weights.device)
    with torch.cuda.device_of(product):
        kernels.product_kernel[(split.rows, split.parts, layer.images)](
            layer.table, covariance, weights, product,
            units=layer.units, outputs=outputs, origin=strip.start, stop=strip.stop, blocks=split.blocks,
            covariance_by_image=by_image(covariance), covariance_by_row=covariance.stride(1),
            weights_by_image=by_image(weights),
            patches=weights.new_empty(2 * split.rows * split.parts * layer.images * shape.side**2),
            nodes=at.nodes, rules=at.rules, node_limits=at.node_limits, series_limits=at.series_limits,
            reach=at.last_reach, TERMS=TERMS[weights.dtype], NODE_LIMITS=len(at.node_limits),
            LIMITS=len(at.series_limits), LANES=32 * shape.warps, **shape.options(),
        )  # fmt: skip
    return product.sum(0)


class Gradients(NamedTuple):
    """Derivatives of a weighted sum of covariances of pairs of different units.

    Of their nonlinear parts in each unit's mean and variance, of their separable parts in its gate, each (images,
    units), and of both in the covariance of each pair's pre-activations, (images, rows of the strip, units).
    """

    by_mean: Tensor
    by_variance: Tensor
    by_gate: Tensor
    by_covariance: Tensor | None

    def with_own(self, own: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Derivatives in means and variances, gates and the units' own variances (weighted by `own`) included."""
        std = standard_deviation(variance)
        gate_by_mean, gate_by_variance = gate_slopes(Units(standardize(mean, std), std))
        own_by_mean, own_by_variance = variance_slopes(mean, variance)
        return (
            self.by_mean + self.by_gate * gate_by_mean + own * own_by_mean,
            self.by_variance + self.by_gate * gate_by_variance + own * own_by_variance,
        )


def covariance_gradient(layer: Layer, covariance: Tensor, grad: Tensor) -> Gradients:
    """The derivatives of Σ gradᵢⱼKᵢⱼ, with grad (images, units, units)."""
    strip, grad = Strip(dense_rows(covariance), 0), dense_rows(grad)
    by_covariance = grad.new_empty(layer.images, layer.units, layer.units)
    return _gradients(layer, strip, grad, grad, by_covariance, factored=False)


def form_gradient(layer: Layer, strip: Strip, pull: Tensor, weights: Tensor, with_covariance: bool) -> Gradients:
    """The derivatives of ½Σ (pullᵢ·bⱼ)Kᵢⱼ for a strip of full rows, with pull and B (images or 1, outputs, units)."""
    by_covariance = None
    if with_covariance:
        by_covariance = weights.new_empty(layer.images, strip.covariance.shape[1], layer.units)
    return _gradients(layer, strip, dense_rows(pull), dense_rows(weights), by_covariance, factored=True)


def _gradients(
    layer: Layer, strip: Strip, weights: Tensor, partners: Tensor, by_covariance: Tensor | None, factored: bool
) -> Gradients:
    dtype, covariance = weights.dtype, dense_rows(strip.covariance)
    at, shape = tables(dtype, weights.device), GRADIENT_TILES[dtype]
    split = _Parts.of(layer, strip, shape.side, 3)
    sums = weights.new_zeros(3, split.parts, layer.images, layer.units)
    with torch.cuda.device_of(sums):
        kernels.gradient_kernel[(split.rows, split.parts, layer.images)](
            layer.table, covariance, weights, partners, by_covariance, sums, at.owen, at.excess_limits, at.excess_reach,
            units=layer.units, outputs=weights.shape[1], origin=strip.start, stop=strip.stop, blocks=split.blocks,
            covariance_by_image=by_image(covariance), covariance_by_row=covariance.stride(1),
            weights_by_image=by_image(weights), partners_by_image=by_image(partners),
            TERMS=TERMS[dtype], LIMITS=len(at.excess_limits), OWEN=len(at.owen), FACTORED=factored,
            **shape.options(),
        )  # fmt: skip
    by_mean, by_variance, by_gate = sums.sum(1)
    return Gradients(by_mean, by_variance, by_gate, by_covariance)
