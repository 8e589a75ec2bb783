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
from netmoments.memory import piece_bytes
from netmoments.network.graph import Node, family, shape_of
from netmoments.rules.base import Nonlinearity
from netmoments.rules.composed import LogSumExp, NormalisedRows, OneSigned, PowerSum, Softmax, Squared, SumOfProducts
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
        places = [place.expand(shape_of(call.node)).reshape(-1) for place in _places_of_two(first, second)]
        windows = torch.stack(places, -1).to(call.like.device)
        return RuledCall(Largest(windows, with_zero=False, sign=sign), (first, second))

    return treat


def _places_of_two(first: Node, second: Node) -> tuple[Tensor, Tensor]:
    """Where the numbers of two tensors are when they are flattened and put end to end, in their shapes."""
    before = shape_of(first).numel()
    places = torch.arange(before), torch.arange(before, before + shape_of(second).numel())
    return places[0].reshape(shape_of(first)), places[1].reshape(shape_of(second))


def _product(call: OperatorCall) -> RuledCall | None:
    """Of two noisy tensors."""
    first, second = call.args[:2]
    if not (isinstance(first, fx.Node) and isinstance(second, fx.Node)):
        return None
    if first is second:
        return RuledCall(_square(call), (first,))
    places = [place.expand(shape_of(call.node)).reshape(-1) for place in _places_of_two(first, second)]
    return RuledCall(SumOfProducts(torch.stack(places, -1).to(call.like.device)), (first, second))


def _matrix_product(call: OperatorCall) -> RuledCall | None:
    """Of two noisy tensors, with vectors or leading dimensions as `torch.matmul` has them."""
    first, second = call.args[:2]
    if not (isinstance(first, fx.Node) and isinstance(second, fx.Node)):
        return None
    return _sums_of_products(call, first, second, None)


def _added_matrix_product(call: OperatorCall) -> RuledCall | None:
    """addmm of two noisy matrices to a constant."""
    offset, first, second = call.args[:3]
    if isinstance(offset, fx.Node) or not (isinstance(first, fx.Node) and isinstance(second, fx.Node)):
        return None
    if any(call.node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
        return None
    return _sums_of_products(call, first, second, offset.expand(shape_of(call.node)).reshape(-1))


def _sums_of_products(call: OperatorCall, first: Node, second: Node, offset: Tensor | None) -> RuledCall | None:
    left, right = _places_of_two(first, second)
    left = left if left.dim() > 1 else left.unsqueeze(0)
    right = right if right.dim() > 1 else right.unsqueeze(-1)
    left, right = left.unsqueeze(-2), right.mT.unsqueeze(-3)
    if not _fits(call, shape_of(call.node).numel(), 2 * left.shape[-1]):
        return None
    windows = torch.cat(torch.broadcast_tensors(left, right), -1).flatten(0, -2)
    return RuledCall(SumOfProducts(windows.to(call.like.device), offset), (first, second))


def _fits(call: OperatorCall, units: int, width: int) -> bool:
    """Whether a matrix for every window is no more than is kept at a time."""
    return units * width * width * call.like.element_size() <= piece_bytes("matrices", call.like.device)


def _square(call: OperatorCall) -> Squared:
    return Squared(torch.arange(call.size, device=call.like.device).unsqueeze(-1))


def _power(call: OperatorCall) -> Nonlinearity | None:
    """x to a constant power: of any x where that is a whole number, else of positive x."""
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
    """The length of few numbers: that of more is written out when the network is recorded."""
    shape, power = shape_of(call.args[0]), call.argument(1, "ord", 2)
    dims = call.argument(2, "dim") or range(len(shape))
    windows = reduction_windows(shape, [dim % len(shape) for dim in dims]).to(call.like.device)
    good = isinstance(power, int | float) and 1 <= power < math.inf and _fits(call, *windows.shape)
    return PowerSum(windows, float(power)) if good else None


def _layer_norm(call: OperatorCall) -> NormalisedRows | None:
    shape, many = shape_of(call.args[0]), len(call.argument(1, "normalized_shape"))
    rows = torch.arange(call.size).reshape(-1, shape[len(shape) - many :].numel())
    return _normalised(call, rows, call.argument(2, "weight"), call.argument(3, "bias"), call.argument(4, "eps"))


def _group_norm(call: OperatorCall) -> NormalisedRows | None:
    rows = torch.arange(call.size).reshape(call.argument(3, "N") * call.argument(6, "group"), -1)
    weight, bias = (_by_channel(call, call.argument(place, name)) for place, name in ((1, "weight"), (2, "bias")))
    return _normalised(call, rows, weight, bias, call.argument(7, "eps"))


def _batch_norm_of_input(call: OperatorCall) -> NormalisedRows | None:
    """Batch normalisation with statistics of its input: instance normalisation, of channels of one image."""
    training, eps = (5, 7) if family(call.node.target) is aten.native_batch_norm else (3, 5)
    if not call.argument(training, "training"):
        return None
    places = torch.arange(call.size).reshape(shape_of(call.args[0]))
    rows = places.transpose(0, 1).reshape(places.shape[1], -1)
    weight, bias = (_by_channel(call, call.argument(place, name)) for place, name in ((1, "weight"), (2, "bias")))
    return _normalised(call, rows, weight, bias, call.argument(eps, "eps"))


def _by_channel(call: OperatorCall, value: Tensor | None) -> Tensor | None:
    return None if value is None else value.reshape(1, -1, *[1] * (len(shape_of(call.args[0])) - 2))


def _normalised(call: OperatorCall, rows: Tensor, weight: Any, bias: Any, eps: float) -> NormalisedRows | None:
    """Of few numbers each: more are written out when the network is recorded."""
    scale, shift = call.expanded(1.0 if weight is None else weight), call.expanded(0.0 if bias is None else bias)
    fits = _fits(call, rows.numel(), rows.shape[1])
    return NormalisedRows(rows.to(call.like.device), float(eps), scale, shift) if fits else None


def _one_signed(call: OperatorCall) -> OneSigned:
    """A smooth function of each number that is defined on one side of 0."""
    function = partial(_first_argument, call.node.target, call.args[1:], dict(call.node.kwargs))
    return OneSigned(function, without_batch(shape_of(call.args[0])), call.like)


def _smooth(call: OperatorCall) -> Elementwise | None:
    """A smooth function of each number, its further arguments being constants."""
    if shape_of(call.args[0]) != shape_of(call.node):
        return None
    function = partial(_first_argument, call.node.target, call.args[1:], dict(call.node.kwargs))
    return Elementwise(function, without_batch(shape_of(call.args[0])), call.like)


def without_batch(shape: torch.Size) -> tuple[int, ...]:
    """The shape of one image's numbers: a first dimension of 1 is that of images; another, of patches say, is not."""
    return tuple(shape[1:]) if shape[0] == 1 else tuple(shape)


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
            aten.hardswish, aten.hardsigmoid, aten.erf, aten.sin, aten.cos, aten.exp, aten.exp2, aten.expm1, aten.erfc,
            aten.atan, aten.sinh, aten.cosh, aten.asinh,
        ),
        _one(_smooth),
    ),
    **dict.fromkeys((aten.sqrt, aten.rsqrt, aten.reciprocal, aten.log, aten.log2, aten.log10), _one(_one_signed)),
    aten.mul: _product,
    aten.square: _one(_square),
    aten.pow: _one(_power),
    **dict.fromkeys((aten.mm, aten.bmm, aten.mv, aten.dot, aten.matmul), _matrix_product),
    aten.addmm: _added_matrix_product,
    aten._softmax: _one(_softmax),
    aten._safe_softmax: _one(_softmax),
    aten.logsumexp: _one(_log_sum_exp),
    aten.linalg_vector_norm: _one(_vector_norm),
    aten.native_layer_norm: _one(_layer_norm),
    aten.native_group_norm: _one(_group_norm),
    aten.native_batch_norm: _one(_batch_norm_of_input),
    aten._native_batch_norm_legit: _one(_batch_norm_of_input),
}  # fmt: skip
"""By operator, all overloads alike. A rule may decline a call with None."""


def _lp_pool(many: int, module: Any, example: Tensor) -> PowerSum:
    """An Lp pool over the last dimensions."""
    shape, out = example.shape, module(example.detach()).shape
    kernel, stride = (_every(x, many) for x in (module.kernel_size, module.stride or module.kernel_size))
    none, ones = [0] * many, [1] * many
    windows = pooling_windows(shape[:-many].numel(), shape[-many:], out[-many:], kernel, stride, none, ones)
    return PowerSum(windows.to(example.device), float(module.norm_type))


def _every(value: Any, many: int) -> list[int]:
    return [value] * many if isinstance(value, int) else list(value)


LIBRARY_LAYERS: dict[type[nn.Module], LayerRule] = {
    nn.LPPool1d: partial(_lp_pool, 1),
    nn.LPPool2d: partial(_lp_pool, 2),
    nn.LPPool3d: partial(_lp_pool, 3),
}
"""By kind of module, exactly: torch's own that are several operators which together are one function."""

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
    """The rule that was registered for a module's class, or for the nearest of its bases; else the library's own."""
    own = next((LAYER_RULES[kind] for kind in type(module).__mro__ if kind in LAYER_RULES), None)
    return own or LIBRARY_LAYERS.get(type(module))


def known_rules() -> str:
    """All kinds of layers that have a rule, for messages."""
    nonlinear = sorted({_plain(kind) for kind in RULES})
    own = sorted(layer.__name__ for layer in LAYER_RULES)
    return ", ".join(nonlinear + own)


def operator_name(node: Node) -> str:
    return _plain(family(node.target))


def _plain(kind: Any) -> str:
    return str(getattr(kind, "__name__", kind)).strip("_")
