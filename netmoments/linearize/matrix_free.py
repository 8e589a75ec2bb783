"""The two-stage linearization of networks whose Jacobian A is too large to store.

SqueezeNet's first ReLU has 1.2 million units over 155 thousand inputs: A would take 730 GB. The moments only need
products with A, its rows and its columns. These are computed by passes through the network instead, with a bounded
number of directions at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from netmoments.checks import describe
from netmoments.covariances import Covariance, Diagonal, Isotropic
from netmoments.gaussian import Gaussian
from netmoments.linearize.two_stage import (
    Linearizer,
    after_the_cut,
    by_reverse_mode,
    output_indices,
    points_of,
    require_room_for_jacobians,
)
from netmoments.memory import scratch_budget
from netmoments.network.model import NetworkModel
from netmoments.network.relu_calls import Cut
from netmoments.normal import standard_deviation
from netmoments.precision import full_precision, matmul, matvec, value_and_slope
from netmoments.progress import progress_bar
from netmoments.relu.bivariate import Units, active, scratch_for, units_of
from netmoments.relu.marginal import nonlinear_variance, open_probability, relu_mean
from netmoments.relu.quadratic_form import pairs_form
from netmoments.relu.tiles import Tile, nonlinear_covariance, tile_elements

CALLER = "two_stage_maps"


def two_stage_maps(
    network: Any,
    at: Tensor,
    layer: int | str = -1,
    *,
    outputs: Sequence[int] | Tensor | None = None,
    event_ndim: int | None = None,
    memory_budget: int | None = None,
) -> TwoStageMaps:
    """`two_stage` at one point without storing A: the same mean, variance and covariance, paid for in passes.

    Variances of pre-activations take as many passes through the part before the ReLU as there are units with influence
    on the chosen outputs; under independent pixels, as there are inputs if those are fewer. The covariance takes two
    more for every unit that the noise takes across zero. Choose few `outputs`. Memory stays within `memory_budget`, by
    default half of what is free. Arguments, shapes and accuracy are those of `two_stage`; `at` is one point.

    >>> from netmoments import Gaussian, two_stage
    >>> network = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)).eval()
    >>> point, noise = torch.zeros(2), Gaussian(torch.zeros(2), std=0.1)
    >>> stored, maps = two_stage(network, point), two_stage_maps(network, point)
    >>> bool(torch.allclose(maps.variance(noise), stored.variance(noise)))
    True
    """
    points, batch = points_of(CALLER, at, event_ndim)
    if batch.numel() != 1:
        raise ValueError(f"{CALLER}: one point at a time, got {describe(at)}")
    model = NetworkModel.of(network, points, CALLER)
    indices = output_indices(outputs, 1, model.outputs, CALLER)
    model.memory_budget = memory_budget
    cut, limit, _, chunk = Linearizer.of(model, layer, points)
    require_room_for_jacobians(cut, points, indices, limit)
    with torch.inference_mode(False), full_precision():
        point = points.clone()
        z, out, B, D, live = after_the_cut(cut, point, indices, chunk)
    A = StemMap(cut, point, live[0], chunk)
    return TwoStageMaps(A, z[0, live[0]], B[0], out[0], None if D is None else D[0], limit)


@dataclass(frozen=True, eq=False)
class StemMap:
    """A = ∂z/∂x at a point, (L, n) for L live units, as a linear map that is never stored."""

    cut: Cut
    point: Tensor
    """(1, *event)."""
    live: Tensor
    """Indices of the live units among all, (L,)."""
    chunk: int
    """How many directions go through the network at a time."""

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.live), self.point[0].numel()

    def times(self, directions: Tensor) -> Tensor:
        """A v for directions v (c, n): (c, L), by forward mode."""

        def along(direction: Tensor) -> Tensor:
            step = direction.reshape(self.point.shape)
            return value_and_slope(self.cut.stem, (self.point,), (step,))[1].flatten()[self.live]

        with torch.no_grad(), full_precision():
            return torch.cat([vmap(along)(part) for part in directions.split(self.chunk)])

    def transposed_times(self, weights: Tensor) -> Tensor:
        """Aᵀ w for weights w (c, L): (c, n), by reverse mode."""
        with torch.inference_mode(False), torch.enable_grad(), full_precision():
            x = self.point.clone().requires_grad_()
            z = self.cut.stem(x).flatten()[self.live]
            if not z.requires_grad:
                return weights.new_zeros(len(weights), x.numel())
            parts = [
                torch.autograd.grad(z, x, part, retain_graph=True, is_grads_batched=True)[0].flatten(1)
                for part in weights.split(self.chunk)
            ]
        return torch.cat(parts)

    def rows(self, index: Tensor) -> Tensor:
        """Chosen rows of A, (r, n)."""
        with torch.inference_mode(False), torch.enable_grad(), full_precision():
            x = self.point.clone().requires_grad_()
            z = self.cut.stem(x)
            (rows,) = (
                by_reverse_mode(z, (x,), self.live[index].unsqueeze(0), self.chunk) if z.requires_grad else (None,)
            )
        return self.point.new_zeros(len(index), x.numel()) if rows is None else rows[0]

    def columns(self, index: Tensor) -> Tensor:
        """Chosen columns of A, (L, c)."""
        return self.times(torch.nn.functional.one_hot(index, self.shape[1]).to(self.point)).T

    def row_variances(self, covariance: Covariance) -> Tensor:
        """diag(A Σ Aᵀ), (L,): by columns where Σ is diagonal and there are fewer inputs than units, else by rows."""
        units, inputs = self.shape
        if inputs < units and isinstance(covariance, Isotropic | Diagonal):
            total = self.point.new_zeros(units)
            variances = covariance.variances().expand(inputs)
            for index in _chunks(inputs, self.chunk, "variances, column by column", self.point.device):
                total += matvec(self.columns(index).square(), variances[index])
            return total
        parts = [
            covariance.push_diagonal(self.rows(index))
            for index in _chunks(units, self.chunk, "variances, row by row", self.point.device)
        ]
        return torch.cat(parts)


@dataclass(frozen=True, eq=False)
class TwoStageMaps:
    """out ≈ B relu(A x + c₁) + D x + c₂ near a point, for k chosen outputs, with A a linear map (see `StemMap`)."""

    A: StemMap
    z: Tensor
    """The pre-activations A·point + c₁, (L,)."""
    B: Tensor
    """(k, L)."""
    out: Tensor
    """The network's chosen outputs at the point, (k,)."""
    D: Tensor | None
    """(k, n); None without a path around the ReLU."""
    limit: int
    """The bytes that rows of A may take."""

    def mean(self, noise: Gaussian) -> Tensor:
        """E of the chosen outputs, (k,)."""
        mean, variance = self._pre_activations(noise)
        return self._mean(noise, mean, variance)

    def variance(self, noise: Gaussian) -> Tensor:
        """Var of the chosen outputs, (k,)."""
        return self.covariance(noise).diagonal()

    def covariance(self, noise: Gaussian) -> Tensor:
        """Cov of the chosen outputs, (k, k)."""
        return self.moments(noise)[1]

    def moments(self, noise: Gaussian) -> tuple[Tensor, Tensor]:
        """Mean (k,) and covariance (k, k) together, making the passes that they share once."""
        mean, variance = self._pre_activations(noise)
        gate = open_probability(mean, variance)
        slopes = self.A.transposed_times(self.B * gate)
        linear = noise.covariance.push(slopes if self.D is None else slopes + self.D)
        of_units = matmul(self.B * nonlinear_variance(mean, variance), self.B.mT)
        nonlinear = of_units + self._pairs(noise.covariance, mean, variance)
        return self._mean(noise, mean, variance), linear + 0.5 * (nonlinear + nonlinear.mT)

    def _pre_activations(self, noise: Gaussian) -> tuple[Tensor, Tensor]:
        """Means and variances of the live units' pre-activations, (L,) each."""
        if noise.batch_shape or noise.size != self.A.shape[1] or noise.dtype != self.z.dtype:
            raise ValueError(
                f"{CALLER}: the noise must be one Gaussian over {self.A.shape[1]} inputs in {self.z.dtype}, got {noise}"
            )
        moved = noise.flat_mean - self.A.point.flatten()
        mean = self.z + self.A.times(moved.unsqueeze(0))[0] if bool(moved.any()) else self.z
        return mean, self.A.row_variances(noise.covariance)

    def _mean(self, noise: Gaussian, mean: Tensor, variance: Tensor) -> Tensor:
        """The mean of the chosen outputs, (k,), from the means and variances of the pre-activations."""
        expected = relu_mean(mean, standard_deviation(variance))
        change = matvec(self.B, expected - torch.relu(self.z))
        if self.D is not None:
            change = change + matvec(self.D, noise.flat_mean - self.A.point.flatten())
        return self.out + change

    def _pairs(self, covariance: Covariance, mean: Tensor, variance: Tensor) -> Tensor:
        """B N Bᵀ over pairs of different units that the noise takes across zero, N their nonlinear covariance."""
        units = units_of(mean.unsqueeze(0), variance.unsqueeze(0))
        chosen = active(units)[0].nonzero().squeeze(1)
        if len(chosen) == 0:
            return self.B.new_zeros(len(self.B), len(self.B))
        B = self.B[:, chosen]
        if 2 * len(chosen) * self.A.shape[1] * mean.element_size() <= self.limit:
            rows = self.A.rows(chosen)
            left, right = rows.unsqueeze(0), covariance.times(rows).unsqueeze(0)
            budget = scratch_budget(mean.device, None)
            mean, variance = mean[chosen].unsqueeze(0), variance[chosen].unsqueeze(0)
            return pairs_form(mean, variance, left, right, B.unsqueeze(0), budget)[0]
        product = self._streamed(covariance, Units(units.h[:, chosen], units.s[:, chosen]), chosen, B)
        return matmul(B, product)

    def _streamed(self, covariance: Covariance, units: Units, chosen: Tensor, B: Tensor) -> Tensor:
        """N Bᵀ, (units, k), a strip of rows of A at a time: that strip of A Σ Aᵀ is A applied to Σ times its rows."""
        elements = tile_elements(scratch_budget(B.device, None), B.dtype)
        scratch = scratch_for(B, elements)
        product = B.new_zeros(len(chosen), len(B))
        for index in _chunks(len(chosen), self.A.chunk, "pairs of units", B.device):
            rows = slice(int(index[0]), int(index[-1]) + 1)
            strip = self.A.times(covariance.times(self.A.rows(chosen[rows])))[:, chosen]
            width = max(1, elements // len(index))
            for left in range(0, rows.stop, width):
                columns = slice(left, min(left + width, rows.stop))
                value = nonlinear_covariance(units, Tile(rows, columns), strip[:, columns].unsqueeze(0), scratch)[0]
                product[rows] += matmul(value, B[:, columns].mT)
                product[columns] += matmul(value.mT, B[:, rows].mT)
        return product


def _chunks(count: int, chunk: int, what: str, device: torch.device) -> Iterator[Tensor]:
    """The indices 0 … count − 1 in chunks, with a progress bar."""
    with progress_bar(what, count) as show:
        for start in range(0, count, chunk):
            show(start)
            yield torch.arange(start, min(start + chunk, count), device=device)
