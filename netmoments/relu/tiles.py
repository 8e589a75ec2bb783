"""The nonlinear part of the covariance of pairs of ReLUs, and its derivatives, in the units of the network.

For pre-activations z₁, z₂ with means m = (s₁h, s₂k), variances s₁², s₂² and covariance c = ρs₁s₂:

    Cov(relu z₁, relu z₂) = c Φ(h)Φ(k) + s₁s₂ J(h,k;ρ).

The first, separable part is what the best linear approximation of each ReLU would give. The second, called the
nonlinear part here, is O(ρ²), vanishes for every pair with a saturated unit, and is all that needs quadrature.

The rules of `bivariate` are accurate in units of s₁s₂. That is enough wherever some unit that matters is open now and
then; where none is (a *deep* layer), what they leave out is all there is, and the `tail_…` functions take their place:
the same integrals, to relative accuracy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from netmoments.normal import density, distribution, gauss_legendre
from netmoments.relu.bivariate import (
    SLOTS,
    Scratch,
    TileSeries,
    Units,
    common_shape,
    conditional,
    nonlinear_part,
    orthant_excess,
)


class Tile(NamedTuple):
    """A block of pairs: some rows of the matrix of all pairs, and some columns."""

    rows: slice
    columns: slice

    def keep_lower_(self, matrix: Tensor) -> Tensor:
        """Zero in place what is on or above the diagonal of the whole matrix, so that each pair counts once."""
        beyond = max(0, self.rows.start - self.columns.start)
        if self.columns.start + beyond < self.columns.stop:
            matrix[..., beyond:].tril_(self.rows.start - self.columns.start - beyond - 1)
        return matrix


def correlation(units: Units, tile: Tile, covariance: Tensor, scratch: Scratch) -> Tensor:
    """ρ = c/(s₁s₂) of a tile's pairs, cut to [−1, 1] against rounding, and 0 where the pair is another tile's.

    An uncorrelated pair has no nonlinear part and no derivatives of it: it contributes nothing.
    """
    row, column = units.span(tile.rows).rows(), units.span(tile.columns).columns()
    rho = scratch.take("rho", common_shape(row.s, column.s, covariance))
    torch.mul(covariance, row.s.reciprocal(), out=rho)
    return tile.keep_lower_(rho.mul_(column.s.reciprocal()).clamp_(-1, 1))


def nonlinear_covariance(units: Units, tile: Tile, covariance: Tensor, scratch: Scratch) -> Tensor:
    """s₁s₂J for a tile of pairs, given their covariances. The result lives in the scratch memory."""
    row, column = units.span(tile.rows).rows(), units.span(tile.columns).columns()
    rho = correlation(units, tile, covariance, scratch)
    return nonlinear_part(row.h, column.h, rho, scratch, _series_of(units, tile)).mul_(row.s).mul_(column.s)


def excess_probability(units: Units, tile: Tile, covariance: Tensor, scratch: Scratch) -> Tensor:
    """D = P(z₁>0, z₂>0) − Φ(h)Φ(k) for a tile of pairs. The result lives in the scratch memory."""
    row, column = units.span(tile.rows).rows(), units.span(tile.columns).columns()
    return orthant_excess(
        row.h, column.h, correlation(units, tile, covariance, scratch), scratch, _series_of(units, tile)
    )


def _series_of(units: Units, tile: Tile) -> TileSeries | None:
    """Of a tile of pairs, where the units have their factors at hand."""
    return None if units.series is None else TileSeries(units.series, *tile)


class TileGradient(NamedTuple):
    """Derivatives of Σ weight·s₁s₂J over a tile: in each covariance per unit of weight, and in each unit's m and s²."""

    by_covariance: Tensor
    by_row_mean: Tensor
    by_column_mean: Tensor
    by_row_variance: Tensor
    by_column_variance: Tensor


def tile_gradient(units: Units, tile: Tile, covariance: Tensor, weight: Tensor, scratch: Scratch) -> TileGradient:
    """The closed-form derivatives, with a = (h−ρk)/q, b = (k−ρh)/q, q = √(1−ρ²) and D the orthant excess:

    ∂(s₁s₂J)/∂c   = D
    ∂(s₁s₂J)/∂m₁  = s₂ (k D + φ(k)[Φ(a) − Φ(h)] + ρφ(h)[Φ(b) − Φ(k)])
    ∂(s₁s₂J)/∂s₁² = s₂/(2s₁) (φ(h)(k−ρh)[Φ(b) − Φ(k)] + qφ(h)φ(b) − φ(h)φ(k))

    They are the derivatives of the whole covariance less those of cΦ(h)Φ(k). All are finite at ρ = ±1, and
    zero at ρ = 0. What depends on one unit only is taken out of the sums, which are products with vectors.
    """
    row, column = units.span(tile.rows), units.span(tile.columns)
    h, k = row.h.unsqueeze(-1), column.h.unsqueeze(-2)
    rho = correlation(units, tile, covariance, scratch)
    rho.copy_(torch.where(rho.abs() >= 1 - 4 * torch.finfo(rho.dtype).eps, rho.sign(), rho))  # a duplicate, rounded
    weight = torch.mul(weight, rho != 0, out=scratch.take("used", weight.shape))
    excess = orthant_excess(h, k, rho, scratch, _series_of(units, tile))
    given = conditional(h, k, rho, scratch)
    phi_h, phi_k = density(row.h), density(column.h)
    common = torch.square(given.second, out=scratch.take("common", given.second.shape)).add_(h * h).mul_(-0.5).exp_()
    common.mul_(given.deviation).mul_(0.5 / math.pi).addcmul_(phi_h.unsqueeze(-1), phi_k.unsqueeze(-2), value=-1)
    change_h = given.first.mul_(-math.sqrt(0.5)).erfc_().mul_(0.5).sub_(distribution(h))
    change_k = given.second.mul_(-math.sqrt(0.5)).erfc_().mul_(0.5).sub_(distribution(k))
    # by now the quadrature's buffers are free again, but for those of rho and of its result
    change_h = torch.mul(change_h, weight, out=scratch.take("plus", weight.shape))
    change_k = torch.mul(change_k, weight, out=scratch.take("minus", weight.shape))
    tilted_h = torch.mul(change_h, rho, out=scratch.take("above", weight.shape))
    tilted_k = torch.mul(change_k, rho, out=scratch.take("below", weight.shape))
    weighted = torch.mul(excess, weight, out=scratch.take("height", weight.shape))
    common = torch.mul(common, weight, out=scratch.take("both", weight.shape))

    def over_columns(matrix: Tensor, vector: Tensor) -> Tensor:
        return (matrix @ vector.unsqueeze(-1)).squeeze(-1)

    def over_rows(matrix: Tensor, vector: Tensor) -> Tensor:
        return (vector.unsqueeze(-2) @ matrix).squeeze(-2)

    pull_rows = phi_h * over_columns(tilted_k, column.s)
    pull_columns = phi_k * over_rows(tilted_h, row.s)
    return TileGradient(
        by_covariance=excess,
        by_row_mean=over_columns(weighted, column.s * column.h) + over_columns(change_h, column.s * phi_k) + pull_rows,
        by_column_mean=over_rows(weighted, row.s * row.h) + over_rows(change_k, row.s * phi_h) + pull_columns,
        by_row_variance=(
            phi_h * over_columns(change_k, column.s * column.h) - row.h * pull_rows + over_columns(common, column.s)
        )
        / (2 * row.s),
        by_column_variance=(
            phi_k * over_rows(change_h, row.s * row.h) - column.h * pull_columns + over_rows(common, row.s)
        )
        / (2 * column.s),
    )


TAIL_NODES = 64
NODES_TOGETHER = 2**15
"""Numbers that nodes are evaluated at together."""
POWER = 4

REACH = 8.8
"""exp(−REACH²/2) is a tenth of float64's rounding."""

TEMPORARIES = 16
"""Tensors of the size of a tile that are alive together."""


class _Path(NamedTuple):
    """Where the integrals of some pairs run, to relative accuracy.

    With ρ ≥ 0 (else k, ρ → −k, −ρ, which leaves J as it is), w = √((1−r)/(1+r)), W the same of ρ, p = |h+k|/2 and
    d = |h−k|/2, the integrals of `bivariate` are

        D = (1/π) ∫ E(w)/(1+w²) dw,      J = 2/(π(1+W²)) ∫ (w²−W²) E(w)/(1+w²)² dw      from W to 1,
        E(w) = exp(−(p²(1+w²) + d²(1+1/w²))/2) = exp(−max(|h|,|k|)²/2) exp(−v²/2),      v = pw − d/w,

    a Gaussian in v, which grows with w. The ends are cut where it has fallen by `REACH` standard deviations, and
    between them w = low + length·x⁴ crowds the nodes where v is steep, so that one rule serves every h, k and ρ: J to
    1e-13 of itself, D to 1e-13 up to |ρ| = 0.99 and to 1e-8 beyond. It needs eight times the nodes of `bivariate`,
    and float64: the rounding of h to float32 alone changes φ(h) by h²·6e-8 of itself.
    """

    plus: Tensor  # p
    minus: Tensor  # d
    end: Tensor  # W
    low: Tensor
    length: Tensor
    cut: Tensor  # low − W, to full relative accuracy

    @classmethod
    def of(cls, h: Tensor, k: Tensor, rho: Tensor) -> _Path:
        plus, minus = (h + k).abs() / 2, (h - k).abs() / 2
        end = ((1 - rho) / (1 + rho)).sqrt()
        first, last = plus * end - torch.where(minus > 0, minus / end, 0.0), plus - minus
        lowest = -(last.clamp(max=0).square() + REACH**2).sqrt()
        highest = (first.clamp(min=0).square() + REACH**2).sqrt()
        low = torch.where(first < lowest, _at(lowest, plus, minus), end)
        high = torch.where(last > highest, _at(highest, plus, minus), 1.0)
        whole = (first >= lowest) & (last <= highest)
        length = torch.where(whole, 2 * rho / ((1 + rho) * (1 + end)), high - low)
        return cls(plus, minus, end, low, length, torch.where(first < lowest, low - end, 0.0))

    def nodes(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """w², w²−W², 1+w² and weight·exp(−v²/2) of some nodes at a time, (nodes, ...): as many as make good use of a
        call."""
        points, weights = tail_rule(self.low.device)
        together = max(1, NODES_TOGETHER // max(1, self.low.numel()))
        each = (-1, *(1 for _ in self.low.shape))
        for step, weight in zip(points.split(together), weights.split(together), strict=True):
            step = self.length * step.reshape(each)
            w = self.low + step
            rise = (self.cut + step) * (w + self.end)
            height = torch.addcdiv(self.plus * w, self.minus, w, value=-1).square_().mul_(-0.5).exp_()
            square = w * w
            yield square, rise, 1 + square, height.mul_(weight.reshape(each))


@lru_cache(maxsize=8)
def tail_rule(device: torch.device) -> tuple[Tensor, Tensor]:
    """x⁴ and the weights 4x³·weight of the rule in x, (nodes,)."""
    with torch.inference_mode(False), torch.no_grad():
        points, weights = (torch.tensor(x, dtype=torch.float64) for x in gauss_legendre(TAIL_NODES))
        return (points**POWER).to(device), (POWER * points ** (POWER - 1) * weights).to(device)


def _at(v: Tensor, plus: Tensor, minus: Tensor) -> Tensor:
    """w with pw − d/w = v, without cancellation."""
    root = (v * v + 4 * plus * minus).sqrt()
    return torch.where(v < 0, 2 * minus / (root - v), (v + root) / (2 * plus))


def _flipped(k: Tensor, rho: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """k and ρ with the sign that makes ρ ≥ 0, and that sign."""
    sign = torch.copysign(torch.ones_like(rho), rho)
    return k * sign, rho.abs(), sign


def height_root(h: Tensor, k: Tensor) -> Tensor:
    """exp(−max(|h|,|k|)²/4), the root of what J and D have in common: it underflows later than they do."""
    return torch.maximum(h.abs(), k.abs()).square().mul_(-0.25).exp_()


class TailSums(NamedTuple):
    """J and D of some pairs and ∂J/∂h, ∂J/∂k, all without their common factor exp(−max(|h|,|k|)²/2)."""

    nonlinear: Tensor
    excess: Tensor
    by_first: Tensor
    by_second: Tensor


def tail_nonlinear_part(h: Tensor, k: Tensor, rho: Tensor) -> Tensor:
    """J·exp(max(|h|,|k|)²/2) for float64 tensors that broadcast; see `_Path`."""
    k, rho, _ = _flipped(k, rho)
    path = _Path.of(h, k, rho)
    total = torch.zeros_like(path.low)
    for _, rise, spread, height in path.nodes():
        total += height.mul_(rise).div_(spread.square_()).sum(0)
    return total.mul_(path.length * (2 / math.pi)).div_(1 + path.end.square())


def tail_excess(h: Tensor, k: Tensor, rho: Tensor) -> Tensor:
    """D·exp(max(|h|,|k|)²/2), likewise."""
    k, rho, sign = _flipped(k, rho)
    path = _Path.of(h, k, rho)
    total = torch.zeros_like(path.low)
    for _, _, spread, height in path.nodes():
        total += height.div_(spread).sum(0)
    return total.mul_(path.length * sign / math.pi)


def tail_sums(h: Tensor, k: Tensor, rho: Tensor) -> TailSums:
    """Both with the derivatives of J: ∂J/∂h = −∫ (ρ−r)(h−rk)/(1−r²) φ₂ dr, where (h−rk)/(1−r²) is
    ((h+k)/2 + (h−k)/(2w²))(1+w²)/2, and ∂J/∂k the same with h and k exchanged."""
    k, rho, sign = _flipped(k, rho)
    path = _Path.of(h, k, rho)
    nonlinear, excess, common, steep = (torch.zeros_like(path.low) for _ in range(4))
    for square, rise, spread, height in path.nodes():
        share = height.div_(spread)
        excess += share.sum(0)
        share = share.mul_(rise)
        common += share.sum(0)
        nonlinear += (share / spread).sum(0)
        steep += (share / square).sum(0)
    scale = path.length / math.pi
    risen = scale / (1 + path.end.square())
    common, steep = common.mul_(risen * (h + k) / 2), steep.mul_(risen * (h - k) / 2)
    return TailSums(2 * risen * nonlinear, scale * sign * excess, -(common + steep), (steep - common) * sign)


def tail_correlation(units: Units, tile: Tile, covariance: Tensor) -> Tensor:
    """ρ of a tile's pairs as `correlation` has it; a pair's is the same to the bit whichever unit comes first."""
    row, column = units.span(tile.rows).rows(), units.span(tile.columns).columns()
    larger, smaller = torch.maximum(row.s, column.s), torch.minimum(row.s, column.s)
    return (covariance / larger / smaller).clamp_(-1, 1)


def tail_covariance(units: Units, tile: Tile, covariance: Tensor, scratch: Scratch) -> Tensor:
    """`nonlinear_covariance` to relative accuracy."""
    row, column = units.span(tile.rows).rows(), units.span(tile.columns).columns()
    rho = tile.keep_lower_(tail_correlation(units, tile, covariance))
    root = height_root(row.h, column.h)
    return tail_nonlinear_part(row.h, column.h, rho).mul_(row.s * root).mul_(column.s * root)


def tail_gradient(units: Units, tile: Tile, covariance: Tensor, weight: Tensor, scratch: Scratch) -> TileGradient:
    """`tile_gradient` to relative accuracy: s₂∂J/∂h in m₁, s₂/(2s₁) (J − h∂J/∂h − ρD) in s₁²."""
    row, column = units.span(tile.rows).rows(), units.span(tile.columns).columns()
    rho = tile.keep_lower_(tail_correlation(units, tile, covariance))
    root = height_root(row.h, column.h)
    sums = TailSums(*(x.mul_(root).mul_(root) for x in tail_sums(row.h, column.h, rho)))
    weight = weight * (rho != 0)
    rest = sums.nonlinear - rho * sums.excess
    return TileGradient(
        by_covariance=sums.excess,
        by_row_mean=(weight * column.s * sums.by_first).sum(-1),
        by_column_mean=(weight * row.s * sums.by_second).sum(-2),
        by_row_variance=(weight * column.s * (rest - row.h * sums.by_first) / (2 * row.s)).sum(-1),
        by_column_variance=(weight * row.s * (rest - column.h * sums.by_second) / (2 * column.s)).sum(-2),
    )


GradientOfTile = Callable[[Units, Tile, Tensor, Tensor, Scratch], TileGradient]
"""`tile_gradient` or `tail_gradient`."""


def gate_slopes(units: Units) -> tuple[Tensor, Tensor]:
    """Derivatives of Φ(h): φ(h)/s in the mean, −hφ(h)/(2s²) in s²; 0 for a unit without variance, never infinite."""
    bell = density(units.h)
    noisy = (units.s > 0) & (bell > 0)
    safe = torch.where(noisy, units.s, torch.ones_like(units.s))
    by_mean = torch.where(noisy, bell / safe, torch.zeros_like(safe))
    largest = torch.finfo(safe.dtype).max
    return by_mean.clamp(max=largest), (-0.5 * units.h * by_mean / safe).clamp(-largest, largest)


WIDEST_TILE = 4096


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

    def of(self, tensor: Tensor) -> Tensor:
        """This chunk's images of a tensor, with all units."""
        return tensor if tensor.shape[0] == 1 else tensor[self.images]

    def add_block(self, square: Tensor, rows: slice, columns: slice, value: Tensor) -> None:
        """square[images, rows, columns] += value."""
        part = square[self.images]
        if self.every_unit:
            part[:, rows, columns] += value
        else:
            part[:, self.units[rows].unsqueeze(1), self.units[columns]] += value


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


def images_of(tensor: Tensor, chosen: Tensor) -> Tensor:
    """The chosen images of a tensor, or all of it where they share it."""
    return tensor if tensor.shape[0] == 1 else tensor[chosen]


def tile_elements(memory_budget: int, dtype: torch.dtype) -> int:
    return max(1, memory_budget // (SLOTS * dtype.itemsize))


class UnitGradients:
    """Derivatives in each unit's mean and variance, summed over the pairs it is part of: (images, units)."""

    def __init__(self, images: int, units: Units) -> None:
        self.by_mean = units.h.new_zeros(images, units.h.shape[1])
        self.by_variance = units.h.new_zeros(images, units.h.shape[1])

    def add_tile(self, slopes: TileGradient, tile: Tile) -> None:
        """A tile of pairs."""
        self.by_mean[:, tile.rows] += slopes.by_row_mean
        self.by_mean[:, tile.columns] += slopes.by_column_mean
        self.by_variance[:, tile.rows] += slopes.by_row_variance
        self.by_variance[:, tile.columns] += slopes.by_column_variance


def refuse_second_derivative() -> NoReturn:
    raise RuntimeError(
        "second derivatives of the exact ReLU covariance are not available: differentiate it once only, "
        "or differentiate an output mean, which has all derivatives"
    )


def refuse_forward_mode() -> NoReturn:
    raise RuntimeError(
        "forward-mode derivatives (torch.func.jvp, jacfwd) of the exact ReLU covariance are not available: "
        "use reverse mode (backward, torch.func.grad, vjp or jacrev)"
    )


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
