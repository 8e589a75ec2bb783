"""A Gaussian input N(mean, covariance), read and validated once, when it is built."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from netmoments.checks import (
    describe,
    require_broadcastable,
    require_finite,
    require_float_tensor,
    require_float_tensors,
)
from netmoments.gaussian.covariance import Covariance
from netmoments.gaussian.reading import read_covariance, read_std
from netmoments.gaussian.validation import require_covariance_values
from netmoments.precision import matvec


class Gaussian:
    """N(mean, covariance) over vectors or images, with leading batch dimensions.

    Args:
        mean: (..., n) or (..., C, H, W), float32 or float64. A mean of 1 or 2 dimensions is a vector or a batch of
            vectors, one of 3 or 4 an image or a batch of images; anything else must say `event_ndim`.
        covariance: a number (the *variance* of every coordinate), a tensor of the mean's event shape (variances),
            a dense (..., n, n) matrix, `LowRank(factor, diagonal)`, or any `Covariance`. Batch dimensions are the
            mean's or absent; one variance an image has shape (batch..., 1, ..., 1).
        std: instead of `covariance`: a number or a tensor of *standard deviations*.
        event_ndim: how many trailing dimensions of the mean make one input.

    Values are validated here: finite, variances ≥ 0, a dense covariance symmetric to max(n, 100)·eps of its largest
    entry, its smallest eigenvalue no less than −max(n, 100)·eps of its largest (for n ≤ 100: 2e-14 in float64, 1e-5 in
    float32). A singular covariance is good input. Inside `torch.func.vmap` values cannot be read and are not checked.

    >>> Gaussian(torch.zeros(3, 28, 28), std=0.05)
    Gaussian(event (3, 28, 28), Isotropic, float32 on cpu)
    """

    mean: Tensor
    covariance: Covariance
    event_ndim: int

    def __init__(
        self,
        mean: Tensor,
        covariance: Tensor | float | Covariance | None = None,
        *,
        std: Tensor | float | None = None,
        event_ndim: int | None = None,
    ) -> None:
        mean = require_float_tensor("Gaussian", "mean", mean)
        event_ndim = event_dimensions("Gaussian", "mean", mean, event_ndim)
        if mean.numel() == 0:
            raise ValueError(
                f"Gaussian: mean must have at least one coordinate and no empty batch, got {describe(mean)}"
            )
        if (covariance is None) == (std is None):
            given = "neither" if std is None else "both"
            raise ValueError(
                f"Gaussian: give either covariance= (variances) or std= (standard deviations), got {given}"
            )
        require_finite("Gaussian", "mean", mean)
        structure = (
            read_std(std, mean, event_ndim) if covariance is None else read_covariance(covariance, mean, event_ndim)
        )
        require_covariance_values(structure)
        self._set(mean, structure, event_ndim)

    def _set(self, mean: Tensor, covariance: Covariance, event_ndim: int) -> None:
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "covariance", covariance)
        object.__setattr__(self, "event_ndim", event_ndim)

    @classmethod
    def _trusted(cls, mean: Tensor, covariance: Covariance, event_ndim: int) -> Gaussian:
        """Built from parts that are valid by construction, without looking at their values again."""
        made = cls.__new__(cls)
        made._set(mean, covariance, event_ndim)
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Gaussian is immutable; build a new one instead of setting {name!r}")

    def __repr__(self) -> str:
        batch = f"batch {tuple(self.batch_shape)}, " if self.batch_shape else ""
        dtype = str(self.dtype).removeprefix("torch.")
        kind = type(self.covariance).__name__
        return f"Gaussian({batch}event {tuple(self.event_shape)}, {kind}, {dtype} on {self.device})"

    @property
    def event_shape(self) -> torch.Size:
        """Shape of one input."""
        return self.mean.shape[self.mean.dim() - self.event_ndim :]

    @property
    def batch_shape(self) -> torch.Size:
        own = self.mean.shape[: self.mean.dim() - self.event_ndim]
        return torch.broadcast_shapes(own, self.covariance.batch_shape)

    @property
    def size(self) -> int:
        """n, the number of coordinates of one input."""
        return self.event_shape.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.mean.dtype

    @property
    def device(self) -> torch.device:
        return self.mean.device

    @property
    def flat_mean(self) -> Tensor:
        """The mean as (..., n)."""
        return self.mean.reshape(*self.mean.shape[: self.mean.dim() - self.event_ndim], self.size)

    @property
    def variance(self) -> Tensor:
        """The variance of every coordinate, of the mean's event shape."""
        flat = self.covariance.variances()
        return flat.reshape(*flat.shape[:-1], *self.event_shape)

    def to(self, *args: Any, **kwargs: Any) -> Gaussian:
        """Convert to another dtype or device, as `Tensor.to` does."""
        mean = require_float_tensor("Gaussian.to", "mean", self.mean.to(*args, **kwargs))
        moved = Gaussian._trusted(mean, self.covariance.to(*args, **kwargs), self.event_ndim)
        require_finite("Gaussian.to", "mean", mean)
        require_finite("Gaussian.to", "variance", moved.covariance.variances())
        return moved

    def flattened(self) -> Gaussian:
        """The same with one batch dimension, (N, ...), one input being a batch of 1."""
        batch = self.batch_shape
        mean = self.mean.expand(*batch, *self.event_shape).reshape(-1, *self.event_shape)
        return Gaussian._trusted(mean, self.covariance.flattened(batch), self.event_ndim)

    def entries(self, index: Tensor | slice) -> Gaussian:
        """Chosen entries of a Gaussian with one batch dimension."""
        if len(self.batch_shape) != 1:
            raise ValueError(f"Gaussian.entries: one batch dimension is needed, got {tuple(self.batch_shape)}")
        flat = self.flattened()
        return Gaussian._trusted(flat.mean[index], flat.covariance.entries(index), self.event_ndim)

    @torch.no_grad()
    def sample(self, count: int, *, generator: Generator | None = None) -> Tensor:
        """`count` independent samples, (count, *batch_shape, *event_shape). They carry no gradient."""
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"Gaussian.sample: count must be a positive integer, got {count!r}")
        deviation = self.covariance.draw((count, *self.batch_shape), generator)
        return (self.flat_mean + deviation).reshape(count, *self.batch_shape, *self.event_shape)

    def affine(self, matrix: Tensor, offset: Tensor | None = None) -> Gaussian:
        """The distribution of A x + c for A (..., p, n) and c (..., p), over vectors of length p.

        σ²I never becomes n×n, and where p exceeds the rank of the covariance the result is `LowRank`, not p×p (its
        factor then has derivative 0, not ∞, in a variance that is exactly 0).
        """
        matrix = require_matrix_for(self, "Gaussian.affine", "matrix", matrix)
        require_finite("Gaussian.affine", "matrix", matrix)
        mean = matvec(matrix, self.flat_mean)
        if offset is not None:
            _, offset = require_float_tensors("Gaussian.affine", matrix=matrix, offset=offset)
            require_finite("Gaussian.affine", "offset", offset)
            if offset.dim() < 1 or offset.shape[-1] != matrix.shape[-2]:
                raise ValueError(
                    f"Gaussian.affine: offset must have shape (..., {matrix.shape[-2]}), got {describe(offset)}"
                )
            require_broadcastable("Gaussian.affine", matrix=mean.shape[:-1], offset=offset.shape[:-1])
            mean = mean + offset
        return Gaussian._trusted(mean, self.covariance.pushed(matrix), event_ndim=1)


def require_matrix_for(noise: Gaussian, caller: str, name: str, matrix: Any) -> Tensor:
    """A matrix (..., p, n) that can act on this noise: its dtype, its device, its n columns."""
    matrix = require_float_tensor(caller, name, matrix)
    if matrix.dim() < 2 or matrix.shape[-1] != noise.size or matrix.shape[-2] == 0:
        event = f" (event shape {tuple(noise.event_shape)})" if noise.event_ndim != 1 else ""
        raise ValueError(
            f"{caller}: {name} must have shape (..., p, {noise.size}), a column for each of the noise's "
            f"{noise.size} coordinates{event} and p ≥ 1, got {describe(matrix)}"
        )
    if matrix.dtype != noise.dtype:
        raise TypeError(
            f"{caller}: {name} is {matrix.dtype} but the noise is {noise.dtype}; "
            f"convert one, e.g. noise.to({matrix.dtype})"
        )
    if matrix.device != noise.device:
        raise ValueError(
            f"{caller}: {name} is on {matrix.device} but the noise on {noise.device}; "
            f"move one, e.g. noise.to({str(matrix.device)!r})"
        )
    require_broadcastable(caller, **{name: matrix.shape[:-2], "noise": noise.batch_shape})
    return matrix


def event_dimensions(caller: str, name: str, value: Tensor, event_ndim: int | None) -> int:
    """How many trailing dimensions make one input: 1 of (n,), (N, n); 3 of (C, H, W), (N, C, H, W); else as told."""
    if event_ndim is None:
        if value.dim() in (1, 2):
            return 1
        if value.dim() in (3, 4):
            return 3
        raise ValueError(
            f"{caller}: {name} of {value.dim()} dimensions does not say which are one input (1 or 2 dimensions are "
            f"read as (..., n), 3 or 4 as (..., C, H, W)), got {describe(value)}; pass event_ndim="
        )
    if isinstance(event_ndim, bool) or not isinstance(event_ndim, int) or not 1 <= event_ndim <= value.dim():
        raise ValueError(
            f"{caller}: event_ndim must be between 1 and the {value.dim()} dimensions of {name}, got {event_ndim!r}"
        )
    return event_ndim
