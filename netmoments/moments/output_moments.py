"""`output_moments`: one call for any network, any noise, any method."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from netmoments.affine_relu_affine import AffineReluAffine
from netmoments.checks import describe
from netmoments.gaussian import Gaussian
from netmoments.linearize.two_stage import output_indices
from netmoments.moments.methods import (
    CALLER,
    Choice,
    Method,
    Request,
    Sampling,
    method_named,
    require_number_of_outputs,
)
from netmoments.moments.result import OutputMoments


def output_moments(
    network: Any,
    noise: Gaussian,
    method: Method | str = "auto",
    outputs: Choice = None,
    *,
    memory_budget: int | None = None,
) -> OutputMoments:
    """Mean, variance and covariance of a network's scores when its input is N(mean, covariance).

    Args:
        network: any module in eval mode, an exported program, a `NetworkModel`, or an `AffineReluAffine`, for which all
            is exact. It is never changed.
        noise: the input, with any batch dimensions.
        method: a value such as `Sketch(probes=128)`, or a short name for one with its default options: "layerwise", the
            joint covariance carried through every layer, the tightest; "sketch", for networks of any size; "two-stage",
            as the paper does; "linear", the delta method; "sampling", Monte Carlo with standard errors. "auto" is exact
            where the network is (Affine, ReLU, Affine), else "layerwise" where that fits the memory, else "sketch"; the
            result says which, and why.
        outputs: which scores: a list of indices, or a number k for the k largest at each mean; by default all (for a
            sketch of more than 100, the 5 largest).
        memory_budget: bytes that linearizations or covariances may take at a time, by default half of what is free. A
            sketch takes as many images at a time as fit, at least one: `probes` copies of the network's tensors.

    Where the noise requires a gradient, the mean of the scores has one by "layerwise" and "sketch" (the covariance too
    by "layerwise"), in it and in the network's weights.

    >>> from torch import nn
    >>> network = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)).eval()
    >>> output_moments(network, Gaussian(torch.zeros(2), std=0.1)).method
    'exact'
    """
    chosen = method_named(method, CALLER)
    if isinstance(network, AffineReluAffine):
        return _of_affine_relu_affine(network, noise, chosen, outputs)
    request = Request.read(network, noise, outputs, memory_budget, CALLER)
    _require_derivatives_possible(request, chosen)
    result = request.model.answer(lambda: chosen.moments(request))
    return _shaped(result, request)


def _require_derivatives_possible(request: Request, method: Method) -> None:
    if method.name != Sampling.name and any(
        parameter.is_inference() for parameter in request.model.network.parameters()
    ):
        raise ValueError(
            f"{CALLER}: the network was made under torch.inference_mode(), so that it has no derivatives; make it "
            f"outside, or use method='sampling'"
        )


def _shaped(result: OutputMoments, request: Request) -> OutputMoments:
    """A flat batch of moments with the batch dimensions of the noise; indices only where not all scores were taken."""
    batch = request.noise.batch_shape
    tensors: dict[str, Any] = {
        field.name: value.reshape((*batch, *value.shape[1:]))
        for field in dataclasses.fields(result)
        if isinstance(value := getattr(result, field.name), Tensor)
    }
    if request.outputs is None and result.mean.shape[-1] == request.model.outputs:
        tensors["outputs"] = None
    return dataclasses.replace(result, **tensors)


def _of_affine_relu_affine(network: AffineReluAffine, noise: Any, method: Method, outputs: Choice) -> OutputMoments:
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
