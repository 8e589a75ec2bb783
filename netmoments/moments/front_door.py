"""`output_moments`: one call for any network, any noise, any method."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from netmoments.affine_relu_affine import AffineReluAffine
from netmoments.checks import describe
from netmoments.gaussian import Gaussian
from netmoments.linearize.bank import LinearizationBank
from netmoments.linearize.memory import memory_limit
from netmoments.linearize.two_stage import output_rows
from netmoments.moments.asked import Asked
from netmoments.moments.methods import (
    by_bank,
    of_affine_relu_affine,
    sampled_affine_relu_affine,
)
from netmoments.moments.propagated import (
    LARGEST,
    MANY_SCORES,
    chosen_method,
    unchecked_plan_of,
)
from netmoments.moments.result import OutputMoments
from netmoments.network.cut import find_relu
from netmoments.network.inspection import as_network, inspect, require_derivatives, warn_of_smooth
from netmoments.precision import full_precision
from netmoments.propagate.known_plans import rechecked
from netmoments.propagate.opaque import opaque
from netmoments.propagate.plan import Plan
from netmoments.propagate.planner import NoRule
from netmoments.propagate.sketch import PROBES

CALLER = "output_moments"
METHODS = ("auto", "layerwise", "sketch", "two-stage", "linear", "sampling")
CONTROLS = ("two-stage", "linear", "sketch")
Choice = int | Sequence[int] | Tensor | None


def output_moments(
    network: Any,
    noise: Gaussian,
    method: str = "auto",
    outputs: Choice = None,
    *,
    layer: int | str | None = None,
    bank: LinearizationBank | None = None,
    probes: int = PROBES,
    samples: int = 10_000,
    control: str | None = None,
    seed: int = 0,
    memory_budget: int | None = None,
) -> OutputMoments:
    """Mean, variance and covariance of a network's scores when its input is N(mean, covariance).

    Args:
        network: any module in eval mode, an exported program, or an `AffineReluAffine`, for which all is exact.
        noise: the input, with any batch dimensions; for "two-stage", what shares a mean by `mean.expand(...)` shares
            its linearization (several noise levels of one image, say).
        method: "layerwise", the joint covariance carried through every layer, the tightest; "sketch", formulas with the
            spread of `probes` samples, for networks of any size; "two-stage", linearized before and after one ReLU at
            the noise's mean, with that ReLU exact, as the paper does; "linear", the delta method, linearized
            throughout; "sampling", Monte Carlo with standard errors. "auto" is exact where the network is (Affine,
            ReLU, Affine), else "layerwise" where that fits the memory, else "sketch" ("two-stage" where `layer` or
            `bank` is given); the result says which, and why.
        outputs: which scores: a list of indices, or a number k for the k largest at each mean; by default all (for a
            sketch of more than 100, the 5 largest).
        layer: for "two-stage", the ReLU that is kept, by place in the order of calls (the last by default) or by name;
            see `relus`.
        bank: for "two-stage", linearizations made beforehand; each input is answered from the nearest point.
        probes: for "sketch" (and sampling controlled by one), how many samples go along.
        samples: for "sampling", how many.
        control: for "sampling", the analytic surrogate to use as control variate: "two-stage", "linear" or "sketch";
            unbiased, with smaller standard errors.
        seed: for "sampling" and "sketch".
        memory_budget: bytes that linearizations or covariances may take at a time, by default half of what is free. A
            sketch takes as many images at a time as fit, at least one: `probes` copies of the network's tensors.

    Where the noise requires a gradient, the mean of the scores has one by "layerwise" and "sketch" (the
    covariance too by "layerwise"), in it and in the network's weights.

    >>> network = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)).eval()
    >>> output_moments(network, Gaussian(torch.zeros(2), std=0.1)).method
    'exact'
    """
    if not isinstance(noise, Gaussian):
        raise TypeError(f"{CALLER}: noise must be a netmoments.Gaussian, got {describe(noise)}")
    if method not in METHODS:
        raise ValueError(f"{CALLER}: method must be one of {', '.join(METHODS)}, got {method!r}")
    reason = None
    if method == "auto" and (bank is not None or layer is not None):
        method, reason = "two-stage", "a ReLU to keep, or a bank, was given"
    _check_bank(bank, method, layer)
    _check_control(control, method)
    if layer is not None and "two-stage" not in (method, control):
        raise ValueError(f'{CALLER}: layer= is for method="two-stage" (or control="two-stage"), got {method!r}')
    if isinstance(network, AffineReluAffine):
        return _of_affine_relu_affine(network, noise, method, outputs, samples, control, seed)
    network = as_network(network, CALLER)
    if method != "sampling" and any(parameter.is_inference() for parameter in network.parameters()):
        raise ValueError(
            f"{CALLER}: the network was made under torch.inference_mode(), so that it has no derivatives; make it "
            f"outside, or use method='sampling'"
        )
    flat = noise.flattened()
    found = inspect(network, flat.mean, CALLER)
    if {method, control} & {"two-stage", "linear"} and bank is None:
        if "two-stage" in (method, control):
            find_relu(found.relus, -1 if layer is None else layer)
        require_derivatives(found, CALLER)
        warn_of_smooth(network, found, CALLER)
    if memory_budget is not None:
        memory_limit(flat.device, memory_budget)
    asked = Asked(network, noise, flat, found, layer, probes, samples, control, seed, memory_budget)
    if method in ("auto", "layerwise", "sketch"):
        return rechecked(network, flat.mean[:1].detach(), partial(_propagated, asked, method, outputs))
    count = found.output.shape[1]
    rows = _chosen(network, flat.mean, outputs, count)
    if bank is not None:
        _require_scores_of(bank, count)
        result = by_bank(bank, flat, rows)
    elif method == "sampling":
        result = asked.sampled(rows)
    else:
        result = asked.linearized(method, rows)
    return dataclasses.replace(_shaped(result, noise.batch_shape, every=outputs is None), reason=reason)


def _propagated(asked: Asked, method: str, outputs: Choice) -> OutputMoments:
    """By propagation through the network's graph."""
    flat, network = asked.flat, asked.network
    wanted = flat.mean.requires_grad or flat.covariance.variances().requires_grad
    with_gradients = wanted and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(with_gradients):
        asked = dataclasses.replace(asked, flat=_outside_inference(flat))
        plan, method, reason = _planned(network, asked.flat, method, asked.memory_budget)
    count = asked.found.output.shape[1]
    if method == "sketch" and outputs is None and count > MANY_SCORES:
        outputs = LARGEST
    rows = _chosen(network, flat.mean, outputs, count)
    with torch.inference_mode(False), torch.set_grad_enabled(with_gradients):
        result = asked.propagated(plan, method, rows.clone())
    return dataclasses.replace(_shaped(result, asked.noise.batch_shape, every=outputs is None), reason=reason)


def _planned(
    network: nn.Module, noise: Gaussian, method: str, memory_budget: int | None
) -> tuple[Plan, str, str | None]:
    """The plan that a method goes by, and for "auto" which method that is, and why."""
    if method == "sketch":
        return unchecked_plan_of(network, noise.mean, CALLER, opaque), method, None
    try:
        plan = unchecked_plan_of(network, noise.mean, CALLER)
    except NoRule as error:
        if method != "auto":
            raise
        what = str(error).removeprefix(f"{CALLER}: ").split(" as it is called")[0]
        return unchecked_plan_of(network, noise.mean, CALLER, opaque), "sketch", f"there is {what}"
    return plan, *(chosen_method(plan, noise, memory_budget) if method == "auto" else (method, None))


def _outside_inference(noise: Gaussian) -> Gaussian:
    """The same with tensors that autograd may use, if they were made in inference mode."""
    if not noise.mean.is_inference():
        return noise
    covariance = noise.covariance.to(noise.device, copy=True)
    return Gaussian._trusted(noise.mean.clone(), covariance, noise.event_ndim)


def _of_affine_relu_affine(
    network: AffineReluAffine,
    noise: Gaussian,
    method: str,
    outputs: Choice,
    samples: int,
    control: str | None,
    seed: int,
) -> OutputMoments:
    chosen, rows = _with_outputs(network, noise, outputs)
    if method in ("auto", "two-stage"):
        result = of_affine_relu_affine(chosen, noise)
    elif method == "sampling" and control is None:
        result = sampled_affine_relu_affine(chosen, noise, samples, seed)
    else:
        raise ValueError(
            f'{CALLER}: an AffineReluAffine is exact with method="auto" or "two-stage"; or take plain "sampling"'
        )
    return result if rows is None else dataclasses.replace(result, outputs=rows.expand(result.mean.shape))


def _check_bank(bank: Any, method: str, layer: int | str | None) -> None:
    if bank is None:
        return
    if method != "two-stage":
        raise ValueError(f'{CALLER}: a bank is for method="two-stage", got {method!r}')
    if layer is not None:
        raise ValueError(f"{CALLER}: a bank has its own ReLU; leave out layer, got {layer!r}")
    if not isinstance(bank, LinearizationBank):
        raise TypeError(f"{CALLER}: bank must be a netmoments.LinearizationBank, got {describe(bank)}")


def _check_control(control: Any, method: str) -> None:
    if control is None:
        return
    if control not in CONTROLS:
        raise ValueError(f"{CALLER}: control must be one of {', '.join(CONTROLS)}, or None, got {control!r}")
    if method != "sampling":
        raise ValueError(f'{CALLER}: control= is for method="sampling", got {method!r}')


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
