"""The network the paper is about: g(x) = B relu(A x + c₁) + c₂, and its exact moments under a Gaussian input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from netmoments.checks import describe, require_broadcastable, require_finite, require_float_tensors
from netmoments.gaussian import Gaussian
from netmoments.gaussian.gaussian import require_matrix_for
from netmoments.normal import standard_deviation
from netmoments.precision import matmul, matvec
from netmoments.relu.covariance import flatten_batch
from netmoments.relu.form import nonlinear_form
from netmoments.relu.marginal import open_probability, relu_mean
from netmoments.relu.tiling import memory_budget_for

CALLER = "AffineReluAffine"


@dataclass(frozen=True, eq=False)
class AffineReluAffine:
    """g(x) = B relu(A x + c₁) + c₂ with A (..., p, n), c₁ (..., p), B (..., d, p), c₂ (..., d).

    Leading dimensions make a batch of networks (one for each image, say) and broadcast with those of the noise;
    without them the network is shared. All moments are exact to rounding and differentiable in A, B, c₁, c₂ and in
    the noise's mean and covariance. An input with an event shape (C, H, W) is flattened. Shapes, dtypes, devices and
    finite values are checked when it is built.

    >>> network = AffineReluAffine(torch.eye(2), torch.zeros(2), torch.ones(1, 2), torch.zeros(1))
    >>> network.mean(Gaussian(torch.zeros(2), std=1.0))
    tensor([0.7979])
    """

    A: Tensor
    c1: Tensor
    B: Tensor
    c2: Tensor

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
        self._batch(())
        for name, value in (("A", A), ("c1", c1), ("B", B), ("c2", c2)):
            require_finite(CALLER, name, value)

    def _batch(self, other: tuple[int, ...]) -> torch.Size:
        return require_broadcastable(
            CALLER,
            A=self.A.shape[:-2],
            c1=self.c1.shape[:-1],
            B=self.B.shape[:-2],
            c2=self.c2.shape[:-1],
            noise=other,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """g(x) for x (..., n), its leading dimensions broadcast with the network's."""
        hidden = torch.relu(matvec(self.A, x) + self.c1)
        return matvec(self.B, hidden) + self.c2

    def to(self, *args: Any, **kwargs: Any) -> AffineReluAffine:
        """Convert to another dtype or device, as `Tensor.to` does."""
        return AffineReluAffine(*(x.to(*args, **kwargs) for x in (self.A, self.c1, self.B, self.c2)))

    def mean(self, noise: Gaussian) -> Tensor:
        """E g(x), (..., d): the paper's Theorem 1, B·s(hΦ(h) + φ(h)) + c₂."""
        mean, variance = self._pre_activations(noise)
        expected = relu_mean(mean, standard_deviation(variance))
        return matvec(self.B, expected) + self.c2

    def variance(self, noise: Gaussian, *, memory_budget: int | None = None) -> Tensor:
        """Var g(x), (..., d): diag(B K Bᵀ) with K = Cov relu(Ax + c₁), never stored.

        The part of K that is linear in the noise is pushed through in one product; the rest is summed tile by tile
        over the pairs of units that are neither dead, linear, nor unused by B. `memory_budget` (bytes) bounds the
        tiles, by default 16 MiB on a CPU and 1 GiB on a GPU.
        """
        slopes, nonlinear = self._linear_and_nonlinear(noise, memory_budget)
        return (noise.covariance.push_diagonal(slopes) + nonlinear.diagonal(dim1=-2, dim2=-1)).clamp(min=0)

    def covariance(self, noise: Gaussian, *, memory_budget: int | None = None) -> Tensor:
        """Cov g(x), (..., d, d): B K Bᵀ, with K never stored; see `variance`."""
        slopes, nonlinear = self._linear_and_nonlinear(noise, memory_budget)
        return noise.covariance.push(slopes) + 0.5 * (nonlinear + nonlinear.mT)

    def _pre_activations(self, noise: Gaussian) -> tuple[Tensor, Tensor]:
        """Means and variances of z = Ax + c₁."""
        if not isinstance(noise, Gaussian):
            raise TypeError(f"{CALLER}: noise must be a netmoments.Gaussian, got {describe(noise)}")
        A = require_matrix_for(noise, CALLER, "A", self.A)
        self._batch(noise.batch_shape)
        mean = matvec(A, noise.flat_mean) + self.c1
        return mean, noise.covariance.push_diagonal(A)

    def _linear_and_nonlinear(self, noise: Gaussian, memory_budget: int | None) -> tuple[Tensor, Tensor]:
        """B diag(Φ) A, the expected slope of g (..., d, n), and B N Bᵀ (..., d, d) for the nonlinear part N of K."""
        mean, variance = self._pre_activations(noise)
        gate = open_probability(mean, variance)
        slopes = matmul(self.B * gate.unsqueeze(-2), self.A)
        left, right = noise.covariance.factors(self.A)
        batch = self._batch(noise.batch_shape)
        nonlinear = nonlinear_form(
            flatten_batch(mean, batch, kept=1),
            flatten_batch(variance, batch, kept=1),
            flatten_batch(left, batch, kept=2),
            flatten_batch(right, batch, kept=2),
            flatten_batch(self.B, batch, kept=2),
            memory_budget_for(mean.device, memory_budget),
        )
        return slopes, nonlinear.reshape(*batch, *nonlinear.shape[1:])
