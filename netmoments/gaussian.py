"""The `Gaussian`, a distribution of inputs: how its arguments are read, and what their values must be.

`read_covariance` and `read_std` turn the arguments of `Gaussian` into a structure of `covariances`, and
`require_covariance_values` checks its values.
"""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from numbers import Real
from typing import Any

import torch
from torch import Generator, Tensor

from netmoments.checks import (
    describe,
    require_broadcastable,
    require_count,
    require_finite,
    require_float_tensor,
    require_float_tensors,
    values_hold,
)
from netmoments.covariances import Blocks, Covariance, Dense, Diagonal, Isotropic, LowRank
from netmoments.precision import matvec

CALLER = "Gaussian"
"""The name in error messages."""


class Gaussian:
    """N(mean, covariance) over vectors or images, with leading batch dimensions.

    Args:
        mean: (..., n) or (..., C, H, W), float32 or float64. A mean of 1 or 2 dimensions is a vector or a batch of
            vectors, one of 3 or 4 an image or a batch of images, one of more a batch of inputs. Where a network takes
            another part of the dimensions as one input, its first run says so; `event_ndim` settles it.
        covariance: a number (the *variance* of every coordinate), a tensor of the mean's event shape (variances),
            a dense (..., n, n) matrix, `LowRank(factor, diagonal)`, or any `Covariance`, yours too. Batch dimensions
            are the mean's or absent; one variance an image has shape (batch..., 1, ..., 1).
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
    event_given: bool
    """Whether the caller said which dimensions are one input; if not, the network's first run may say otherwise."""
    event_shape: torch.Size
    """Shape of one input."""
    batch_shape: torch.Size
    size: int
    """n, the number of coordinates of one input."""
    dtype: torch.dtype
    device: torch.device

    def __init__(
        self,
        mean: Tensor,
        covariance: Tensor | float | Covariance | None = None,
        *,
        std: Tensor | float | None = None,
        event_ndim: int | None = None,
    ) -> None:
        mean, event_given = require_float_tensor("Gaussian", "mean", mean), event_ndim is not None
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
        vars(self).update(vars(Gaussian._trusted(mean, structure, event_ndim)), event_given=event_given)

    @classmethod
    def _trusted(cls, mean: Tensor, covariance: Covariance, event_ndim: int) -> Gaussian:
        """A Gaussian of parts that are valid by construction, whose values are not looked at again."""
        gaussian, batch_ndim = cls.__new__(cls), mean.dim() - event_ndim
        event = mean.shape[batch_ndim:]
        vars(gaussian).update(
            mean=mean,
            covariance=covariance,
            event_ndim=event_ndim,
            event_given=True,
            event_shape=event,
            batch_shape=torch.broadcast_shapes(mean.shape[:batch_ndim], covariance.batch_shape),
            size=event.numel(),
            dtype=mean.dtype,
            device=mean.device,
        )
        return gaussian

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Gaussian is immutable; build a new one instead of setting {name!r}")

    def __repr__(self) -> str:
        batch = f"batch {tuple(self.batch_shape)}, " if self.batch_shape else ""
        dtype = str(self.dtype).removeprefix("torch.")
        kind = type(self.covariance).__name__
        return f"Gaussian({batch}event {tuple(self.event_shape)}, {kind}, {dtype} on {self.device})"

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
        variances = moved.covariance.variances()
        require_finite("Gaussian.to", "mean", mean)
        require_finite("Gaussian.to", "variance", variances)
        if variances.dtype != self.dtype:
            _require_no_underflow("Gaussian.to", (self.covariance.variances() > 0).to(variances.device), variances)
        return moved

    def flattened(self) -> Gaussian:
        """The same Gaussian with one batch dimension, (N, ...); a single input becomes a batch of 1."""
        batch = self.batch_shape
        mean = self.mean.expand(*batch, *self.event_shape).reshape(-1, *self.event_shape)
        covariance = self.covariance.flattened(batch) if batch else self.covariance
        return Gaussian._trusted(mean, covariance, self.event_ndim)

    def entries(self, index: Tensor | slice) -> Gaussian:
        """Chosen entries of a Gaussian with one batch dimension."""
        if len(self.batch_shape) != 1:
            raise ValueError(f"Gaussian.entries: one batch dimension is needed, got {tuple(self.batch_shape)}")
        flat = self.flattened()
        return Gaussian._trusted(flat.mean[index], flat.covariance.entries(index), self.event_ndim)

    @torch.no_grad()
    def sample(self, count: int, *, generator: Generator | None = None) -> Tensor:
        """`count` independent samples, (count, *batch_shape, *event_shape). They carry no gradient."""
        require_count("Gaussian.sample", "count", count, least=1)
        deviation = self.covariance.draw((count, *self.batch_shape), generator)
        return (self.flat_mean + deviation).reshape(count, *self.batch_shape, *self.event_shape)

    def readings(self) -> list[Gaussian]:
        """The same numbers with other dimensions as one input, if the caller did not say which they are.

        Only noise without batch dimensions of its own can be read in another way: one variance for all coordinates, or
        one for each.
        """
        readings: list[Gaussian] = []
        structure = self.covariance
        if self.event_given or not isinstance(structure, Isotropic | Diagonal):
            return readings
        for event_ndim in range(self.mean.dim(), 0, -1):
            batch, event = _split(self.mean, event_ndim)
            other: Covariance
            if isinstance(structure, Isotropic) and not structure.batch_shape:
                other = Isotropic(structure.variance, event.numel())
            elif isinstance(structure, Diagonal) and structure.variance.numel() == self.mean.numel():
                other = Diagonal(structure.variance.reshape(*batch, event.numel()))
            else:
                continue
            if event_ndim != self.event_ndim:
                readings.append(Gaussian._trusted(self.mean, other, event_ndim))
        return readings

    def affine(self, matrix: Tensor, offset: Tensor | None = None) -> Gaussian:
        """The distribution of A x + c for A (..., p, n) and c (..., p), over vectors of length p.

        σ²I never becomes n×n. Where p exceeds the rank of an isotropic, diagonal or low-rank covariance the result is
        `LowRank`, not p×p (its factor then has derivative 0, not ∞, in a variance that is exactly 0).
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


def event_dimensions(caller: str, name: str, value: Tensor, event_ndim: int | None) -> int:
    """How many trailing dimensions make one input: `event_ndim` if given, else by the number of dimensions.

    That is 1 for (n,) and (N, n), 3 for (C, H, W) and (N, C, H, W); more dimensions are a batch of inputs.
    """
    if event_ndim is None:
        if value.dim() in (1, 2):
            return 1
        if value.dim() in (3, 4):
            return 3
        if value.dim() > 4:
            return value.dim() - 1
        raise ValueError(f"{caller}: {name} must have at least one dimension, got {describe(value)}")
    if isinstance(event_ndim, bool) or not isinstance(event_ndim, int) or not 1 <= event_ndim <= value.dim():
        raise ValueError(
            f"{caller}: event_ndim must be between 1 and the {value.dim()} dimensions of {name}, got {event_ndim!r}"
        )
    return event_ndim


def read_covariance(value: Any, mean: Tensor, event_ndim: int) -> Covariance:
    """The structure that `covariance=value` means for this mean; an error if it could mean two."""
    batch, event = _split(mean, event_ndim)
    size = event.numel()
    if isinstance(value, Covariance):
        return _read_structure(value, mean, batch, event)
    if _is_number(value):
        return Isotropic(_number("covariance", value, mean), size)
    _, value = require_float_tensors(CALLER, mean=mean, covariance=value)
    readings: dict[str, Covariance] = {}
    if value.shape == (*batch, *(1,) * event_ndim):
        readings["one variance for each batch entry"] = Isotropic(value.reshape(batch), size)
    elif value.shape in (event, batch + event):
        readings["variances"] = Diagonal(value.reshape(*value.shape[: value.dim() - event_ndim], size))
    if value.shape in ((size, size), (*batch, size, size)):
        readings["a dense matrix"] = Dense(value)
    if len(readings) == 1 or (readings and size == 1):
        return next(iter(readings.values()))
    if readings:
        raise ValueError(
            f"{CALLER}: covariance of shape {tuple(value.shape)} can be read as {' or as '.join(readings)} for a mean "
            f"of shape {tuple(mean.shape)}; say which with nm.Diagonal(...) or nm.Dense(...)"
        )
    raise ValueError(
        f"{CALLER}: covariance must be a number, variances of shape {_either(event, batch)}, or a dense matrix of "
        f"shape {_either(torch.Size((size, size)), batch)} for a mean of shape {tuple(mean.shape)}, "
        f"got {describe(value)}"
    )


def read_std(value: Any, mean: Tensor, event_ndim: int) -> Covariance:
    """The structure that `std=value` means for this mean: a number, or standard deviations of the event's shape."""
    batch, event = _split(mean, event_ndim)
    if isinstance(value, Covariance):
        raise TypeError(f"{CALLER}: std must be a number or a tensor, got {describe(value)}; pass it as covariance=")
    if _is_number(value):
        return Isotropic(_square("std", _number("std", value, mean)), event.numel())
    _, value = require_float_tensors(CALLER, mean=mean, std=value)
    if value.shape == (*batch, *(1,) * event_ndim):
        return Isotropic(_square("std", value.reshape(batch)), event.numel())
    if value.shape in (event, batch + event):
        flat = value.reshape(*value.shape[: value.dim() - event_ndim], event.numel())
        return Diagonal(_square("std", flat))
    raise ValueError(
        f"{CALLER}: std must be a number or standard deviations of shape {_either(event, batch)} for a mean of shape "
        f"{tuple(mean.shape)}, got {describe(value)}; a dense matrix is a covariance="
    )


def _read_structure(value: Covariance, mean: Tensor, batch: torch.Size, event: torch.Size) -> Covariance:
    """A structure that was passed itself: checked to fit the mean's dtype, device and shape, with a flat diagonal."""
    size = event.numel()
    if isinstance(value, Diagonal):
        _, variance = require_float_tensors(CALLER, mean=mean, variance=value.variance)
        value = Diagonal(_flat_event("Diagonal variance", variance, batch, event))
    elif isinstance(value, LowRank):
        value = _read_low_rank(value, mean, batch, event)
    elif isinstance(value, Isotropic):
        require_float_tensors(CALLER, mean=mean, variance=value.variance)
    elif isinstance(value, Dense):
        require_float_tensors(CALLER, mean=mean, covariance=value.matrix)
        if value.matrix.dim() < 2 or value.matrix.shape[-2] != value.matrix.shape[-1]:
            raise ValueError(f"{CALLER}: Dense needs a square matrix (..., n, n), got {describe(value.matrix)}")
    else:
        _require_declared_tensors(value)
        named = {f"{type(value).__name__}'s tensor {place}": x for place, x in enumerate(value.tensors())}
        require_float_tensors(CALLER, mean=mean, variances=value.variances(), **named)
    if value.size != size:
        raise ValueError(
            f"{CALLER}: the covariance has {value.size} coordinates but a mean of shape {tuple(mean.shape)} has {size}"
        )
    if value.batch_shape not in (torch.Size(), batch):
        raise ValueError(
            f"{CALLER}: the covariance's batch shape must be {tuple(batch)} or (), got {tuple(value.batch_shape)}"
        )
    return value


def _require_declared_tensors(value: Covariance) -> None:
    """Refuse a structure of the user's that is no dataclass, or has tensors that would not be moved and divided."""
    kind = type(value).__name__
    if not is_dataclass(value):
        raise TypeError(f"{CALLER}: {kind} must be a frozen dataclass, because changed copies are made of it")
    tensors = [field.name for field in fields(value) if isinstance(getattr(value, field.name), Tensor)]
    undeclared = [name for name in tensors if name not in value.kept_dimensions]
    if undeclared:
        raise TypeError(
            f"{CALLER}: {kind}.kept_dimensions must name every tensor of the structure and how many of its trailing "
            f"dimensions belong to one entry; {', '.join(undeclared)} is missing"
        )


def _read_low_rank(value: LowRank, mean: Tensor, batch: torch.Size, event: torch.Size) -> LowRank:
    """`_read_structure` for `LowRank`."""
    _, factor = require_float_tensors(CALLER, mean=mean, factor=value.factor)
    if factor.dim() < 2 or factor.shape[-2] != event.numel() or factor.shape[-1] == 0:
        raise ValueError(
            f"{CALLER}: LowRank factor must have shape (..., {event.numel()}, r) with r ≥ 1, got {describe(factor)}"
        )
    if not isinstance(value.diagonal, Tensor) and _is_number(value.diagonal):
        return LowRank(factor, _finite("LowRank diagonal", value.diagonal))
    if isinstance(value.diagonal, Tensor) and value.diagonal.dim() == 0:
        value = LowRank(factor, value.diagonal.expand(event.numel()))
    _, diagonal = require_float_tensors(CALLER, mean=mean, diagonal=value.diagonal)
    return LowRank(factor, _flat_event("LowRank diagonal", diagonal, batch, event))


def _flat_event(name: str, value: Tensor, batch: torch.Size, event: torch.Size) -> Tensor:
    """(batch..., event...) or (batch..., n) as (batch..., n)."""
    size = event.numel()
    for lead in (torch.Size(), batch):
        if value.shape in (lead + event, torch.Size((*lead, size))):
            return value.reshape(*lead, size)
    raise ValueError(f"{CALLER}: {name} must have shape {_either(event, batch)}, got {describe(value)}")


def _split(mean: Tensor, event_ndim: int) -> tuple[torch.Size, torch.Size]:
    """The batch shape and the event shape."""
    batch_ndim = mean.dim() - event_ndim
    return mean.shape[:batch_ndim], mean.shape[batch_ndim:]


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, Real) and not isinstance(value, bool)


def _number(name: str, value: Any, mean: Tensor) -> Tensor:
    """A number as a tensor of the mean's dtype, in which it must not become 0 or infinite."""
    if isinstance(value, Tensor):
        return require_float_tensors(CALLER, mean=mean, **{name: value})[1]
    exact = _finite(name, value)
    number = torch.tensor(exact, dtype=mean.dtype, device=mean.device)
    if math.isfinite(exact) and (math.isinf(float(number)) or (exact != 0 and float(number) == 0)):
        dtype = str(mean.dtype).removeprefix("torch.")
        raise ValueError(f"{CALLER}: {name} is too small or too large for {dtype}, got {exact:g}; use float64")
    return number


def _finite(name: str, value: Any) -> float:
    """A number as a float; one that is too large for that is refused."""
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{CALLER}: {name} must be a finite number, got {describe(value)}") from None


def _square(name: str, std: Tensor) -> Tensor:
    """Variances from standard deviations, which must not underflow or overflow."""
    require_non_negative(name, std)
    square = std * std
    if not values_hold(torch.isfinite(square) & ((square > 0) | (std == 0))):
        raise ValueError(
            f"{CALLER}: {name} is too small or too large for its square in {str(std.dtype).removeprefix('torch.')}, "
            f"got values from {float(std.min()):g} to {float(std.max()):g}"
            f"{'' if std.dtype == torch.float64 else '; use float64'}"
        )
    return square


def _either(event: torch.Size, batch: torch.Size) -> str:
    """The allowed shapes, with and without batch, in words."""
    return f"{tuple(event)} or {tuple(batch + event)}" if batch else f"{tuple(event)}"


def require_covariance_values(covariance: Covariance) -> None:
    """Refuse a structure whose values make it no covariance."""
    match covariance:
        case Isotropic(variance=variance) | Diagonal(variance=variance):
            require_non_negative("variance", variance)
        case LowRank(factor=factor, diagonal=diagonal):
            require_finite(CALLER, "LowRank factor", factor)
            require_non_negative("LowRank diagonal", torch.as_tensor(diagonal, dtype=factor.dtype))
            variances = covariance.variances()
            require_finite(CALLER, "variance", variances)
            _require_no_underflow(
                CALLER, (factor != 0).any(-1) | torch.as_tensor(diagonal != 0, device=factor.device), variances
            )
        case Dense(matrix=matrix):
            require_finite(CALLER, "covariance", matrix)
            require_symmetric(matrix)
            require_positive_semidefinite(matrix)
        case Blocks(parts=parts):
            for part in parts:
                require_covariance_values(part)
        case _:
            require_non_negative("variance", covariance.variances())


def require_non_negative(name: str, value: Tensor) -> None:
    """Refuse values that are not finite or are negative."""
    require_finite(CALLER, name, value)
    if not values_hold(value >= 0):
        raise ValueError(f"{CALLER}: {name} must be ≥ 0 everywhere, got a smallest value of {float(value.min()):g}")


def _require_no_underflow(caller: str, noisy: Tensor, variances: Tensor) -> None:
    """Refuse variances (..., n) that have all underflowed to 0 where noise was meant, as `noisy` (..., n) says."""
    if not values_hold(~noisy.any(-1) | (variances > 0).any(-1)):
        dtype = str(variances.dtype).removeprefix("torch.")
        raise ValueError(
            f"{caller}: all variances are too small for {dtype} and would be 0, no noise at all; use float64 (its "
            f"smallest is 5e-324), or other units for the inputs"
        )


def require_symmetric(matrix: Tensor) -> None:
    """Refuse |Σᵢⱼ − Σⱼᵢ| > `tolerance`·max|Σ|, which is more than the rounding of A Σ Aᵀ."""
    largest = matrix.detach().abs().amax((-2, -1))
    asymmetry = (matrix.detach() - matrix.detach().mT).abs().amax((-2, -1))
    if not values_hold(asymmetry <= tolerance(matrix) * largest):
        raise ValueError(
            f"{CALLER}: covariance must be symmetric, got |Σ − Σᵀ| up to {float(asymmetry.max()):.3g} where the "
            f"largest entry is {float(largest.max()):.3g}; pass (S + S.mT) / 2 if the difference is noise"
        )


def require_positive_semidefinite(matrix: Tensor) -> None:
    """Refuse λ_min < −`tolerance`·λ_max.

    A Cholesky factorization of Σ + `tolerance`·max Σᵢᵢ I shows that most matrices are good; else eigenvalues decide.
    """
    values = matrix.detach()
    bound = tolerance(matrix)
    variances = values.diagonal(dim1=-2, dim2=-1)
    if not values_hold(variances >= 0):
        raise ValueError(
            f"{CALLER}: covariance must have variances ≥ 0 on its diagonal, got {float(variances.min()):g}"
        )
    shift = bound * variances.amax(-1)
    shifted = values + torch.diag_embed(shift.unsqueeze(-1).expand(variances.shape))
    _, failed = torch.linalg.cholesky_ex(shifted)
    if values_hold(failed == 0):
        return
    eigenvalues = torch.linalg.eigvalsh(values)
    smallest, largest = eigenvalues[..., 0], eigenvalues[..., -1]
    if not values_hold(smallest >= -bound * largest):
        worst = int((smallest / largest.clamp(min=torch.finfo(matrix.dtype).tiny)).argmin())
        raise ValueError(
            f"{CALLER}: covariance must be positive semidefinite, got a smallest eigenvalue of "
            f"{float(smallest.flatten()[worst]):.3g} (largest {float(largest.flatten()[worst]):.3g}, "
            f"tolerance {bound:.1g} of it)"
        )


def tolerance(matrix: Tensor) -> float:
    """max(n, 100)·eps, relative to its size: how far rounding may take an n×n matrix from being a covariance."""
    return max(matrix.shape[-1], 100) * torch.finfo(matrix.dtype).eps


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
