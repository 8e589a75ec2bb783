"""Watching a network run: every ReLU with its name and shape, every smooth function, without changing the network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from netmoments.network.activations import is_relu, pre_activations, smooth_name
from netmoments.network.exported import ExportedNetwork


@dataclass(frozen=True)
class Relu:
    """One call of a ReLU: its place in the order of calls, its name, and the shape of one image's pre-activations."""

    index: int
    name: str
    shape: torch.Size
    batched: bool = field(default=True, repr=False)
    """Whether its input has the images of a batch as its first dimension; if not, each image is run by itself."""

    @property
    def size(self) -> int:
        return self.shape.numel()


@dataclass(frozen=True)
class Trace:
    """What a network did with an example."""

    relus: tuple[Relu, ...]
    smooth: tuple[str, ...]
    """Smooth functions it called, with the modules that did."""
    output: Tensor
    largest: int
    """Elements of the largest tensor that any call returned, for one image."""
    shapes: tuple[torch.Size, ...]
    """What the ReLUs were called with, the whole batch."""
    differentiable: bool = True
    """Whether the scores have a derivative in the input."""


def trace(network: nn.Module, inputs: Tensor) -> Trace:
    """Run the network on a batch of inputs (N, ...) and record it."""
    watcher = _Watcher(inputs.shape[0])
    with torch.no_grad(), _module_names(network, watcher.modules), watcher:
        output = network(inputs.clone())  # a copy: the first call may be in place
    names = _exported_names(network.program) if isinstance(network, ExportedNetwork) else watcher.names
    numbered = zip(_numbered(names), watcher.shapes, strict=True)
    relus = tuple(Relu(index, name, shape[1:]) for index, (name, shape) in enumerate(numbered))
    return Trace(relus, tuple(dict.fromkeys(watcher.smooth)), output, watcher.largest, tuple(watcher.shapes))


def with_batch_known(alone: Trace, pair: Trace) -> Trace:
    """The trace of one image, told by that of two which ReLUs have the images as the first dimension of their input.

    Others see images folded into another dimension, (N·T, C) say, or are called once an image.
    """
    same_calls = len(alone.shapes) == len(pair.shapes)

    def known(relu: Relu) -> Relu:
        one = alone.shapes[relu.index]
        if same_calls and one[:1] == (1,) and pair.shapes[relu.index] == (2, *one[1:]):
            return relu
        return replace(relu, shape=one[1:] if one[:1] == (1,) else one, batched=False)

    return replace(alone, relus=tuple(known(relu) for relu in alone.relus))


class _Watcher(TorchFunctionMode):
    def __init__(self, batch: int) -> None:
        super().__init__()
        self.modules: list[str] = []
        self.names: list[str] = []
        self.shapes: list[torch.Size] = []
        self.smooth: list[str] = []
        self.largest = 0
        self._batch = batch

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        where = self.modules[-1] if self.modules else "network"
        if is_relu(func, args, kwargs):
            self.names.append(where)
            self.shapes.append(pre_activations(args, kwargs).shape)
        elif (smooth := smooth_name(func)) is not None:
            self.smooth.append(f"{smooth} in {where}")
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            self.largest = max(self.largest, -(-result.numel() // self._batch))
        return result


@contextmanager
def _module_names(network: nn.Module, stack: list[str]) -> Iterator[None]:
    """Inside this block `stack` ends with the name of the module that is running."""

    def entering(name: str) -> Callable[..., None]:
        return lambda *_: stack.append(name)

    def leaving(*_: Any) -> None:
        stack.pop()

    handles: list[Any] = []
    for name, module in network.named_modules():
        if not isinstance(module, torch.jit.ScriptModule | fx.GraphModule):
            handles.append(module.register_forward_pre_hook(entering(name or "network")))
            handles.append(module.register_forward_hook(leaving, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _exported_names(network: fx.GraphModule) -> list[str]:
    """For an exported program: the module each ReLU came from, in the order of calls."""
    found = []
    for node in network.graph.nodes:
        if node.op == "call_function" and is_relu(node.target, node.args, node.kwargs):
            modules = node.meta.get("nn_module_stack") or {}
            path = next(reversed(modules.values()))[0] if modules else ""
            found.append(path or "network")
    return found


def _numbered(names: list[str]) -> list[str]:
    """Names that occur once as they are, others as name#0, name#1, …"""
    times = Counter(names)
    seen: Counter[str] = Counter()
    result = []
    for name in names:
        result.append(name if times[name] == 1 else f"{name}#{seen[name]}")
        seen[name] += 1
    return result
