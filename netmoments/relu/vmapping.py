"""`torch.func.vmap` and `jacrev` for functions whose dimension 0 is already images: N of them, or 1 shared by all."""

from __future__ import annotations

from typing import Any

from torch import Tensor

Dims = tuple[int | None, ...]


def vmap_forward(function: Any, size: int, in_dims: Dims, inputs: tuple[Any, ...]) -> tuple[Tensor, int]:
    """Run `function` once with the vmapped dimension folded into the images; shared inputs stay shared."""
    images = _images(in_dims, inputs)
    folded = [
        x if d is None and (not isinstance(x, Tensor) or x.shape[0] == 1) else _fold(x, d, size, images)
        for x, d in zip(inputs, in_dims, strict=True)
    ]
    return function.apply(*folded).unflatten(0, (size, images)), 0


def vmap_gradient(function: Any, size: int, in_dims: Dims, inputs: tuple[Any, ...]) -> tuple[Any, Any]:
    """The same for a gradient `function(grad, *tensors, *options)`, one result for each of the first tensors.

    Every vmapped call needs gradients of its own, so nothing stays shared inside; a gradient of an input that the
    images share is summed over them afterwards.
    """
    images = _images(in_dims, inputs)
    folded = [_fold(x, d, size, images) if isinstance(x, Tensor) else x for x, d in zip(inputs, in_dims, strict=True)]
    outputs = tuple(value.unflatten(0, (size, images)) for value in function.apply(*folded))
    lengths = [_length(x, d) for x, d in zip(inputs, in_dims, strict=True) if isinstance(x, Tensor)][1:]
    reduced = tuple(
        value.sum(1, keepdim=True) if length < images else value
        for value, length in zip(outputs, lengths, strict=False)
    )
    return reduced, (0,) * len(reduced)


def _length(tensor: Tensor, dim: int | None) -> int:
    return tensor.shape[0] if dim is None else tensor.movedim(dim, 0).shape[1]


def _images(in_dims: Dims, inputs: tuple[Any, ...]) -> int:
    return max(_length(x, d) for x, d in zip(inputs, in_dims, strict=True) if isinstance(x, Tensor))


def _fold(tensor: Tensor, dim: int | None, size: int, images: int) -> Tensor:
    """(size, N or 1, ...) or (N or 1, ...) → (size·N, ...)."""
    apart = tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)
    return apart.expand(size, images, *apart.shape[2:]).reshape(size * images, *apart.shape[2:])
