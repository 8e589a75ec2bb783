"""What a covariance argument means: number, diagonal, dense or structured. One reading or an error, never a guess."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor

from netmoments.checks import describe, require_float_tensors, values_hold
from netmoments.gaussian.covariance import Covariance, Dense, Diagonal, Isotropic, LowRank
from netmoments.gaussian.validation import require_non_negative

CALLER = "Gaussian"


def read_covariance(value: Any, mean: Tensor, event_ndim: int) -> Covariance:
    """The structure meant by `covariance=value` for this mean."""
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
    """The structure meant by `std=value`: a number or standard deviations of the event's shape."""
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
    """A structure given by hand: the same dtype, device and size as the mean, a diagonal flattened."""
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
    if value.size != size:
        raise ValueError(
            f"{CALLER}: the covariance has {value.size} coordinates but a mean of shape {tuple(mean.shape)} has {size}"
        )
    if value.batch_shape not in (torch.Size(), batch):
        raise ValueError(
            f"{CALLER}: the covariance's batch shape must be {tuple(batch)} or (), got {tuple(value.batch_shape)}"
        )
    return value


def _read_low_rank(value: LowRank, mean: Tensor, batch: torch.Size, event: torch.Size) -> LowRank:
    _, factor = require_float_tensors(CALLER, mean=mean, factor=value.factor)
    if factor.dim() < 2 or factor.shape[-2] != event.numel() or factor.shape[-1] == 0:
        raise ValueError(
            f"{CALLER}: LowRank factor must have shape (..., {event.numel()}, r) with r ≥ 1, got {describe(factor)}"
        )
    if not isinstance(value.diagonal, Tensor) and _is_number(value.diagonal):
        return LowRank(factor, float(value.diagonal))
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
    at = mean.dim() - event_ndim
    return mean.shape[:at], mean.shape[at:]


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, Real) and not isinstance(value, bool)


def _number(name: str, value: Any, mean: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return require_float_tensors(CALLER, mean=mean, **{name: value})[1]
    return torch.tensor(float(value), dtype=mean.dtype, device=mean.device)


def _square(name: str, std: Tensor) -> Tensor:
    require_non_negative(name, std)
    square = std * std
    if not values_hold(torch.isfinite(square) & ((square > 0) | (std == 0))):
        raise ValueError(
            f"{CALLER}: {name} is too small or too large for its square in {str(std.dtype).removeprefix('torch.')}, "
            f"got values from {float(std.min()):g} to {float(std.max()):g}; use float64"
        )
    return square


def _either(event: torch.Size, batch: torch.Size) -> str:
    return f"{tuple(event)} or {tuple(batch + event)}" if batch else f"{tuple(event)}"
