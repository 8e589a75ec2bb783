"""A private twin of a network, on which everything is tried that would change the network.

Hooks are registered and tensors replaced on the twin only. So no error, interrupt or other thread can leave the user's
network in another state than it was in.
"""

from __future__ import annotations

import copy
import functools
import operator
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn


def replica(network: nn.Module) -> nn.Module:
    """A twin of a network: new modules of the same types, with the same parameters, attributes and hooks.

    Parameters are the same tensors, buffers are copies, and a module used twice is used twice here too. Lists,
    dictionaries, bound methods, partial functions and closures that hold modules hold those of the twin. Any other
    attribute is shared, as are scripted modules, which cannot be copied.
    """
    twins: dict[int, Any] = {}  # by the id of what they are twins of
    modules = [module for module in network.modules() if not isinstance(module, torch.jit.ScriptModule)]
    for module in modules:
        twins[id(module)] = object.__new__(type(module))
    for buffer in network.buffers():
        twins[id(buffer)] = buffer.detach().clone()
    for module in modules:
        shared = {"_graph", "_code"} if isinstance(module, fx.GraphModule) else set()
        attributes = {name: value if name in shared else _twin_of(value, twins) for name, value in vars(module).items()}
        attributes["_compiled_call_impl"] = None
        vars(twins[id(module)]).update(attributes)
        for kind in type(module).__mro__:
            for name in vars(kind).get("__slots__", ()):
                if hasattr(module, name) and not name.startswith("__"):
                    object.__setattr__(twins[id(module)], name, _twin_of(getattr(module, name), twins))
    return twins.get(id(network), network)


def _twin_of(value: Any, twins: dict[int, Any]) -> Any:
    """A value with modules and buffers replaced by their twins, inside containers and functions too.

    A container that several modules share gets one twin, which they share.
    """
    if id(value) in twins:
        return twins[id(value)]
    if isinstance(value, dict):
        twin = twins[id(value)] = {} if type(value) is dict else copy.copy(value)
        twin.update([(key, _twin_of(item, twins)) for key, item in value.items()])
        return twin
    if type(value) in (list, set):
        twin = twins[id(value)] = type(value)()
        items = [_twin_of(item, twins) for item in value]
        twin.extend(items) if type(value) is list else twin.update(items)
        return twin
    if isinstance(value, tuple):
        items = [_twin_of(item, twins) for item in value]
        changed = any(map(operator.is_not, items, value))
        return (type(value)(*items) if hasattr(value, "_fields") else tuple(items)) if changed else value
    if isinstance(value, types.MethodType) and id(value.__self__) in twins:
        return types.MethodType(value.__func__, twins[id(value.__self__)])
    if isinstance(value, functools.partial):
        arguments = [_twin_of(item, twins) for item in value.args]
        return functools.partial(_twin_of(value.func, twins), *arguments, **_twin_of(value.keywords, twins))
    if isinstance(value, types.FunctionType) and value.__closure__:
        return _twin_of_closure(value, twins)
    return value


def _twin_of_closure(function: types.FunctionType, twins: dict[int, Any]) -> Any:
    """The function with the twins of the modules that it closes over, also inside containers."""
    try:
        values = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a cell that is not filled yet
        return function
    twins[id(function)] = function  # ends the recursion where it closes over itself
    items = [_twin_of(item, twins) for item in values]
    if all(map(operator.is_, items, values)):
        return function
    code, scope = function.__code__, function.__globals__
    closure = tuple(map(types.CellType, items))
    twin = types.FunctionType(code, scope, function.__name__, function.__defaults__, closure)
    twin.__kwdefaults__ = function.__kwdefaults__
    twins[id(function)] = twin
    return twin


def named_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, each once."""
    return {**dict(network.named_parameters()), **dict(network.named_buffers())}


class TensorSlots:
    """The places where a twin keeps its parameters and buffers, to run it with other tensors.

    `tensors` has the twin's own by name; a tensor that several modules share has one name.
    """

    def __init__(self, twin: nn.Module) -> None:
        self.tensors = named_tensors(twin)
        names = {id(tensor): name for name, tensor in self.tensors.items()}
        self._slots = [
            (holder, key, names[id(value)])
            for module in twin.modules()
            if not isinstance(module, torch.jit.ScriptModule)
            for holder in (module._parameters, module._buffers)
            for key, value in holder.items()
            if value is not None
        ]

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Have the twin use these tensors, given by name, from now on."""
        for holder, key, name in self._slots:
            holder[key] = tensors[name]  # type: ignore[assignment]
