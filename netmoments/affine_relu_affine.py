"""The network of the paper, g(x) = B relu(A x + c₁) + c₂ (+ D x), and its exact moments under a Gaussian.

The part of a covariance that is linear in the noise is one product of matrices, the variances of the units have a
formula, and the nonlinear covariances of pairs are summed tile by tile (`relu.quadratic_form`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from netmoments.checks import describe, require_broadcastable, require_finite, require_float_tensors, values_hold
from netmoments.covariances import Covariance, Factors
from netmoments.gaussian import Gaussian, require_matrix_for
from netmoments.memory import scratch_budget
from netmoments.normal import SATURATED, standard_deviation, standardize
from netmoments.precision import matmul, matvec, row_products
from netmoments.relu.bivariate import Units, deep_layers
from netmoments.relu.marginal import expected_relu, nonlinear_variance, open_probability
from netmoments.relu.quadratic_form import flatten_batch, pairs_form, pairs_form_diagonal, unflatten_batch

CALLER = "AffineReluAffine"
"""The name in error messages."""


@dataclass(frozen=True, eq=False)
class AffineReluAffine:
    """g(x) = B relu(A x + c₁) + c₂ with A (..., p, n), c₁ (..., p), B (..., d, p), c₂ (..., d).

    With D (..., d, n), a path around the ReLU is added: g(x) = B relu(A x + c₁) + D x + c₂. Leading dimensions make a
    batch of networks (one for each image, say) and broadcast with those of the noise; without them the network is
    shared. All moments are exact to rounding and differentiable in A, B, c₁, c₂, D and in the noise's mean and
    covariance. An input with an event shape (C, H, W) is flattened. Shapes, dtypes, devices and finite values are
    checked when it is built.

    >>> network = AffineReluAffine(torch.eye(2), torch.zeros(2), torch.ones(1, 2), torch.zeros(1))
    >>> network.mean(Gaussian(torch.zeros(2), std=1.0))
    tensor([0.7979])
    """

    A: Tensor
    c1: Tensor
    B: Tensor
    c2: Tensor
    D: Tensor | None = None

    def __post_init__(self) -> None:
        A, c1, B, c2 = require_float_tensors(CALLER, A=self.A, c1=self.c1, B=self.B, c2=self.c2)
        if A.dim() < 2 or 0 in A.shape[-2:]:
            raise ValueError(f"{CALLER}: A must have shape (..., p, n) with p, n ≥ 1, got {describe(A)}")
        units = A.shape[-2]
        if c1.dim() < 1 or c1.shape[-1] != units:
            raise ValueError(f"{CALLER}: c1 must have shape (..., {units}), one for each row of A, got {describe(c1)}")
        if B.dim() < 2 or B.shape[-1] != units or B.shape[-2] == 0:
            raise ValueError(
                f"{CALLER}: B must have shape (..., d, {units}) with d ≥ 1, a column for each row of A "
                f"(A has shape {tuple(A.shape)}), got {describe(B)}"
            )
        if c2.dim() < 1 or c2.shape[-1] != B.shape[-2]:
            raise ValueError(
                f"{CALLER}: c2 must have shape (..., {B.shape[-2]}), one for each row of B, got {describe(c2)}"
            )
        named = {"A": A, "c1": c1, "B": B, "c2": c2}
        if self.D is not None:
            _, named["D"] = require_float_tensors(CALLER, A=A, D=self.D)
            if self.D.dim() < 2 or self.D.shape[-2:] != (B.shape[-2], A.shape[-1]):
                raise ValueError(
                    f"{CALLER}: D must have shape (..., {B.shape[-2]}, {A.shape[-1]}), from inputs to outputs, "
                    f"got {describe(self.D)}"
                )
        _ = self.batch_shape
        for name, value in named.items():
            require_finite(CALLER, name, value)

    @property
    def batch_shape(self) -> torch.Size:
        """The leading dimensions of the network; () if it is shared."""
        of_d = {} if self.D is None else {"D": self.D.shape[:-2]}
        return require_broadcastable(
            CALLER, A=self.A.shape[:-2], c1=self.c1.shape[:-1], B=self.B.shape[:-2], c2=self.c2.shape[:-1], **of_d
        )

    def __call__(self, x: Tensor) -> Tensor:
        """g(x) for x (..., n), or (..., C, H, W) with C·H·W = n; leading dimensions broadcast with the network's."""
        hidden = torch.relu(self.pre_activation(x))
        return self._with_offset(matvec(self.B, hidden), _flatten_to(x, self.A.shape[-1]))

    def pre_activation(self, x: Tensor) -> Tensor:
        """A x + c₁, the input of the ReLU, for an x as the network takes it."""
        _, x = require_float_tensors(CALLER, A=self.A, x=x)
        flat = _flatten_to(x, self.A.shape[-1])
        require_broadcastable(CALLER, network=self.batch_shape, x=flat.shape[:-1])
        return matvec(self.A, flat) + self.c1

    def _with_offset(self, of_relu: Tensor, x: Tensor) -> Tensor:
        """What B makes of the ReLU's output, plus D x + c₂."""
        return of_relu + self.c2 if self.D is None else of_relu + matvec(self.D, x) + self.c2

    def to(self, *args: Any, **kwargs: Any) -> AffineReluAffine:
        """Convert to another dtype or device, as `Tensor.to` does."""
        return AffineReluAffine(*self._each(lambda x: x.to(*args, **kwargs)))

    def entries(self, index: int | slice | Tensor) -> AffineReluAffine:
        """Chosen networks of a batch, by its first dimension, or one by an int. All parts must have the batch."""
        return AffineReluAffine.trusted(*self._each(lambda x: x[index]))

    def outputs(self, rows: Tensor) -> AffineReluAffine:
        """The same network with chosen outputs only, indices (k,), or (..., k) with the network's batch dimensions."""
        batch = torch.broadcast_shapes(self.batch_shape, rows.shape[:-1])
        index = rows.to(self.A.device).expand(*batch, -1)

        def picked(x: Tensor) -> Tensor:
            wide = index.unsqueeze(-1).expand(*batch, -1, x.shape[-1])
            return x.expand(*batch, *x.shape[-2:]).gather(-2, wide)

        c2 = self.c2.expand(*batch, -1).gather(-1, index)
        D = None if self.D is None else picked(self.D)
        return AffineReluAffine.trusted(self.A, self.c1, picked(self.B), c2, D)

    def _each(self, change: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """A, c₁, B, c₂ and D with `change` applied to each."""
        D = None if self.D is None else change(self.D)
        return change(self.A), change(self.c1), change(self.B), change(self.c2), D

    @classmethod
    def trusted(cls, A: Tensor, c1: Tensor, B: Tensor, c2: Tensor, D: Tensor | None = None) -> AffineReluAffine:
        """A network of parts that are valid by construction, which are not looked at again."""
        network = object.__new__(cls)
        vars(network).update(A=A, c1=c1, B=B, c2=c2, D=D)
        return network

    def mean(self, noise: Gaussian) -> Tensor:
        """E g(x), (..., d): the paper's Theorem 1, B·s(hΦ(h) + φ(h)) + c₂ (+ D·mean)."""
        self._check(noise)
        variance = noise.covariance.push_diagonal(self.A)
        mean = matvec(self.A, noise.flat_mean) + self.c1
        return self._with_offset(matvec(self.B, expected_relu(mean, standard_deviation(variance))), noise.flat_mean)

    def variance(self, noise: Gaussian, *, memory_budget: int | None = None) -> Tensor:
        """Var g(x), (..., d): diag(B K Bᵀ) with K = Cov relu(Ax + c₁), never stored.

        The part of K that is linear in the noise is pushed through in one product; the rest is summed tile by tile
        over the pairs of units that are neither dead, linear, nor unused by B. `memory_budget` (bytes) bounds the
        tiles, by default 16 MiB on a CPU and 1 GiB on a GPU. For an output that depends only on units that are hardly
        ever open, the error is relative to the variance itself, 1e-12 in float64 and 1e-6 in float32.
        """
        batch = self._check(noise, memory_budget)
        layer = _PreActivations.of_network(self, noise.flat_mean, noise.covariance)
        if layer.needs_more_digits(self.B):
            variance = self.to(torch.float64).variance(noise.to(torch.float64), memory_budget=memory_budget)
            return variance.to(noise.dtype)
        linear = noise.covariance.push_diagonal(layer.slopes)
        of_units = row_products(self.B * layer.nonlinear.unsqueeze(-2), self.B)
        scale = layer.factors.scale
        of_pairs = unflatten_batch(pairs_form_diagonal(*layer.flat(self.B, batch), memory_budget), batch)
        return (linear + of_units + (of_pairs if scale is None else of_pairs * scale[..., None])).clamp(min=0)

    def covariance(self, noise: Gaussian, *, memory_budget: int | None = None) -> Tensor:
        """Cov g(x), (..., d, d): B K Bᵀ, with K never stored; see `variance`, which is its diagonal."""
        self._check(noise, memory_budget)
        layer = _PreActivations.of_network(self, noise.flat_mean, noise.covariance)
        return self._covariance(noise.flat_mean, noise.covariance, layer, memory_budget)

    def moments(self, mean: Tensor, covariance: Covariance) -> tuple[Tensor, Tensor]:
        """`mean` and `covariance` together under N(mean, covariance), for a mean (..., n) that is known to fit."""
        layer = _PreActivations.of_network(self, mean, covariance)
        expected = self._with_offset(matvec(self.B, expected_relu(layer.mean, layer.std)), mean)
        return expected, self._covariance(mean, covariance, layer, None)

    def _covariance(
        self, mean: Tensor, covariance: Covariance, layer: _PreActivations, memory_budget: int | None
    ) -> Tensor:
        """The linear part, plus the nonlinear variances of units and nonlinear covariances of pairs, through B."""
        if layer.needs_more_digits(self.B):
            wide, wide_mean, wide_covariance = self.to(torch.float64), mean.double(), covariance.to(torch.float64)
            wide_layer = _PreActivations.of_network(wide, wide_mean, wide_covariance)
            return wide._covariance(wide_mean, wide_covariance, wide_layer, memory_budget).to(mean.dtype)
        batch = torch.broadcast_shapes(layer.slopes.shape[:-2], self.c2.shape[:-1])
        linear = covariance.push(layer.slopes)
        of_units = matmul(self.B * layer.nonlinear.unsqueeze(-2), self.B.mT)
        scale = layer.factors.scale
        of_pairs = unflatten_batch(pairs_form(*layer.flat(self.B, batch), memory_budget), batch)
        nonlinear = of_units + (of_pairs if scale is None else of_pairs * scale[..., None, None])
        total = linear + 0.5 * (nonlinear + nonlinear.mT)
        variance = total.diagonal(dim1=-2, dim2=-1).clamp(min=0)
        return torch.diagonal_scatter(total, variance, dim1=-2, dim2=-1)

    def _check(self, noise: Gaussian, memory_budget: int | None = None) -> torch.Size:
        """The common batch shape of network and noise, after a check that they fit and that the budget is valid."""
        if memory_budget is not None:
            scratch_budget(self.A.device, memory_budget)
        if not isinstance(noise, Gaussian):
            raise TypeError(f"{CALLER}: noise must be a netmoments.Gaussian, got {describe(noise)}")
        require_matrix_for(noise, CALLER, "A", self.A)
        return require_broadcastable(CALLER, network=self.batch_shape, noise=noise.batch_shape)


class _PreActivations(NamedTuple):
    """z = Ax + c₁ under the noise, (..., p): means, deviations, factors of the covariance, and what follows from them.

    As Cov relu(√c z) = c Cov relu(z), a scale c common to all covariances is taken out of the sum over pairs. Images
    that differ only in their noise level and their means then share one covariance, which is computed once.
    """

    mean: Tensor
    std: Tensor
    factors: Factors
    unscaled_variance: Tensor
    """Var z without the scale of the factors, (..., p)."""
    nonlinear: Tensor
    """Var relu(z) less its linear part, Φ²·Var z, (..., p)."""
    slopes: Tensor
    """B diag(Φ) A + D, the expected slope of the network, (..., d, n); exact, as Cov(x, relu(z)) = Cov(x, z)Φ."""

    @classmethod
    def of_network(cls, network: AffineReluAffine, mean: Tensor, covariance: Covariance) -> _PreActivations:
        factors = covariance.factors(network.A)
        unscaled, variance = factors.diagonals()
        mean = matvec(network.A, mean) + network.c1
        gates, nonlinear = open_probability(mean, variance), nonlinear_variance(mean, variance)
        slopes = matmul(network.B * gates.unsqueeze(-2), network.A)
        slopes = slopes if network.D is None else slopes + network.D
        return cls(mean, standard_deviation(variance), factors, unscaled, nonlinear, slopes)

    def needs_more_digits(self, weights: Tensor) -> bool:
        """Whether float32 is too coarse, because an output depends only on units that are hardly ever open."""
        if self.mean.dtype == torch.float64:
            return False
        units = Units(standardize(self.mean, self.std), self.std)
        return not values_hold(~deep_layers(units, weights))

    def flat(self, weights: Tensor, batch: torch.Size) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The arguments of `pairs_form`, with one batch dimension.

        The means are m/√c. Where that is beyond saturation, or c is 0, a constant far beyond it takes their place,
        and 0 where m = c = 0.
        """
        mean, scale = self.mean, self.factors.scale
        if scale is not None:
            root = standard_deviation(scale).unsqueeze(-1)
            inside = mean.abs() < SATURATED * root * self.unscaled_variance.detach().sqrt()
            certain = torch.sign(mean.detach()) * torch.finfo(root.dtype).max
            mean = torch.where(inside, mean / torch.where(inside, root, torch.ones_like(root)), certain)
        return (
            flatten_batch(mean, batch, kept=1),
            flatten_batch(self.unscaled_variance, batch, kept=1),
            flatten_batch(self.factors.left, batch, kept=2),
            flatten_batch(self.factors.right, batch, kept=2),
            flatten_batch(weights, batch, kept=2),
        )


def _flatten_to(x: Tensor, size: int) -> Tensor:
    """x of shape (..., n) as it is, and of shape (..., C, H, W) with C·H·W = n as (..., n)."""
    if x.dim() >= 1 and x.shape[-1] == size:
        return x
    if x.dim() >= 3 and x.shape[-3:].numel() == size:
        return x.flatten(-3)
    raise ValueError(f"{CALLER}: x must have shape (..., {size}) or (..., C, H, W) of that size, got {describe(x)}")
