"""Which rule each kind of layer has, and how users add their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from netmoments.checks import describe
from netmoments.network.graph import Node, shape_of
from netmoments.propagate.affine import OPERATORS, family
from netmoments.propagate.elementwise import Elementwise
from netmoments.propagate.largest import Largest
from netmoments.propagate.nonlinearity import Nonlinearity
from netmoments.propagate.piecewise_linear import PiecewiseLinear, between, one_kink, relu
from netmoments.propagate.pooling import adaptive_windows, pooling_windows, reduction_windows

aten = torch.ops.aten


class Treated(NamedTuple):
    """A nonlinear layer and the nodes it takes, flattened and put end to end."""

    rule: Nonlinearity
    inputs: tuple[Node, ...]


class Call(NamedTuple):
    """A node that is to be treated: its arguments, with values for constants and nodes for what is noisy."""

    node: Node
    args: tuple[Any, ...]
    like: Tensor

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        if len(self.args) > place:
            return self.args[place]
        return self.node.kwargs.get(name, default)

    @property
    def size(self) -> int:
        """Numbers in the first input."""
        return shape_of(self.args[0]).numel()

    def spread(self, value: Any) -> Tensor:
        """A number or a constant tensor as one number for each of the first input."""
        tensor = torch.as_tensor(value, dtype=self.like.dtype, device=self.like.device)
        return tensor.expand(shape_of(self.args[0])).reshape(-1)

    def only_first_noisy(self) -> bool:
        rest = (*self.args[1:], *self.node.kwargs.values())
        return isinstance(self.args[0], fx.Node) and not any(isinstance(x, fx.Node) for x in rest)


Rule = Callable[[Call], Treated | None]
LayerRule = Callable[[nn.Module, Tensor], "Nonlinearity | None"]


def _one(rule: Callable[[Call], Nonlinearity | None]) -> Rule:
    """A rule for operators of which only the first argument may be noisy."""

    def treat(call: Call) -> Treated | None:
        found = rule(call) if call.only_first_noisy() else None
        return None if found is None else Treated(found, (call.args[0],))

    return treat


def _leaky(call: Call) -> PiecewiseLinear:
    slope = call.spread(call.argument(1, "negative_slope", 0.01))
    return one_kink(slope, 1 - slope)


def _absolute(call: Call) -> PiecewiseLinear:
    return one_kink(call.spread(-1.0), call.spread(2.0))


def _threshold(call: Call) -> PiecewiseLinear | None:
    """x above a threshold, else a value: continuous only if they are equal."""
    low, value = call.argument(1, "threshold"), call.argument(2, "value")
    return between(call.spread(low), None, call.size, call.like) if low == value else None


def _clamp(low: tuple[int, str] | None, high: tuple[int, str] | None, defaults: tuple[Any, Any] = (None, None)) -> Rule:
    def rule(call: Call) -> PiecewiseLinear | None:
        ends = [
            None if where is None else call.argument(*where, default)
            for where, default in zip((low, high), defaults, strict=True)
        ]
        bottom, top = (None if end is None else call.spread(end) for end in ends)
        if bottom is None and top is None:
            return None
        if bottom is not None and top is not None and bool((bottom > top).any()):
            return None
        return between(bottom, top, call.size, call.like)

    return _one(rule)


def _pool(call: Call) -> Largest:
    """Max-pooling over the last dimensions, as many as its kernel has."""
    shape, out = shape_of(call.args[0]), shape_of(call.node)
    kernel = list(call.argument(1, "kernel_size"))
    many = len(kernel)
    stride = list(call.argument(2, "stride", [])) or kernel
    padding = list(call.argument(3, "padding", [])) or [0] * many
    dilation = list(call.argument(4, "dilation", [])) or [1] * many
    every = (list(x) * many if len(x) == 1 else list(x) for x in (kernel, stride, padding, dilation))
    windows = pooling_windows(shape[:-many].numel(), shape[-many:], out[-many:], *every)
    return Largest(windows.to(call.like.device), with_zero=False)


def _adaptive_pool(call: Call) -> Largest:
    shape, out = shape_of(call.args[0]), shape_of(call.node)
    many = len(call.argument(1, "output_size"))
    windows = adaptive_windows(shape[:-many].numel(), shape[-many:], out[-many:])
    return Largest(windows.to(call.like.device), with_zero=False)


def _reduction(sign: int) -> Rule:
    def rule(call: Call) -> Largest | None:
        shape = shape_of(call.args[0])
        chosen = call.argument(1, "dim", [])
        dims = [chosen] if isinstance(chosen, int) else list(chosen)
        dims = [dim % len(shape) for dim in dims] or list(range(len(shape)))
        return Largest(reduction_windows(shape, dims).to(call.like.device), with_zero=False, sign=sign)

    return _one(rule)


def _of_two(sign: int) -> Rule:
    """The larger (smaller) of two tensors; with a constant, a shifted ReLU."""

    def treat(call: Call) -> Treated | None:
        first, second = call.args[:2]
        if not (isinstance(first, fx.Node) and isinstance(second, fx.Node)):
            noisy, constant = (first, second) if isinstance(first, fx.Node) else (second, first)
            alone = Call(call.node, (noisy,), call.like)
            if shape_of(noisy) != shape_of(call.node):
                return None
            end = alone.spread(constant)
            low, high = (end, None) if sign > 0 else (None, end)
            return Treated(between(low, high, alone.size, call.like), (noisy,))
        out = shape_of(call.node)
        places, start = [], 0
        for node in (first, second):
            own = torch.arange(start, start + shape_of(node).numel()).reshape(shape_of(node))
            places.append(own.expand(out).reshape(-1))
            start += shape_of(node).numel()
        windows = torch.stack(places, -1).to(call.like.device)
        return Treated(Largest(windows, with_zero=False, sign=sign), (first, second))

    return treat


def _smooth(call: Call) -> Elementwise | None:
    """A smooth function of each number, its further arguments being constants."""
    if shape_of(call.args[0]) != shape_of(call.node):
        return None
    function = partial(_first_argument, call.node.target, call.args[1:], dict(call.node.kwargs))
    return Elementwise(function, tuple(shape_of(call.args[0])[1:]), call.like)


def _first_argument(target: Any, rest: tuple[Any, ...], named: Mapping[str, Any], x: Tensor) -> Tensor:
    value: Tensor = target(x, *rest, **named)
    return value


RULES: dict[Any, Rule] = {
    aten.relu: _one(lambda call: relu(call.size, call.like)),
    aten.leaky_relu: _one(_leaky),
    aten._prelu_kernel: _one(_leaky),
    aten.prelu: _one(_leaky),
    aten.abs: _one(_absolute),
    aten.threshold: _one(_threshold),
    aten.hardtanh: _clamp((1, "min_val"), (2, "max_val"), (-1.0, 1.0)),
    aten.relu6: _clamp((9, "low"), (9, "high"), (0.0, 6.0)),
    aten.clamp: _clamp((1, "min"), (2, "max")),
    aten.clamp_min: _clamp((1, "min"), None),
    aten.clamp_max: _clamp(None, (1, "max")),
    aten.max_pool1d: _one(_pool),
    aten.max_pool2d: _one(_pool),
    aten.max_pool3d: _one(_pool),
    aten.max_pool2d_with_indices: _one(_pool),
    aten.max_pool3d_with_indices: _one(_pool),
    aten.adaptive_max_pool2d: _one(_adaptive_pool),
    aten.adaptive_max_pool3d: _one(_adaptive_pool),
    aten.amax: _reduction(1),
    aten.amin: _reduction(-1),
    aten.max: _reduction(1),
    aten.min: _reduction(-1),
    aten.maximum: _of_two(1),
    aten.minimum: _of_two(-1),
    **dict.fromkeys(
        (
            aten.tanh, aten.sigmoid, aten.silu, aten.gelu, aten.elu, aten.softplus, aten.celu, aten.mish,
            aten.hardswish, aten.hardsigmoid, aten.erf, aten.sin, aten.cos,
        ),
        _one(_smooth),
    ),
}  # fmt: skip
"""By operator, all overloads alike. A rule may decline a call with None."""

_LAYERS: dict[type[nn.Module], LayerRule] = {}


def elementwise(module: nn.Module, example: Tensor) -> Elementwise:
    """The rule for a layer that treats each number by itself: expectations by quadrature."""
    return Elementwise(module, tuple(example.shape[1:]), example)


def affine(module: nn.Module, example: Tensor) -> None:
    """The rule for a layer that is affine in its input, whatever operators it uses."""
    return None


def register_rule(layer: type[nn.Module], rule: LayerRule) -> None:
    """Have the calls of a kind of module treated by a rule of your own, in "layerwise", "sketch" and all the rest.

    Args:
        layer: the module's class; its forward takes one tensor and returns one.
        rule: called with the module and an example of its input, (1, ...), gives a `Nonlinearity`: `elementwise` for a
            function of each number by itself, or your own; or None, as `affine` does, for a layer that is affine.

    >>> class Wave(nn.Module):
    ...     def forward(self, x):
    ...         return x + torch.sin(x) ** 2
    >>> register_rule(Wave, elementwise)
    """
    if not (isinstance(layer, type) and issubclass(layer, nn.Module)):
        raise TypeError(f"register_rule: layer must be a class of modules, got {describe(layer)}")
    if not callable(rule):
        raise TypeError(
            f"register_rule: rule must be a function of a module and an example of its input (elementwise, affine, or "
            f"your own), got {describe(rule)}"
        )
    _LAYERS[layer] = rule


def layer_rule(module: nn.Module) -> LayerRule | None:
    """The rule that was registered for a module's class."""
    return _LAYERS.get(type(module))


def registered_rules() -> tuple[object, ...]:
    """Which rules users have registered, to see whether that has changed."""
    return tuple(_LAYERS.items())


def known_rules() -> str:
    """All kinds of layers that have a rule, for messages."""
    nonlinear = sorted({_plain(kind) for kind in RULES})
    own = sorted(layer.__name__ for layer in _LAYERS)
    return f"affine ({len(OPERATORS)} operators), {', '.join(nonlinear + own)}"


def operator_name(node: Node) -> str:
    return _plain(family(node.target))


def _plain(kind: Any) -> str:
    return str(getattr(kind, "__name__", kind)).strip("_")
