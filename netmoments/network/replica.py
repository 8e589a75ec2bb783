"""A private twin of a network: how a network is looked into without being changed.

Hooks are put on and tensors put in on the twin only, so that neither an error, nor an interrupt, nor another thread can
leave the user's network in another state than it was in.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn


def replica(network: nn.Module) -> nn.Module:
    """A network of the same modules with the same parameters, attributes and hooks, whose modules are its own.

    A module used twice is used twice here too. Buffers are copies, parameters the same tensors. Lists, dictionaries,
    bound methods, partial functions and closures that hold modules hold those of the twin; any other attribute is
    shared. Scripted modules cannot be copied and are shared too.
    """
    twins: dict[int, Any] = {}
    modules = [module for module in network.modules() if not isinstance(module, torch.jit.ScriptModule)]
    for module in modules:
        twins[id(module)] = object.__new__(type(module))
    for buffer in network.buffers():
        twins[id(buffer)] = buffer.detach().clone()
    for module in modules:
        own = vars(module)
        kept = {"_graph", "_code"} if isinstance(module, fx.GraphModule) else set()
        twin = {name: value if name in kept else _held(value, twins) for name, value in own.items()}
        twin["_compiled_call_impl"] = None
        vars(twins[id(module)]).update(twin)
    return twins.get(id(network), network)


def _held(value: Any, twins: Mapping[int, Any]) -> Any:
    """An attribute of the twin: modules and buffers replaced by their twins, inside containers and functions too."""
    if id(value) in twins:
        return twins[id(value)]
    if isinstance(value, dict):
        return _like(value, {key: _held(item, twins) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_held(item, twins) for item in value))
    if isinstance(value, list | tuple | set) and type(value) in (list, tuple, set):
        return type(value)(_held(item, twins) for item in value)
    if isinstance(value, types.MethodType) and id(value.__self__) in twins:
        return types.MethodType(value.__func__, twins[id(value.__self__)])
    if isinstance(value, functools.partial):
        arguments = (_held(item, twins) for item in value.args)
        return functools.partial(_held(value.func, twins), *arguments, **_held(value.keywords, twins))
    if isinstance(value, types.FunctionType) and value.__closure__:
        return _rebound(value, twins)
    return value


def _like(old: dict[Any, Any], new: dict[Any, Any]) -> Any:
    """A dictionary of the same kind, for the kinds that modules have."""
    if type(old) is dict:
        return new
    made = copy.copy(old)
    made.update(new)
    return made


def _rebound(function: types.FunctionType, twins: Mapping[int, Any]) -> Any:
    """A function that closes over modules, closing over their twins."""
    cells = function.__closure__ or ()
    try:
        held = [cell.cell_contents for cell in cells]
    except ValueError:  # a cell that is not filled yet
        return function
    if not any(id(item) in twins for item in held):
        return function
    closure = tuple(types.CellType(twins.get(id(item), item)) for item in held)
    made = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, closure
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def named_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, each once."""
    return {**dict(network.named_parameters()), **dict(network.named_buffers())}


class TensorSlots:
    """Where a twin keeps its parameters and buffers, so that others can be put in their place.

    A tensor that several modules share, or a module that is used twice, has one name.
    """

    def __init__(self, twin: nn.Module) -> None:
        self.tensors = named_tensors(twin)
        names = {id(tensor): name for name, tensor in self.tensors.items()}
        self._slots = [
            (held, key, names[id(value)])
            for module in twin.modules()
            if not isinstance(module, torch.jit.ScriptModule)
            for held in (module._parameters, module._buffers)
            for key, value in held.items()
            if value is not None
        ]

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Have the twin run with these, by name."""
        for held, key, name in self._slots:
            held[key] = tensors[name]  # type: ignore[assignment]
