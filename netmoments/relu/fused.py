"""The exact covariance of a layer of ReLUs on a GPU: launches `kernels` and `forward_kernels`, the images side by side.

Dimension 0 of every input is images, or 1 where they share it. The plain versions in `covariance` and `form` say what
is computed and stand in where Triton is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from netmoments.relu import forward_kernels, kernels
from netmoments.relu.kernel_tables import TERMS, tables
from netmoments.relu.pairs import saturation


class Shape(NamedTuple):
    """Tiles of side×side pairs, up to `run` of them one after the other by one program.

    A program has so many warps, whose threads use so many registers at most.
    """

    side: int
    warps: int
    registers: int
    run: int = 1

    def options(self) -> dict[str, int]:
        """What Triton's compiler is told."""
        return {"SIDE": self.side, "num_warps": self.warps, "maxnreg": self.registers}


TILES = {torch.float32: Shape(32, 4, 96, 4), torch.float64: Shape(32, 4, 168, 8)}
DIAGONAL_TILES = {torch.float32: Shape(16, 1, 128, 8), torch.float64: Shape(32, 4, 168, 8)}
WIDE_TILES = {torch.float32: Shape(32, 4, 168, 8), torch.float64: Shape(32, 4, 255, 8)}
"""Of the diagonal of a form with more than a few outputs."""

FEW, MANY = 16, 64
"""Outputs of a form's diagonal that a program sums: if there are no more than a few, and else."""

PRECISION = {torch.float32: "tf32x3", torch.float64: "ieee"}
"""Of the products of a tile with the weights of a form: see `forward_kernels.full_product`."""

GROUPS = (2**12, 2**16)
"""Pairs whose strongly correlated ones go together, in tiles: of fewer than MANY_PAIRS in all, and else."""

MANY_PAIRS = 2**25

RUNS = 2048
"""Runs of tiles are shorter where there would be fewer of them."""

MOST_IMAGES = 65535
"""Images in one launch: CUDA's limit."""


def available(tensor: Tensor) -> bool:
    """Whether the kernels can be used for this tensor: Triton is installed, and the tensor on a CUDA device."""
    return kernels.PRESENT and (tensor.is_cuda or bool(kernels.INTERPRETED))


class Layer(NamedTuple):
    """What the kernels need to know of each unit of each image, and whether a mean or a variance was no number."""

    table: Tensor
    """(images, blocks of units, quantities, units of a block)."""
    units: int
    fault: Tensor

    @property
    def images(self) -> int:
        return self.table.shape[0]

    def active(self) -> Tensor:
        """Units that are neither certain nor linear or dead to rounding, (images, units)."""
        return (self.table[:, :, int(kernels.INVERSE)] != 0).flatten(1)[:, : self.units]

    def nonlinear(self) -> Layer:
        """The layer with its gates shut and no variances of its own: what is left is the nonlinear part of pairs."""
        self.table[:, :, int(kernels.GATE) : int(kernels.OWN) + 1] = 0
        return self


def layer_of(mean: Tensor, variance: Tensor, fault: Tensor | None = None) -> Layer:
    """The layer with these means and variances, (images or 1, units); `fault` collects what `refuse` reports."""
    images, units = max(mean.shape[0], variance.shape[0]), mean.shape[1]
    terms, block = TERMS[mean.dtype], int(kernels.BLOCK)
    fault = torch.zeros(1, dtype=torch.int32, device=mean.device) if fault is None else fault
    table = mean.new_empty(images, -(-units // block), int(kernels.FIRST) + terms, block)
    with torch.cuda.device_of(table):
        kernels.units_kernel[(table.shape[1], images)](
            mean, variance, table, fault, tables(mean.dtype, mean.device).steps,
            units, by_image(mean), mean.stride(1), by_image(variance), variance.stride(1), saturation(mean.dtype),
            TERMS=terms, num_warps=2,
        )  # fmt: skip
    return Layer(table, units, fault)


def by_image(tensor: Tensor) -> int:
    """How far apart images are in memory; 0 where they share."""
    return 0 if tensor.shape[0] == 1 else tensor.stride(0)


def dense_rows(tensor: Tensor) -> Tensor:
    """The tensor with its last dimension dense in memory, and the one before it dense upon that."""
    return tensor if tensor[0].is_contiguous() else tensor.contiguous()


def refuse(code: int) -> None:
    """NaN or a negative variance is an error, as in `tiling.units_of`."""
    if code == 1:
        raise ValueError("the mean of a ReLU layer holds NaN")
    if code:
        raise ValueError("the diagonal of the covariance of a ReLU layer must be ≥ 0, got a negative value or NaN")


class Verdict:
    """A layer's fault on its way to the host, so that waiting for it does not wait for what is launched after."""

    def __init__(self, fault: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._code = fault
        if fault.is_cuda:
            self._code = torch.empty(fault.shape, dtype=fault.dtype, pin_memory=True)
            with torch.cuda.device_of(fault):
                self._code.copy_(fault, non_blocking=True)
                self._event = torch.cuda.Event()
                self._event.record()

    def check(self) -> None:
        """Wait, and raise the error if there is one."""
        if self._event is not None:
            self._event.synchronize()
        refuse(int(self._code.max()))


def image_chunks(images: int, bytes_each: int, memory_budget: int) -> Iterator[slice]:
    """As many images at a time as fit the budget."""
    together = max(1, min(MOST_IMAGES, memory_budget // bytes_each))
    for start in range(0, images, together):
        yield slice(start, min(start + together, images))


def part_of(tensor: Tensor, images: slice) -> Tensor:
    """Some images of a tensor, or all of it where they share it."""
    return tensor if tensor.shape[0] == 1 else tensor[images]


def table_bytes(units: int, dtype: torch.dtype) -> int:
    """About the memory that one image's table and notes take."""
    return (int(kernels.FIRST) + TERMS[dtype]) * units * dtype.itemsize + units * units // 8


class _Marks(NamedTuple):
    """Which tiles have strongly correlated pairs, and, a bit for each pair, which.

    From the kernels that leave these pairs out for those that evaluate them, which count them in `running`.
    """

    marked: Tensor
    marks: Tensor
    running: Tensor

    @classmethod
    def unknown(cls, tiles: int, side: int, device: torch.device) -> _Marks:
        words = tiles * side * side // min(side, 32)
        return cls(*(torch.empty(count, dtype=torch.int32, device=device) for count in (tiles, words, words)))


def _tiles(blocks: int) -> int:
    """How many tiles the lower triangle of so many blocks has."""
    return blocks * (blocks + 1) // 2


def _run(shape: Shape, tiles: int) -> int:
    """How many tiles one program takes, where there are so many in all."""
    return min(shape.run, max(1, tiles // RUNS))


def _group(shape: Shape, tiles: int) -> int:
    """How many tiles' strongly correlated pairs go together, where there are so many in all."""
    pairs = shape.side * shape.side
    return GROUPS[tiles * pairs >= MANY_PAIRS] // pairs


@cache
def _weak(shape: Shape, dtype: torch.dtype, device: torch.device, even: bool) -> dict[str, Any]:
    """The arguments of the kernels that evaluate all but the strongly correlated pairs of a layer."""
    at = tables(dtype, device)
    return {
        "lookup": at.weak,
        "series_reach": at.series_reach,
        "nodes": at.nodes,
        "reach": at.reach,
        "TERMS": TERMS[dtype],
        "BY_NODES": at.series_reach < at.reach,
        "EVEN": even,
        "num_stages": 1,  # the kernels themselves ask for covariances ahead
        **shape.options(),
    }


@cache
def _strong(side: int, group: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """The arguments of the kernels that evaluate the strongly correlated pairs."""
    at = tables(dtype, device)
    return {
        "lookup": at.strong,
        "nodes": at.nodes,
        "TERMS": TERMS[dtype],
        "GROUP": group,
        "SIDE": side,
        "num_warps": int(forward_kernels.LANES) // 32,
    }


def relu_covariance(mean: Tensor, variance: Tensor, covariance: Tensor, memory_budget: int) -> Tensor:
    """Cov(relu z), (images, units, units); of the covariance, taken as symmetric, the lower triangle is read."""
    units, dtype, device = mean.shape[1], mean.dtype, mean.device
    images = max(x.shape[0] for x in (mean, variance, covariance))
    shape = TILES[dtype]
    tiles = _tiles(-(-units // shape.side))
    covariance = dense_rows(covariance)
    result = covariance.new_empty(images, units, units)
    fault = torch.zeros(1, dtype=torch.int32, device=device)
    verdict: Verdict | None = None
    for chunk in image_chunks(images, table_bytes(units, dtype), memory_budget):
        here = result[chunk]
        layer = layer_of(part_of(mean, chunk).expand(len(here), -1), part_of(variance, chunk), fault)
        verdict = Verdict(fault)
        source = part_of(covariance, chunk)
        run, group = _run(shape, tiles * len(here)), _group(shape, tiles * len(here))
        numbers = {"units": units, "covariance_by_image": by_image(source), "tiles": tiles}
        with torch.cuda.device_of(result):
            marks = _Marks.unknown(tiles * len(here), shape.side, device)
            forward_kernels.covariance_kernel[(-(-tiles // run), len(here))](
                layer.table, source, here, marks.marked, marks.marks,
                **numbers, run=run, **_weak(shape, dtype, device, units % shape.side == 0),
            )  # fmt: skip
            forward_kernels.strong_covariance_kernel[(-(-tiles // group), len(here))](
                layer.table, source, here, *marks, **numbers, **_strong(shape.side, group, dtype, device)
            )
    if verdict is not None:
        verdict.check()
    return result


class Strip(NamedTuple):
    """The covariances of the pre-activations of some units, from `start` on, with the units up to its last column."""

    covariance: Tensor
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.covariance.shape[1]


def form_diagonal(layer: Layer, strip: Strip, weights: Tensor) -> Tensor:
    """What the pairs of a strip (each row i with all columns j ≤ i) and their mirror images add to diag(B K Bᵀ)."""
    dtype, device, images, outputs = weights.dtype, weights.device, layer.images, weights.shape[1]
    shape, together = (DIAGONAL_TILES[dtype], FEW) if outputs <= FEW else (WIDE_TILES[dtype], MANY)
    first, last = strip.start // shape.side, -(-strip.stop // shape.side)
    tiles = _tiles(last) - _tiles(first)
    run, group = _run(shape, tiles * images), _group(shape, tiles * images)
    programs, strong_programs, parts = -(-tiles // run), -(-tiles // group), -(-outputs // together)
    weights, covariance = dense_rows(weights), dense_rows(strip.covariance)
    sums = weights.new_empty(images, programs + strong_programs, parts * together, dtype=torch.float64)
    marks = _Marks.unknown(images * tiles, shape.side, device)
    numbers = {
        "units": layer.units,
        "outputs": outputs,
        "first_tile": _tiles(first),
        "origin": strip.start,
        "covariance_by_image": by_image(covariance),
        "covariance_by_row": covariance.stride(1),
        "weights_by_image": by_image(weights),
        "sums_by_image": sums.stride(0),
        "sums_by_program": sums.stride(1),
        "tiles": tiles,
    }
    with torch.cuda.device_of(sums):
        forward_kernels.diagonal_kernel[(programs, images, parts)](
            layer.table, covariance, weights, sums, marks.marked, marks.marks,
            **numbers, run=run, OUTPUTS=together, PRECISION=PRECISION[dtype],
            **_weak(shape, dtype, device, layer.units % shape.side == 0),
        )  # fmt: skip
        forward_kernels.strong_diagonal_kernel[(strong_programs, images, -(-outputs // FEW))](
            layer.table, covariance, weights, sums[:, programs:], *marks,
            **numbers, OUTPUTS=FEW, **_strong(shape.side, group, dtype, device),
        )  # fmt: skip
    return sums.sum(1)[:, :outputs].to(dtype)
