"""The operators that are affine in their noisy arguments, and how to get their linear parts.

No operator needs a formula: its linear part is the operator itself, called with zeros for the constants that it adds.
So one entry of `OPERATORS` says which arguments may be noisy, and which are added.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from netmoments.network.graph import Node, family
from netmoments.precision import SUPPORTED_DTYPES

aten = torch.ops.aten


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
            aten.view, aten._unsafe_view, aten.reshape, aten.flatten, aten.unflatten, aten.expand, aten.squeeze,
            aten.unsqueeze, aten.select, aten.slice, aten.split, aten.split_with_sizes, aten.chunk, aten.unbind,
            aten.narrow, aten.permute, aten.transpose, aten.t, aten.movedim, aten.flip, aten.roll, aten.clone,
            aten.contiguous, aten.alias, aten.detach, aten.lift_fresh_copy, aten._to_copy, aten.neg, aten.sum,
            aten.mean, aten.cumsum, aten.avg_pool1d, aten.avg_pool2d, aten.avg_pool3d, aten._adaptive_avg_pool2d,
            aten._adaptive_avg_pool3d, aten.adaptive_avg_pool1d, aten.adaptive_avg_pool2d, aten.reflection_pad1d,
            aten.reflection_pad2d, aten.replication_pad1d, aten.replication_pad2d, aten.upsample_nearest1d,
            aten.upsample_nearest2d, aten.upsample_bilinear2d, aten.upsample_bicubic2d, aten.pixel_shuffle,
            aten.pixel_unshuffle, aten.channel_shuffle, aten.im2col, aten.unfold, aten.index, aten.index_select,
            aten.gather, aten.diagonal, aten.tril, aten.triu, aten.repeat, aten.dropout, aten.feature_dropout,
            aten.upsample_linear1d, aten.upsample_trilinear3d, aten.upsample_nearest3d, aten._upsample_nearest_exact1d,
            aten._upsample_nearest_exact2d, aten._upsample_nearest_exact3d, aten._upsample_bilinear2d_aa,
            aten._upsample_bicubic2d_aa, aten.col2im, aten.reflection_pad3d, aten.replication_pad3d,
            aten.grid_sampler_2d, aten.grid_sampler_3d, aten.unsafe_split, aten.unsafe_chunk, aten._reshape_copy,
            aten.view_as, aten.expand_as, aten.as_strided,
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
