"""`output_moments`, the one way in: what is asked is read once, the network looked at once, and a method answers."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from netmoments.affine_relu_affine import AffineReluAffine
from netmoments.checks import describe, random_seed, require_count
from netmoments.gaussian import Gaussian
from netmoments.linearize.two_stage import output_indices
from netmoments.memory import memory_limit
from netmoments.moments.methods import Method, method_named
from netmoments.moments.request import CALLER, Request, WhichOutputs, require_number_of_outputs
from netmoments.moments.result import MomentErrors, OutputMoments
from netmoments.sampling.mirrored import mirrored_moments

CHECK, LEAST_CHECK = 256, 16
"""Runs of the network that say how far a formula is off: by default, and at least."""
CHECK_SEED = random_seed(0, "check", 0)
"""Of these runs: not one that a user would take for samples of their own."""


def output_moments(
    network: Any,
    noise: Gaussian | Mapping[str, Any] | Sequence[Any],
    method: Method | str = "auto",
    outputs: WhichOutputs = None,
    *,
    tolerance: float | None = None,
    samples: int | None = None,
    seconds: float | None = None,
    check: int | None = None,
    covariance: bool | None = None,
    key: str | int | None = None,
    memory_budget: int | None = None,
) -> OutputMoments:
    """Mean, variance and covariance of a network's outputs when its input is N(mean, covariance), with their errors.

    Args:
        network: any module in eval mode that runs, an exported program, a `NetworkModel`, or an `AffineReluAffine`,
            for which all is exact. It is run, and never changed by this library.
        noise: the input, with any batch dimensions; for a network of several arguments a tuple or a dictionary of them,
            with independent Gaussians among constants (tensors are repeated for each input where the network wants it).
        method: "auto" is exact where the network is (Affine, ReLU, Affine) of up to 2,048 units, else as many samples
            as the tolerance needs, with expected slopes as control, for any network. Others are values such as
            `Sketch(probes=128)`, or short names: "layerwise", the joint covariance carried through every layer, the
            tightest formula; "sketch", for networks of any size; "two-stage", as the paper does; "linear", the delta
            method; "sampling", Monte Carlo with as many samples as told.
        outputs: which outputs: a list of indices, or a number k for the k largest at each mean; by default all.
        tolerance, samples, seconds: for "auto": the error of means in standard deviations of the output, variances to
            √2 times that relative, averaged over the outputs (0.01: what ten thousand plain samples have); and limits,
            by default 1/tolerance² samples an input, what plain sampling would take. What was reached is in the result.
        check: about how many runs of the network a formula's answer is compared with, for its `error`; 256 by default,
            0 for none, else 16 at least. Where the noise requires a gradient there is no check unless it is asked for.
        covariance: whether to give all covariances; by default for up to 100 outputs.
        key: which output, for a network that returns several tensors in a tuple or dictionary; by default all, and
            `result[key]` is one of them.
        memory_budget: bytes that linearizations, covariances or samples may take at a time; by default half of what is
            free, for samples as many as is fastest. A sketch takes as many images at a time as fit, at least one:
            `probes` copies of the network's tensors.

    Where the noise requires a gradient, "auto" is the formula that fits, and the mean of the outputs has one by
    "layerwise" and "sketch" (the covariance too by "layerwise"), in it and in the network's weights.

    >>> from torch import nn
    >>> network = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)).eval()
    >>> output_moments(network, Gaussian(torch.zeros(2), std=0.1)).method
    'exact'
    """
    start = time.perf_counter()
    chosen = method_named(method, CALLER, tolerance=tolerance, samples=samples, seconds=seconds)
    if check is not None:
        require_count(CALLER, "check", check, least=0)
        if 0 < check < LEAST_CHECK:
            raise ValueError(f"{CALLER}: check must be 0 for none, or at least {LEAST_CHECK} runs, got {check}")
    if isinstance(network, AffineReluAffine):
        if memory_budget is not None:
            memory_limit(network.A.device, memory_budget)
        if key is not None:
            raise ValueError(f"{CALLER}: an AffineReluAffine has one output; leave out key, got {key!r}")
        found = _of_affine_relu_affine(network, noise, chosen, outputs)
        matrix = found.covariance if covariance is not False else None
        return dataclasses.replace(found, covariance=matrix, seconds=time.perf_counter() - start)
    request = Request.read(network, noise, outputs, memory_budget, CALLER, key=key, covariance=covariance)
    flat = request.model.answer(partial(chosen.moments, request))
    if not bool((flat.mean.detach().isfinite() & flat.variance.detach().isfinite()).all()):
        raise too_large_for(flat.mean.dtype)
    if flat.error is None and check != 0 and (check is not None or not request.wants_gradient):
        flat = checked(request, flat, CHECK if check is None else check)
    if flat.samples and flat.error is not None:
        rounding = torch.finfo(request.flat.mean.dtype).eps * flat.mean.detach().abs()
        flat = dataclasses.replace(flat, error=at_least_rounding(flat.error, flat.variance.detach(), rounding))
    return request.shaped(flat, seconds=time.perf_counter() - start)


def too_large_for(dtype: torch.dtype) -> ValueError:
    """The error for moments beyond the range of a dtype: where a variance is, no number of a formula is one."""
    name = str(dtype).removeprefix("torch.")
    return ValueError(
        f"{CALLER}: the moments are too large for {name}; take smaller units of the input"
        f"{'' if name == 'float64' else ', or network and noise in float64'}"
    )


def checked(request: Request, found: OutputMoments, runs: int) -> OutputMoments:
    """A formula's answer with its error: how far it is from a few samples, and how far these may be off themselves.

    With the difference b to samples whose standard error is s, √(b² + s²).
    """
    outputs = found.outputs if request.outputs is not None else None
    products = found.covariance is not None and request.products(found.mean.shape[-1])
    sampled, taken = mirrored_moments(request.model, request.flat, outputs, runs, products=products, seed=CHECK_SEED)

    def error(formula: Tensor, value: Tensor, squared: Tensor) -> Tensor:
        """Infinite where the samples' fourth powers are beyond float64, so that nothing is known of it."""
        off = (formula.detach().double() - value) ** 2 + squared
        return off.sqrt().nan_to_num(nan=torch.inf, posinf=torch.inf).to(formula.dtype)

    mean = error(found.mean, sampled.mean, sampled.mean_error_squared)
    variance = error(found.variance, sampled.variance, sampled.variance_error_squared)
    if not products or found.covariance is None:
        return dataclasses.replace(found, error=MomentErrors(mean, variance), samples=taken)
    covariance = error(found.covariance, sampled.second, sampled.second_error_squared)
    return dataclasses.replace(found, error=MomentErrors(mean, variance, covariance), samples=taken)


def at_least_rounding(errors: MomentErrors, variance: Tensor, rounding: Tensor) -> MomentErrors:
    """The errors of samples, but at least what is left open where every score is known to `rounding` only.

    It counts where noise is so small that it hardly moves the last digits of the scores, and where scores are so small
    that their variance is 0 in its dtype.
    """
    spread, dtype = variance.sqrt(), errors.variance.dtype
    smallest = (errors.mean > 0).to(dtype) * torch.finfo(dtype).smallest_normal
    least = torch.maximum((rounding * (2 * spread + rounding)).to(dtype), smallest)
    mean = torch.maximum(errors.mean, rounding.to(errors.mean.dtype))
    return MomentErrors(mean, torch.maximum(errors.variance, least), errors.covariance)


def _of_affine_relu_affine(
    network: AffineReluAffine, noise: Any, method: Method, outputs: WhichOutputs
) -> OutputMoments:
    """The same for a network that is linearized already, with the chosen scores only."""
    if not isinstance(noise, Gaussian):
        raise TypeError(f"{CALLER}: noise must be a netmoments.Gaussian, got {describe(noise)}")
    if outputs is None:
        return method.of_affine_relu_affine(network, noise)
    count = network.B.shape[-2]
    if isinstance(outputs, int):
        require_number_of_outputs(CALLER, outputs, count)
        with torch.no_grad():
            indices = network(noise.flat_mean).topk(outputs, -1).indices
    else:
        indices = output_indices(outputs, 1, count, CALLER).squeeze(0)
    result = method.of_affine_relu_affine(network.outputs(indices), noise)
    return dataclasses.replace(result, outputs=indices.to(noise.device).expand(result.mean.shape))
