"""`output_moments`: one call for any network, any noise, any method."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from netmoments.affine_relu_affine import AffineReluAffine
from netmoments.checks import describe
from netmoments.gaussian import Gaussian
from netmoments.linearize.bank import LinearizationBank
from netmoments.linearize.two_stage import output_rows
from netmoments.moments.methods import (
    by_bank,
    by_linear,
    by_sampling,
    by_two_stage,
    of_affine_relu_affine,
    sampled_affine_relu_affine,
)
from netmoments.moments.result import OutputMoments
from netmoments.network.cut import find_relu
from netmoments.network.inspection import as_network, inspect, require_derivatives, warn_of_smooth
from netmoments.precision import full_precision

CALLER = "output_moments"
METHODS = ("two-stage", "linear", "sampling")
Choice = int | Sequence[int] | Tensor | None


def output_moments(
    network: Any,
    noise: Gaussian,
    method: str = "two-stage",
    outputs: Choice = None,
    *,
    layer: int | str | None = None,
    bank: LinearizationBank | None = None,
    samples: int = 10_000,
    seed: int = 0,
    memory_budget: int | None = None,
) -> OutputMoments:
    """Mean, variance and covariance of a network's scores when its input is N(mean, covariance).

    Args:
        network: any module in eval mode, an exported program, or an `AffineReluAffine`, for which all is exact.
        noise: the input, with any batch dimensions; what shares a mean by `mean.expand(...)` shares its
            linearization (several noise levels of one image, say).
        method: "two-stage", linearized before and after one ReLU at the noise's mean, with that ReLU exact; "linear",
            the delta method, linearized throughout; "sampling", Monte Carlo with standard errors.
        outputs: which scores: all by default, a list of indices, or a number k for the k largest at each mean.
        layer: for "two-stage", the ReLU that is kept, by place in the order of calls (the last by default) or by name;
            see `relus`.
        bank: for "two-stage", linearizations made beforehand; each input is answered from the nearest point.
        samples: for "sampling", how many.
        seed: for "sampling".
        memory_budget: bytes that linearizations may take at a time, by default half of what is free.

    >>> network = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)).eval()
    >>> output_moments(network, Gaussian(torch.zeros(2), std=0.1)).method
    'two-stage'
    """
    if not isinstance(noise, Gaussian):
        raise TypeError(f"{CALLER}: noise must be a netmoments.Gaussian, got {describe(noise)}")
    if method not in METHODS:
        raise ValueError(f"{CALLER}: method must be one of {', '.join(METHODS)}, got {method!r}")
    if bank is not None and method != "two-stage":
        raise ValueError(f'{CALLER}: a bank is for method="two-stage", got {method!r}')
    if bank is not None and layer is not None:
        raise ValueError(f"{CALLER}: a bank has its own ReLU; leave out layer, got {layer!r}")
    if bank is not None and not isinstance(bank, LinearizationBank):
        raise TypeError(f"{CALLER}: bank must be a netmoments.LinearizationBank, got {describe(bank)}")
    if isinstance(network, AffineReluAffine):
        chosen, rows = _with_outputs(network, noise, outputs)
        if method == "two-stage":
            result = of_affine_relu_affine(chosen, noise)
        elif method == "sampling":
            result = sampled_affine_relu_affine(chosen, noise, samples, seed)
        else:
            raise ValueError(f'{CALLER}: an AffineReluAffine is exact with method="two-stage"; or take "sampling"')
        return result if rows is None else dataclasses.replace(result, outputs=rows.expand(result.mean.shape))
    network = as_network(network, CALLER)
    flat = noise.flattened()
    found = inspect(network, flat.mean, CALLER)
    rows = _chosen(network, flat.mean, outputs, found.output.shape[1])
    if method == "sampling":
        result = by_sampling(network, flat, rows, samples, seed)
    elif bank is not None:
        _require_scores_of(bank, found.output.shape[1])
        result = by_bank(bank, flat, rows)
    else:
        relu = None if method == "linear" else find_relu(found.relus, -1 if layer is None else layer)
        require_derivatives(found, CALLER)
        warn_of_smooth(network, found, CALLER)
        if relu is None:
            result = by_linear(network, flat, rows, found, memory_budget)
        else:
            result = by_two_stage(network, flat, _origin(noise, rows), rows, relu, memory_budget)
    return _shaped(result, noise.batch_shape, every=outputs is None)


def _chosen(network: nn.Module, means: Tensor, outputs: Choice, count: int) -> Tensor:
    """Indices (N, k) of the wanted scores; for a number, of the largest at each mean, in order."""
    if not isinstance(outputs, int):
        return output_rows(outputs, len(means), count, CALLER).to(means.device)
    _require_number(outputs, count)
    with torch.no_grad(), full_precision():
        return torch.cat([network(part.clone()).topk(outputs, 1).indices for part in means.split(64)])


def _require_number(outputs: int, count: int) -> None:
    if isinstance(outputs, bool) or not 1 <= outputs <= count:
        raise ValueError(
            f"{CALLER}: outputs must be from 1 to the network's {count} scores, or a list of indices, got {outputs}"
        )


def _require_scores_of(bank: LinearizationBank, count: int) -> None:
    of_bank = bank.networks.B.shape[-2]
    if of_bank != count:
        raise ValueError(
            f"{CALLER}: the bank is of another network: its linearizations have {of_bank} scores, the network {count}"
        )


def _origin(noise: Gaussian, rows: Tensor) -> Tensor:
    """For every entry of the flattened noise a number, 0, 1, …: one for those of an expanded mean and equal scores."""
    mean = noise.mean
    batch = range(mean.dim() - noise.event_ndim)
    own = [1 if mean.stride(dim) == 0 else mean.shape[dim] for dim in batch]
    numbers = torch.arange(math.prod(own), device=noise.device).reshape(own)
    each = numbers.expand(noise.batch_shape).reshape(-1, 1)
    return torch.cat([each, rows], 1).unique(dim=0, return_inverse=True)[1]


def _with_outputs(
    network: AffineReluAffine, noise: Gaussian, outputs: Choice
) -> tuple[AffineReluAffine, Tensor | None]:
    """The network with the chosen outputs, and which they are; None for all."""
    if outputs is None:
        return network, None
    if isinstance(outputs, int):
        _require_number(outputs, network.B.shape[-2])
        with torch.no_grad():
            rows = network(noise.flat_mean).topk(outputs, -1).indices
    else:
        rows = output_rows(outputs, 1, network.B.shape[-2], CALLER).squeeze(0)
    return network.outputs(rows), rows.to(noise.device)


def _shaped(result: OutputMoments, batch: torch.Size, *, every: bool) -> OutputMoments:
    """A flat batch of moments with the batch dimensions of the noise; the choice of scores only if there was one."""
    tensors: dict[str, Any] = {
        field.name: value.reshape((*batch, *value.shape[1:]))
        for field in dataclasses.fields(result)
        if isinstance(value := getattr(result, field.name), Tensor)
    }
    if every:
        tensors["outputs"] = None
    return dataclasses.replace(result, **tensors)
