"""Compound operators written out in elementary ones: normalisation as squares, means, roots and products, and so on.

`graph` records networks with these. The result is the same up to rounding, but each elementary operator has a rule, or
is affine and needs none. Operators that are not listed in `WRITTEN_OUT` are recorded as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

aten = torch.ops.aten
FEW_NUMBERS = 32
"""Normalisation and norms of fewer numbers are not written out: their mean square is far from Gaussian, and there is a
rule for them as a whole."""
MOST_FACTORS = 8
"""Products along a dimension are written out up to this many factors."""


def _normalised(x: Tensor, dims: Sequence[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(x − mean)/√(variance + eps), the mean, and 1/√(variance + eps), with the moments taken over `dims`."""
    mean = x.mean(list(dims), keepdim=True)
    centred = x - mean
    scale = (centred.square().mean(list(dims), keepdim=True) + eps).rsqrt()
    return centred * scale, mean, scale


def _layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    if math.prod(shape) < FEW_NUMBERS:
        return NotImplemented
    y, mean, scale = _normalised(x, range(-len(shape), 0), eps)
    return _scaled(y, weight, bias), mean, scale


def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, channels: int, size: int, groups: int, eps: float
) -> Any:
    if channels * size // groups < FEW_NUMBERS:
        return NotImplemented
    y, mean, scale = _normalised(x.reshape(n, groups, -1), [-1], eps)
    y = _scaled(y.reshape(x.shape), *_by_channel(x, weight, bias))
    return y, mean.reshape(n, groups), scale.reshape(n, groups)


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Batch normalisation by statistics of its input, as in instance normalisation; by learned ones it is affine."""
    if not training or running_mean is not None:
        return NotImplemented
    return _batch_norm_of_input(x, weight, bias, eps)


def _batch_norm_without_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> Any:
    return _batch_norm_of_input(x, weight, bias, eps) if training else NotImplemented


def _batch_norm_of_input(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    if x.numel() // x.shape[1] < FEW_NUMBERS:
        return NotImplemented
    y, mean, scale = _normalised(x, [0, *range(2, x.dim())], eps)
    return _scaled(y, *_by_channel(x, weight, bias)), mean.reshape(-1), scale.reshape(-1)


def _by_channel(x: Tensor, *values: Tensor | None) -> list[Tensor | None]:
    """Values (C,) in a shape that broadcasts with x, (N, C, ...)."""
    return [None if value is None else value.reshape([1, -1] + [1] * (x.dim() - 2)) for value in values]


def _scaled(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _variance(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    dims = list(range(x.dim())) if not dim else list(dim)
    count = math.prod(x.shape[place] for place in dims)
    centred = x - x.mean(dims, keepdim=True)
    return centred.square().sum(dims, keepdim=keepdim) / (count - (1 if correction is None else correction))


def _deviation(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    return _variance(x, dim, correction=correction, keepdim=keepdim).sqrt()


def _variance_and_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    dims = list(range(x.dim())) if not dim else list(dim)
    return _variance(x, dims, correction=correction, keepdim=keepdim), x.mean(dims, keepdim=keepdim)


def _vector_norm(
    x: Tensor, ord: float = 2, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    dims = list(range(x.dim())) if dim is None else list(dim)
    if ord != 2 or dtype is not None or math.prod(x.shape[place] for place in dims) < FEW_NUMBERS:
        return NotImplemented
    return x.square().sum(dims, keepdim=keepdim).sqrt()


def _divided(x: Any, y: Any) -> Any:
    """A quotient of tensors as a product with a reciprocal; division by a number is affine as it is."""
    if not isinstance(y, Tensor) or not isinstance(x, Tensor) or y.dim() == 0 or not y.is_floating_point():
        return NotImplemented
    return x * y.reciprocal()


def _glu(x: Tensor, dim: int = -1) -> Tensor:
    first, second = x.chunk(2, dim)
    return first * second.sigmoid()


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Any:
    return NotImplemented if half_to_float else x - x.logsumexp(dim, keepdim=True)


def _log_sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    return -torch.nn.functional.softplus(-x), x.new_empty(0)


def _addcmul(x: Tensor, first: Tensor, second: Tensor, *, value: float = 1) -> Tensor:
    return x + (first * second if value == 1 else value * first * second)


def _addcdiv(x: Tensor, first: Tensor, second: Tensor, *, value: float = 1) -> Tensor:
    return x + value * first * second.reciprocal()


def _lerp(start: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    return start + weight * (end - start)


def _baddbmm(x: Tensor, first: Tensor, second: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = torch.bmm(first, second)
    return (x if beta == 1 else beta * x) + (product if alpha == 1 else alpha * product)


def _product_along(x: Tensor, dim: int, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if not 0 < x.shape[dim] <= MOST_FACTORS or dtype is not None:
        return NotImplemented
    factors = list(x.unbind(dim))
    while len(factors) > 1:
        factors = [
            factors[k] * factors[k + 1] if k + 1 < len(factors) else factors[k] for k in range(0, len(factors), 2)
        ]
    return factors[0].unsqueeze(dim) if keepdim else factors[0]


def _trilinear(
    first: Tensor,
    weight: Tensor,
    second: Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Any:
    """A bilinear layer, x₁ᵀWx₂, as an affine map of x₁ times x₂; other uses of the operator are left as they are."""
    if (list(expand1), list(expand2), list(expand3), list(sumdim)) != ([1, 3], [0], [1, 2], [2, 3]):
        return NotImplemented
    mapped = torch.nn.functional.linear(first, weight.transpose(1, 2).reshape(-1, weight.shape[1]))
    return (mapped.reshape(-1, weight.shape[0], weight.shape[2]) * second.unsqueeze(1)).sum(-1)


def _distances(first: Tensor, second: Tensor, p: float, compute_mode: int | None) -> Any:
    """Euclidean distances between rows."""
    if p != 2:
        return NotImplemented
    return (first.unsqueeze(-2) - second.unsqueeze(-3)).square().sum(-1).sqrt()


def _lstm_cell(
    inputs: Tensor, hidden: Tensor, cell: Tensor, bias: Tensor | None = None, hidden_bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """A step of an LSTM on a GPU without cuDNN, from the products of the input and the hidden state with weights."""
    gates = _sum_of(inputs, hidden, bias, hidden_bias)
    enter, forget, new, leave = gates.chunk(4, 1)
    cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * cell.tanh(), cell, inputs.new_empty(0)


def _gru_cell(
    inputs: Tensor, hidden: Tensor, state: Tensor, bias: Tensor | None = None, hidden_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A step of a GRU on a GPU without cuDNN, from the products of the input and the hidden state with weights."""
    first, second = _sum_of(inputs, bias).chunk(3, 1), _sum_of(hidden, hidden_bias).chunk(3, 1)
    reset, update = ((a + b).sigmoid() for a, b in zip(first[:2], second[:2], strict=True))
    new = (first[2] + reset * second[2]).tanh()
    return update * (state - new) + new, inputs.new_empty(0)


def _sum_of(first: Tensor, *others: Tensor | None) -> Tensor:
    for other in others:
        first = first if other is None else first + other
    return first


def _packed(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """The steps of sequences, longest first, put end to end, and how many sequences there are at each step."""
    steps, counts = x.transpose(0, 1) if batch_first else x, list(map(int, lengths))
    running = [sum(count > step for count in counts) for step in range(max(counts))]
    return torch.cat([steps[step, :number] for step, number in enumerate(running)]), torch.tensor(running)


def _as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Any:
    """The numbers at these places in memory, by their places in x; left as it is where one lies outside of x."""
    if not x.numel():
        return NotImplemented
    own_start = int(x.storage_offset())
    held = _places_in_memory(x.shape, x.stride(), own_start).reshape(-1)
    wanted = _places_in_memory(size, stride, own_start if storage_offset is None else storage_offset)
    order = np.argsort(held, kind="stable")
    place = np.searchsorted(held, wanted, sorter=order).clip(max=len(held) - 1)
    chosen = order[place]
    if not np.array_equal(held[chosen], wanted):
        return NotImplemented
    indices = torch.from_numpy(chosen.reshape(-1)).to(x.device)
    return x.reshape(-1).index_select(0, indices).reshape(tuple(size))


def _places_in_memory(size: Sequence[int], stride: Sequence[int], start: int) -> np.ndarray:
    """Where the numbers of a tensor lie in its storage, in the tensor's shape."""
    places = np.full(tuple(size), start)
    for dim, (length, step) in enumerate(zip(size, stride, strict=True)):
        places += (np.arange(length) * step).reshape([-1 if axis == dim else 1 for axis in range(len(size))])
    return places


WRITTEN_OUT: dict[Any, Callable[..., Any]] = {
    aten.native_layer_norm.default: _layer_norm,
    aten.native_group_norm.default: _group_norm,
    aten.native_batch_norm.default: _batch_norm,
    aten._native_batch_norm_legit.no_stats: _batch_norm_without_statistics,
    aten.var.correction: _variance,
    aten.std.correction: _deviation,
    aten.var_mean.correction: _variance_and_mean,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.div.Tensor: _divided,
    aten.glu.default: _glu,
    aten._log_softmax.default: _log_softmax,
    aten.log_sigmoid_forward.default: _log_sigmoid,
    aten.addcmul.default: _addcmul,
    aten.addcdiv.default: _addcdiv,
    aten.lerp.Tensor: _lerp,
    aten.baddbmm.default: _baddbmm,
    aten.prod.dim_int: _product_along,
    aten._trilinear.default: _trilinear,
    aten._cdist_forward.default: _distances,
    aten._thnn_fused_lstm_cell.default: _lstm_cell,
    aten._thnn_fused_gru_cell.default: _gru_cell,
    aten._pack_padded_sequence.default: _packed,
    aten.as_strided.default: _as_strided,
    aten.log1p.default: lambda x: (1 + x).log(),
}
"""The function that writes out each overload; it returns NotImplemented for calls that are better left as they are."""
