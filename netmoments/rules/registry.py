"""Which rule each operator of torch and each class of modules has, and how users register rules of their own.

`RULES` is the table of operators: for each a function that takes a call found in a network's graph and returns the rule
for it, or None if it has none for that call. `LIBRARY_LAYERS` and `LAYER_RULES`, which `register_rule` fills, do the
same for whole modules. A rule must know which inputs each of its units looks at: windows come first in this file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from netmoments.checks import describe
from netmoments.memory import piece_bytes
from netmoments.network.graph import Node, family, shape_of
from netmoments.rules.base import Nonlinearity
from netmoments.rules.composed import LogSumExp, NormalisedRows, OneSigned, PowerSum, Softmax, Squared, SumOfProducts
from netmoments.rules.maximum import Largest
from netmoments.rules.one_number import Elementwise, PiecewiseLinear, between, one_kink, relu


def pooling_windows(
    channels: int,
    inputs: Sequence[int],
    outputs: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Windows of a pool in any number of dimensions, (channels · outputs, kernel).

    They hold places in a flattened (channels, *inputs) tensor, and −1 for padding.
    """
    axes = [
        _places(torch.arange(out) * step - pad, torch.arange(size) * spacing, length)
        for length, out, size, step, pad, spacing in zip(
            inputs, outputs, kernel, stride, padding, dilation, strict=True
        )
    ]
    return _in_channels(channels, inputs, axes)


def adaptive_windows(channels: int, inputs: Sequence[int], outputs: Sequence[int]) -> Tensor:
    """Windows of an adaptive pool, as in `pooling_windows`: output i looks at ⌊i·in/out⌋ … ⌈(i+1)·in/out⌉ − 1."""
    axes = []
    for length, out in zip(inputs, outputs, strict=True):
        output = torch.arange(out)
        start, stop = output * length // out, -(-(output + 1) * length // out)
        within = torch.arange(int((stop - start).max()))
        axes.append(torch.where(within < (stop - start).unsqueeze(-1), start.unsqueeze(-1) + within, -1))
    return _in_channels(channels, inputs, axes)


def reduction_windows(shape: Sequence[int], dims: Sequence[int]) -> Tensor:
    """Windows of a reduction over some dimensions of a tensor, (outputs, w), as places in the flattened tensor."""
    places = torch.arange(math.prod(shape)).reshape(tuple(shape))
    last = tuple(range(-len(dims), 0))
    moved = places.movedim(tuple(dims), last)
    return moved.reshape(-1, math.prod(moved.shape[len(shape) - len(dims) :]))


def _places(starts: Tensor, steps: Tensor, length: int) -> Tensor:
    """Windows along one axis, (outputs, kernel); −1 for places outside of it."""
    places = starts.unsqueeze(-1) + steps
    return torch.where((places >= 0) & (places < length), places, -1)


def _in_channels(channels: int, inputs: Sequence[int], axes: Sequence[Tensor]) -> Tensor:
    """Windows in all channels of a tensor, from the windows along each of its axes."""
    windows = torch.zeros(1, 1, dtype=torch.int64)
    for length, axis in zip(inputs, axes, strict=True):
        combined = windows[:, None, :, None] * length + axis[None, :, None, :]
        missing = (windows[:, None, :, None] < 0) | (axis[None, :, None, :] < 0)
        windows = torch.where(missing, -1, combined).reshape(len(windows) * len(axis), -1)
    offset = torch.arange(channels)[:, None, None] * math.prod(inputs)
    return torch.where(windows < 0, -1, windows + offset).reshape(-1, windows.shape[1])


aten = torch.ops.aten


class RuledCall(NamedTuple):
    """The rule for one call, and the nodes that are its input: their numbers, flattened and put end to end."""

    rule: Nonlinearity
    inputs: tuple[Node, ...]


class OperatorCall(NamedTuple):
    """One call of an operator in a network's graph."""

    node: Node
    args: tuple[Any, ...]
    """The positional arguments: values where they are constant, nodes where they are noisy."""
    like: Tensor
    """Any tensor of the network's dtype on its device."""

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """The argument at a place, or of a name."""
        if len(self.args) > place:
            return self.args[place]
        return self.node.kwargs.get(name, default)

    @property
    def size(self) -> int:
        """Numbers in the first input."""
        return shape_of(self.args[0]).numel()

    def expanded(self, value: Any) -> Tensor:
        """A number or a constant tensor, expanded to the shape of the first input and flattened."""
        tensor = torch.as_tensor(value, dtype=self.like.dtype, device=self.like.device)
        return tensor.expand(shape_of(self.args[0])).reshape(-1)

    def only_first_noisy(self) -> bool:
        """Whether the first argument is noisy and all others are constant."""
        rest = (*self.args[1:], *self.node.kwargs.values())
        return isinstance(self.args[0], fx.Node) and not any(isinstance(x, fx.Node) for x in rest)


Rule = Callable[[OperatorCall], RuledCall | None]
LayerRule = Callable[[nn.Module, Tensor], "Nonlinearity | None"]


def _one_input(rule_of: Callable[[OperatorCall], Nonlinearity | None]) -> Rule:
    """An entry of `RULES` for an operator with one noisy argument, the first."""

    def ruled(call: OperatorCall) -> RuledCall | None:
        rule = rule_of(call) if call.only_first_noisy() else None
        return None if rule is None else RuledCall(rule, (call.args[0],))

    return ruled


def _leaky(call: OperatorCall) -> PiecewiseLinear:
    slope = call.expanded(call.argument(1, "negative_slope", 0.01))
    return one_kink(slope, 1 - slope)


def _absolute(call: OperatorCall) -> PiecewiseLinear:
    return one_kink(call.expanded(-1.0), call.expanded(2.0))


def _threshold(call: OperatorCall) -> PiecewiseLinear | None:
    """x above a threshold, else a constant value: a rule exists only if they are equal, so that it is continuous."""
    low, value = call.argument(1, "threshold"), call.argument(2, "value")
    return between(call.expanded(low), None, call.size, call.like) if low == value else None


def _clamp(low: tuple[int, str] | None, high: tuple[int, str] | None, defaults: tuple[Any, Any] = (None, None)) -> Rule:
    """A clamp whose ends are the arguments at these places and of these names; None for an end that it lacks."""

    def rule_of(call: OperatorCall) -> PiecewiseLinear | None:
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

    return _one_input(rule_of)


def _max_pool(call: OperatorCall) -> Largest:
    """Max-pooling over the last dimensions, as many as its kernel has."""
    shape, out = shape_of(call.args[0]), shape_of(call.node)
    kernel = list(call.argument(1, "kernel_size"))
    ndim = len(kernel)
    stride = list(call.argument(2, "stride", [])) or kernel
    padding = list(call.argument(3, "padding", [])) or [0] * ndim
    dilation = list(call.argument(4, "dilation", [])) or [1] * ndim
    options = (list(x) * ndim if len(x) == 1 else list(x) for x in (kernel, stride, padding, dilation))
    windows = pooling_windows(shape[:-ndim].numel(), shape[-ndim:], out[-ndim:], *options)
    return Largest(windows.to(call.like.device), with_zero=False)


def _adaptive_max_pool(call: OperatorCall) -> Largest:
    shape, out = shape_of(call.args[0]), shape_of(call.node)
    ndim = len(call.argument(1, "output_size"))
    windows = adaptive_windows(shape[:-ndim].numel(), shape[-ndim:], out[-ndim:])
    return Largest(windows.to(call.like.device), with_zero=False)


def _extreme_over_dims(sign: int) -> Rule:
    """The largest number over some dimensions of a tensor, or the smallest for the sign −1."""

    def rule_of(call: OperatorCall) -> Largest | None:
        shape = shape_of(call.args[0])
        dim = call.argument(1, "dim", [])
        dims = [dim] if isinstance(dim, int) else list(dim)
        dims = [dim % len(shape) for dim in dims] or list(range(len(shape)))
        return Largest(reduction_windows(shape, dims).to(call.like.device), with_zero=False, sign=sign)

    return _one_input(rule_of)


def _extreme_of_two(sign: int) -> Rule:
    """The larger of two tensors number by number, or the smaller for the sign −1; with a constant, a shifted ReLU."""

    def ruled(call: OperatorCall) -> RuledCall | None:
        first, second = call.args[:2]
        if not (isinstance(first, fx.Node) and isinstance(second, fx.Node)):
            noisy, constant = (first, second) if isinstance(first, fx.Node) else (second, first)
            clamp = OperatorCall(call.node, (noisy,), call.like)
            if shape_of(noisy) != shape_of(call.node):
                return None
            end = clamp.expanded(constant)
            low, high = (end, None) if sign > 0 else (None, end)
            return RuledCall(between(low, high, clamp.size, call.like), (noisy,))
        windows = _windows_of_two(call, first, second)
        return RuledCall(Largest(windows, with_zero=False, sign=sign), (first, second))

    return ruled


def _windows_of_two(call: OperatorCall, first: Node, second: Node) -> Tensor:
    """Windows (n, 2) of units that look at one number of each of two tensors that broadcast."""
    places = [place.expand(shape_of(call.node)).reshape(-1) for place in _places_of_two(first, second)]
    return torch.stack(places, -1).to(call.like.device)


def _places_of_two(first: Node, second: Node) -> tuple[Tensor, Tensor]:
    """The places that the numbers of two tensors have in their common input (see `RuledCall`), in their shapes."""
    before = shape_of(first).numel()
    places = torch.arange(before), torch.arange(before, before + shape_of(second).numel())
    return places[0].reshape(shape_of(first)), places[1].reshape(shape_of(second))


def _product(call: OperatorCall) -> RuledCall | None:
    """The product of two noisy tensors, number by number; the square if they are the same tensor."""
    first, second = call.args[:2]
    if not (isinstance(first, fx.Node) and isinstance(second, fx.Node)):
        return None
    if first is second:
        return RuledCall(_square(call), (first,))
    return RuledCall(SumOfProducts(_windows_of_two(call, first, second)), (first, second))


def _matrix_product(call: OperatorCall) -> RuledCall | None:
    """The matrix product of two noisy tensors, with vectors or leading dimensions as in `torch.matmul`."""
    first, second = call.args[:2]
    if not (isinstance(first, fx.Node) and isinstance(second, fx.Node)):
        return None
    return _sums_of_products(call, first, second, None)


def _added_matrix_product(call: OperatorCall) -> RuledCall | None:
    """A constant plus the product of two noisy matrices (`addmm`)."""
    offset, first, second = call.args[:3]
    if isinstance(offset, fx.Node) or not (isinstance(first, fx.Node) and isinstance(second, fx.Node)):
        return None
    if any(call.node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
        return None
    return _sums_of_products(call, first, second, offset.expand(shape_of(call.node)).reshape(-1))


def _sums_of_products(call: OperatorCall, first: Node, second: Node, offset: Tensor | None) -> RuledCall | None:
    """A matrix product as sums of products; None where its windows would not fit."""
    left, right = _places_of_two(first, second)
    left = left if left.dim() > 1 else left.unsqueeze(0)
    right = right if right.dim() > 1 else right.unsqueeze(-1)
    left, right = left.unsqueeze(-2), right.mT.unsqueeze(-3)
    if not _fits(call, shape_of(call.node).numel(), 2 * left.shape[-1]):
        return None
    windows = torch.cat(torch.broadcast_tensors(left, right), -1).flatten(0, -2)
    return RuledCall(SumOfProducts(windows.to(call.like.device), offset), (first, second))


def _fits(call: OperatorCall, units: int, width: int) -> bool:
    """Whether the covariances of all windows, (units, width, width), fit into a piece of work."""
    return units * width * width * call.like.element_size() <= piece_bytes("matrices", call.like.device)


def _square(call: OperatorCall) -> Squared:
    return Squared(torch.arange(call.size, device=call.like.device).unsqueeze(-1))


def _power(call: OperatorCall) -> Nonlinearity | None:
    """x to a constant power: smooth for every x if the exponent is a whole number ≥ 0, else on one side of 0."""
    exponent = call.argument(1, "exponent")
    if not isinstance(exponent, int | float):
        return None
    if exponent == 2:
        return _square(call)
    return _smooth(call) if exponent >= 0 and float(exponent).is_integer() else _one_signed(call)


def _softmax(call: OperatorCall) -> Softmax | None:
    shape = shape_of(call.args[0])
    rows = reduction_windows(shape, [call.argument(1, "dim") % len(shape)]).to(call.like.device)
    return Softmax(rows) if _fits(call, rows.numel(), rows.shape[1]) else None


def _log_sum_exp(call: OperatorCall) -> LogSumExp | None:
    shape = shape_of(call.args[0])
    windows = reduction_windows(shape, [dim % len(shape) for dim in call.argument(1, "dim")]).to(call.like.device)
    return LogSumExp(windows) if _fits(call, *windows.shape) else None


def _vector_norm(call: OperatorCall) -> PowerSum | None:
    """The norm of few numbers; that of more is written out in simpler operators when the network is recorded."""
    shape, power = shape_of(call.args[0]), call.argument(1, "ord", 2)
    dims = call.argument(2, "dim") or range(len(shape))
    windows = reduction_windows(shape, [dim % len(shape) for dim in dims]).to(call.like.device)
    has_rule = isinstance(power, int | float) and 1 <= power < math.inf and _fits(call, *windows.shape)
    return PowerSum(windows, float(power)) if has_rule else None


def _layer_norm(call: OperatorCall) -> NormalisedRows | None:
    shape, ndim = shape_of(call.args[0]), len(call.argument(1, "normalized_shape"))
    rows = torch.arange(call.size).reshape(-1, shape[len(shape) - ndim :].numel())
    return _normalised(call, rows, call.argument(2, "weight"), call.argument(3, "bias"), call.argument(4, "eps"))


def _group_norm(call: OperatorCall) -> NormalisedRows | None:
    rows = torch.arange(call.size).reshape(call.argument(3, "N") * call.argument(6, "group"), -1)
    weight, bias = (_by_channel(call, call.argument(place, name)) for place, name in ((1, "weight"), (2, "bias")))
    return _normalised(call, rows, weight, bias, call.argument(7, "eps"))


def _batch_norm_of_input(call: OperatorCall) -> NormalisedRows | None:
    """Batch normalisation by the statistics of its input: for one image that normalises each channel."""
    training, eps = (5, 7) if family(call.node.target) is aten.native_batch_norm else (3, 5)
    if not call.argument(training, "training"):
        return None
    places = torch.arange(call.size).reshape(shape_of(call.args[0]))
    rows = places.transpose(0, 1).reshape(places.shape[1], -1)
    weight, bias = (_by_channel(call, call.argument(place, name)) for place, name in ((1, "weight"), (2, "bias")))
    return _normalised(call, rows, weight, bias, call.argument(eps, "eps"))


def _by_channel(call: OperatorCall, value: Tensor | None) -> Tensor | None:
    """One number for each channel, in a shape that broadcasts with the input."""
    return None if value is None else value.reshape(1, -1, *[1] * (len(shape_of(call.args[0])) - 2))


def _normalised(call: OperatorCall, rows: Tensor, weight: Any, bias: Any, eps: float) -> NormalisedRows | None:
    """Normalised rows of few numbers; longer ones are written out in simpler operators when a network is recorded."""
    scale, shift = call.expanded(1.0 if weight is None else weight), call.expanded(0.0 if bias is None else bias)
    fits = _fits(call, rows.numel(), rows.shape[1])
    return NormalisedRows(rows.to(call.like.device), float(eps), scale, shift) if fits else None


def _one_signed(call: OperatorCall) -> OneSigned:
    """A smooth function of each number that is defined on one side of 0, with constants as further arguments."""
    function = partial(_as_function, call.node.target, call.args[1:], dict(call.node.kwargs))
    return OneSigned(function, without_batch(shape_of(call.args[0])), call.like)


def _smooth(call: OperatorCall) -> Elementwise | None:
    """A smooth function of each number, with constants as further arguments."""
    if shape_of(call.args[0]) != shape_of(call.node):
        return None
    function = partial(_as_function, call.node.target, call.args[1:], dict(call.node.kwargs))
    return Elementwise(function, without_batch(shape_of(call.args[0])), call.like)


def without_batch(shape: torch.Size) -> tuple[int, ...]:
    """The shape of one image's numbers: without a first dimension of 1, which counts images."""
    return tuple(shape[1:]) if shape[0] == 1 else tuple(shape)


def _as_function(target: Any, rest: tuple[Any, ...], named: Mapping[str, Any], x: Tensor) -> Tensor:
    """An operator as a function of its first argument, which comes last so that the others can be bound."""
    value: Tensor = target(x, *rest, **named)
    return value


SMOOTH = (
    aten.tanh, aten.sigmoid, aten.silu, aten.gelu, aten.elu, aten.softplus, aten.celu, aten.mish, aten.hardswish,
    aten.hardsigmoid, aten.erf, aten.erfc, aten.sin, aten.cos, aten.exp, aten.exp2, aten.expm1, aten.atan, aten.sinh,
    aten.cosh, aten.asinh,
)  # fmt: skip
"""Operators that are functions of one number, known by quadrature, and defined everywhere."""
ONE_SIGNED = (aten.sqrt, aten.rsqrt, aten.reciprocal, aten.log, aten.log2, aten.log10)
"""The same, defined on one side of 0 only."""

RULES: dict[Any, Rule] = {
    aten.relu: _one_input(lambda call: relu(call.size, call.like)),
    aten.leaky_relu: _one_input(_leaky),
    aten._prelu_kernel: _one_input(_leaky),
    aten.prelu: _one_input(_leaky),
    aten.abs: _one_input(_absolute),
    aten.threshold: _one_input(_threshold),
    aten.hardtanh: _clamp((1, "min_val"), (2, "max_val"), (-1.0, 1.0)),
    aten.relu6: _clamp((9, "low"), (9, "high"), (0.0, 6.0)),
    aten.clamp: _clamp((1, "min"), (2, "max")),
    aten.clamp_min: _clamp((1, "min"), None),
    aten.clamp_max: _clamp(None, (1, "max")),
    aten.max_pool1d: _one_input(_max_pool),
    aten.max_pool2d: _one_input(_max_pool),
    aten.max_pool3d: _one_input(_max_pool),
    aten.max_pool2d_with_indices: _one_input(_max_pool),
    aten.max_pool3d_with_indices: _one_input(_max_pool),
    aten.adaptive_max_pool2d: _one_input(_adaptive_max_pool),
    aten.adaptive_max_pool3d: _one_input(_adaptive_max_pool),
    aten.amax: _extreme_over_dims(1),
    aten.amin: _extreme_over_dims(-1),
    aten.max: _extreme_over_dims(1),
    aten.min: _extreme_over_dims(-1),
    aten.maximum: _extreme_of_two(1),
    aten.minimum: _extreme_of_two(-1),
    **dict.fromkeys(SMOOTH, _one_input(_smooth)),
    **dict.fromkeys(ONE_SIGNED, _one_input(_one_signed)),
    aten.mul: _product,
    aten.square: _one_input(_square),
    aten.pow: _one_input(_power),
    **dict.fromkeys((aten.mm, aten.bmm, aten.mv, aten.dot, aten.matmul), _matrix_product),
    aten.addmm: _added_matrix_product,
    aten._softmax: _one_input(_softmax),
    aten._safe_softmax: _one_input(_softmax),
    aten.logsumexp: _one_input(_log_sum_exp),
    aten.linalg_vector_norm: _one_input(_vector_norm),
    aten.native_layer_norm: _one_input(_layer_norm),
    aten.native_group_norm: _one_input(_group_norm),
    aten.native_batch_norm: _one_input(_batch_norm_of_input),
    aten._native_batch_norm_legit: _one_input(_batch_norm_of_input),
}  # fmt: skip
"""The rule of each operator, for all of its overloads: a function that returns None for a call it has no rule for."""


def _lp_pool(ndim: int, module: Any, example: Tensor) -> PowerSum:
    """An Lp pool over the last `ndim` dimensions."""
    shape, out = example.shape, module(example.detach()).shape
    kernel, stride = (
        [x] * ndim if isinstance(x, int) else list(x) for x in (module.kernel_size, module.stride or module.kernel_size)
    )
    padding, dilation = [0] * ndim, [1] * ndim
    windows = pooling_windows(shape[:-ndim].numel(), shape[-ndim:], out[-ndim:], kernel, stride, padding, dilation)
    return PowerSum(windows.to(example.device), float(module.norm_type))


LIBRARY_LAYERS: dict[type[nn.Module], LayerRule] = {
    nn.LPPool1d: partial(_lp_pool, 1),
    nn.LPPool2d: partial(_lp_pool, 2),
    nn.LPPool3d: partial(_lp_pool, 3),
}
"""The library's rules for modules of torch, by exact class: several operators that together are one function."""

LAYER_RULES: dict[type[nn.Module], LayerRule] = {}
"""The rules that users have registered, by class of module."""


def elementwise(module: nn.Module, example: Tensor) -> Elementwise:
    """The rule for a layer that applies a function to each number by itself; expectations come from quadrature."""
    return Elementwise(module, tuple(example.shape[1:]), example)


def affine(module: nn.Module, example: Tensor) -> None:
    """The rule for a layer that is affine in its input, whatever operators it uses."""
    return None


def register_rule(layer: type[nn.Module], rule: LayerRule) -> None:
    """Register your own rule for a class of modules, for "layerwise", "sketch", and sampling with a sketch as control.

    Args:
        layer: the module's class; its forward takes one tensor and returns one.
        rule: a function of the module and an example of its input, (1, ...), which returns a `Nonlinearity`:
            `elementwise` for a function of each number by itself, or your own; or None for an affine layer, as
            `affine` does.

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
    """The rule registered for a module's class or for the nearest of its base classes; else the library's own."""
    registered = next((LAYER_RULES[kind] for kind in type(module).__mro__ if kind in LAYER_RULES), None)
    return registered or LIBRARY_LAYERS.get(type(module))


def operator_name(node: Node) -> str:
    """The name of a node's operator, for messages."""
    return _plain_name(family(node.target))


def _plain_name(operator: Any) -> str:
    return str(getattr(operator, "__name__", operator)).strip("_")
