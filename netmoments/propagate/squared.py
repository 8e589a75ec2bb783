"""Affine operators on variances of independent numbers: Σⱼ Lᵢⱼ² vⱼ, operator by operator."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from netmoments.network.graph import Node, shape_of
from netmoments.propagate.affine import OPERATORS, family, linear_call
from netmoments.propagate.plan import AffineStep
from netmoments.propagate.rules import operator_name

aten = torch.ops.aten
Values = Mapping[Node, Any]
_CALLER = "diagonal"
_POOLED = {aten.avg_pool1d: 1, aten.avg_pool2d: 2, aten.avg_pool3d: 3}
_POOL_DEFAULTS: tuple[Any, ...] = (None, None, [], [0], False, True, None)
"""Input, kernel, stride, padding, ceil_mode, count_include_pad, divisor_override."""


def variance_step(step: AffineStep, variances: Values) -> Any:
    """What one affine operation z = L x + c makes of the variances of its inputs if those are independent."""
    kind = family(step.node.target)
    if step.constants is None or kind not in SQUARED:
        raise ValueError(
            f"{_CALLER}: no rule for the variances of {operator_name(step.node)} with correlations dropped; there are "
            f"rules for {', '.join(sorted({str(known.__name__).strip('_') for known in SQUARED}))}"
        )
    return SQUARED[kind](step, variances)


def _linear(step: AffineStep, values: Values) -> Any:
    """L itself, at other values than the operation's own."""
    every = {**(step.constants or {}), **values}
    return linear_call(step.node, OPERATORS[family(step.node.target)], every, frozenset(step.inputs))


def _selected(step: AffineStep, variances: Values) -> Any:
    """Entries of L are 0 and 1."""
    return _linear(step, {node: variances[node] for node in step.inputs})


def _scaled(step: AffineStep, variances: Values) -> Any:
    """Each number by a factor of its own: Lᵢᵢ² vᵢ."""
    (source,) = step.inputs
    factor = _linear(step, {source: torch.ones_like(variances[source])})
    if isinstance(factor, tuple | list):  # normalised values, then the statistics
        return (factor[0].square() * variances[source],)
    return factor.square() * variances[source]


def _multiplied(step: AffineStep, variances: Values) -> Any:
    """Products with constants: the same with their squares."""
    squares = {node: value.square() for node, value in (step.constants or {}).items() if isinstance(value, Tensor)}
    scales = {name: value for name, value in step.node.kwargs.items() if name in ("alpha", "beta") and value != 1}
    if scales:
        raise ValueError(f"{_CALLER}: {operator_name(step.node)} is known for factors of 1, got {scales}")
    return _linear(step, {**squares, **{node: variances[node] for node in step.inputs}})


def _summed(step: AffineStep, variances: Values) -> Tensor:
    """x ± alpha·y, in any order: vₓ + alpha² v_y, as if x and y were not the same."""
    (first, second, *rest), named = step.node.args, step.node.kwargs
    alpha = float(rest[0] if rest else named.get("alpha", 1))  # type: ignore[arg-type]
    factors = (alpha, 1.0) if family(step.node.target) is aten.rsub else (1.0, alpha)
    total = torch.zeros(shape_of(step.node)).to(variances[step.inputs[0]])
    for node, factor in zip((first, second), factors, strict=True):
        if node in step.inputs:
            total = total + factor**2 * variances[node]  # type: ignore[index]
    return total


def _averaged(count: Callable[[AffineStep], Any]) -> Callable[[AffineStep, Values], Tensor]:
    """Means of `count` numbers each: the mean of their variances, by `count` once more."""

    def rule(step: AffineStep, variances: Values) -> Tensor:
        average: Tensor = _selected(step, variances)
        counts = count(step)
        return average / (counts.to(average) if isinstance(counts, Tensor) else counts)

    return rule


def _reduced_count(step: AffineStep) -> float:
    return shape_of(step.inputs[0]).numel() / shape_of(step.node).numel()


def _pooled_count(step: AffineStep) -> int:
    """The kernel's size, padding counting as zeros; another divisor if there is one."""
    given: tuple[Any, ...] = step.node.args
    kernel, _, padding, ceil_mode, with_padding, divisor = (*given[1:], *_POOL_DEFAULTS[len(given) :])
    if divisor is not None:
        return int(divisor)
    if ceil_mode or (any(padding) and not with_padding):
        raise ValueError(f"{_CALLER}: average pooling is known only if all its windows have the same divisor")
    return math.prod(kernel if len(kernel) > 1 else kernel * _POOLED[family(step.node.target)])


def _adaptive_count(step: AffineStep) -> Tensor:
    """How many numbers each window of adaptive pooling has: ⌈(i+1)·in/out⌉ − ⌊i·in/out⌋ along each axis."""
    (source,), total = step.inputs, torch.ones(())
    many = len(step.node.args[1]) if isinstance(step.node.args[1], list | tuple) else 1
    for length, out in zip(shape_of(source)[-many:], shape_of(step.node)[-many:], strict=True):
        place = torch.arange(out)
        own = -(-(place + 1) * length // out) - place * length // out
        total = total.unsqueeze(-1) * own
    return total


SQUARED: dict[Any, Callable[[AffineStep, Values], Any]] = {
    **dict.fromkeys(
        (
            aten.convolution, aten.linear, aten.addmm, aten.baddbmm, aten.mm, aten.bmm, aten.mv, aten.dot, aten.matmul,
        ),
        _multiplied,
    ),
    **dict.fromkeys(
        (
            aten.mul, aten.div, aten.neg, aten.native_batch_norm, aten._native_batch_norm_legit_no_training,
            aten._batch_norm_no_update, aten.cudnn_batch_norm, aten.miopen_batch_norm,
        ),
        _scaled,
    ),
    **dict.fromkeys((aten.add, aten.sub, aten.rsub), _summed),
    aten.mean: _averaged(_reduced_count),
    **dict.fromkeys(_POOLED, _averaged(_pooled_count)),
    **dict.fromkeys(
        (
            aten._adaptive_avg_pool2d, aten._adaptive_avg_pool3d, aten.adaptive_avg_pool1d, aten.adaptive_avg_pool2d,
        ),
        _averaged(_adaptive_count),
    ),
    **dict.fromkeys(
        (
            aten.view, aten._unsafe_view, aten.reshape, aten.flatten, aten.unflatten, aten.expand,
            aten.squeeze, aten.unsqueeze, aten.select, aten.slice, aten.split, aten.split_with_sizes, aten.chunk,
            aten.unbind, aten.narrow, aten.permute, aten.transpose, aten.t, aten.flip, aten.roll, aten.clone,
            aten.contiguous, aten.alias, aten.detach, aten._to_copy, aten.sum, aten.cumsum, aten.cat, aten.stack,
            aten.constant_pad_nd, aten.reflection_pad1d, aten.reflection_pad2d, aten.replication_pad1d,
            aten.replication_pad2d, aten.upsample_nearest1d, aten.upsample_nearest2d, aten.pixel_shuffle,
            aten.pixel_unshuffle, aten.channel_shuffle, aten.index, aten.index_select, aten.repeat, aten.tril,
            aten.triu, operator.getitem,
        ),
        _selected,
    ),
}  # fmt: skip
"""By operator, all overloads alike."""
