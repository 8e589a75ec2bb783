"""The exact covariance of a layer of ReLUs as a dense matrix, and the orthant probabilities of its pairs.

A matrix is computed in three steps: the separable part of all pairs; the nonlinear part of pairs of active units, tile
by tile (`tiles`); and once more, in float64 and to relative accuracy, the pairs whose values are smaller than the
absolute error of the second step and still wanted. On a GPU with Triton the kernels of `triton` do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from netmoments.checks import describe, require_broadcastable, require_float_tensors
from netmoments.memory import scratch_budget
from netmoments.normal import distribution, standard_deviation, standardize
from netmoments.precision import full_precision
from netmoments.relu.bivariate import (
    SMALL_LAYER,
    Scratch,
    Units,
    active,
    correlation_and_gap,
    dead,
    deep_layers,
    excess_by_owen,
    nonlinear_matrix,
    noticeable,
    scratch_for,
    units_of,
)
from netmoments.relu.marginal import variance_of, variance_slopes
from netmoments.relu.quadratic_form import flatten_batch
from netmoments.relu.tiles import (
    TEMPORARIES,
    GradientOfImages,
    GradientOfTile,
    OfImages,
    Tile,
    UnitGradients,
    chunks,
    excess_probability,
    gate_slopes,
    height_root,
    images_of,
    nonlinear_covariance,
    tail_excess,
    tail_gradient,
    tail_nonlinear_part,
    tile_elements,
    tile_gradient,
    triangle,
)
from netmoments.relu.triton import launch as fused
from netmoments.relu.triton.launch import covariance_gradient


def relu_covariance(mean: Tensor, covariance: Tensor, *, memory_budget: int | None = None) -> Tensor:
    """Cov(relu z) for z ~ N(mean, covariance): (..., p) and (..., p, p) to (..., p, p), exact to rounding.

    Cov(relu zᵢ, relu zⱼ) = Sᵢⱼ Φ(hᵢ)Φ(hⱼ) + sᵢsⱼ J(hᵢ,hⱼ;ρᵢⱼ), in place of the paper's series (Lemma 4), which
    diverges at |ρ| = 1/√2. Absolute error in units of sᵢsⱼ: below 1e-14 in float64 and 5e-7 in float32, for every
    ρ in [−1, 1]; where a unit is hardly ever open, h < −3, relative to the two parts themselves, 1e-12 and 1e-6, as far
    as floats go. The diagonal is `relu_variance`. Singular covariances and zero variances give the exact limit. The
    covariance is taken as symmetric, and read on and below its diagonal only; the result is symmetric to the bit.

    Gradients are the closed-form derivatives (∂Cov/∂Sᵢⱼ is the orthant probability), finite at ρ = ±1 and at zero
    variance; the covariance is taken as symmetric, each entry getting the derivative of its own output entry.
    `torch.func.vmap`, `grad` and `jacrev` work; forward mode and second derivatives raise an error.
    `memory_budget`, in bytes, bounds the scratch memory (not the result), by default 16 MiB on a CPU, 1 GiB on a GPU.

    Values are not validated here: build a `Gaussian` for that.

    >>> relu_covariance(torch.zeros(2), torch.eye(2))  # ½ − 1/(2π)
    tensor([[0.3408, 0.0000],
            [0.0000, 0.3408]])
    """
    mean, covariance = require_float_tensors("relu_covariance", mean=mean, covariance=covariance)
    batch = _layer_batch("relu_covariance", mean, covariance)
    budget = scratch_budget(mean.device, memory_budget)
    result = _ReluCovariance.apply(*flat_layer(mean, covariance, batch), budget, True)
    return result.reshape(*batch, *covariance.shape[-2:])


def orthant_probability(mean: Tensor, covariance: Tensor) -> Tensor:
    """P(zᵢ > 0, zⱼ > 0) of every pair for z ~ N(mean, covariance): (..., p) and (..., p, p) to (..., p, p).

    Φ(hᵢ)Φ(hⱼ) plus the orthant excess; on the diagonal Φ(hᵢ). Absolute error below 1e-14 in float64 for every
    correlation, ±1 included, where the slope is infinite: 1 − |ρ| is computed from exact products of the inputs. Where
    a unit is hardly ever open, h < −3, the error is 1e-12 of the result's two parts, or 1e-8 of it beyond |ρ| = 0.99.
    The result is symmetric. A unit of zero variance is above 0, below it, or (at mean 0) counts as above with
    probability 1/2.

    This is the derivative of `relu_covariance` in the covariance. It has no derivatives of its own; `vmap` works.

    >>> orthant_probability(torch.zeros(2), torch.eye(2))
    tensor([[0.5000, 0.2500],
            [0.2500, 0.5000]])
    """
    mean, covariance = require_float_tensors("orthant_probability", mean=mean, covariance=covariance)
    batch = _layer_batch("orthant_probability", mean, covariance)
    flat = flat_layer(mean, covariance, batch)
    return _OrthantProbability.apply(*flat, scratch_budget(mean.device, None)).reshape(*batch, *covariance.shape[-2:])


def layer_covariance(mean: Tensor, covariance: Tensor) -> Tensor:
    """`relu_covariance` for means (N, p) and covariances (N, p, p), which are not checked.

    Entries are accurate relative to the whole layer, not each to itself.
    """
    return _ReluCovariance.apply(mean, covariance.diagonal(dim1=-2, dim2=-1), covariance, None, False)


def flat_layer(mean: Tensor, covariance: Tensor, batch: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and covariance with one batch dimension."""
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    return flatten_batch(mean, batch, 1), flatten_batch(variance, batch, 1), flatten_batch(covariance, batch, 2)


def _layer_batch(caller: str, mean: Tensor, covariance: Tensor) -> torch.Size:
    """The batch shape of a layer whose shapes are checked."""
    if mean.dim() < 1 or mean.shape[-1] == 0:
        raise ValueError(f"{caller}: mean must have shape (..., p) with p ≥ 1, got {describe(mean)}")
    units = mean.shape[-1]
    if covariance.dim() < 2 or covariance.shape[-2:] != (units, units):
        raise ValueError(
            f"{caller}: covariance must have shape (..., {units}, {units}) to match mean of shape {tuple(mean.shape)}, "
            f"got {describe(covariance)}"
        )
    return require_broadcastable(caller, mean=mean.shape[:-1], covariance=covariance.shape[:-2])


class _ReluCovariance(OfImages):
    """(mean, variance, covariance) → the layer's covariance, (images, units, units).

    Dimension 0 is images, N or 1 (shared). The separable part SᵢⱼΦᵢΦⱼ is computed for all pairs, the nonlinear part is
    added tile by tile, each pair of active units once, and the diagonal holds the units' variances. Then pairs with a
    unit that is hardly ever open are computed again: all of them (`entrywise`), or those that matter to a deep layer.
    """

    @staticmethod
    def forward(
        mean: Tensor, variance: Tensor, covariance: Tensor, memory_budget: int | None, entrywise: bool
    ) -> Tensor:
        if fused.ENABLED and fused.available(mean):
            budget = scratch_budget(mean.device, memory_budget)
            return fused.relu_covariance(mean, variance, covariance, entrywise, budget)
        units = units_of(mean, variance)
        again = dead(units) if entrywise else deep_layers(units, None).unsqueeze(-1)
        result = _plain_covariance(units, mean, variance, covariance, memory_budget)
        if bool(again.any()):
            again = again if entrywise else again & noticeable(units, None)
            budget = scratch_budget(mean.device, memory_budget)
            _replace_pairs(result, again, mean, variance, covariance, _covariance_of_pairs, budget)
            result.diagonal(dim1=1, dim2=2).copy_(variance_of(mean, variance))
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.memory_budget = inputs[3]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (*_ReluCovarianceGradient.apply(grad, *ctx.saved_tensors, ctx.memory_budget), None, None)


class _ReluCovarianceGradient(GradientOfImages):
    """The vector–Jacobian product of `_ReluCovariance` in closed form; nothing is kept from the forward pass."""

    @staticmethod
    def forward(grad: Tensor, mean: Tensor, variance: Tensor, covariance: Tensor, memory_budget: int | None) -> Any:
        memory_budget = scratch_budget(mean.device, memory_budget)
        inputs = (mean, variance, covariance)
        gradients = _fused_gradients if fused.available(mean) else _plain_gradients
        results = gradients(grad, *inputs, memory_budget)
        std = standard_deviation(variance)
        deep = deep_layers(Units(standardize(mean, std), std), None).expand(len(grad))
        if bool(deep.any()):
            m, v, c = (images_of(x, deep).double() for x in inputs)
            accurate = _tail_gradients(grad[deep].double(), m, v, c, memory_budget)
            for result, part in zip(results, accurate, strict=True):
                result[deep] = part.to(result.dtype)
        return tuple(result.sum_to_size(x.shape) for result, x in zip(results, inputs, strict=True))


MIRROR_BLOCK = 128
"""Rows and columns of the blocks that `mirror_` copies."""


def mirror_(square: Tensor) -> Tensor:
    """Make matrices (images, p, p) symmetric to the bit, in place, by copying what is below the diagonal above it."""
    for start in range(0, square.shape[-1], MIRROR_BLOCK):
        block = slice(start, start + MIRROR_BLOCK)
        square[:, :start, block] = square[:, block, :start].mT
        corner = square[:, block, block]
        corner.copy_(corner.tril() + corner.tril(-1).mT)
    return square


def _plain_covariance(
    units: Units, mean: Tensor, variance: Tensor, covariance: Tensor, memory_budget: int | None
) -> Tensor:
    """The layer's covariance with an absolute error in units of sᵢsⱼ."""
    images = max(len(units.h), len(covariance))
    gate = distribution(units.h)
    independent = gate.unsqueeze(-1) * gate.unsqueeze(-2)
    result = independent.mul_(covariance) if len(independent) == images else independent * covariance
    if result.numel() <= SMALL_LAYER:
        result += nonlinear_matrix(units, covariance)
    else:
        budget = scratch_budget(mean.device, memory_budget)
        _add_pairs(result, units, covariance, nonlinear_covariance, budget)
    result.diagonal(dim1=1, dim2=2).copy_(variance_of(mean, variance))
    return mirror_(result)


def _plain_gradients(
    grad: Tensor, mean: Tensor, variance: Tensor, covariance: Tensor, memory_budget: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients in mean, variance and covariance for each image, tile by tile."""
    units = units_of(mean, variance)
    return _gradients_of(tile_gradient, active(units), units, grad, mean, variance, covariance, memory_budget)


def _tail_gradients(
    grad: Tensor, mean: Tensor, variance: Tensor, covariance: Tensor, memory_budget: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`_plain_gradients` to relative accuracy, in float64."""
    units = units_of(mean, variance)
    relevant = noticeable(units, None)
    return _gradients_of(tail_gradient, relevant, units, grad, mean, variance, covariance, memory_budget)


def _gradients_of(
    of_tile: GradientOfTile,
    relevant: Tensor,
    units: Units,
    grad: Tensor,
    mean: Tensor,
    variance: Tensor,
    covariance: Tensor,
    memory_budget: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the separable parts of all pairs and the nonlinear parts of pairs of relevant units."""
    images = grad.shape[0]
    by_mean, by_variance, by_covariance = _separable_gradients(grad, units, mean, variance, covariance)
    elements = tile_elements(memory_budget, mean.dtype)
    scratch = scratch_for(mean, elements)
    for chunk in chunks(relevant, images, elements, shared=covariance.shape[0] == 1):
        kept = chunk.restrict(units).with_series()
        by_unit = UnitGradients(chunk.count, kept)
        for tile in triangle(kept.h.shape[1], elements // chunk.count):
            rows, columns = tile
            lower, upper = chunk.block(grad, rows, columns), chunk.block(grad, columns, rows).mT
            weight = torch.add(lower, upper, out=scratch.take("weight", lower.shape))
            with full_precision():
                slopes = of_tile(kept, tile, chunk.block(covariance, rows, columns), weight, scratch)
            chunk.add_block(by_covariance, rows, columns, slopes.by_covariance * lower)
            chunk.add_block(by_covariance, columns, rows, (slopes.by_covariance * upper).mT)
            by_unit.add_tile(slopes, tile)
        chunk.add(by_mean, by_unit.by_mean)
        chunk.add(by_variance, by_unit.by_variance)
    return by_mean, by_variance, by_covariance


def _fused_gradients(
    grad: Tensor, mean: Tensor, variance: Tensor, covariance: Tensor, memory_budget: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`_plain_gradients` by the kernels on a GPU."""
    parts = []
    for chunk in fused.image_chunks(len(grad), fused.table_bytes(mean.shape[1], mean.dtype), memory_budget):
        upstream = grad[chunk]
        m, v, s = (fused.part_of(x, chunk) for x in (mean, variance, covariance))
        gradient = covariance_gradient(fused.layer_of(m.expand(len(upstream), -1), v), s, upstream)
        parts.append((*gradient.with_own(upstream.diagonal(dim1=1, dim2=2), m, v), gradient.by_covariance))
    by_mean, by_variance, by_covariance = (x[0] if len(parts) == 1 else torch.cat(x) for x in zip(*parts, strict=True))
    return by_mean, by_variance, by_covariance


class _OrthantProbability(OfImages):
    """(mean, variance, covariance) → P(zᵢ > 0, zⱼ > 0), (images, units, units)."""

    @staticmethod
    def forward(mean: Tensor, variance: Tensor, covariance: Tensor, memory_budget: int) -> Tensor:
        images = max(x.shape[0] for x in (mean, variance, covariance))
        units = units_of(mean, variance)
        gate = distribution(units.h)
        result = (gate.unsqueeze(-1) * gate.unsqueeze(-2)).expand(images, -1, -1).clone()
        _add_pairs(result, units, covariance, excess_probability, memory_budget)
        mirror_(result)
        hardly_open = dead(units)
        if bool(hardly_open.any()):
            _replace_pairs(result, hardly_open, mean, variance, covariance, _probability_of_pairs, memory_budget)
        _replace_strong_pairs(result, units, variance, covariance)
        result.diagonal(dim1=1, dim2=2).copy_(gate)
        return result.clamp_(0, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise RuntimeError(
            "orthant_probability has no derivatives; detach its inputs, or differentiate relu_covariance"
        )

    jvp = backward


def _separable_gradients(
    grad: Tensor, units: Units, mean: Tensor, variance: Tensor, covariance: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of SᵢⱼΦᵢΦⱼ off the diagonal and of the units' variances on it, for each image."""
    gate = distribution(units.h)
    by_covariance = (gate.unsqueeze(-1) * gate.unsqueeze(-2)).mul(grad)
    by_covariance.diagonal(dim1=1, dim2=2).zero_()
    weighted = grad * covariance
    weighted.diagonal(dim1=1, dim2=2).zero_()
    with full_precision():
        by_gate = (weighted @ gate.unsqueeze(-1) + weighted.mT @ gate.unsqueeze(-1)).squeeze(-1)
    by_mean, by_variance = gate_slopes(units)
    diagonal_by_mean, diagonal_by_variance = variance_slopes(mean, variance)
    diagonal = grad.diagonal(dim1=1, dim2=2)
    return (
        by_gate * by_mean + diagonal * diagonal_by_mean,
        by_gate * by_variance + diagonal * diagonal_by_variance,
        by_covariance,
    )


def _add_pairs(
    result: Tensor,
    units: Units,
    covariance: Tensor,
    of_tile: Callable[[Units, Tile, Tensor, Scratch], Tensor],
    memory_budget: int,
) -> None:
    """Add `of_tile`, tile by tile, to every result[i, j] with i > j of active units."""
    elements = tile_elements(memory_budget, result.dtype)
    scratch = scratch_for(result, elements)
    for chunk in chunks(active(units), result.shape[0], elements, shared=covariance.shape[0] == 1):
        kept = chunk.restrict(units).with_series()
        for tile in triangle(kept.h.shape[1], elements // chunk.count):
            rows, columns = tile
            value = of_tile(kept, tile, chunk.block(covariance, rows, columns), scratch)
            chunk.add_block(result, rows, columns, value)


STRONG = 0.99
"""The |ρ| beyond which a rounding of ρ shows in an orthant probability."""


def _replace_strong_pairs(result: Tensor, units: Units, variance: Tensor, covariance: Tensor) -> None:
    """Compute the orthant probabilities of strongly correlated pairs again, with 1 − |ρ| from exact products.

    Pairs with a unit left of h = −6 are left as they are: what a rounding of ρ can change there is below 1e-17.
    """
    std = torch.where((units.s > 0) & (units.h > -6), units.s, torch.inf)
    rho = covariance / std.unsqueeze(-1) / std.unsqueeze(-2)
    image, i, j = (rho.abs() > STRONG).expand_as(result).tril(-1).nonzero(as_tuple=True)
    if not len(image):
        return

    def picked(x: Tensor, unit: Tensor) -> Tensor:
        return x.expand(len(result), -1)[image, unit]

    correlation, gap = correlation_and_gap(
        picked(variance, i), picked(variance, j), covariance.expand_as(result)[image, i, j]
    )
    h, k = picked(units.h, i).double(), picked(units.h, j).double()
    scratch = Scratch(torch.float64, result.device, len(image))
    probability = distribution(h) * distribution(k) + excess_by_owen(h, k, correlation, scratch, gap)
    result[image, i, j] = result[image, j, i] = probability.to(result.dtype)


PairsOfUnits = Callable[[Units, Units, Tensor, Tensor], Tensor]
"""A function of the units of rows, the units of columns, their correlations and their covariances."""


def _covariance_of_pairs(row: Units, column: Units, rho: Tensor, covariance: Tensor) -> Tensor:
    """SᵢⱼΦᵢΦⱼ + sᵢsⱼJ to relative accuracy."""
    root = height_root(row.h, column.h)
    nonlinear = tail_nonlinear_part(row.h, column.h, rho) * (row.s * root) * (column.s * root)
    return covariance * (distribution(row.h) * distribution(column.h)) + nonlinear


def _probability_of_pairs(row: Units, column: Units, rho: Tensor, covariance: Tensor) -> Tensor:
    """ΦᵢΦⱼ + D to relative accuracy."""
    root = height_root(row.h, column.h)
    excess = tail_excess(row.h, column.h, rho) * root * root
    return distribution(row.h) * distribution(column.h) + excess


def _replace_pairs(
    result: Tensor,
    chosen: Tensor,
    mean: Tensor,
    variance: Tensor,
    covariance: Tensor,
    of_pairs: PairsOfUnits,
    memory_budget: int,
) -> None:
    """Replace result[i, j] by `of_pairs` in float64 where unit i or j is chosen, a few rows at a time.

    `chosen` is (images or 1, units). The diagonal is left to the caller.
    """
    units = units_of(mean.double(), variance.double())
    size = result.shape[-1]
    elements = max(1, memory_budget // (TEMPORARIES * 8))
    place = torch.arange(size, device=result.device)
    for chunk in chunks(chosen, result.shape[0], elements, shared=False):
        s = chunk.with_all_units(units.s)
        safe = Units(chunk.with_all_units(units.h), torch.where(s > 0, s, 1.0))
        matrix, target = chunk.with_all_units(covariance), result[chunk.images]
        for index in chunk.units.split(max(1, elements // (chunk.count * size))):
            row, column = Units(safe.h[:, index], safe.s[:, index]).rows(), safe.columns()
            c = torch.where(place < index.unsqueeze(-1), matrix[:, index], matrix[:, :, index].mT).double()
            c = torch.where((s[:, index].unsqueeze(-1) > 0) & (s.unsqueeze(-2) > 0), c, 0.0)
            rho = (c / torch.maximum(row.s, column.s) / torch.minimum(row.s, column.s)).clamp_(-1, 1)
            values = of_pairs(row, column, rho, c).to(result.dtype)
            target[:, index] = values
            target[:, :, index] = values.mT
    mirror_(result)  # the two values of a pair of chosen units can differ in the last digit
