"""The operators that are affine in their noisy arguments, and chains of elementwise ones taken as one function.

No affine operator needs a formula: its linear part is the operator itself, called with zeros for the constants that it
adds. So one entry of `OPERATORS` says which arguments may be noisy, and which are added.

A chain is x·σ(x), x/(1 + |x|) or exp(−x²), say. Taken one by one, every nonlinear operation would be a layer whose
output counts as nearly Gaussian for the next one. Together they are one layer with one input a unit, whose moments are
found by quadrature.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from netmoments.network.graph import NetworkGraph, Node, family, shape_of
from netmoments.precision import SUPPORTED_DTYPES
from netmoments.rules.base import Nonlinearity
from netmoments.rules.composed import OneSigned
from netmoments.rules.one_number import Elementwise
from netmoments.rules.registry import ONE_SIGNED, SMOOTH, without_batch

aten = torch.ops.aten

VIEWS = {
    aten.view, aten._unsafe_view, aten.reshape, aten.flatten, aten.unflatten, aten.squeeze, aten.unsqueeze,
}  # fmt: skip
"""Operators that give the same numbers in the same order another shape."""
COPIES = {aten.clone, aten.contiguous, aten.alias}
"""Operators whose result equals their argument."""
IN_ORDER = {*VIEWS, *COPIES, aten.detach}
"""Operators whose result has the same numbers in the same order."""


@dataclass(frozen=True)
class AffineOperator:
    """Which arguments of an operator may be noisy, by position, such that it is affine in them."""

    noisy: tuple[int, ...] = (0,)
    product: tuple[int, ...] = ()
    """Arguments that are multiplied with each other: only one of these may be noisy."""
    offsets: tuple[int, ...] = ()
    """Arguments that are added: constants there are zero in the linear part."""


_FIRST = AffineOperator()
_SUM = AffineOperator((0, 1), offsets=(0, 1))
_PRODUCT = AffineOperator((0, 1), product=(0, 1))
_BATCH_NORM = AffineOperator((0,), offsets=(2, 3))
_LIST = AffineOperator((0,), offsets=(0,))

OPERATORS: dict[Any, AffineOperator] = {
    operator.getitem: _FIRST,
    aten.convolution: AffineOperator((0,), offsets=(2,)),
    aten.linear: AffineOperator((0,), offsets=(2,)),
    aten.addmm: AffineOperator((0, 1, 2), product=(1, 2), offsets=(0,)),
    aten.baddbmm: AffineOperator((0, 1, 2), product=(1, 2), offsets=(0,)),
    aten.native_batch_norm: _BATCH_NORM,
    aten._native_batch_norm_legit_no_training: _BATCH_NORM,
    aten._batch_norm_no_update: _BATCH_NORM,
    aten.cudnn_batch_norm: _BATCH_NORM,
    aten.miopen_batch_norm: _BATCH_NORM,
    aten.div: AffineOperator((0,)),
    aten.rsub: AffineOperator((0, 1), offsets=(0, 1)),
    aten.where: AffineOperator((1, 2), offsets=(1, 2)),
    aten.masked_fill: AffineOperator((0,), offsets=(2,)),
    aten.constant_pad_nd: AffineOperator((0,), offsets=(2,)),
    **dict.fromkeys((aten.add, aten.sub, aten.copy, aten.slice_scatter, aten.select_scatter), _SUM),
    **dict.fromkeys((aten.mul, aten.mm, aten.bmm, aten.mv, aten.dot, aten.matmul), _PRODUCT),
    **dict.fromkeys((aten.cat, aten.stack), _LIST),
    **dict.fromkeys(
        (
            *VIEWS, *COPIES, aten.expand, aten.select, aten.slice, aten.split, aten.split_with_sizes, aten.chunk,
            aten.unbind, aten.narrow, aten.permute, aten.transpose, aten.t, aten.movedim, aten.flip, aten.roll,
            aten.detach, aten.lift_fresh_copy, aten._to_copy, aten.neg, aten.sum, aten.mean, aten.cumsum,
            aten.avg_pool1d, aten.avg_pool2d, aten.avg_pool3d, aten._adaptive_avg_pool2d,
            aten._adaptive_avg_pool3d, aten.adaptive_avg_pool1d, aten.adaptive_avg_pool2d, aten.reflection_pad1d,
            aten.reflection_pad2d, aten.replication_pad1d, aten.replication_pad2d, aten.upsample_nearest1d,
            aten.upsample_nearest2d, aten.upsample_bilinear2d, aten.upsample_bicubic2d, aten.pixel_shuffle,
            aten.pixel_unshuffle, aten.channel_shuffle, aten.im2col, aten.unfold, aten.index, aten.index_select,
            aten.gather, aten.diagonal, aten.tril, aten.triu, aten.repeat, aten.dropout, aten.feature_dropout,
            aten.upsample_linear1d, aten.upsample_trilinear3d, aten.upsample_nearest3d, aten._upsample_nearest_exact1d,
            aten._upsample_nearest_exact2d, aten._upsample_nearest_exact3d, aten._upsample_bilinear2d_aa,
            aten._upsample_bicubic2d_aa, aten.col2im, aten.reflection_pad3d, aten.replication_pad3d,
            aten.grid_sampler_2d, aten.grid_sampler_3d, aten.unsafe_split, aten.unsafe_chunk, aten._reshape_copy,
            aten.view_as, aten.expand_as,
        ),
        _FIRST,
    ),
}  # fmt: skip
"""The entry of every affine operator, for all its overloads."""

SHAPE_ONLY = {
    aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.new_zeros, aten.new_ones, aten.new_full,
    aten.new_empty, aten.fill, aten.zero,
}  # fmt: skip
"""Operators whose value depends on the shape of their argument only."""


def affine_operator(node: Node, noisy: frozenset[Node]) -> AffineOperator | None:
    """The entry of a node's operator, or None if it is not known to be affine in those arguments that are noisy."""
    kind = family(node.target)
    if kind in SHAPE_ONLY:
        return None if any(_holds(argument, noisy) for argument in node.args[1:]) else _FIRST
    entry = OPERATORS.get(kind)
    if entry is None or node.kwargs.get("rounding_mode") is not None or not _gives_numbers(node):
        return None
    places = [place for place, argument in enumerate(node.args) if _holds(argument, noisy)]
    if any(_holds(argument, noisy) for argument in node.kwargs.values()):
        return None
    if not set(places) <= set(entry.noisy) or len(set(places) & set(entry.product)) > 1:
        return None
    return entry


def linear_arguments(
    node: Node, entry: AffineOperator, args: tuple[Any, ...], noisy: frozenset[Node]
) -> tuple[Any, ...]:
    """The arguments for a node's linear part: `args`, its own with constants put in, but zero where these are added."""
    zeroed = set(entry.offsets)
    if entry.product and not any(_holds(node.args[place], noisy) for place in entry.product):
        zeroed.add(entry.product[0])  # the product itself is a constant
    return tuple(
        _without_constants(argument, value, noisy) if place in zeroed else value
        for place, (argument, value) in enumerate(zip(node.args, args, strict=True))
    )


def _without_constants(argument: Any, value: Any, noisy: frozenset[Node]) -> Any:
    """The value of an argument, or of a list of them, with zeros for constants."""
    if isinstance(argument, list | tuple):
        return [_without_constants(item, of_item, noisy) for item, of_item in zip(argument, value, strict=True)]
    if isinstance(argument, fx.Node) and argument in noisy:
        return value
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    return None if value is None else 0


def _gives_numbers(node: Node) -> bool:
    """Whether the result (the first of several) is float32 or float64; rounding to a coarser dtype is not affine."""
    value = node.meta.get("val")
    first = value[0] if isinstance(value, list | tuple) and value else value
    return not isinstance(first, Tensor) or first.dtype in SUPPORTED_DTYPES


def _holds(argument: Any, noisy: frozenset[Node]) -> bool:
    """Whether an argument is a noisy node, or a list with one in it."""
    if isinstance(argument, list | tuple):
        return any(_holds(part, noisy) for part in argument)
    return isinstance(argument, fx.Node) and argument in noisy


EVERYWHERE = {
    *SMOOTH, aten.relu, aten.leaky_relu, aten.abs, aten.hardtanh, aten.relu6, aten.clamp, aten.clamp_min,
    aten.clamp_max, aten.square,
}  # fmt: skip
"""Functions that are defined for all numbers."""
LIMITED = {*ONE_SIGNED, aten.pow}
"""Functions that are defined for positive numbers only, or not at 0."""
ARITHMETIC = {*COPIES, aten.add, aten.sub, aten.rsub, aten.mul, aten.neg, aten.div, aten.detach}
SCALES = (-100.0, -10.0, -1.0, -0.1, 0.0, 0.1, 1.0, 10.0, 100.0)
"""Multiples of the largest input seen in a run, on which a chain is tried."""
LARGE = 1e6
"""A chain counts as defined everywhere if, at all `SCALES`, it is at most so many times as large as in the run."""


@dataclass(frozen=True, eq=False)
class Chain:
    """A node whose every number is a function of one number of another node, the root, at the same place."""

    root: Node
    steps: tuple[Node, ...] = ()
    """The operations after the root, up to and with the node itself; none if it is the root."""
    curved: int = 0
    """The largest number of steps on one path that are not affine."""
    one_signed: bool = False
    """Whether the function is defined on one side of 0 only."""

    def function(self, graph: NetworkGraph, constants: Mapping[Node, Any]) -> Callable[[Tensor], Tensor]:
        """The function from the root's values to the node's, for any number of images."""
        calls = []
        for node in self.steps:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda x: x if x in graph.noisy else constants[x])
            calls.append((node, args, kwargs))
        return partial(_run, self.root, calls)

    def rule(self, graph: NetworkGraph, constants: Mapping[Node, Any], like: Tensor) -> Nonlinearity:
        """The rule for all steps as one layer."""
        kind = OneSigned if self.one_signed else Elementwise
        return kind(self.function(graph, constants), without_batch(shape_of(self.root)), like)


def chain_of(
    node: Node,
    is_affine: bool,
    chains: Mapping[Node, Chain],
    never_negative: Collection[Node],
    graph: NetworkGraph,
    constants: Mapping[Node, Any],
    seen: Mapping[Node, Any],
) -> Chain | None:
    """The chain that ends in a node, or None if there is none.

    `chains` are those of earlier nodes, `never_negative` the nodes of which that is known, and `seen` are the values of
    all nodes in a run. `is_affine` says whether the node is.
    """
    kind, arguments = family(node.target), [x for x in node.all_input_nodes if x in graph.noisy]
    if kind not in EVERYWHERE | LIMITED | ARITHMETIC or not all(_alike(x, node) for x in arguments):
        return None
    if kind in ARITHMETIC and not is_affine and kind is not aten.mul:  # division with rounding
        return None
    before = [chains.get(x, Chain(x)) for x in arguments]
    if len({chain.root for chain in before}) != 1:
        return None
    steps = {step for chain in before for step in chain.steps}
    chain = Chain(
        before[0].root,
        (*sorted(steps, key=graph.place.__getitem__), node),
        max(earlier.curved for earlier in before) + (not is_affine),
        any(earlier.one_signed for earlier in before),
    )
    if not _is_limited(node) or chain.one_signed or _is_defined_everywhere(chain, graph, constants, seen):
        return chain
    if chain.root in never_negative:
        return replace(chain, one_signed=True)
    return Chain(arguments[0], (node,), 1, one_signed=True) if len(arguments) == 1 else None


def _is_limited(node: Node) -> bool:
    """Whether a node's function is not defined for all numbers; whole powers are."""
    if family(node.target) is not aten.pow:
        return family(node.target) in LIMITED
    exponent = node.args[1]
    return not (isinstance(exponent, int | float) and exponent >= 0 and float(exponent).is_integer())


NEVER_NEGATIVE = {
    aten.relu, aten.relu6, aten.sigmoid, aten.hardsigmoid, aten.softplus, aten.exp, aten.exp2, aten.abs, aten.sqrt,
    aten.rsqrt, aten.square, aten.cosh, aten._softmax, aten._safe_softmax, aten.linalg_vector_norm,
}  # fmt: skip
"""Functions whose values are never negative."""
KEEPS_SIGN = {
    *VIEWS, *COPIES, aten.expand, aten.slice, aten.select, aten.permute, aten.transpose, aten.sum, aten.mean,
    aten.avg_pool1d, aten.avg_pool2d, aten.avg_pool3d, aten._adaptive_avg_pool2d, aten.max_pool2d_with_indices,
    aten.reciprocal, operator.getitem,
}  # fmt: skip
"""Operators whose values are not negative if their arguments are not."""


def is_never_negative(node: Node, known: Collection[Node]) -> bool:
    """Whether no number of a node can be negative, where `known` are the earlier nodes of which that is known."""
    kind, arguments = family(node.target), node.all_input_nodes
    if kind in NEVER_NEGATIVE:
        return True
    if kind is aten.pow:
        exponent = node.args[1]
        return arguments[0] in known or (isinstance(exponent, int | float) and exponent % 2 == 0)
    if kind is aten.mul:
        numbers = [x for x in node.args if isinstance(x, int | float)]
        is_square = len(node.args) == 2 and node.args[0] is node.args[1]
        return is_square or (all(x in known for x in arguments) and all(x >= 0 for x in numbers))
    return kind in KEEPS_SIGN and all(x in known for x in arguments)


def _alike(node: Node, other: Node) -> bool:
    """Whether two nodes are tensors of the same shape and dtype."""
    one, another = node.meta["val"], other.meta["val"]
    both_tensors = isinstance(one, Tensor) and isinstance(another, Tensor)
    return both_tensors and one.shape == another.shape and one.dtype == another.dtype


@torch.no_grad()
def _is_defined_everywhere(
    chain: Chain, graph: NetworkGraph, constants: Mapping[Node, Any], seen: Mapping[Node, Any]
) -> bool:
    """Whether a chain gives no very large number, infinity or NaN at all `SCALES`."""
    function, value = chain.function(graph, constants), seen[chain.root]
    size, most = value.abs().max(), LARGE * function(value).abs().max()
    return all(bool((function(torch.full_like(value, scale) * size).abs() <= most).all()) for scale in SCALES)


def _run(root: Node, calls: list[tuple[Node, Any, Any]], x: Tensor) -> Tensor:
    """The value of the last of several calls, where the root has the value x."""
    values = {root: x}
    for node, args, kwargs in calls:
        positional, named = fx.node.map_arg((args, kwargs), values.__getitem__)
        x = values[node] = node.target(*positional, **named)  # type: ignore[operator]
    return x
