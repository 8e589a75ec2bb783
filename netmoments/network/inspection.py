"""What a network must be before anything is computed about it, checked once and said clearly."""

from __future__ import annotations

import warnings
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn

from netmoments.checks import describe, require_finite, require_float_tensor
from netmoments.network.exported import ExportedNetwork
from netmoments.network.tracing import Relu, Trace, trace
from netmoments.precision import full_precision

_known: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], Trace]] = WeakKeyDictionary()


def as_network(network: Any, caller: str) -> nn.Module:
    """A module in eval mode: as given, unwrapped if compiled, or an exported program made callable with any batch."""
    if isinstance(network, torch.export.ExportedProgram):
        network = network.module()
    if isinstance(network, fx.GraphModule) and hasattr(network, "_guards_fn"):
        network = ExportedNetwork(network)
    network = getattr(network, "_orig_mod", network)
    if not isinstance(network, nn.Module):
        raise TypeError(f"{caller}: network must be a torch.nn.Module or an exported program, got {describe(network)}")
    if isinstance(network, torch.jit.ScriptModule):
        raise TypeError(
            f"{caller}: a scripted network cannot be looked into; pass the module it was made from, or export that "
            f"with torch.export"
        )
    if not isinstance(network, ExportedNetwork):
        _require_eval(network, caller)
    return network


def _require_eval(network: nn.Module, caller: str) -> None:
    if network.training:
        raise ValueError(
            f"{caller}: the network is in training mode, where dropout and batch normalisation are random; call "
            f"network.eval() first"
        )
    left_on = [name for name, module in network.named_modules() if module.training and not list(module.children())]
    if left_on:
        raise ValueError(f"{caller}: {', '.join(left_on[:4])} left in training mode; call network.eval()")


def inspect(network: nn.Module, inputs: Tensor, caller: str) -> Trace:
    """The trace of a network on a batch of inputs, once it is known to be a function of each image by itself.

    The first time a network sees inputs of a shape it is run three times: alone twice (is it deterministic?) and beside
    another image (does the batch matter?). Smooth functions on the way are warned about, once a network.
    """
    require_float_tensor(caller, "the input", inputs)
    key = (inputs.shape[1:], inputs.dtype, inputs.device)
    found = _known.setdefault(network, {})
    if key not in found:
        seen = bool(found)
        found[key] = _examined(network, inputs[:1].detach(), caller)
        if found[key].smooth and not seen:
            warnings.warn(
                f"{caller}: the network calls {', '.join(found[key].smooth)}, which is smooth and not piecewise "
                f"linear; it is linearized at the given point like everything but the chosen ReLU",
                stacklevel=3,
            )
    return found[key]


def relus(network: Any, example: Tensor) -> tuple[Relu, ...]:
    """Every ReLU call of a network in order, with its name, shape and size; `example` is a batch (N, ...) of inputs.

    >>> network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    >>> relus(network, torch.zeros(1, 3))
    (Relu(index=0, name='1', shape=torch.Size([4])),)
    """
    return inspect(as_network(network, "relus"), example, "relus").relus


def _examined(network: nn.Module, image: Tensor, caller: str) -> Trace:
    _require_matching_dtype(network, image, caller)
    with full_precision():
        try:
            found = trace(network, image)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"{caller}: the network cannot take an input of shape {tuple(image.shape[1:])}: {reason}"
            ) from error
        output = found.output
        _require_scores(output, image, caller)
        with torch.no_grad():
            again = network(image.clone())
            beside = network(torch.cat([image, image.flip(-1) * 0.5]))
    if not _same(output, again):
        raise ValueError(
            f"{caller}: the network is not deterministic: two runs on the same input differ (dropout or noise left on?)"
        )
    if beside.shape[0] != 2 or not _same(output, beside[:1]):
        raise ValueError(
            f"{caller}: the network's output for an image depends on the other images of the batch (batch "
            f"normalisation in training mode?); netmoments needs each image treated by itself"
        )
    return found


def _require_scores(output: Any, image: Tensor, caller: str) -> None:
    if not isinstance(output, Tensor) or output.dim() != 2 or output.shape[0] != 1 or output.shape[1] == 0:
        raise ValueError(
            f"{caller}: the network must return scores of shape (batch, classes), got {describe(output)} for one input "
            f"of shape {tuple(image.shape[1:])}; wrap it in a module that picks or flattens them"
        )
    require_finite(caller, "the network's output", output)


def _require_matching_dtype(network: nn.Module, image: Tensor, caller: str) -> None:
    for name, parameter in network.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != image.dtype:
            raise TypeError(
                f"{caller}: the network is {parameter.dtype} ({name}) but the input {image.dtype}; convert one, e.g. "
                f"network.to({image.dtype})"
            )
        if parameter.device != image.device:
            raise ValueError(
                f"{caller}: the network is on {parameter.device} ({name}) but the input on {image.device}; move one, "
                f"e.g. input.to({str(parameter.device)!r})"
            )


def _same(x: Tensor, y: Tensor) -> bool:
    """Equal up to the rounding of another order of summation."""
    tolerance = 1e4 * torch.finfo(x.dtype).eps
    return bool(((x - y).abs() <= tolerance * x.abs().max().clamp(min=1e-30)).all())
