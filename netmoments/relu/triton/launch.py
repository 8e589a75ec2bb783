"""Launches of the GPU kernels for a layer of ReLUs, and the tables that they look up.

`relu_covariance` gives the dense covariance; `form_diagonal`, `form_product`, `covariance_gradient` and `form_gradient`
serve the quadratic forms of `triton.quadratic_form` and all gradients. `layer_of` makes the table of a layer's units
that every kernel reads, and `tables` the constants.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from netmoments.normal import OWEN_NODES, gauss_legendre, standard_deviation, standardize
from netmoments.relu.bivariate import DEAD, FAINT, SELDOM, NoMoments, Units, saturation
from netmoments.relu.marginal import variance_slopes
from netmoments.relu.quadrature_rules import NONLINEAR_RULES, Rule, excess_limits, nonlinear_limits, recurrence
from netmoments.relu.tiles import TAIL_NODES, gate_slopes, tail_rule
from netmoments.relu.triton import forward_kernels, kernels

TERMS = {torch.float32: 24, torch.float64: 80}
"""The most terms of the series, which the table of units has factors for."""

CHEAP = {torch.float32: 12, torch.float64: 80}
"""Up to so many terms the series is cheaper than nodes of the same accuracy."""

MODERATE = {torch.float32: 0.87, torch.float64: 0.0}
"""The |ρ| up to which a tile is evaluated with the nodes that its largest correlation needs."""


class Tables(NamedTuple):
    """The constants of the kernels on a device: rules of quadrature, and limits of the series."""

    steps: Tensor
    """The `recurrence` of the series' factors."""
    nodes: Tensor
    """(u, weight·(1−u), 1−u) of the nodes of all rules for J."""
    rules: Tensor
    """Where the nodes of each rule begin, and the end."""
    node_limits: Tensor
    """The largest |ρ| of each rule, but for the last."""
    series_limits: Tensor
    """The largest |ρ| for which 0, 1, … terms of J's series are enough."""
    excess_limits: Tensor
    """The largest |ρ| for which 0, 1, … terms of D's series are enough."""
    owen: Tensor
    """(node², weight) for Owen's T."""
    weak: Tensor
    """The rows of `enough(…, reach)`, (BINS + 1, 3), for all but strongly correlated pairs."""
    strong: Tensor
    """The same for |ρ| up to 1, for strongly correlated pairs."""
    series_reach: float
    """The |ρ| up to which the series is cheaper than nodes."""
    reach: float
    """The |ρ| beyond which pairs are strongly correlated, and are evaluated apart from the others."""
    last_reach: float
    """The |ρ| up to which all terms of J's series are enough."""
    excess_reach: float
    """The |ρ| up to which all terms of D's series are enough."""


@cache
def tables(dtype: torch.dtype, device: torch.device) -> Tables:
    """The constants for a dtype on a device, made once."""
    terms, rules = TERMS[dtype], NONLINEAR_RULES[dtype]
    series, excess = nonlinear_limits(terms, dtype), excess_limits(terms, dtype)
    starts = [0]
    for rule in rules:
        starts.append(starts[-1] + len(rule.nodes))
    owen = [(u * u, w) for u, w in zip(*gauss_legendre(OWEN_NODES[dtype]), strict=True)]
    series_reach = series[CHEAP[dtype]]
    reach = max(series_reach, MODERATE[dtype])
    with torch.inference_mode(False):
        return Tables(
            steps=torch.tensor(recurrence(terms), dtype=torch.float64, device=device),
            nodes=torch.tensor([(u, w * v, v) for rule in rules for u, w, v in rule.nodes], dtype=dtype, device=device),
            rules=torch.tensor(starts, dtype=torch.int32, device=device),
            node_limits=_padded([rule.limit for rule in rules[:-1]], dtype, device),
            series_limits=_padded(series[:-1], dtype, device),
            excess_limits=_padded(excess[:-1], dtype, device),
            owen=torch.tensor(owen, dtype=dtype, device=device),
            weak=torch.tensor(enough(series, rules, series_reach, reach), dtype=torch.int32, device=device),
            strong=torch.tensor(enough(series, rules, series_reach, 1.0), dtype=torch.int32, device=device),
            series_reach=series_reach,
            reach=reach,
            last_reach=series[-1],
            excess_reach=excess[-1],
        )


def enough(
    series: Sequence[float], rules: Sequence[Rule], series_reach: float, reach: float
) -> list[tuple[int, int, int]]:
    """How many terms of the series, and which nodes (first, end), are enough, by correlation.

    There is a row for each of `BINS` equal parts of [0, 1], and one for 1 itself. Correlations beyond `series_reach`
    count as that for the series, those beyond `reach` as that for both.
    """
    parts, at_once = int(forward_kernels.BINS), int(kernels.AT_ONCE)
    rows = []
    for part in range(parts + 1):
        largest = min((part + 1) / parts, reach)
        terms = sum(limit < min(largest, series_reach) for limit in series[:-1])
        nth = sum(rule.limit < largest for rule in rules[:-1])
        start = sum(len(rule.nodes) for rule in rules[:nth])
        rows.append((-(-terms // at_once) * at_once, start, start + len(rules[nth].nodes)))
    return rows


def _padded(limits: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Limits, padded to a power of two by one that no correlation exceeds."""
    length = 1 << (len(limits) - 1).bit_length()
    return torch.tensor([*limits, *[2.0] * (length - len(limits))], dtype=dtype, device=device)


class Shape(NamedTuple):
    """Tiles of side×side pairs, up to `run` of them one after the other by one program.

    A program has so many warps, whose threads use so many registers at most.
    """

    side: int
    warps: int
    registers: int
    run: int = 1

    def options(self) -> dict[str, int]:
        """The options for Triton's compiler."""
        return {"SIDE": self.side, "num_warps": self.warps, "maxnreg": self.registers}


TILES = {torch.float32: Shape(32, 4, 96, 4), torch.float64: Shape(32, 4, 168, 8)}
DIAGONAL_TILES = {torch.float32: Shape(16, 1, 128, 8), torch.float64: Shape(32, 4, 168, 8)}
WIDE_TILES = {torch.float32: Shape(32, 4, 168, 8), torch.float64: Shape(32, 4, 255, 8)}
"""Tiles for the dense covariance, and for the diagonal of a form with up to `FEW` outputs and with more."""

FEW, MANY = 16, 64
"""How many outputs of a form's diagonal a program sums: `FEW` if there are no more, else `MANY`."""

PRECISION = {torch.float32: "tf32x3", torch.float64: "ieee"}
"""How a tile is multiplied with the weights of a form: see `forward_kernels.full_product`."""

GROUPS = (2**12, 2**16)
"""The pairs of tiles whose strongly correlated ones one program evaluates: up to MANY_PAIRS in all, and beyond."""

MANY_PAIRS = 2**25
"""The number of pairs from which on programs take the larger groups."""

RUNS = 2048
"""Runs of tiles are shortened where there would be fewer runs than this."""

MOST_IMAGES = 65535
"""The most images in one launch, which CUDA limits."""


ENABLED = kernels.PRESENT
"""Whether Triton is installed."""


def available(tensor: Tensor) -> bool:
    """Whether the kernels can be used for this tensor: Triton is installed, and the tensor on a CUDA device."""
    return kernels.PRESENT and (tensor.is_cuda or bool(kernels.INTERPRETED))


class Layer(NamedTuple):
    """What the kernels need to know of each unit of each image."""

    table: Tensor
    """(images, blocks of units, quantities, units of a block)."""
    units: int
    fault: Tensor
    """1 if a mean was NaN, 2 if a variance was not ≥ 0, else 0: `refuse` raises the error."""

    @property
    def images(self) -> int:
        return self.table.shape[0]

    def active(self) -> Tensor:
        """Which units are neither without variance nor linear or dead to rounding, (images, units)."""
        return (self.table[:, :, int(kernels.INVERSE)] != 0).flatten(1)[:, : self.units]

    def nonlinear(self) -> Layer:
        """The layer, changed in place to have only the nonlinear parts of pairs: gates and variances become 0."""
        self.table[:, :, int(kernels.GATE) : int(kernels.OWN) + 1] = 0
        return self


def layer_of(mean: Tensor, variance: Tensor, fault: Tensor | None = None) -> Layer:
    """The layer with these means and variances, (images or 1, units); `fault` may be shared by several layers."""
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
    """The stride of images in memory; 0 if they share the tensor."""
    return 0 if tensor.shape[0] == 1 else tensor.stride(0)


def dense_rows(tensor: Tensor) -> Tensor:
    """The tensor with each image contiguous in memory."""
    return tensor if tensor[0].is_contiguous() else tensor.contiguous()


def refuse(code: int) -> None:
    """Raise the error of a layer's fault, as `bivariate.units_of` does."""
    if code == 1:
        raise NoMoments("the mean of a ReLU layer holds NaN")
    if code:
        raise NoMoments("the diagonal of the covariance of a ReLU layer must be ≥ 0, got a negative value or NaN")


class Verdict:
    """A layer's fault, on its way to the host: waiting for it does not wait for what is launched later."""

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
    """Slices of images, as many together as fit the budget."""
    together = max(1, min(MOST_IMAGES, memory_budget // bytes_each))
    for start in range(0, images, together):
        yield slice(start, min(start + together, images))


def part_of(tensor: Tensor, images: slice) -> Tensor:
    """Some images of a tensor, or the tensor itself if all images share it."""
    return tensor if tensor.shape[0] == 1 else tensor[images]


def table_bytes(units: int, dtype: torch.dtype) -> int:
    """About how many bytes the table and the marks of one image take."""
    return (int(kernels.FIRST) + TERMS[dtype]) * units * dtype.itemsize + units * units // 8


class _Marks(NamedTuple):
    """Where the strongly correlated pairs of a layer are.

    The kernels that leave these pairs out write it for the kernels that evaluate them.
    """

    marked: Tensor
    """Whether a tile has such pairs."""
    marks: Tensor
    """A bit for each pair of a tile."""
    running: Tensor
    """Running sums of the bits, which the second kernels compute."""

    @classmethod
    def unknown(cls, tiles: int, side: int, device: torch.device) -> _Marks:
        words = tiles * side * side // min(side, 32)
        return cls(*(torch.empty(count, dtype=torch.int32, device=device) for count in (tiles, words, words)))


def _tiles(blocks: int) -> int:
    """How many tiles the lower triangle of so many blocks has."""
    return blocks * (blocks + 1) // 2


def _run(shape: Shape, tiles: int) -> int:
    """How many tiles one program takes, if there are `tiles` in all."""
    return min(shape.run, max(1, tiles // RUNS))


def _group(shape: Shape, tiles: int) -> int:
    """How many tiles' strongly correlated pairs one program evaluates, if there are `tiles` in all."""
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


@cache
def tail_points(device: torch.device) -> Tensor:
    """The nodes of `tiles.tail_rule` as `tail_kernel` reads them, (nodes, 2)."""
    with torch.inference_mode(False):
        return torch.stack(tail_rule(torch.device("cpu")), 1).to(device)


WIDE = 1024
"""How many units a program looks at together to find out whether a layer is deep."""
TAIL_SIDE, TAIL_WARPS = 16, 4
"""The side and the warps of tiles for seldom open units: in float64 a pair takes many registers."""


def relu_covariance(mean: Tensor, variance: Tensor, covariance: Tensor, entrywise: bool, memory_budget: int) -> Tensor:
    """Cov(relu z), (images, units, units); of the covariance, taken as symmetric, the lower triangle is read.

    It is accurate relative to the layer as a whole; with `entrywise`, pairs with a unit that is hardly ever open are
    accurate relative to themselves.
    """
    units, dtype, device = mean.shape[1], mean.dtype, mean.device
    images = max(x.shape[0] for x in (mean, variance, covariance))
    shape = TILES[dtype]
    tiles = _tiles(-(-units // shape.side))
    covariance = dense_rows(covariance)
    result = covariance.new_empty(images, units, units)
    fault = torch.zeros(1, dtype=torch.int32, device=device)
    verdict: Verdict | None = None
    waits = not (mean.is_cuda and torch.cuda.is_current_stream_capturing())  # nobody waits for a recording
    for chunk in image_chunks(images, table_bytes(units, dtype), memory_budget):
        here = result[chunk]
        layer = layer_of(part_of(mean, chunk).expand(len(here), -1), part_of(variance, chunk), fault)
        verdict = Verdict(fault) if waits else None
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
            m, v, chosen = part_of(mean, chunk), part_of(variance, chunk), None
            if not entrywise:
                chosen = torch.empty(len(here), units, dtype=torch.int8, device=device)
                forward_kernels.seldom_open_kernel[(len(here),)](
                    layer.table, chosen, units, SELDOM, FAINT, TERMS=TERMS[dtype], WIDE=WIDE
                )
            forward_kernels.tail_kernel[(_tiles(-(-units // TAIL_SIDE)), len(here))](
                layer.table, m, v, source, here, chosen, tail_points(device),
                units, by_image(m), m.stride(1), by_image(v), v.stride(1), by_image(source), DEAD,
                TERMS=TERMS[dtype], NODES=TAIL_NODES, SIDE=TAIL_SIDE, num_warps=TAIL_WARPS,
            )  # fmt: skip
    if verdict is not None:
        verdict.check()
    return result


class Strip(NamedTuple):
    """Rows of the covariance of the pre-activations, from unit `start` on, with its first columns or all of them."""

    covariance: Tensor
    start: int

    @property
    def stop(self) -> int:
        """The unit after the last row."""
        return self.start + self.covariance.shape[1]


def form_diagonal(layer: Layer, strip: Strip, weights: Tensor) -> Tensor:
    """The part of diag(B K Bᵀ) from the pairs of a strip, row i with all columns j ≤ i, and their mirror images."""
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


PRODUCT_TILES = {torch.float32: Shape(32, 4, 255), torch.float64: Shape(32, 4, 255)}
GRADIENT_TILES = {torch.float32: Shape(32, 4, 255), torch.float64: Shape(32, 8, 255)}
"""Tiles for `form_product` and for gradients."""

PROGRAMS = 1024
"""Columns are split among programs until there are about so many of them, to fill a GPU."""


class _Parts(NamedTuple):
    """How a strip is split among programs: `rows` blocks of rows, times `parts` of `blocks` blocks of columns each."""

    rows: int
    parts: int
    blocks: int

    @classmethod
    def of(cls, layer: Layer, strip: Strip, side: int, numbers: int) -> _Parts:
        """`numbers` is how many results a part writes for each unit and image."""
        rows, columns = -(-strip.covariance.shape[1] // side), -(-layer.units // side)
        most = max(1, 2**24 // max(1, layer.images * layer.units * numbers))
        parts = min(columns, most, -(-PROGRAMS // (rows * layer.images)))
        blocks = -(-columns // parts)
        return cls(rows, -(-columns // blocks), blocks)


def form_product(layer: Layer, strip: Strip, weights: Tensor) -> Tensor:
    """K Bᵀ for the units of a strip of full rows, (images, outputs, units), and 0 for all other units."""
    outputs = weights.shape[1]
    weights, covariance = dense_rows(weights), dense_rows(strip.covariance)
    shape = PRODUCT_TILES[weights.dtype]
    split = _Parts.of(layer, strip, shape.side, outputs)
    product = weights.new_zeros(split.parts, layer.images, outputs, layer.units)
    at = tables(weights.dtype, weights.device)
    with torch.cuda.device_of(product):
        kernels.product_kernel[(split.rows, split.parts, layer.images)](
            layer.table, covariance, weights, product,
            units=layer.units, outputs=outputs, origin=strip.start, stop=strip.stop, blocks=split.blocks,
            covariance_by_image=by_image(covariance), covariance_by_row=covariance.stride(1),
            weights_by_image=by_image(weights),
            patches=weights.new_empty(2 * split.rows * split.parts * layer.images * shape.side**2),
            nodes=at.nodes, rules=at.rules, node_limits=at.node_limits, series_limits=at.series_limits,
            reach=at.last_reach, TERMS=TERMS[weights.dtype], NODE_LIMITS=len(at.node_limits),
            LIMITS=len(at.series_limits), LANES=32 * shape.warps, **shape.options(),
        )  # fmt: skip
    return product.sum(0)


class Gradients(NamedTuple):
    """Derivatives of a weighted sum of covariances of pairs of different units."""

    by_mean: Tensor
    """Of the nonlinear parts in each unit's mean, (images, units)."""
    by_variance: Tensor
    """Of the nonlinear parts in each unit's variance, (images, units)."""
    by_gate: Tensor
    """Of the separable parts in each unit's gate, (images, units)."""
    by_covariance: Tensor
    """Of both in the covariance of each pair's pre-activations, (images, rows of the strip, units)."""

    def with_own(self, own: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """All derivatives in means and variances: also through gates, and of units' variances weighted by `own`."""
        std = standard_deviation(variance)
        gate_by_mean, gate_by_variance = gate_slopes(Units(standardize(mean, std), std))
        own_by_mean, own_by_variance = variance_slopes(mean, variance)
        return (
            self.by_mean + self.by_gate * gate_by_mean + own * own_by_mean,
            self.by_variance + self.by_gate * gate_by_variance + own * own_by_variance,
        )


def covariance_gradient(layer: Layer, covariance: Tensor, grad: Tensor) -> Gradients:
    """The derivatives of Σ gradᵢⱼKᵢⱼ, with grad (images, units, units)."""
    strip, grad = Strip(dense_rows(covariance), 0), dense_rows(grad)
    by_covariance = grad.new_empty(layer.images, layer.units, layer.units)
    return _gradients(layer, strip, grad, grad, by_covariance, factored=False)


def form_gradient(layer: Layer, strip: Strip, pull: Tensor, weights: Tensor) -> Gradients:
    """The derivatives of ½Σ (pullᵢ·bⱼ)Kᵢⱼ for a strip of full rows, with pull and B (images or 1, outputs, units)."""
    by_covariance = weights.new_empty(layer.images, strip.covariance.shape[1], layer.units)
    return _gradients(layer, strip, dense_rows(pull), dense_rows(weights), by_covariance, factored=True)


def _gradients(
    layer: Layer, strip: Strip, weights: Tensor, partners: Tensor, by_covariance: Tensor, factored: bool
) -> Gradients:
    """The derivatives with weights (images, units, units), or, if factored, ½ weightsᵀ·partners (`gradient_kernel`)."""
    dtype, covariance = weights.dtype, dense_rows(strip.covariance)
    at, shape = tables(dtype, weights.device), GRADIENT_TILES[dtype]
    split = _Parts.of(layer, strip, shape.side, 3)
    sums = weights.new_zeros(3, split.parts, layer.images, layer.units)
    with torch.cuda.device_of(sums):
        kernels.gradient_kernel[(split.rows, split.parts, layer.images)](
            layer.table, covariance, weights, partners, by_covariance, sums, at.owen, at.excess_limits, at.excess_reach,
            units=layer.units, outputs=weights.shape[1], origin=strip.start, stop=strip.stop, blocks=split.blocks,
            covariance_by_image=by_image(covariance), covariance_by_row=covariance.stride(1),
            weights_by_image=by_image(weights), partners_by_image=by_image(partners),
            TERMS=TERMS[dtype], LIMITS=len(at.excess_limits), OWEN=len(at.owen), FACTORED=factored,
            **shape.options(),
        )  # fmt: skip
    by_mean, by_variance, by_gate = sums.sum(1)
    return Gradients(by_mean, by_variance, by_gate, by_covariance)
