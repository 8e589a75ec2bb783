"""Memory that is taken once and used again for every tile."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

SLOTS = 21
"""Buffers of the size of one tile: 13 for the quadrature, 6 more for derivatives, 2 for their weights."""

KEPT_BYTES = 64 * 2**20
"""Up to this size a CPU thread keeps its scratch memory for the next call: fresh pages cost more than arithmetic."""

_kept = threading.local()


class Scratch:
    """Named buffers of one dtype and device, each of up to `elements` elements, in one block of memory.

    A buffer's content lasts until its name is asked for again. Only what is used becomes resident.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, elements: int) -> None:
        self.elements = elements
        with torch.inference_mode(False):  # else a block kept from inside inference mode would be unusable outside
            self._block = torch.empty(SLOTS, elements, dtype=dtype, device=device)
        self._slots: dict[str, Tensor] = {}

    def take(self, name: str, shape: torch.Size) -> Tensor:
        """An uninitialized tensor of this shape."""
        slot = self._slots.get(name)
        if slot is None:
            slot = self._slots[name] = self._block[len(self._slots)]
        return slot[: shape.numel()].view(shape)


def scratch_for(like: Tensor, elements: int) -> Scratch:
    """Scratch memory for blocks of up to `elements` pairs; on a CPU the thread's own, kept between calls."""
    size = SLOTS * elements * like.dtype.itemsize
    if like.device.type != "cpu" or size > KEPT_BYTES:
        return Scratch(like.dtype, like.device, elements)
    kept: dict[torch.dtype, Scratch] = _kept.__dict__.setdefault("by_dtype", {})
    if like.dtype not in kept or kept[like.dtype].elements < elements:
        kept[like.dtype] = Scratch(like.dtype, like.device, elements)
    return kept[like.dtype]


def common_shape(*tensors: Tensor) -> torch.Size:
    """The broadcast shape of tensors with equally many dimensions (`torch.broadcast_shapes` is slow)."""
    return torch.Size(map(max, *(x.shape for x in tensors)))
