"""Checks that a network is a deterministic, differentiable function of each image by itself, made by running it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from netmoments.checks import describe, require_finite, require_values, unlike_plain
from netmoments.files import first_line
from netmoments.network.exported import ExportedNetwork
from netmoments.network.relu_calls import Trace, trace, with_batch_known
from netmoments.network.replica import named_tensors, replica
from netmoments.precision import full_precision, random_state_kept, without_cudnn

COPIES = 8
"""How often an image is repeated in one batch, to catch a network that is random only now and then."""


def examined(network: nn.Module, image: Tensor, caller: str) -> Trace:
    """The trace of a network on one image (1, ...), or an error if it is no function of each image by itself.

    The network is run on the image twice and on copies of it (is it deterministic?), on another image, and on both
    together (does the batch matter?). All runs are those of a replica, and leave the random state as it was.
    """
    require_plain_weights(network, caller)
    with torch.inference_mode(False), full_precision(), random_state_kept(image.device):
        return _examined(replica(network), image.detach().clone(), caller)


def refuse_training(network: nn.Module, caller: str) -> None:
    """Raise an error that names what is in training mode, except in exported programs, which have no modes."""
    if isinstance(network, ExportedNetwork):
        return
    if network.training:
        raise ValueError(
            f"{caller}: the network is in training mode, where dropout and batch normalisation are random; call "
            f"network.eval() first"
        )
    exported = {id(x) for module in network.modules() if isinstance(module, ExportedNetwork) for x in module.modules()}
    training = [
        name
        for name, module in network.named_modules()
        if module.training and id(module) not in exported and not any(child.training for child in module.children())
    ]
    if training:
        raise ValueError(f"{caller}: {', '.join(training[:4])} left in training mode; call network.eval()")


QUANTIZED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.nn.quantized")
"""Where torch defines modules with packed weights, which cannot be read."""


def require_plain_weights(network: nn.Module, caller: str) -> None:
    """Require weights that are dense tensors with values: others have no derivatives, or cannot be computed with."""
    for name, module in network.named_modules():
        if type(module).__module__.startswith(QUANTIZED):
            raise TypeError(
                f"{caller}: {name or 'the network'} is quantized ({type(module).__name__}) and cannot be looked into; "
                f"pass the float network it was made from, or sample it with netmoments.monte_carlo"
            )
    for name, tensor in named_tensors(network).items():
        unlike = None if tensor.is_complex() else unlike_plain(tensor)  # complex weights may be inside a network
        if unlike is not None:
            raise TypeError(f"{caller}: the network's {name} must be a plain tensor, got one that is {unlike}")
        require_values(caller, f"the network's {name}", tensor)


def other_dtypes(network: nn.Module, image: Tensor) -> str:
    """The end of an error message that lists parameters and buffers of another dtype than the image; "" if none are."""
    others = [
        f"{name} ({str(tensor.dtype).removeprefix('torch.')})"
        for name, tensor in named_tensors(network).items()
        if tensor.is_floating_point() and tensor.dtype != image.dtype
    ]
    if not others:
        return ""
    return f"; it has {', '.join(others[:4])} for an input of {image.dtype}: convert it, e.g. network.to({image.dtype})"


def _examined(network: nn.Module, image: Tensor, caller: str) -> Trace:
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    try:
        alone = trace(network, image)
    except REFUSALS as error:
        raise ValueError(
            f"{caller}: the network cannot take an input of shape {tuple(image.shape[1:])}: {first_line(error)}"
            f"{other_dtypes(network, image)}"
        ) from error
    _require_scores(alone.output, image, caller)
    if alone.output.dtype != image.dtype:
        raise ValueError(
            f"{caller}: the network returns {alone.output.dtype} for an input of {image.dtype}"
            f"{other_dtypes(network, image) or f'; convert what it returns, with .to({image.dtype})'}"
        )
    other_image = another_image(image)
    both = torch.cat([image, other_image])
    with torch.no_grad():
        scores, other_scores = network(image.clone()), network(other_image.clone())
    _require_deterministic(same_values(alone.output, scores), caller)
    try:
        pair = trace(network, both)
        with torch.no_grad():
            copies = network(image.repeat(COPIES, *(1,) * (image.dim() - 1)))
    except REFUSALS as error:
        raise ValueError(
            f"{caller}: the network takes one image but not a batch of two: {first_line(error)}"
        ) from error
    _require_deterministic(same_values(copies[:1].expand_as(copies), copies), caller)
    together = pair.output
    if len(together) != 2 or not (same_values(scores, together[:1]) and same_values(other_scores, together[1:])):
        raise ValueError(
            f"{caller}: the network's output for an image depends on the other images of the batch (batch "
            f"normalisation in training mode?); netmoments needs each image treated by itself"
        )
    changes = not same_values(scores, other_scores)
    unknown = any(parameter.is_inference() for parameter in network.parameters())  # refused where it matters
    differentiable = not changes or unknown or _has_derivative(network, both)
    has_gradient = differentiable and (changes or unknown or _slope(network, both) is not None)
    now = dict(network.named_buffers())
    changed = not equal_tensors(list(buffers.values()), [now[name] for name in buffers])
    return dataclasses.replace(
        with_batch_known(alone, pair),
        differentiable=differentiable,
        has_gradient=has_gradient,
        reads_values=alone.reads_values or pair.reads_values,
        changes_buffers=changed,
    )


def _require_deterministic(same: bool, caller: str) -> None:
    if not same:
        raise ValueError(
            f"{caller}: the network is not deterministic: two runs on the same input differ (dropout or noise left on?)"
        )


HALVINGS = 20
"""How often the line between two images is halved to find where the scores change."""


def _has_derivative(network: nn.Module, images: Tensor) -> bool:
    """Whether the scores have a derivative that is not zero, at one of two images or where they change between them.

    A network whose units are saturated at both images has one somewhere between them; a network that rounds has none.
    """
    low, high = images.split(1)
    for _ in range(HALVINGS):
        slope = _slope(network, torch.cat([low, high]))
        if slope is None or bool(slope.any()):
            return slope is not None
        middle = torch.lerp(low, high, 0.5)
        with torch.no_grad(), full_precision():
            first, second = network(torch.cat([low, middle])).split(1)
        low, high = (middle, high) if same_values(first, second) else (low, middle)
    return False


def _slope(network: nn.Module, images: Tensor) -> Tensor | None:
    """The derivative of a weighted sum of each image's scores in the image; None if torch cannot compute it."""
    with torch.inference_mode(False), torch.enable_grad(), full_precision():
        x = images.clone().requires_grad_()
        try:
            out = network(x.clone())
        except RuntimeError as error:
            if "requires grad" not in str(error):
                raise
            return None  # numpy() in forward, say
        if not out.requires_grad:
            return None
        weights = torch.linspace(1, 2, out.numel(), dtype=out.dtype, device=out.device).reshape(out.shape)
        try:
            return torch.autograd.grad(out, x, weights, allow_unused=True)[0]
        except RuntimeError:
            try:
                with without_cudnn():
                    return torch.autograd.grad(network(x.clone()), x, weights, allow_unused=True)[0]
            except RuntimeError:  # the network changes something in place that the derivative needs
                return None


REFUSALS = (RuntimeError, AssertionError, ValueError, IndexError, TypeError, AttributeError, KeyError)
"""Errors that mean that a network cannot take an input."""


def another_image(image: Tensor) -> Tensor:
    """An image that differs from the given one, whatever that is."""
    ramp = torch.linspace(0.25, 1, image.numel(), dtype=image.dtype, device=image.device).reshape(image.shape)
    return 0.5 * image.flip(-1) + ramp


def _require_scores(output: Any, image: Tensor, caller: str) -> None:
    if not isinstance(output, Tensor) or output.dim() != 2 or output.shape[0] != 1 or output.shape[1] == 0:
        raise ValueError(
            f"{caller}: the network must return scores of shape (batch, classes), got {describe(output)} for one input "
            f"of shape {tuple(image.shape[1:])}; wrap it in a module that picks or flattens them"
        )
    require_finite(caller, "the network's output", output)


def same_values(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are finite in the same places and equal there, up to rounding in another order of sums."""
    finite = x.isfinite()
    if x.shape != y.shape or not torch.equal(finite, y.isfinite()):
        return False
    x, y = x.where(finite, 0.0), y.where(finite, 0.0)
    tolerance = 1e4 * torch.finfo(x.dtype).eps * x.abs().max().clamp(min=1e-30)
    return not bool(((x - y).abs() > tolerance).any())


def equal_tensors(first: list[Tensor], second: list[Tensor]) -> bool:
    """Whether two lists hold equal tensors, where NaN equals NaN."""
    if len(first) != len(second):
        return False
    for x, y in zip(first, second, strict=True):
        if not torch.equal(x, y) and not (x.shape == y.shape and bool(((x == y) | (x.isnan() & y.isnan())).all())):
            return False
    return True


def attributes_of(network: nn.Module) -> list[Any]:
    """The plain attributes of all modules: numbers, words and flags, also in tuples and lists."""
    return [(name, value) for module in network.modules() for name, value in vars(module).items() if _is_plain(value)]


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | complex | str)
