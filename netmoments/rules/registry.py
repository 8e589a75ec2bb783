"""Which rule each operator and each layer has, and how users add their own.

`RULES` has the operators of torch, `register_rule` the classes of modules. Rules of pooling layers need to know which
inputs every output looks at: the windows below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from netmoments.checks import describe
from netmoments.network.graph import Node, shape_of
from netmoments.rules.affine import OPERATORS, family
from netmoments.rules.base import Nonlinearity
from netmoments.rules.maximum import Largest
from netmoments.rules.piecewise_linear import PiecewiseLinear, between, one_kink, relu
from netmoments.rules.smooth import Elementwise


def pooling_windows(
    channels: int,
    inputs: Sequence[int],
    outputs: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """(channels · outputs, kernel) places in a (channels, *inputs) tensor, −1 for padding: any number of dimensions."""
    axes = [
        _places(torch.arange(out) * step - pad, torch.arange(size) * spread, length)
        for length, out, size, step, pad, spread in zip(inputs, outputs, kernel, stride, padding, dilation, strict=True)
    ]
    return _in_channels(channels, inputs, axes)


def adaptive_windows(channels: int, inputs: Sequence[int], outputs: Sequence[int]) -> Tensor:
    """The same for adaptive pooling: output i looks at ⌊i·in/out⌋ … ⌈(i+1)·in/out⌉ − 1."""
    axes = []
    for length, out in zip(inputs, outputs, strict=True):
        place = torch.arange(out)
        start, stop = place * length // out, -(-(place + 1) * length // out)
        within = torch.arange(int((stop - start).max()))
        axes.append(torch.where(within < (stop - start).unsqueeze(-1), start.unsqueeze(-1) + within, -1))
    return _in_channels(channels, inputs, axes)


def reduction_windows(shape: Sequence[int], dims: Sequence[int]) -> Tensor:
    """(outputs, w) places in a tensor of that shape, for a maximum over some of its dimensions."""
    places = torch.arange(math.prod(shape)).reshape(tuple(shape))
    last = tuple(range(-len(dims), 0))
    moved = places.movedim(tuple(dims), last)
    return moved.reshape(-1, math.prod(moved.shape[len(shape) - len(dims) :]))


def _places(starts: Tensor, steps: Tensor, length: int) -> Tensor:
    """(outputs, kernel) places along one axis, −1 where there is nothing."""
    place = starts.unsqueeze(-1) + steps
    return torch.where((place >= 0) & (place < length), place, -1)


def _in_channels(channels: int, inputs: Sequence[int], axes: Sequence[Tensor]) -> Tensor:
    """The places along each axis put together to places in the whole tensor."""
    flat = torch.zeros(1, 1, dtype=torch.int64)
    for length, axis in zip(inputs, axes, strict=True):
        both = flat[:, None, :, None] * length + axis[None, :, None, :]
        missing = (flat[:, None, :, None] < 0) | (axis[None, :, None, :] < 0)
        flat = torch.where(missing, -1, both).reshape(len(flat) * len(axis), -1)
    offset = torch.arange(channels)[:, None, None] * math.prod(inputs)
    every = torch.where(flat < 0, -1, flat + offset)
    return every.reshape(-1, flat.shape[1])


aten = torch.ops.aten


class RuledCall(NamedTuple):
    """A nonlinear layer and the nodes it takes, flattened and put end to end."""

    rule: Nonlinearity
    inputs: tuple[Node, ...]


class OperatorCall(NamedTuple):
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

    def expanded(self, value: Any) -> Tensor:
        """A number or a constant tensor as one number for each of the first input."""
        tensor = torch.as_tensor(value, dtype=self.like.dtype, device=self.like.device)
        return tensor.expand(shape_of(self.args[0])).reshape(-1)

    def only_first_noisy(self) -> bool:
        rest = (*self.args[1:], *self.node.kwargs.values())
        return isinstance(self.args[0], fx.Node) and not any(isinstance(x, fx.Node) for x in rest)


Rule = Callable[[OperatorCall], RuledCall | None]
LayerRule = Callable[[nn.Module, Tensor], "Nonlinearity | None"]


def _one(rule: Callable[[OperatorCall], Nonlinearity | None]) -> Rule:
    """A rule for operators of which only the first argument may be noisy."""

    def treat(call: OperatorCall) -> RuledCall | None:
        found = rule(call) if call.only_first_noisy() else None
        return None if found is None else RuledCall(found, (call.args[0],))

    return treat


def _leaky(call: OperatorCall) -> PiecewiseLinear:
    slope = call.expanded(call.argument(1, "negative_slope", 0.01))
    return one_kink(slope, 1 - slope)


def _absolute(call: OperatorCall) -> PiecewiseLinear:
    return one_kink(call.expanded(-1.0), call.expanded(2.0))


def _threshold(call: OperatorCall) -> PiecewiseLinear | None:
    """x above a threshold, else a value: continuous only if they are equal."""
    low, value = call.argument(1, "threshold"), call.argument(2, "value")
    return between(call.expanded(low), None, call.size, call.like) if low == value else None


def _clamp(low: tuple[int, str] | None, high: tuple[int, str] | None, defaults: tuple[Any, Any] = (None, None)) -> Rule:
    def rule(call: OperatorCall) -> PiecewiseLinear | None:
        ends = [
            None if where is None else call.argument(*where, default)
            for where, default in zip((low, high), defaults, strict=True)
        ]
        bottom, top = (None if end is None else call.expanded(end) for end in ends)
        if bottom is None and top is None:
            return None
        if bottom is not None and top is not None and bool((bottom > top).any()):
            return None
        return between(bottom, top, call.size, call.like)

    return _one(rule)


def _pool(call: OperatorCall) -> Largest:
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


def _adaptive_pool(call: OperatorCall) -> Largest:
    shape, out = shape_of(call.args[0]), shape_of(call.node)
    many = len(call.argument(1, "output_size"))
    windows = adaptive_windows(shape[:-many].numel(), shape[-many:], out[-many:])
    return Largest(windows.to(call.like.device), with_zero=False)


def _reduction(sign: int) -> Rule:
    def rule(call: OperatorCall) -> Largest | None:
        shape = shape_of(call.args[0])
        chosen = call.argument(1, "dim", [])
        dims = [chosen] if isinstance(chosen, int) else list(chosen)
        dims = [dim % len(shape) for dim in dims] or list(range(len(shape)))
        return Largest(reduction_windows(shape, dims).to(call.like.device), with_zero=False, sign=sign)

    return _one(rule)


def _of_two(sign: int) -> Rule:
    """The larger (smaller) of two tensors; with a constant, a shifted ReLU."""

    def treat(call: OperatorCall) -> RuledCall | None:
        first, second = call.args[:2]
        if not (isinstance(first, fx.Node) and isinstance(second, fx.Node)):
            noisy, constant = (first, second) if isinstance(first, fx.Node) else (second, first)
            alone = OperatorCall(call.node, (noisy,), call.like)
            if shape_of(noisy) != shape_of(call.node):
                return None
            end = alone.expanded(constant)
            low, high = (end, None) if sign > 0 else (None, end)
            return RuledCall(between(low, high, alone.size, call.like), (noisy,))
        out = shape_of(call.node)
        places, start = [], 0
        for node in (first, second):
            own = torch.arange(start, start + shape_of(node).numel()).reshape(shape_of(node))
            places.append(own.expand(out).reshape(-1))
            start += shape_of(node).numel()
        windows = torch.stack(places, -1).to(call.like.device)
        return RuledCall(Largest(windows, with_zero=False, sign=sign), (first, second))

    return treat


def _smooth(call: OperatorCall) -> Elementwise | None:
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

LAYER_RULES: dict[type[nn.Module], LayerRule] = {}
"""By kind of module: rules that users have registered."""


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
    LAYER_RULES[layer] = rule


def layer_rule(module: nn.Module) -> LayerRule | None:
    """The rule that was registered for a module's class, or for the nearest of its bases."""
    return next((LAYER_RULES[kind] for kind in type(module).__mro__ if kind in LAYER_RULES), None)


def known_rules() -> str:
    """All kinds of layers that have a rule, for messages."""
    nonlinear = sorted({_plain(kind) for kind in RULES})
    own = sorted(layer.__name__ for layer in LAYER_RULES)
    return f"affine ({len(OPERATORS)} operators), {', '.join(nonlinear + own)}"


def operator_name(node: Node) -> str:
    return _plain(family(node.target))


def _plain(kind: Any) -> str:
    return str(getattr(kind, "__name__", kind)).strip("_")
