"""Which inputs every output of a pooling layer looks at."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


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
