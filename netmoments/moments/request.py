"""What a caller asks for, checked once: a model of the network, the noise as one Gaussian, and which outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from netmoments.checks import describe
from netmoments.covariances import Blocks
from netmoments.gaussian import Gaussian
from netmoments.linearize.two_stage import output_indices
from netmoments.memory import memory_limit
from netmoments.moments.result import MomentErrors, OutputMoments
from netmoments.network.interface import Arguments, NoisyArgument
from netmoments.network.model import NetworkModel
from netmoments.network.validate import other_dtypes, require_plain_weights
from netmoments.precision import full_precision

CALLER = "output_moments"
MANY_OUTPUTS = 100
"""Beyond so many outputs there are no covariances unless they are asked for."""

WhichOutputs = int | Sequence[int] | Tensor | None
"""Which scores: indices, (k,) or (N, k); a number k for the k largest at each mean; None for all."""


@dataclass(frozen=True, eq=False)
class Request:
    """What a caller wants to know, checked: the moments of chosen scores of a network, for every entry of the noise."""

    model: NetworkModel
    noise: Gaussian
    """As it was given, with any batch dimensions."""
    flat: Gaussian
    """The same with one batch dimension, N entries."""
    outputs: WhichOutputs
    wants_gradient: bool
    """Whether the noise requires a gradient, and gradients are on."""
    covariance: bool | None = None
    """Whether covariances are wanted; None for those of up to MANY_OUTPUTS outputs."""

    @classmethod
    def read(
        cls,
        network: Any,
        noise: Any,
        outputs: WhichOutputs,
        memory_budget: int | None,
        caller: str,
        *,
        key: str | int | None = None,
        covariance: bool | None = None,
    ) -> Request:
        """Every argument checked once; the network looked at, or known from before."""
        arguments = None
        if not isinstance(noise, Gaussian):
            noise, arguments = joint_noise(noise, caller)
        flat = noise.flattened()
        wanted = flat.mean.requires_grad or flat.covariance.variances().requires_grad
        wanted = wanted and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        try:
            model = NetworkModel.of_any(network, flat.mean, caller, arguments=arguments, key=key)
        except Exception as refusal:
            model, noise = _read_otherwise(refusal, network, noise, arguments, key, caller)
            flat = noise.flattened()
        if memory_budget is not None:
            memory_limit(flat.device, memory_budget)
        model.memory_budget = memory_budget
        return cls(model, noise, flat, outputs, wanted, covariance)

    def products(self, count: int) -> bool:
        """Whether all covariances of so many outputs are wanted."""
        return count <= MANY_OUTPUTS if self.covariance is None else self.covariance

    def shaped(self, flat: OutputMoments, seconds: float) -> OutputMoments:
        """A method's answer with the dimensions of the noise, and all outputs in the network's own shape."""
        batch = self.noise.batch_shape
        every = self.outputs is None and flat.mean.shape[-1] == self.model.outputs
        parts = self.model.parts if every else ()
        output = parts[0].shape if len(parts) == 1 else flat.mean.shape[1:]

        shape = (*batch, *output)
        changed: dict[str, Any] = {"mean": flat.mean.reshape(shape), "variance": flat.variance.reshape(shape)}
        wanted = self.products(flat.mean.shape[-1])
        for name in ("covariance", "outputs", "distance", "reached", "wins"):
            value = getattr(flat, name) if name != "covariance" or wanted else None
            if value is None:
                changed[name] = None
            else:
                changed[name] = value.reshape((*batch, *value.shape[1:]))
        if flat.error is not None:
            matrix = flat.error.covariance
            matrix = None if matrix is None or not wanted else matrix.reshape((*batch, *matrix.shape[1:]))
            mean, variance = flat.error.mean.reshape(shape), flat.error.variance.reshape(shape)
            changed["error"] = MomentErrors(mean, variance, matrix)
        if every:
            changed["outputs"] = None
        return dataclasses.replace(
            flat, **changed, seconds=seconds, output_ndim=len(output), parts=parts if len(parts) > 1 else ()
        )

    @torch.inference_mode(False)  # where tensors are made that derivatives cannot use
    def indices(self) -> Tensor:
        """Indices (N, k) of the wanted scores; of all where none were named."""
        mean, outputs = self.flat.mean, self.outputs
        if outputs is None:
            return torch.arange(self.model.outputs, device=mean.device).expand(len(mean), -1)
        if not isinstance(outputs, int):
            chosen = output_indices(outputs, len(mean), self.model.outputs, self.model.caller)
            return chosen.to(mean.device, copy=True)
        require_number_of_outputs(self.model.caller, outputs, self.model.outputs)
        with torch.no_grad(), full_precision():
            return torch.cat([self.model.network(part.clone()).topk(outputs, 1).indices for part in mean.split(64)])

    @contextmanager
    def following_gradients(self) -> Iterator[Gaussian]:
        """The flat noise as autograd may use it; inside, gradients are on exactly if the noise requires one."""
        flat, on = self.flat, self.wants_gradient
        with torch.inference_mode(False), torch.set_grad_enabled(on):
            if flat.mean.is_inference():
                covariance = flat.covariance.to(flat.device, copy=True)
                flat = Gaussian._trusted(flat.mean.clone(), covariance, flat.event_ndim)
            yield flat


def _read_otherwise(
    refusal: Exception, network: Any, noise: Gaussian, arguments: Arguments | None, key: str | int | None, caller: str
) -> tuple[NetworkModel, Gaussian]:
    """Another reading of the noise that the network can take, with the model for it; else the first one's refusal, or
    what is wrong with the weights, which says more.
    """
    if isinstance(network, nn.Module):
        try:
            require_plain_weights(network, caller)
        except TypeError as error:
            raise error from None
    if not isinstance(refusal, ValueError):
        raise refusal
    tries: list[tuple[Gaussian, Arguments | None]]
    if arguments is None:
        tries = [(other, None) for other in noise.readings()]
    else:
        tries = [(noise, dataclasses.replace(arguments, repeated=False))]
    for reading, called in tries:
        try:
            inputs = reading.flattened().mean
            return NetworkModel.of_any(network, inputs, caller, arguments=called, key=key), reading
        except ValueError:
            continue
    hint = other_dtypes(network, noise.mean) if isinstance(network, nn.Module) else ""
    if hint and hint not in str(refusal):
        raise ValueError(f"{refusal}{hint}") from refusal
    if arguments is not None or not tries or "cannot take an input" not in str(refusal):
        raise refusal
    raise ValueError(
        f"{refusal}; the mean of shape {tuple(noise.mean.shape)} was read as a batch {tuple(noise.batch_shape)} of "
        f"inputs {tuple(noise.event_shape)}, and otherwise: say which with Gaussian(..., event_ndim=)"
    ) from refusal


def require_number_of_outputs(caller: str, outputs: int, count: int) -> None:
    if isinstance(outputs, bool) or not 1 <= outputs <= count:
        raise ValueError(
            f"{caller}: outputs must be from 1 to the network's {count} scores, or a list of indices, got {outputs}"
        )


def joint_noise(given: Any, caller: str) -> tuple[Gaussian, Arguments]:
    """A tuple or dictionary of Gaussians and constants as one Gaussian of rows, and the call it is for.

    The Gaussians are independent; their batches must be the same, or absent.
    """
    if isinstance(given, Mapping):
        named = {str(name): value for name, value in given.items()}
    elif isinstance(given, tuple | list):
        named = {str(place): value for place, value in enumerate(given)}
    else:
        raise TypeError(
            f"{caller}: noise must be a netmoments.Gaussian, or a tuple or dictionary of the network's arguments with "
            f"Gaussians among them, got {describe(given)}"
        )
    noisy = {name: value for name, value in named.items() if isinstance(value, Gaussian)}
    if not noisy:
        raise ValueError(f"{caller}: none of the network's arguments is a netmoments.Gaussian, got {', '.join(named)}")
    first = next(iter(noisy.values()))
    for name, value in noisy.items():
        if (value.dtype, value.device) != (first.dtype, first.device):
            raise TypeError(
                f"{caller}: all noisy arguments must have one dtype and device, got {first.dtype} on {first.device} "
                f"and {value.dtype} on {value.device} ({name}); convert one with .to()"
            )
    try:
        batch = torch.broadcast_shapes(*(value.batch_shape for value in noisy.values()))
    except RuntimeError:
        shapes = ", ".join(f"{name} {tuple(value.batch_shape)}" for name, value in noisy.items())
        raise ValueError(f"{caller}: the noisy arguments must have the same batch shape, got {shapes}") from None
    means, structure, start = [], dict(named), 0
    for name, value in noisy.items():
        means.append(value.flat_mean.expand(*batch, value.size))
        structure[name] = NoisyArgument(start, value.event_shape)
        start += value.size
    noise = Gaussian._trusted(torch.cat(means, -1), Blocks(tuple(value.covariance for value in noisy.values())), 1)
    return noise, Arguments(structure if isinstance(given, Mapping) else tuple(structure.values()))
