"""Memory that is taken once and used again for every tile."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """Named buffers of one dtype and device. A buffer's content lasts until the name is asked for again.

    Fresh pages cost a CPU more than the arithmetic on them, so the kernels write into these instead of allocating.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._buffers: dict[str, Tensor] = {}

    @classmethod
    def like(cls, tensor: Tensor) -> Scratch:
        return cls(tensor.dtype, tensor.device)

    def take(self, name: str, shape: torch.Size) -> Tensor:
        """An uninitialized tensor of this shape."""
        size = shape.numel()
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=self._dtype, device=self._device)
            self._buffers[name] = buffer
        return buffer[:size].view(shape)


def common_shape(*tensors: Tensor) -> torch.Size:
    """The broadcast shape of tensors with equally many dimensions (`torch.broadcast_shapes` takes 50 µs)."""
    return torch.Size(map(max, *(x.shape for x in tensors)))
