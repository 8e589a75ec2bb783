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
        for kind in type(module).__mro__:
            for name in vars(kind).get("__slots__", ()):
                if hasattr(module, name) and not name.startswith("__"):
                    object.__setattr__(twins[id(module)], name, _held(getattr(module, name), twins))
    return twins.get(id(network), network)


def _held(value: Any, twins: dict[int, Any]) -> Any:
    """An attribute of the twin: modules and buffers replaced by their twins, inside containers and functions too.

    A container that several modules share is one container of the twin's.
    """
    if id(value) in twins:
        return twins[id(value)]
    if isinstance(value, dict):
        made = twins[id(value)] = {} if type(value) is dict else copy.copy(value)
        made.update([(key, _held(item, twins)) for key, item in value.items()])
        return made
    if type(value) in (list, set):
        made = twins[id(value)] = type(value)()
        items = [_held(item, twins) for item in value]
        made.extend(items) if type(value) is list else made.update(items)
        return made
    if isinstance(value, tuple):
        items = [_held(item, twins) for item in value]
        changed = any(one is not other for one, other in zip(items, value, strict=True))
        return (type(value)(*items) if hasattr(value, "_fields") else tuple(items)) if changed else value
    if isinstance(value, types.MethodType) and id(value.__self__) in twins:
        return types.MethodType(value.__func__, twins[id(value.__self__)])
    if isinstance(value, functools.partial):
        arguments = [_held(item, twins) for item in value.args]
        return functools.partial(_held(value.func, twins), *arguments, **_held(value.keywords, twins))
    if isinstance(value, types.FunctionType) and value.__closure__:
        return _rebound(value, twins)
    return value


def _rebound(function: types.FunctionType, twins: dict[int, Any]) -> Any:
    """A function that closes over modules, or containers of them, closing over their twins."""
    try:
        held = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a cell that is not filled yet
        return function
    twins[id(function)] = function  # one that closes over itself
    items = [_held(item, twins) for item in held]
    if all(one is other for one, other in zip(items, held, strict=True)):
        return function
    code, scope = function.__code__, function.__globals__
    closure = tuple(map(types.CellType, items))
    made = types.FunctionType(code, scope, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    twins[id(function)] = made
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
