"""Which pairs of units to look at, and in what pieces, so that memory stays flat as networks grow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from netmoments.normal import standard_deviation
from netmoments.relu.marginal import standardize
from netmoments.relu.pairs import Tile, Units, saturation
from netmoments.relu.scratch import SLOTS

WIDEST_TILE = 4096
DEFAULT_BUDGET = {"cpu": 16 * 2**20, "cuda": 2**30}


def memory_budget_for(device: torch.device, memory_budget: int | None) -> int:
    """Bytes of scratch memory for tiles: the caller's, or 16 MiB on a CPU (about its cache) and 1 GiB on a GPU."""
    if memory_budget is None:
        return DEFAULT_BUDGET.get(device.type, DEFAULT_BUDGET["cpu"])
    if isinstance(memory_budget, bool) or not isinstance(memory_budget, int) or memory_budget < 2**16:
        raise ValueError(f"memory_budget must be a number of bytes, at least 65536, got {memory_budget!r}")
    return memory_budget


@dataclass(frozen=True)
class Chunk:
    """Some images, and the units that matter for at least one of them."""

    images: slice
    units: Tensor
    every_unit: bool

    @property
    def count(self) -> int:
        """How many images."""
        return self.images.stop - self.images.start

    def restrict(self, units: Units) -> Units:
        """The units of this chunk; where one is certain, in some image only, s is 1: its covariances are 0 anyway."""
        s = self.pick(units.s)
        return Units(self.pick(units.h), torch.where(s > 0, s, 1.0))

    def pick(self, tensor: Tensor) -> Tensor:
        """This chunk's part of a tensor whose dimension 0 is images (or 1, shared) and whose dimension 1 is units."""
        part = tensor if tensor.shape[0] == 1 else tensor[self.images]
        return part if self.every_unit else part.index_select(1, self.units)

    def add(self, target: Tensor, value: Tensor) -> None:
        """target[images, units] += value, summed over images where the target is shared."""
        part = target if target.shape[0] == 1 else target[self.images]
        value = value.sum_to_size(part.shape[0], *value.shape[1:])
        if self.every_unit:
            part += value
        else:
            part.index_add_(1, self.units, value)

    def block(self, square: Tensor, rows: slice, columns: slice) -> Tensor:
        """square[images, rows, columns], counting rows and columns among this chunk's units; a copy if not all are."""
        part = square if square.shape[0] == 1 else square[self.images]
        if self.every_unit:
            return part[:, rows, columns]
        return part[:, self.units[rows].unsqueeze(1), self.units[columns]]

    def add_block(self, square: Tensor, rows: slice, columns: slice, value: Tensor) -> None:
        """square[images, rows, columns] += value."""
        part = square[self.images]
        if self.every_unit:
            part[:, rows, columns] += value
        else:
            part[:, self.units[rows].unsqueeze(1), self.units[columns]] += value


def units_of(mean: Tensor, variance: Tensor) -> Units:
    """The units with these means and variances; NaN or a negative variance is an error here, before it spreads."""
    if bool(torch.isnan(mean).any()):
        raise ValueError("the mean of a ReLU layer holds NaN")
    if not bool((variance >= 0).all()):
        raise ValueError("the diagonal of the covariance of a ReLU layer must be ≥ 0, got a negative value or NaN")
    std = standard_deviation(variance)
    return Units(standardize(mean, std), std)


def active(units: Units) -> Tensor:
    """Units that are neither certain (s = 0) nor linear or dead to rounding."""
    return (units.s > 0) & (units.h.abs() <= saturation(units.h.dtype))


def chunks(relevant: Tensor, images: int, elements: int, shared: bool) -> Iterator[Chunk]:
    """Split the images so that all pairs of a chunk, or a strip of one image's, fit `elements`.

    When the images share one covariance of the pre-activations (`shared`), several go together even if large,
    so that it is computed once for all of them.
    """
    units = relevant.shape[1]
    together = max(elements // (units * units), min(16, images) if shared else 1)
    for start in range(0, images, together):
        span = slice(start, min(start + together, images))
        mask = (relevant if relevant.shape[0] == 1 else relevant[span]).any(0)
        index = mask.nonzero().squeeze(-1)
        if len(index):
            yield Chunk(span, index, every_unit=len(index) == units)


def triangle(units: int, elements: int) -> Iterator[Tile]:
    """Tiles that cover every pair row > column, at most `elements` pairs each where possible.

    The largest come first, so that scratch memory is taken once.
    """
    width = min(units, WIDEST_TILE, max(1, elements))
    height = max(1, min(elements // width, max(128, -(-units // 4))))
    height = -(-units // -(-units // height))
    for top in reversed(range(0, units, height)):
        bottom = min(top + height, units)
        for left in range(0, bottom, width):
            yield Tile(slice(top, bottom), slice(left, min(left + width, bottom)))


def tile_elements(memory_budget: int, dtype: torch.dtype) -> int:
    return max(1, memory_budget // (SLOTS * dtype.itemsize))
